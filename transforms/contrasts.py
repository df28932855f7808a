"""Paired contrasts between methods, and intervals of operating points and transfer gaps, over resampled cohorts.

All in the reference setting: canonical reference, brain, true voxel volume. Thresholds chosen on validation stay fixed;
those matched on test stay fixed in operating points and mean gaps, and are chosen anew in every replicate in contrasts
at matched or equal burden and in interpolated gaps (protocol, sections 6 and 9).

Behind the levels of a curve stand rows that hold the subjects' values at levels of their own: one for each budget,
where the validation rule is cross-fitted and every subject keeps the level of its fold, and one for the subjects'
optima. They are read like a level, but no level is matched among them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared
from transforms.replicates import (
    HISTOGRAM_COLUMNS,
    SUBJECT_QUERY,
    TEST_SUBJECT,
    aggregated_dice,
    aggregated_sensitivity,
    dense,
    dice_values,
    mean_and_median,
    numbers,
    voxel_volume,
)
from transforms.resampling import (
    INFEASIBLE,
    Floats,
    Integers,
    Resample,
    by_block,
    chosen,
    divided,
    draw,
    exact,
    interval,
    matched_levels,
    mean_burdens,
    p_values,
    pooled_voxel_ranking,
)

AGGREGATIONS = ("mean", "median", "pooled")
RESELECTED = ("test_matched", "equal_burden")  # operating points whose thresholds every replicate chooses anew
REFERENCE_SETTING = "reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'"


def entry_cte(kinds: str) -> str:
    """SQL that numbers the ranked entries of some kinds, given as a condition."""
    return f"""{TEST_SUBJECT},
    entry as (
        select method_id, kind, (row_number() over (order by position) - 1)::usmallint as entry
        from ranked_method
        where is_ranked and {kinds}
    )"""


OWN_LEVEL = f"""
    own_row as (
        select
            o.method_id, o.subject_id, o.level,
            p.level_count + 1 + case
                when o.threshold_rule_id = 'subject_optimum' then (select count(*) from budget) else b.position
            end as row
        from own_level as o
        join budget as b using (budget_cm3)
        cross join protocol as p
        where {REFERENCE_SETTING} and (b.position = 0 or o.threshold_rule_id <> 'subject_optimum')  -- it has no budget
    )"""


def curve_queries(kinds: str) -> dict[str, str]:
    """Entries of some kinds with their plain curves and thresholds in the reference setting."""
    return {
        "test_subject": SUBJECT_QUERY,
        "entry": f"with {entry_cte(kinds)} from entry order by entry",
        "curve": f"""
            with {entry_cte(kinds)}
            select e.entry, t.subject, c.level, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels
            from reference_curve as c
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where c.postprocess_id = 'plain'""",
        "own_curve": f"""
            with {entry_cte(kinds)}, {OWN_LEVEL}
            select
                e.entry, t.subject, o.row::usmallint as level,
                c.predicted_voxels, c.true_positive_voxels, c.reference_voxels
            from own_row as o
            join reference_curve as c using (method_id, subject_id, level)
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where c.postprocess_id = 'plain'""",
        "choice": f"""
            with {entry_cte(kinds)}
            select
                e.entry, c.threshold_rule_id, c.budget_cm3,
                case
                    when r.rule_kind = 'subject_optimum' then p.level_count + 1 + (select count(*) from budget)
                    when c.status = 'degraded' then p.level_count + 1 + b.position
                    else c.level
                end::usmallint as level
            from threshold_choice as c
            join calibration_rule as r using (threshold_rule_id)
            join entry as e using (method_id)
            join budget as b using (budget_cm3)
            cross join protocol as p
            where {REFERENCE_SETTING} and c.status <> 'infeasible'""",
    }


def contrast_queries(kinds: str) -> dict[str, str]:
    """The same with lesions and voxel rankings."""
    return curve_queries(kinds) | {
        "lesion": f"""
            with {entry_cte(kinds)}
            select e.entry, t.subject, c.level, c.hit_iou_10, c.lesion_count
            from reference_curve as c
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where c.postprocess_id = 'plain' and c.lesion_count is not null""",
        "own_lesion": f"""
            with {entry_cte(kinds)}, {OWN_LEVEL}
            select e.entry, t.subject, o.row::usmallint as level, c.hit_iou_10, c.lesion_count
            from own_row as o
            join reference_curve as c using (method_id, subject_id, level)
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where c.postprocess_id = 'plain' and c.lesion_count is not null""",
        "ranking": f"""
            with {entry_cte(kinds)}
            select e.entry, t.subject, v.auroc, v.average_precision
            from voxel_ranking as v
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where v.reference_id = 'canonical' and v.support_id = 'brain'""",
        "histogram": f"""
            with {entry_cte(kinds)}
            select e.entry, t.subject, {HISTOGRAM_COLUMNS}
            from score_histogram as h
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where h.reference_id = 'canonical' and h.support_id = 'brain'""",
    }


CURVE_INPUTS = (
    *("cohort_subject", "ranked_method", "threshold_choice", "calibration_rule", "reference_curve", "own_level"),
    *("budget", "protocol"),
)


@dataclass(frozen=True, order=True)
class Measure:
    """What two methods are compared in: a metric at an operating point and budget, aggregated over subjects.

    The operating point is a threshold rule, `equal_burden` or `threshold_free`; no budget where it uses none.
    """

    metric_id: str
    operating_point: str
    budget_cm3: float | None
    aggregation_id: str

    @property
    def family(self) -> str:
        """The contrasts that are adjusted together: across budgets, or across voxel metrics by mean and median."""
        if self.operating_point != "threshold_free":
            return f"{self.metric_id} {self.operating_point} {self.aggregation_id}"
        return "voxel_metrics pooled" if self.aggregation_id == "pooled" else "voxel_metrics mean_and_median"


@dataclass(frozen=True)
class Curve:
    """One method's voxel counts in the reference setting, plain maps, levels x subjects.

    Attributes:
        predicted: Predicted voxels; likewise `true_positive` and `reference`.
        true_positive: See `predicted`.
        reference: See `predicted`.
        own_rows: How many of the last rows hold subjects' own levels.
    """

    predicted: Floats
    true_positive: Floats
    reference: Floats
    own_rows: int = field(default=0, kw_only=True)

    @staticmethod
    def of(rows: pl.DataFrame, levels: int, subjects: int, own_rows: int = 0) -> "Curve":
        """From rows of level, subject and counts; own levels are numbered from `levels` on."""
        places = [numbers(rows, "level").astype(np.int64), numbers(rows, "subject").astype(np.int64)]
        names = ("predicted_voxels", "true_positive_voxels", "reference_voxels")
        shape = (levels + own_rows, subjects)
        predicted, hit, reference = (dense(rows, places, shape, name).astype(np.float64) for name in names)
        return Curve(predicted, hit, reference, own_rows=own_rows)

    @property
    def false_positive(self) -> Floats:
        """False positives at the true levels, own levels left out."""
        levels = len(self.predicted) - self.own_rows
        return self.predicted[:levels] - self.true_positive[:levels]

    def dice(self, resample: Resample, levels: Integers, empty_dice: str) -> Floats:
        """Mean, median and pooled Dice, aggregations x points x replicates, at levels given as points x replicates."""
        read, choice = np.unique(np.maximum(levels, 0), return_inverse=True)
        choice = np.where(levels == INFEASIBLE, INFEASIBLE, choice.reshape(levels.shape))
        voxels = [part[None, read] for part in (self.predicted, self.true_positive, self.reference)]
        return aggregated_dice(resample, voxels[0], voxels[1], voxels[2], choice, empty_dice)[:, 0]

    def mean_dice(self, resample: Resample, levels: Integers, empty_dice: str) -> Floats:
        """Mean Dice, points x replicates."""
        values = dice_values(self.predicted, self.true_positive, self.reference, empty_dice)
        defined = ~np.isnan(values[0])
        inside = resample.among(defined)
        sums = inside.sums(exact(values[:, defined], inside.shape[1]))
        return chosen(divided(sums, inside.sizes)[None], levels)[0]

    def matched(self, resample: Resample, budgets: Floats, voxel_mm3: float) -> tuple[Integers, Integers, Floats]:
        """Level matched to each budget, the level below, and the weight of the level below at equal burden."""
        burdens = mean_burdens(resample, self.false_positive, voxel_mm3)
        above = matched_levels(burdens, budgets)
        below = np.where(above == INFEASIBLE, INFEASIBLE, above - 1)
        high, low = chosen(burdens[None], below)[0], chosen(burdens[None], above)[0]
        return above, below, (budgets[:, None] - low) / (high - low)


@dataclass(frozen=True)
class _Entry:
    """One method or baseline with what its contrasts need; no histogram: that is held for one entry at a time."""

    method_id: str
    is_baseline: bool
    values: dict[Measure, Floats]
    subjects: dict[Measure, int]


class Cohort:
    """The resampled test cohort and the rows of every entry."""

    def __init__(self, protocol: Protocol, inputs: Inputs) -> None:
        parameters = protocol.parameters
        self.inputs = inputs
        self.entries = [
            (str(m), kind == "baseline") for m, kind in inputs["entry"].select("method_id", "kind").iter_rows()
        ]
        self.resample = draw(inputs["test_subject"].height, parameters.contrast_replicates, parameters.seed)
        self.budgets = np.array(parameters.budgets_cm3)
        self.own_rows = len(self.budgets) + 1
        self.empty_dice, self.level_count = parameters.empty_dice, parameters.level_count
        self.voxel_mm3 = voxel_volume(inputs["cohort_subject"])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compare."""
        return not self.entries or self.resample.shape[1] == 0

    def curves(self) -> list[Curve]:
        """The curve of every entry."""
        parts, subjects = self.parts("curve"), self.resample.shape[1]
        return [Curve.of(rows, self.level_count + 1, subjects, self.own_rows) for rows in parts]

    def parts(self, name: str) -> list[pl.DataFrame]:
        """Rows of every entry by level (`curve` or `lesion`), those at subjects' own levels behind them."""
        rows = pl.concat([self.inputs[name].cast({"level": pl.UInt16}), self.inputs[f"own_{name}"]])
        return by_entry(rows, len(self.entries))

    def fixed_levels(self, rule: str) -> list[Integers]:
        """Levels of a rule for every entry, by budget; `INFEASIBLE` where there is none."""
        levels = np.full((len(self.entries), len(self.budgets)), INFEASIBLE, np.int64)
        position = {budget: place for place, budget in enumerate(self.budgets.tolist())}
        choices = self.inputs["choice"].filter(threshold_rule_id=rule)
        for entry, budget, level in choices.select("entry", "budget_cm3", "level").iter_rows():
            levels[entry, position[budget]] = level
        return list(levels)


def by_entry(frame: pl.DataFrame, entries: int) -> list[pl.DataFrame]:
    """The rows of every entry in turn; no rows for an entry that has none."""
    parts = frame.partition_by("entry", as_dict=True)
    return [parts.get((entry,), frame.clear()) for entry in range(entries)]


def repeated(levels: Integers, resample: Resample) -> Integers:
    """The same levels in every replicate, points x replicates."""
    return np.repeat(levels[:, None], len(resample.counts), axis=1)


@dataclass(frozen=True)
class _Fixed:
    """Operating points whose thresholds stay fixed, of every entry.

    Attributes:
        points: Rule and budget of each; no budget where the rule uses none.
        levels: The level that each entry reads at each point, entries x points; `INFEASIBLE` where there is none.
    """

    points: list[tuple[str, float | None]]
    levels: Integers

    @staticmethod
    def of(cohort: Cohort, protocol: Protocol) -> "_Fixed":
        """Of all rules but the one that is matched on test."""
        points: list[tuple[str, float | None]] = []
        levels: list[Integers] = []
        for rule in protocol.threshold_rules:
            if rule.id in RESELECTED:
                continue
            chosen_levels = np.stack(cohort.fixed_levels(rule.id))
            budgets: list[float | None] = [*cohort.budgets.tolist()] if rule.uses_budget else [None]
            points += [(rule.id, budget) for budget in budgets]
            levels.append(chosen_levels[:, : len(budgets)])
        return _Fixed(points, np.concatenate(levels, axis=1))


def _dice_at_points(cohort: Cohort, curve: Curve, fixed: Integers) -> Floats:
    """Dice at fixed levels, at the matched levels, and at equal burden: aggregations x points x replicates."""
    read, place = np.unique(fixed, return_inverse=True)  # rules that choose the same level share its work

    def at_points(block: Resample) -> Floats:
        above, below, weight = curve.matched(block, cohort.budgets, cohort.voxel_mm3)
        levels = np.concatenate([repeated(read, block), above, below])
        at_fixed, matched, looser = np.split(
            curve.dice(block, levels, cohort.empty_dice), [len(read), len(read) + len(above)], axis=1
        )
        return np.concatenate([at_fixed[:, place], matched, (1 - weight) * matched + weight * looser], axis=1)

    return by_block(cohort.resample, at_points)


def _sensitivity_at_validation(cohort: Cohort, rows: pl.DataFrame, validation: Integers) -> tuple[Floats, int]:
    """Lesion sensitivity, aggregations x budgets x replicates, and how many subjects have lesions."""
    subjects = cohort.resample.shape[1]
    places = [numbers(rows, "level").astype(np.int64), numbers(rows, "subject").astype(np.int64)]
    shape = (cohort.level_count + 1 + cohort.own_rows, subjects)
    hits = dense(rows, places, shape, "hit_iou_10").astype(np.float64)
    lesions = dense(rows, places, shape, "lesion_count").astype(np.float64)[0]
    read, choice = np.unique(np.maximum(validation, 0), return_inverse=True)
    choice = np.where(validation == INFEASIBLE, INFEASIBLE, choice)

    def sensitivity(block: Resample) -> Floats:
        return aggregated_sensitivity(block, hits[None, read], lesions, repeated(choice, block))[:, 0]

    return by_block(cohort.resample, sensitivity), int((lesions > 0).sum())


def _entry(cohort: Cohort, place: int, curve: Curve, fixed: _Fixed, rows: dict[str, pl.DataFrame], bins: int) -> _Entry:
    values: dict[Measure, Floats] = {}
    subjects: dict[Measure, int] = {}
    budgets: list[float] = cohort.budgets.tolist()
    points = [*fixed.points, *((point, budget) for point in RESELECTED for budget in budgets)]
    dice = _dice_at_points(cohort, curve, fixed.levels[place])
    defined = int(
        (~np.isnan(dice_values(curve.predicted, curve.true_positive, curve.reference, cohort.empty_dice)[0])).sum()
    )
    sensitivity, with_lesions = _sensitivity_at_validation(
        cohort, rows["lesion"], cohort.fixed_levels("validation")[place]
    )
    for a, aggregation in enumerate(AGGREGATIONS):
        for p, (point, budget) in enumerate(points):
            measure = Measure("dice", point, budget, aggregation)
            values[measure] = dice[a, p]
            subjects[measure] = cohort.resample.shape[1] if aggregation == "pooled" else defined
        for b, budget in enumerate(budgets):
            measure = Measure("lesion_sensitivity", "validation", budget, aggregation)
            values[measure], subjects[measure] = sensitivity[a, b], with_lesions
    for (metric, aggregation), (value, count) in _voxel_values(cohort, rows, bins).items():
        measure = Measure(metric, "threshold_free", None, aggregation)
        values[measure], subjects[measure] = value, count
    return _Entry(*cohort.entries[place], values, subjects)


def _voxel_values(
    cohort: Cohort, rows: dict[str, pl.DataFrame], bins: int
) -> dict[tuple[str, str], tuple[Floats, int]]:
    """Voxel metrics by metric and aggregation, with the subjects behind them."""
    subjects = cohort.resample.shape[1]
    result: dict[tuple[str, str], tuple[Floats, int]] = {}
    for metric, column in (("voxel_auroc", "auroc"), ("voxel_ap", "average_precision")):
        values = np.full(subjects, np.nan)
        ranking = rows["ranking"].filter(pl.col(column).is_not_null())
        values[numbers(ranking, "subject").astype(np.int64)] = numbers(ranking, column)
        blocks = [mean_and_median(block, values) for block in cohort.resample.blocks()]
        for part, aggregation in enumerate(("mean", "median")):
            result[metric, aggregation] = np.concatenate([block[part] for block in blocks]), ranking.height
    places = [numbers(rows["histogram"], name).astype(np.int64) for name in ("bin", "subject")]
    positive, negative = (
        dense(rows["histogram"], places, (bins, subjects), f"{sign}_voxels") for sign in ("positive", "negative")
    )
    auroc, precision = pooled_voxel_ranking(cohort.resample, positive, negative)
    result["voxel_auroc", "pooled"], result["voxel_ap", "pooled"] = (auroc, subjects), (precision, subjects)
    return result


@declared(
    name="contrast_estimate",
    row="One row per family, pair of methods and measure: the contrast, its interval and its own p-value; none of them "
    "where a method has no threshold.",
    key=("family", "method_a", "method_b", "metric_id", "operating_point", "budget_cm3?", "aggregation_id"),
    columns=("estimate?", "estimate_low?", "estimate_high?", "p_value?", "n_subjects", "n_replicates"),
    inputs=(*CURVE_INPUTS, "voxel_ranking", "score_histogram"),
    queries=contrast_queries("kind <> 'configuration'"),
)
def contrast_estimate(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Contrasts between methods, and between methods and baselines (never between two baselines)."""
    cohort = Cohort(protocol, inputs)
    if cohort.is_empty:
        return contrast_estimate.table.frame()
    count = len(cohort.entries)
    parts = {"ranking": by_entry(inputs["ranking"], count), "lesion": cohort.parts("lesion")}
    histograms = inputs["histogram"]
    fixed = _Fixed.of(cohort, protocol)
    entries: list[_Entry] = []
    for place, curve in enumerate(cohort.curves()):
        rows = {name: frames[place] for name, frames in parts.items()}
        rows["histogram"] = histograms.filter(pl.col("entry") == place)  # one at a time: a copy of all takes gigabytes
        entries.append(_entry(cohort, place, curve, fixed, rows, protocol.parameters.histogram_bins))
    level = protocol.parameters.interval_level
    rows = [row for a, b in combinations(entries, 2) if not a.is_baseline for row in _contrast_rows(a, b, level)]
    return contrast_estimate.table.frame(rows)


def _contrast_rows(a: _Entry, b: _Entry, level: float) -> Iterator[tuple[object, ...]]:
    kind = "baselines" if b.is_baseline else "methods"
    measures = list(a.values)
    differences = np.stack([a.values[measure] - b.values[measure] for measure in measures])
    differences[np.isnan(differences[:, 0])] = np.nan  # no estimate, no replicates of it
    low, high, defined = interval(differences[:, 1:], level)
    columns = [nullable(part) for part in (differences[:, 0], low, high, p_values(differences[:, 1:]))]
    for measure, count, *numbers_ in zip(measures, defined.tolist(), *columns, strict=True):
        key = (measure.metric_id, measure.operating_point, measure.budget_cm3, measure.aggregation_id)
        subjects = min(a.subjects[measure], b.subjects[measure])
        yield (f"{measure.family} {kind}", a.method_id, b.method_id, *key, *numbers_, subjects, count)


def nullable(values: Floats) -> list[float | None]:
    """Values with None in place of NaN."""
    return [None if np.isnan(value) else value for value in values.tolist()]


OPERATING_COLUMNS = ("dice_mean", "dice_median", "dice_pooled", "burden_cm3_mean")
INTERVAL_COLUMNS = tuple(f"{name}_{end}" for name in OPERATING_COLUMNS for end in ("low", "high"))


@declared(
    name="operating_interval",
    row="One row per method, threshold rule, budget and post-processing: intervals of the operating point, with its "
    "threshold fixed.",
    key=("method_id", "threshold_rule_id", "budget_cm3", "postprocess_id"),
    columns=tuple(f"{name}?" for name in INTERVAL_COLUMNS),
    inputs=("cohort_subject", "ranked_method", "operating_subject", "budget", "crossfit_fold"),
    queries={
        "test_subject": SUBJECT_QUERY,
        "point": f"""
            with {TEST_SUBJECT}
            select
                o.method_id, o.threshold_rule_id, o.budget_cm3, o.postprocess_id, t.subject,
                case
                    when o.threshold_rule_id = 'subject_optimum' then -1
                    when o.threshold_rule_id = 'validation' and f.fold is not null then -2 - b.position
                    else o.level
                end as read,
                o.predicted_voxels, o.true_positive_voxels, o.reference_voxels
            from operating_subject as o
            join budget as b using (budget_cm3)
            left join crossfit_fold as f using (subject_id)
            join test_subject as t using (subject_id)
            order by o.method_id, o.postprocess_id, read, o.threshold_rule_id, o.budget_cm3, t.subject""",
    },
)
def operating_interval(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Intervals of operating points; rules that read the same level share them."""
    parameters = protocol.parameters
    resample = draw(inputs["test_subject"].height, parameters.contrast_replicates, parameters.seed)
    voxel_mm3 = voxel_volume(inputs["cohort_subject"])
    key = ["method_id", "threshold_rule_id", "budget_cm3", "postprocess_id"]
    frames = [operating_interval.table.frame()]
    for part in inputs["point"].partition_by("method_id", maintain_order=True):
        distinct = part.unique(["postprocess_id", "read", "subject"], keep="first", maintain_order=True)
        points = distinct.select("postprocess_id", "read").unique(maintain_order=True).with_row_index("point")
        rows = distinct.join(points, on=["postprocess_id", "read"])
        ends = points.with_columns(_operating_ends(rows, points.height, resample, voxel_mm3, protocol))
        found = part.select(*key, "read").unique(maintain_order=True).join(ends, on=["postprocess_id", "read"])
        frames.append(found.select(*key, *INTERVAL_COLUMNS))
    return pl.concat(frames)


def _operating_ends(
    rows: pl.DataFrame, points: int, resample: Resample, voxel_mm3: float, protocol: Protocol
) -> list[pl.Series]:
    places = [numbers(rows, "point").astype(np.int64), numbers(rows, "subject").astype(np.int64)]
    shape = (points, resample.shape[1])
    names = ("predicted_voxels", "true_positive_voxels", "reference_voxels")
    predicted, hit, reference = (dense(rows, places, shape, name).astype(np.float64) for name in names)

    def points_of(block: Resample) -> Floats:
        only = np.zeros((1, len(block.counts)), np.int64)
        voxels = [part[:, None] for part in (predicted, hit, reference)]
        dice = aggregated_dice(block, voxels[0], voxels[1], voxels[2], only, protocol.parameters.empty_dice)
        return np.stack([*dice[:, :, 0], mean_burdens(block, predicted - hit, voxel_mm3)])

    values = by_block(resample, points_of)
    low, high, _ = interval(values[..., 1:], protocol.parameters.interval_level)
    ends = np.stack([low, high], axis=1).reshape(len(INTERVAL_COLUMNS), points)
    return [_series(name, column) for name, column in zip(INTERVAL_COLUMNS, ends, strict=True)]


def _series(name: str, values: Floats) -> pl.Series:
    return pl.Series(name, values).fill_nan(None)


@declared(
    name="gap_interval",
    row="One row per method and budget with a transfer gap: its intervals, of the mean gap at fixed thresholds, of the "
    "interpolated gap with the matched threshold chosen anew in every replicate.",
    key=("method_id", "budget_cm3"),
    columns=(
        *("gap_mean_low?", "gap_mean_high?", "interval_kind", "gap_interpolated_low?", "gap_interpolated_high?"),
        *("interpolated_interval_kind", "n_replicates"),
    ),
    inputs=CURVE_INPUTS,
    queries=curve_queries("true"),
)
def gap_interval(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Intervals of transfer gaps; `n_replicates` counts the replicates in which the budget can be matched."""
    cohort = Cohort(protocol, inputs)
    rows: list[tuple[object, ...]] = []
    if not cohort.is_empty:
        levels = zip(cohort.fixed_levels("validation"), cohort.fixed_levels("test_matched"), strict=True)
        for (method, _), curve, (validation, matched) in zip(cohort.entries, cohort.curves(), levels, strict=True):
            feasible = (validation != INFEASIBLE) & (matched != INFEASIBLE)
            gaps = _gaps(cohort, curve, validation, matched)[:, feasible, 1:]
            low, high, defined = interval(gaps, protocol.parameters.interval_level)
            ends = [nullable(part) for part in (low[0], high[0], low[1], high[1])]
            budgets: Sequence[float] = cohort.budgets[feasible].tolist()
            for budget, a, b, c, d, count in zip(budgets, *ends, defined[1].tolist(), strict=True):
                rows.append((method, budget, a, b, "fixed_threshold", c, d, "reselected", count))
    return gap_interval.table.frame(rows)


def _gaps(cohort: Cohort, curve: Curve, validation: Integers, matched: Integers) -> Floats:
    """Mean and interpolated gap: the two x budgets x replicates."""

    def gaps(block: Resample) -> Floats:
        above, below, weight = curve.matched(block, cohort.budgets, cohort.voxel_mm3)
        levels = np.concatenate([repeated(validation, block), repeated(matched, block), above, below])
        before, fixed, tighter, looser = np.split(curve.mean_dice(block, levels, cohort.empty_dice), 4)
        return np.stack([fixed - before, (1 - weight) * tighter + weight * looser - before])

    return by_block(cohort.resample, gaps)
