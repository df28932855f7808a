"""The training set as an eleventh axis, and contrasts of models that share one, over resampled cohorts.

A configuration is a model with the maps of one of its training sets. The axis is balanced over the training sets that
every model has, and its sums of squares are those of any other axis (protocol, section 8): each training set is
resampled as a multiverse of its own, and the marginal sums of all of them are put together. Source: Appendix 0.E of
MIRTO (Kafee Hernashki & Chatterjee, 2026), Tables 58 and 59.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared
from transforms.multiverse import (
    UNIVERSE_SETS,
    Marginals,
    Multiverse,
    Tally,
    metric_centres,
    multiverse_queries,
    statistic_rows,
)
from transforms.replicates import SUBJECT_QUERY, TEST_SUBJECT, mean_and_median, numbers
from transforms.resampling import Floats, Resample, draw, interval, p_values

AXIS = "configuration"  # the eleventh axis, beside the columns that carry the ten
METRICS = ("dice", "voxel_auroc", "voxel_ap")

# the maps that stand for every model under one training set, in the models' order
MEMBERS = """
    select method_id, model_position as position
    from configuration
    where is_ranked and training_set in (select training_set from configuration_level where position = $value)"""
QUERIES = multiverse_queries(MEMBERS)


class _TrainingSet(Mapping[str, pl.DataFrame]):
    """The inputs of one training set's multiverse."""

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
    row="One row per universe set, statistic, metric (each and `all`), term and replicate that defines it, with the "
    "training set as an eleventh axis; replicate 0 takes every subject once.",
    key=("universe_set", "statistic", "metric_id", "item", "replicate"),
    columns=("value",),
    inputs=(
        *("universe", "cell", "budget", "axis_level", "ranked_method", "method", "cohort_subject", "cell_score"),
        *("threshold_choice", "subject_threshold", "replicate_level", "threshold_curve", "lesion_curve"),
        *("voxel_ranking", "slice_ranking", "score_histogram", "slice_score", "configuration", "configuration_level"),
    ),
    queries=QUERIES | {"member": f"with m as ({MEMBERS}) from m order by position"},
)
def configuration_statistic(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Variance shares of every replicate, balanced over training sets; no rows below two of them."""
    empty = configuration_statistic.table.frame()
    levels = inputs["configuration_level"].filter(status="ok").sort("position")
    levels = levels.filter(pl.len().over("universe_set") > 1)
    positions = levels.get_column("position").unique(maintain_order=True).to_list()
    if not positions or inputs[f"test_subject:{positions[0]}"].is_empty():
        return empty
    centres = metric_centres(protocol, inputs[f"primary_score:{positions[0]}"])
    tallies = {position: _tally(protocol, inputs, position, centres) for position in positions}
    balanced = {name: [tallies[place] for place in _positions(levels, name)] for name in UNIVERSE_SETS}
    return pl.concat([empty, *_statistics(balanced)])


def _positions(levels: pl.DataFrame, universe_set: str) -> list[int]:
    """Training sets that are levels of the axis in a universe set."""
    return levels.filter(universe_set=universe_set).get_column("position").to_list()


def _tally(protocol: Protocol, inputs: Inputs, position: int, centres: Floats) -> Tally:
    """Marginal sums under one training set; its measurements are let go of before the next."""
    methods = [str(m) for m in inputs[f"member:{position}"].get_column("method_id")]
    return Tally.of(Multiverse(protocol, _TrainingSet(inputs, position), methods), centres, [])


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
    return np.concatenate([mean_and_median(block, values)[0] for block in resample.blocks()]), rows.height


def _contrast(a: tuple[Floats, int], b: tuple[Floats, int], level: float) -> tuple[object, ...]:
    """Estimate, interval, p-value, subjects and replicates."""
    difference = a[0] - b[0]
    if np.isnan(difference[0]):
        return (None,) * 4 + (min(a[1], b[1]), 0)
    low, high, defined = interval(difference[None, 1:], level)
    found = [float(difference[0]), float(low[0]), float(high[0]), float(p_values(difference[None, 1:])[0])]
    return (*(None if np.isnan(value) else value for value in found), min(a[1], b[1]), int(defined[0]))
