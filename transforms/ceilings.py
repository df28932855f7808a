"""Ceilings of Dice that use the reference: thresholds of a subject's lesions, and a choice among its components.

Both are one problem. Segments of some false and true positives are there to be taken: one for each predicted component
that holds reference voxels; or, for each lesion, the steps of its region's curve from a threshold to a lower one. Their
best Dice within a budget of false positives is bounded from above: let the last segment be taken in part, and the steps
of a curve be those of its concave envelope. Then segments are best taken by falling precision, until the budget is
spent or Dice no longer rises (the relaxed knapsack: Dantzig 1957, doi:10.1287/opre.5.2.266). The bound is attained
wherever that leaves no segment in part; `attained_dice` is what whole segments attain in any case. They are ceilings,
not methods (protocol, section 9).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from ingest.compiled import compiled
from ingest.critical import exceeding_voxels
from transforms.catalog import Inputs, declared
from transforms.contrasts import entry_cte, nullable
from transforms.replicates import SUBJECT_QUERY, numbers
from transforms.resampling import Floats, Integers, Resample, divided, draw, exact, interval


@dataclass(frozen=True)
class Segments:
    """What can be taken: false and true positive voxels, each of shape (segments,)."""

    false_positive: Integers
    true_positive: Integers


@dataclass(frozen=True)
class Ceiling:
    """The best Dice within a budget.

    Attributes:
        dice: Upper bound of Dice.
        false_positive: False positive voxels that it comes with, perhaps a part of the last segment's.
        attained_dice: Dice that whole segments attain: the best choice lies between the two.
    """

    dice: float
    false_positive: float
    attained_dice: float


def ceiling_of(segments: Segments, reference: int, most_false_positive: int) -> Ceiling:
    """Bound the best Dice that some of the segments attain within a budget of false positives.

    Args:
        segments: What can be taken; of several that stand in line (a curve's), precisions must fall along the line.
        reference: Reference voxels, at least 1.
        most_false_positive: False positive voxels of the budget.

    Returns:
        The ceiling; 0 where there is no segment.
    """
    order = np.argsort(-_precision(segments), kind="stable")
    false, true = (
        np.concatenate([np.zeros(1, np.int64), np.cumsum(part[order])])
        for part in (segments.false_positive, segments.true_positive)
    )
    whole = int(np.searchsorted(false, most_false_positive, side="right"))
    dice = 2 * true[:whole] / (false[:whole] + true[:whole] + reference)
    best = int(dice.argmax())
    attained = Ceiling(float(dice[best]), float(false[best]), float(dice[best]))
    if whole == false.size:
        return attained
    share = (most_false_positive - false[whole - 1]) / (false[whole] - false[whole - 1])
    hits = true[whole - 1] + share * (true[whole] - true[whole - 1])
    partly = float(2 * hits / (most_false_positive + hits + reference))
    return attained if partly <= attained.dice else Ceiling(partly, float(most_false_positive), attained.dice)


def _precision(segments: Segments) -> Floats:
    return divided(segments.true_positive.astype(np.float64), segments.false_positive + segments.true_positive)


def region_segments(region: Integers, curve: Segments) -> tuple[Integers, Segments]:
    """Steps of the concave envelopes of some regions' curves.

    Args:
        region: Region of each point, those of one region together.
        curve: False and true positive voxels of each point, by falling level, so that neither falls along a region.

    Returns:
        Region of each step, and the steps; every curve starts from nothing predicted. None for a region without a true
        positive.
    """
    return _envelope_steps(region, curve.false_positive, curve.true_positive)


def _envelope_steps(region: Integers, false: Integers, true: Integers) -> tuple[Integers, Segments]:
    of, falses, trues = np.empty_like(region), np.empty_like(false), np.empty_like(true)
    count = _walk_curves(region, false, true, of, falses, trues)
    return of[:count], Segments(falses[:count], trues[:count])


@compiled
def _walk_curves(
    region: Integers, false: Integers, true: Integers, of: Integers, falses: Integers, trues: Integers
) -> int:
    """Write the steps of every envelope; their number.

    A step that is no less precise than the one before it joins that one (monotone chain: Andrew 1979,
    doi:10.1016/0020-0190(79)90072-3).
    """
    count, first, last_false, last_true = 0, 0, 0, 0
    for point in range(region.size):
        if point == 0 or region[point] != region[point - 1]:
            first, last_false, last_true = count, 0, 0
        step_false, step_true = false[point] - last_false, true[point] - last_true
        if step_true == 0:
            continue
        last_false, last_true = false[point], true[point]
        while count > first and trues[count - 1] * step_false <= step_true * falses[count - 1]:
            count -= 1
            step_false += falses[count]
            step_true += trues[count]
        of[count], falses[count], trues[count] = region[point], step_false, step_true
        count += 1
    return count


POINT = """
    point as (
        select o.method_id, o.subject_id, o.budget_cm3, o.level, o.true_positive_voxels, o.reference_voxels, s.voxel_mm3
        from operating_subject as o
        join cohort_subject as s using (subject_id)
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
        *("cohort_subject", "ranked_method", "operating_subject", "threshold_curve", "region_curve"),
        "component_overlap",
    ),
    queries={
        "entry": f"with {entry_cte('true')} from entry order by entry",
        "point": f"""
            with {POINT}
            select p.*, c.predicted_voxels as most_predicted_voxels
            from point as p
            join threshold_curve as c using (method_id, subject_id)
            where c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true'
                and c.postprocess_id = 'plain' and c.level = 0
            order by p.method_id, p.subject_id, p.budget_cm3""",
        "region": f"""
            with {entry_cte("true")}
            select
                r.subject_id, dense_rank() over (order by r.subject_id, r.lesion_id)::bigint as region,
                (r.region_predicted_voxels - r.overlap_voxels)::bigint as false_positive,
                r.overlap_voxels::bigint as true_positive
            from region_curve as r
            join entry as e using (method_id)
            join test_subject as t using (subject_id)
            where e.entry = $value
            order by region, r.level desc""",
        "component": f"""
            with {entry_cte("true")}, {POINT}
            select
                p.subject_id, p.budget_cm3, c.component_count,
                (c.component_voxels - c.component_true_positive_voxels)::bigint as false_positive,
                c.component_true_positive_voxels::bigint as true_positive
            from point as p
            join entry as e using (method_id)
            join component_overlap as c using (method_id, subject_id, level)
            where e.entry = $value""",
    },
)
def segment_ceiling(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Both ceilings, method by method: the regions of one at a time."""
    del protocol
    rows: list[tuple[object, ...]] = []
    points = inputs["point"].partition_by("method_id", as_dict=True)
    for method, place in inputs["entry"].select("method_id", "entry").iter_rows():
        if (method,) in points:
            regions = _segments_of_regions(inputs[f"region:{place}"])
            components = _segments_of_components(inputs[f"component:{place}"])
            rows += _method_rows(points[(method,)], regions, components)
    return segment_ceiling.table.frame(rows)


def _segments_of_regions(points: pl.DataFrame) -> dict[str, Segments]:
    """Steps of all regions of each subject."""
    of, steps = region_segments(numbers(points, "region"), _segments(points))
    subjects = points.select("subject_id", "region").unique("region", maintain_order=True)
    columns = {"region": of, "false_positive": steps.false_positive, "true_positive": steps.true_positive}
    found = pl.DataFrame(columns).join(subjects, on="region")
    # a subject whose regions hold no true positive has no step, but is measured
    nothing = Segments(np.zeros(0, np.int64), np.zeros(0, np.int64))
    parts = {str(subject): nothing for subject in subjects.get_column("subject_id").unique().to_list()}
    return parts | {str(k[0]): _segments(part) for k, part in found.partition_by("subject_id", as_dict=True).items()}


def _segments_of_components(rows: pl.DataFrame) -> dict[tuple[object, ...], Segments]:
    """Components of each subject and budget."""
    parts = rows.partition_by("subject_id", "budget_cm3", as_dict=True)
    return {key: _segments(part, numbers(part, "component_count").astype(np.int64)) for key, part in parts.items()}


def _segments(rows: pl.DataFrame, repeats: Integers | int = 1) -> Segments:
    return Segments(*(np.repeat(numbers(rows, name), repeats) for name in ("false_positive", "true_positive")))


def _method_rows(
    points: pl.DataFrame, regions: dict[str, Segments], components: dict[tuple[object, ...], Segments]
) -> Iterator[tuple[object, ...]]:
    nothing = Segments(np.zeros(0, np.int64), np.zeros(0, np.int64))
    for point in points.iter_rows(named=True):
        subject, budget = point["subject_id"], point["budget_cm3"]
        found = {
            "lesion_threshold": regions.get(subject, None if point["most_predicted_voxels"] else nothing),
            "component_selection": components.get(
                (subject, budget), None if point["true_positive_voxels"] else nothing
            ),
        }
        most = exceeding_voxels(budget, point["voxel_mm3"]) - 1
        for ceiling_id, segments in found.items():
            if segments is not None:
                best = ceiling_of(segments, point["reference_voxels"], most)
                burden = best.false_positive * point["voxel_mm3"] / 1000
                yield point["method_id"], subject, budget, ceiling_id, best.dice, best.attained_dice, burden


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
    rows: list[tuple[object, ...]] = []
    parts = inputs["gain"].join(subjects, on="subject_id").sort("method_id", "budget_cm3", "ceiling_id", "subject")
    for key, part in parts.partition_by("method_id", "budget_cm3", "ceiling_id", as_dict=True).items():
        gains = np.full(subjects.height, np.nan)
        gains[numbers(part, "subject")] = numbers(part, "gain")
        low, high, defined = interval(_means(resample, gains)[None, 1:], parameters.interval_level)
        rows.append((*key, *nullable(low), *nullable(high), int(defined[0])))
    return ceiling_interval.table.frame(rows)


def _means(resample: Resample, values: Floats) -> Floats:
    """Mean over the subjects whose value is not NaN, by replicate."""
    inside = resample.among(~np.isnan(values))
    return divided(inside.sums(exact(values[~np.isnan(values)], inside.shape[1])), inside.sizes)
