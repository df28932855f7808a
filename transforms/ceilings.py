"""Ceilings of Dice that use the reference: thresholds of a subject's lesions, and a choice among its components.

Both are one problem. Segments of some false and true positives are there to be taken: one for each predicted component
that holds reference voxels; or, for each lesion, the steps of its region's curve from a threshold to a lower one. Their
best Dice within a budget of false positives is bounded from above: let the last segment be taken in part, and the steps
of a curve be those of its concave envelope. Then segments are best taken by falling precision, until the budget is
spent or Dice no longer rises (the relaxed knapsack: Dantzig 1957, doi:10.1287/opre.5.2.266). The bound is attained
wherever that leaves no segment in part; `attained_dice` is what whole segments attain in any case. They are ceilings,
not methods (protocol, section 9).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from ingest.compiled import compiled
from ingest.critical import exceeding_voxels
from transforms.catalog import Inputs, declared
from transforms.contrasts import by_entry, entry_cte, nullable
from transforms.replicates import SUBJECT_QUERY, TEST_SUBJECT, numbers, voxel_volume
from transforms.resampling import Flags, Floats, Integers, Resample, divided, draw, exact, interval


@dataclass(frozen=True)
class Segments:
    """What can be taken: false and true positive voxels, each of shape (segments,).

    Attributes:
        line: Line of each segment. Those of one line, a curve's, can only be taken in order; precisions fall along it.
        false_positive: Voxels outside the reference; likewise `true_positive` those inside, at least 1.
        true_positive: See `false_positive`.
    """

    line: Integers
    false_positive: Integers
    true_positive: Integers

    def part(self, chosen: slice | Flags) -> "Segments":
        """Some of the segments."""
        return Segments(self.line[chosen], self.false_positive[chosen], self.true_positive[chosen])

    @staticmethod
    def of(rows: pl.DataFrame) -> "Segments":
        """From columns of the same names."""
        names = ("line", "false_positive", "true_positive")
        return Segments(*(numbers(rows, name).astype(np.int64) for name in names))


class Ceiling(NamedTuple):
    """The best Dice within a budget."""

    dice: float
    """Upper bound of Dice."""
    false_positive: float
    """False positive voxels that it comes with, perhaps a part of the last segment's."""
    attained_dice: float
    """Dice that whole segments attain: the best choice lies between the two."""


def ceiling_of(segments: Segments, reference: int, most_false_positive: int) -> Ceiling:
    """Bound the best Dice that some of the segments attain within a budget of false positives.

    Args:
        segments: What can be taken. Leave out beforehand what the budget does not hold by itself: the bound is tighter.
        reference: Reference voxels, at least 1.
        most_false_positive: False positive voxels of the budget.

    Returns:
        The ceiling; 0 where there is no segment.
    """
    false, true = segments.false_positive, segments.true_positive
    order = np.argsort(-true / (false + true), kind="stable")
    line = np.unique(segments.line, return_inverse=True)[1].astype(np.int64)
    is_closed = np.zeros(line.size, np.bool_)
    return _take(line[order], false[order], true[order], reference, most_false_positive, is_closed)


@compiled
def _take(line: Integers, false: Integers, true: Integers, reference: int, most: int, is_closed: Flags) -> Ceiling:
    """Take segments by falling precision as long as Dice rises; the first that does not fit bounds it, taken in part.

    It closes its line, and whole segments of the other lines fill what is left of the budget.
    """
    spent, hits, bound = 0, 0, -1.0
    for index in range(line.size):
        if true[index] * (hits + spent + reference) <= hits * (true[index] + false[index]):
            break
        if is_closed[line[index]]:
            continue
        if spent + false[index] <= most:
            spent += false[index]
            hits += true[index]
        else:
            is_closed[line[index]] = True
            if bound < 0:
                part = hits + true[index] * ((most - spent) / false[index])
                bound = 2 * part / (most + part + reference)
    attained = 2 * hits / (hits + spent + reference)
    return Ceiling(attained, float(spent), attained) if bound < 0 else Ceiling(bound, float(most), attained)


def envelope_steps(curves: Segments) -> Segments:
    """Steps of the concave envelopes of some curves.

    Args:
        curves: False and true positive voxels of each point, from nothing predicted on; the points of one curve (line)
            together and by falling level, so that neither count falls along it.

    Returns:
        The steps, of falling precision along each curve; none where a curve has no true positive.
    """
    blank = [np.empty(curves.line.size, np.int64) for _ in range(3)]
    count = _walk_curves(curves.line, curves.false_positive, curves.true_positive, blank[0], blank[1], blank[2])
    return Segments(blank[0][:count], blank[1][:count], blank[2][:count])


@compiled
def _walk_curves(
    line: Integers, false: Integers, true: Integers, lines: Integers, falses: Integers, trues: Integers
) -> int:
    """Write the steps of every envelope; their number.

    A step that is no less precise than the one before it joins that one (monotone chain: Andrew 1979,
    doi:10.1016/0020-0190(79)90072-3).
    """
    count, first, last_false, last_true = 0, 0, 0, 0
    for point in range(line.size):
        if point == 0 or line[point] != line[point - 1]:
            first, last_false, last_true = count, 0, 0
        step_false, step_true = false[point] - last_false, true[point] - last_true
        if step_true > 0:
            last_false, last_true = false[point], true[point]
            while count > first and trues[count - 1] * step_false <= step_true * falses[count - 1]:
                count -= 1
                step_false += falses[count]
                step_true += trues[count]
            lines[count], falses[count], trues[count] = line[point], step_false, step_true
            count += 1
    return count


LESION_BITS = 32
"""A line of a region is its subject's number, moved by so many bits, and its lesion's."""

POINT = """
    point as (
        select o.method_id, o.subject_id, o.budget_cm3, o.level, o.true_positive_voxels, o.reference_voxels
        from operating_subject as o
        where o.threshold_rule_id = 'validation' and o.postprocess_id = 'plain' and o.reference_voxels > 0
    )"""


@declared(
    name="segment_ceiling",
    row="One row per method, test subject with a reference, budget and ceiling that is made of segments (thresholds of "
    "lesions, a choice of components): an upper bound of the best Dice within the budget; none where the segments are "
    "not measured.",
    key=("method_id", "subject_id", "budget_cm3", "ceiling_id"),
    columns=("dice", "attained_dice", "burden_cm3"),
    inputs=(
        *("cohort_subject", "ranked_method", "operating_subject", "reference_curve", "region_curve"),
        "component_overlap",
    ),
    queries={
        "entry": f"with {entry_cte('true')} from entry order by entry",
        "point": f"""
            with {TEST_SUBJECT}, {POINT}
            select p.*, t.subject::bigint as subject, c.predicted_voxels as most_predicted_voxels
            from point as p
            join test_subject as t using (subject_id)
            join reference_curve as c using (method_id, subject_id)
            where c.postprocess_id = 'plain' and c.level = 0
            order by p.method_id, p.subject_id, p.budget_cm3""",
        "region": f"""
            with {entry_cte("true")}
            select
                e.entry, (t.subject::bigint << {LESION_BITS}) + r.lesion_id as line,
                r.region_predicted_voxels - r.overlap_voxels as false_positive, r.overlap_voxels as true_positive
            from region_curve as r
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            order by e.entry, line, r.level desc""",
        "component": f"""
            with {entry_cte("true")}, {POINT}
            select
                e.entry, t.subject::bigint as subject, p.budget_cm3, c.component_count,
                (c.component_voxels - c.component_true_positive_voxels)::bigint as false_positive,
                c.component_true_positive_voxels::bigint as true_positive
            from point as p
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            join component_overlap as c using (method_id, subject_id, level)
            order by all""",
    },
)
def segment_ceiling(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Both ceilings, method by method.

    A component that breaks the budget by itself, and so a region's curve from where it does, is left out.
    """
    del protocol
    rows: list[tuple[object, ...]] = []
    voxel_mm3 = voxel_volume(inputs["cohort_subject"])
    points = inputs["point"].partition_by("method_id", as_dict=True)
    methods = inputs["entry"].get_column("method_id").to_list()
    curves, choices = inputs["region"], by_entry(inputs["component"], len(methods))
    for place, (method, components) in enumerate(zip(methods, choices, strict=True)):
        regions = Segments.of(curves.filter(pl.col("entry") == place))  # one method's at a time: a copy of all is large
        for part in points[(method,)].partition_by("budget_cm3") if (method,) in points else ():
            budget = float(part.item(0, "budget_cm3"))
            most = exceeding_voxels(budget, voxel_mm3) - 1
            found = {
                "lesion_threshold": _steps(regions, most),
                "component_selection": _choices(components.filter(pl.col("budget_cm3") == budget), most),
            }
            rows += _rows(part, found, most, voxel_mm3)
    return segment_ceiling.table.frame(rows)


def _steps(curves: Segments, most: int) -> dict[int, Segments]:
    """Steps of all regions of each subject that has any point, within the budget."""
    steps = envelope_steps(curves.part(curves.false_positive <= most))
    return _by_subject(steps.line >> LESION_BITS, steps, curves.line >> LESION_BITS)


def _choices(rows: pl.DataFrame, most: int) -> dict[int, Segments]:
    """Components of each subject that has any, within the budget: each a line of its own."""
    count = numbers(rows, "component_count").astype(np.int64)
    subject, false, true = (
        np.repeat(numbers(rows, name), count) for name in ("subject", "false_positive", "true_positive")
    )
    fits = false <= most
    return _by_subject(subject[fits], Segments(np.arange(false.size), false, true).part(fits), subject)


def _by_subject(subject: Integers, segments: Segments, measured: Integers) -> dict[int, Segments]:
    """The segments of each subject that is measured, perhaps none; subjects ascend."""
    subjects = np.unique(measured)
    ends = zip(np.searchsorted(subject, subjects), np.searchsorted(subject, subjects, side="right"), strict=True)
    return {int(one): segments.part(slice(*end)) for one, end in zip(subjects, ends, strict=True)}


def _rows(
    points: pl.DataFrame, found: Mapping[str, Mapping[int, Segments]], most: int, voxel_mm3: float
) -> Iterator[tuple[object, ...]]:
    """Rows of one method and budget; none of a subject of whom something is predicted that the segments do not show."""
    predicted = {"lesion_threshold": "most_predicted_voxels", "component_selection": "true_positive_voxels"}
    blank = np.zeros(0, np.int64)
    nothing = Segments(blank, blank, blank)
    for point in points.iter_rows(named=True):
        for ceiling_id, of_subject in found.items():
            segments = of_subject.get(point["subject"], None if point[predicted[ceiling_id]] else nothing)
            if segments is not None:
                best = ceiling_of(segments, point["reference_voxels"], most)
                key = (point["method_id"], point["subject_id"], point["budget_cm3"], ceiling_id)
                yield *key, best.dice, best.attained_dice, best.false_positive * voxel_mm3 / 1000


@declared(
    name="ceiling_interval",
    row="One row per method, budget and ceiling: the interval of its mean gain over the validation threshold, over "
    "resampled test subjects.",
    key=("method_id", "budget_cm3", "ceiling_id"),
    columns=("gain_low?", "gain_high?", "n_replicates"),
    inputs=("cohort_subject", "ceiling_subject"),
    queries={
        "test_subject": SUBJECT_QUERY,
        "gain": """
            select method_id, budget_cm3, ceiling_id, subject_id, dice - validation_dice as gain
            from ceiling_subject
            where dice is not null""",
    },
)
def ceiling_interval(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Percentile intervals of paired gains; `n_replicates` counts those that hold a subject with a reference."""
    parameters, subjects = protocol.parameters, inputs["test_subject"]
    resample = draw(subjects.height, parameters.contrast_replicates, parameters.seed)
    parts = inputs["gain"].join(subjects, on="subject_id").sort("method_id", "budget_cm3", "ceiling_id", "subject")
    keys = parts.select("method_id", "budget_cm3", "ceiling_id").unique(maintain_order=True).with_row_index("series")
    parts = parts.join(keys, on=["method_id", "budget_cm3", "ceiling_id"])
    gains = np.full((keys.height, subjects.height), np.nan)
    gains[numbers(parts, "series"), numbers(parts, "subject")] = numbers(parts, "gain")
    low, high, defined = interval(_means(resample, gains)[:, 1:], parameters.interval_level)
    ends = zip(keys.drop("series").iter_rows(), nullable(low), nullable(high), defined.tolist(), strict=True)
    return ceiling_interval.table.frame([(*key, *end) for key, *end in ends])


def _means(resample: Resample, values: Floats) -> Floats:
    """Mean of each series over the subjects whose value is not NaN, series x replicates."""
    means = np.empty((len(values), len(resample.counts)))
    masks, mask_of = np.unique(~np.isnan(values), axis=0, return_inverse=True)
    for place, mask in enumerate(masks):  # most often one: that of the subjects with a reference
        inside, chosen = resample.among(mask), mask_of.ravel() == place
        means[chosen] = divided(inside.sums(exact(values[chosen][:, mask], inside.shape[1])), inside.sizes)
    return means
