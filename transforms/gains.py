"""What post-processing gains over plain maps at equal burden, over resampled cohorts (protocol, section 9, identity 5).

The validation threshold stays fixed; the plain threshold of the same burden is found anew in every replicate. Dice is
the subject mean; sensitivity is pooled over lesions above the floor, at a matched IoU of at least 0.10. All in the
reference setting: canonical reference, brain, true voxel volume.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared
from transforms.contrasts import (
    CURVE_INPUTS,
    REFERENCE_SETTING,
    Cohort,
    Curve,
    by_entry,
    contrast_queries,
    entry_cte,
    nullable,
)
from transforms.replicates import dense, dice_values, numbers
from transforms.resampling import Floats, Integers, Resample, by_block, divided, exact, interval, mean_burdens

GAINS = (
    *("total_gain", "fixed_threshold_effect", "relaxation"),
    *("sensitivity_gain", "sensitivity_fixed_threshold_effect"),
)
READ = ("test_subject", "entry", "choice", "curve", "lesion", "own_curve", "own_lesion")
QUERIES = {name: contrast_queries("true")[name] for name in READ} | {
    "processed": f"""
        with {entry_cte("true")},
        point as (
            select method_id, subject_id, budget_cm3, level
            from subject_threshold
            where {REFERENCE_SETTING} and threshold_rule_id = 'validation'
        )
        select
            e.entry, v.budget_cm3, c.postprocess_id, t.subject,
            c.predicted_voxels, c.true_positive_voxels, c.reference_voxels, c.hit_iou_10
        from point as v
        join reference_curve as c using (method_id, subject_id, level)
        join entry as e using (method_id)
        join test_subject as t using (subject_id)
        where c.postprocess_id <> 'plain' and c.lesion_count is not null
        order by e.entry, v.budget_cm3, c.postprocess_id, t.subject""",
}


@dataclass(frozen=True)
class _Series:
    """Counts of some rows (levels of plain maps, or points of processed ones) x subjects.

    Burdens leave out the rows that hold subjects' own levels, since no threshold is matched among them.
    """

    false_positive: Floats
    dice: Floats
    hits: Floats

    @staticmethod
    def of(voxels: Curve, hits: Floats, empty_dice: str) -> "_Series":
        """From voxel counts and lesion hits, rows x subjects."""
        dice = dice_values(voxels.predicted, voxels.true_positive, voxels.reference, empty_dice)
        return _Series(voxels.false_positive, dice, hits)

    def means(self, resample: Resample, lesions: Floats, voxel_mm3: float) -> tuple[Floats, Floats, Floats]:
        """Mean burden in cm3, mean Dice and pooled sensitivity, each rows x replicates."""
        defined = ~np.isnan(self.dice[0])
        inside = resample.among(defined)
        dice = divided(inside.sums(exact(self.dice[:, defined], inside.shape[1])), inside.sizes)
        sensitivity = divided(resample.sums(self.hits), resample.sums(lesions))
        return mean_burdens(resample, self.false_positive, voxel_mm3), dice, sensitivity


@declared(
    name="gain_interval",
    row="One row per method, budget and post-processing: intervals of its gains over plain maps at equal burden, with "
    "the plain threshold found anew in every replicate.",
    key=("method_id", "budget_cm3", "postprocess_id"),
    columns=(*(f"{gain}_{end}?" for gain in GAINS for end in ("low", "high")), "n_replicates"),
    inputs=(*CURVE_INPUTS, "subject_threshold"),
    queries=QUERIES,
)
def gain_interval(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Percentile intervals of every part of a gain; `n_replicates` counts those in which mean Dice is defined."""
    cohort = Cohort(protocol, inputs)
    rows: list[tuple[object, ...]] = []
    if not cohort.is_empty:
        count = len(cohort.entries)
        lesions, processed = cohort.parts("lesion"), by_entry(inputs["processed"], count)
        entries = zip(cohort.fixed_levels("validation"), cohort.curves(), lesions, processed, strict=True)
        for (method, _), (levels, curve, hits, points) in zip(cohort.entries, entries, strict=True):
            if points.height:
                found = _rows(cohort, levels, curve, hits, points, protocol.parameters.interval_level)
                rows += [(method, *row) for row in found]
    return gain_interval.table.frame(rows)


def _rows(
    cohort: Cohort, validation: Integers, curve: Curve, lesion: pl.DataFrame, points: pl.DataFrame, level: float
) -> list[tuple[object, ...]]:
    """Budget, post-processing, intervals and replicates of one method's gains."""
    subjects = cohort.resample.shape[1]
    at = [numbers(lesion, name).astype(np.int64) for name in ("level", "subject")]
    hits, counts = (
        dense(lesion, at, (len(curve.predicted), subjects), name).astype(np.float64)
        for name in ("hit_iou_10", "lesion_count")
    )
    keys = points.select("budget_cm3", "postprocess_id").unique(maintain_order=True).with_row_index("point")
    points = points.join(keys, on=["budget_cm3", "postprocess_id"])
    place = [numbers(points, name).astype(np.int64) for name in ("point", "subject")]
    names = ("predicted_voxels", "true_positive_voxels", "reference_voxels", "hit_iou_10")
    voxels = [dense(points, place, (keys.height, subjects), name).astype(np.float64) for name in names]
    plain = _Series.of(curve, hits, cohort.empty_dice)
    processed = _Series.of(Curve(*voxels[:3]), voxels[3], cohort.empty_dice)
    level_at = dict(zip(cohort.budgets.tolist(), validation.tolist(), strict=True))
    fixed = np.array([level_at[budget] for budget in keys.get_column("budget_cm3").to_list()])

    def gains_of(block: Resample) -> Floats:
        return _gains(block, plain, processed, counts[0], fixed, cohort.voxel_mm3)

    gains = by_block(cohort.resample, gains_of)[..., 1:]
    low, high, defined = interval(gains, level)
    ends = [nullable(end[gain]) for gain in range(len(GAINS)) for end in (low, high)]
    key = keys.select("budget_cm3", "postprocess_id").iter_rows()
    return [(*k, *e, n) for k, *e, n in zip(key, *ends, defined[0].tolist(), strict=True)]


def _gains(
    block: Resample, plain: _Series, processed: _Series, lesions: Floats, fixed: Integers, voxel_mm3: float
) -> Floats:
    """The five gains x points x replicates."""
    burdens, plain_dice, plain_sensitivity = plain.means(block, lesions, voxel_mm3)
    targets, dice, sensitivity = processed.means(block, lesions, voxel_mm3)
    above = np.stack([(burdens > target).sum(axis=0) for target in targets])
    below = np.maximum(above - 1, 0)
    low, high = (np.take_along_axis(burdens, levels, axis=0) for levels in (above, below))
    # maps without post-processing never have less burden, so where level 0 keeps the target it has exactly that
    weight = np.divide(targets - low, high - low, out=np.zeros_like(low), where=high > low)

    def matched(statistic: Floats) -> Floats:
        tighter, looser = (np.take_along_axis(statistic, levels, axis=0) for levels in (above, below))
        return (1 - weight) * tighter + weight * looser

    equal = matched(plain_dice)
    same = plain_dice[fixed]
    return np.stack(
        [
            dice - equal,
            dice - same,
            same - equal,
            sensitivity - matched(plain_sensitivity),
            sensitivity - plain_sensitivity[fixed],
        ]
    )
