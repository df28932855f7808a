"""The training set as an eleventh axis, configuration sets, and contrasts, over resampled cohorts.

A configuration is a model with the maps of one of its training sets. The axis is balanced over the training sets that
every model has, and its sums of squares are those of any other axis (protocol, section 8): each training set is
resampled as a multiverse of its own, and the marginal sums of all of them are put together. The same multiverses give
the flip shares and variance shares of a configuration set, which says whose maps stand for each model. Source: Appendix
0.E of MIRTO (Kafee Hernashki & Chatterjee, 2026), Tables 58, 59 and 62.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared
from transforms.contrasts import CURVE_INPUTS, Cohort, Curve, curve_queries
from transforms.multiverse import (
    UNIVERSE_SETS,
    Marginals,
    Multiverse,
    Tally,
    metric_centres,
    multiverse_queries,
    statistic_rows,
    tallied_statistics,
)
from transforms.replicates import SUBJECT_QUERY, TEST_SUBJECT, dice_values, mean_and_median, numbers
from transforms.resampling import Floats, Resample, by_block, draw, interval, p_values

AXIS = "configuration"  # the eleventh axis, beside the columns that carry the ten
METRICS = ("dice", "voxel_auroc", "voxel_ap")
JUDGED_UNIVERSES = ("defensible",)  # those that the hypotheses ask of

# the maps that stand for every model in one configuration set, in the models' order
MEMBERS = """
    select m.method_id, m.model_id, m.model_position as position
    from ledger_member as m
    join ledger_set as s on s.configuration_set = m.configuration_set and s.position = $value"""
QUERIES = multiverse_queries(MEMBERS)


class _OneSet(Mapping[str, pl.DataFrame]):
    """The inputs of one configuration set's multiverse."""

    def __init__(self, inputs: Inputs, position: int) -> None:
        self._inputs, self._position = inputs, position

    def __getitem__(self, name: str) -> pl.DataFrame:
        return self._inputs[f"{name}:{self._position}" if name in QUERIES else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


@declared(
    name="configuration_statistic",
    row="One row per configuration set, universe set, statistic, metric (each and `all`), pair of models or term, and "
    "replicate that defines it; without a set, all training sets are the levels of an eleventh axis. Replicate 0 takes "
    "every subject once.",
    key=("configuration_set?", "universe_set", "statistic", "metric_id", "item", "replicate"),
    columns=("value",),
    inputs=(
        *("universe", "cell", "budget", "axis_level", "ranked_method", "method", "cohort_subject", "cell_score"),
        *("threshold_choice", "own_level", "replicate_level", "threshold_curve", "lesion_curve"),
        *("voxel_ranking", "slice_ranking", "score_histogram", "slice_score", "configuration_level"),
        *("ledger_set", "ledger_member"),
    ),
    queries=QUERIES | {"member": f"with m as ({MEMBERS}) from m order by position"},
)
def configuration_statistic(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Statistics of every replicate; no rows where every model has its primary maps alone.

    Variance shares are balanced over training sets, two or more. Each set of other maps than the primary ones has its
    flip shares, the largest of them and its variance shares, over defensible universes; sets of the same maps are
    computed once, under the name of the first, and none whose maps lack a score.
    """
    empty = configuration_statistic.table.frame()
    sets = inputs["ledger_set"].sort("position")
    place = dict(sets.select("configuration_set", "position").iter_rows())
    first = {name: place[same] for name, same in sets.select("configuration_set", "same_as").iter_rows()}
    levels = inputs["configuration_level"].filter(status="ok").sort("position")
    levels = levels.filter(pl.len().over("universe_set") > 1)
    of_levels = {first[f"all {name}"] for name in levels.get_column("training_set")}
    is_own = (pl.col("same_as") == pl.col("configuration_set")) & (pl.col("configuration_set") != "primary")
    judged = {place[name]: name for name in sets.filter(is_own, status="ok").get_column("configuration_set")}
    positions = sorted({*of_levels, *judged})
    if not positions or inputs[f"test_subject:{positions[0]}"].is_empty():
        return empty
    centres = metric_centres(protocol, inputs[f"primary_score:{positions[0]}"])
    tallies: dict[int, Tally] = {}
    frames = [empty]
    for position in positions:
        models, tally = _tally(protocol, inputs, position, centres)
        if position in of_levels:
            tallies[position] = tally
        if position in judged:
            frames += [_named(part, judged[position]) for part in tallied_statistics(tally, models, JUDGED_UNIVERSES)]
    balanced = {name: [tallies[first[f"all {one}"]] for one in _names(levels, name)] for name in UNIVERSE_SETS}
    return pl.concat([*frames, *(_named(part, None) for part in _statistics(balanced))])


def _names(levels: pl.DataFrame, universe_set: str) -> list[str]:
    """Training sets that are levels of the axis in a universe set."""
    return levels.filter(universe_set=universe_set).get_column("training_set").to_list()


def _named(rows: pl.DataFrame, configuration_set: str | None) -> pl.DataFrame:
    name = pl.lit(configuration_set, pl.String).alias("configuration_set")
    return rows.select(name, pl.all())


def _tally(protocol: Protocol, inputs: Inputs, position: int, centres: Floats) -> tuple[list[str], Tally]:
    """Models and sums of one configuration set; its measurements are let go of before the next."""
    members = inputs[f"member:{position}"]
    models, methods = ([str(m) for m in members.get_column(name)] for name in ("model_id", "method_id"))
    pairs = list(combinations(range(len(models)), 2))
    return models, Tally.of(Multiverse(protocol, _OneSet(inputs, position), methods), centres, pairs)


def _statistics(balanced: Mapping[str, Sequence[Tally]]) -> Iterator[pl.DataFrame]:
    """Variance shares of every universe set over its training sets."""
    for place, universe_set in enumerate(UNIVERSE_SETS):
        tallies = balanced[universe_set]
        for name, metrics in tallies[0].groups(place).items() if tallies else ():
            axes = tallies[0].axes
            end = max(levels.stop for levels in axes.values())
            parts = [tally.marginals(place, metrics) for tally in tallies]
            joined = with_training_sets(parts, next(iter(axes.values())))
            for term, share in joined.shares(axes | {AXIS: slice(end, end + len(tallies))}).items():
                yield statistic_rows(universe_set, "configuration_variance", name, term, share)


def with_training_sets(parts: Sequence[Marginals], axis: slice) -> Marginals:
    """Put the marginal sums of training sets together, with the training set as a last axis.

    Args:
        parts: Sums under each training set, over the same universes and as many methods in the same order.
        axis: Where the levels of one of the other axes lie: over them, sums are totals.

    Returns:
        Their sums; the levels of the new axis follow those of all others.
    """
    counts = parts[0].counts
    totals = np.stack([part.sums[:, axis].sum(axis=1) for part in parts], axis=1)
    return Marginals(
        sums=np.concatenate([np.sum([part.sums for part in parts], axis=0), totals], axis=1),
        squares=np.sum([part.squares for part in parts], axis=0),
        counts=np.concatenate([len(parts) * counts, np.full(len(parts), counts[axis].sum())]),
    )


@declared(
    name="configuration_contrast_estimate",
    row="One row per training set, pair of models that share it, and metric: the contrast of their subject means, its "
    "interval and its own p-value; none of them where a model has no threshold.",
    key=("training_set", "method_a", "method_b", "metric_id"),
    columns=(
        *("operating_point", "budget_cm3?", "estimate?", "estimate_low?", "estimate_high?", "p_value?"),
        *("n_subjects", "n_replicates"),
    ),
    inputs=("configuration", "cohort_subject", "operating_subject", "voxel_ranking", "protocol"),
    queries={
        "test_subject": SUBJECT_QUERY,
        "value": f"""
            with {TEST_SUBJECT}
            select o.method_id, t.subject, 'dice' as metric_id, o.dice as value
            from operating_subject as o
            join configuration as c using (method_id)
            join protocol as p on p.reference_budget_cm3 = o.budget_cm3
            join test_subject as t using (subject_id)
            where o.threshold_rule_id = 'validation' and o.postprocess_id = 'plain' and o.dice is not null
            union all
            select
                v.method_id, t.subject, unnest(['voxel_auroc', 'voxel_ap']) as metric_id,
                unnest([v.auroc, v.average_precision]) as value
            from voxel_ranking as v
            join configuration as c using (method_id)
            join test_subject as t using (subject_id)
            where v.reference_id = 'canonical' and v.support_id = 'brain'""",
    },
)
def configuration_contrast_estimate(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Contrasts of models that share a training set: reference budget, validation thresholds, plain maps."""
    trained = inputs["configuration"].filter(pl.col("is_ranked") & pl.col("training_set").is_not_null())
    trained = trained.sort("model_position")
    parameters, subjects = protocol.parameters, inputs["test_subject"].height
    rows: list[tuple[object, ...]] = []
    if trained.is_empty() or subjects == 0:
        return configuration_contrast_estimate.table.frame()
    resample = draw(subjects, parameters.contrast_replicates, parameters.seed)
    values = inputs["value"].filter(pl.col("value").is_not_null())
    means = {
        (method, metric): _subject_means(resample, values.filter(method_id=method, metric_id=metric))
        for method in trained.get_column("method_id").to_list()
        for metric in METRICS
    }
    for (training_set,), part in sorted(trained.partition_by("training_set", as_dict=True).items()):
        models = list(part.select("model_id", "method_id").iter_rows())
        for (model_a, a), (model_b, b) in combinations(models, 2):
            for metric in METRICS:
                budget = parameters.reference_budget_cm3 if metric == "dice" else None
                point = ("threshold_free" if budget is None else "validation", budget)
                found = _contrast(means[a, metric], means[b, metric], parameters.interval_level)
                rows.append((training_set, model_a, model_b, metric, *point, *found))
    return configuration_contrast_estimate.table.frame(rows)


def _subject_means(resample: Resample, rows: pl.DataFrame) -> tuple[Floats, int]:
    """Mean over subjects by replicate, and how many subjects have a value."""
    values = np.full(resample.shape[1], np.nan)
    values[numbers(rows, "subject").astype(np.int64)] = numbers(rows, "value")
    return by_block(resample, lambda block: mean_and_median(block, values)[0]), rows.height


@declared(
    name="configuration_baseline_contrast",
    row="One row per maps of another training set than the primary one, and baseline: the contrast of mean Dice at "
    "equal burden and the reference budget, its interval and its own p-value; none of them where one never reaches it.",
    key=("method_a", "method_b"),
    columns=("budget_cm3", "estimate?", "estimate_low?", "estimate_high?", "p_value?", "n_subjects", "n_replicates"),
    inputs=CURVE_INPUTS,
    queries=curve_queries(
        "kind <> 'method' and exists (from ranked_method where is_ranked and kind = 'configuration')"
    ),
)
def configuration_baseline_contrast(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """What `contrast_estimate` says of primary maps and baselines, of all other maps."""
    cohort = Cohort(protocol, inputs)
    if cohort.is_empty:
        return configuration_baseline_contrast.table.frame()
    budget, level = protocol.parameters.reference_budget_cm3, protocol.parameters.interval_level
    values = [_equal_burden_dice(cohort, curve, budget) for curve in cohort.curves()]
    named = [(name, is_baseline, value) for (name, is_baseline), value in zip(cohort.entries, values, strict=True)]
    rows = [
        (a, b, budget, *_contrast(first, second, level))
        for (a, is_baseline, first), (b, is_other, second) in product(named, named)
        if is_other and not is_baseline
    ]
    return configuration_baseline_contrast.table.frame(rows)


def _equal_burden_dice(cohort: Cohort, curve: Curve, budget: float) -> tuple[Floats, int]:
    """Mean Dice at a mean burden of exactly the budget, by replicate, and how many subjects have a Dice."""

    def at_budget(block: Resample) -> Floats:
        above, below, weight = curve.matched(block, np.array([budget]), cohort.voxel_mm3)
        tighter, looser = curve.mean_dice(block, np.concatenate([above, below]), cohort.empty_dice)
        return (1 - weight[0]) * tighter + weight[0] * looser

    dice = dice_values(curve.predicted, curve.true_positive, curve.reference, cohort.empty_dice)[0]
    return by_block(cohort.resample, at_budget), int((~np.isnan(dice)).sum())


def _contrast(a: tuple[Floats, int], b: tuple[Floats, int], level: float) -> tuple[object, ...]:
    """Estimate, interval, p-value, subjects and replicates."""
    difference = a[0] - b[0]
    if np.isnan(difference[0]):
        return (None,) * 4 + (min(a[1], b[1]), 0)
    low, high, defined = interval(difference[None, 1:], level)
    found = [float(difference[0]), float(low[0]), float(high[0]), float(p_values(difference[None, 1:])[0])]
    return (*(None if np.isnan(value) else value for value in found), min(a[1], b[1]), int(defined[0]))
