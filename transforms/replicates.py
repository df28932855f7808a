"""Scores of one method over resampled cohorts: Dice, lesion sensitivity and the threshold-free metrics.

The measures and their aggregations are those of the SQL marts (protocol, sections 1, 3, 4 and 7), in all replicates at
once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.protocol import Protocol
from transforms.resampling import (
    Floats,
    Integers,
    Resample,
    chosen,
    divided,
    exact,
    medians,
    pooled_slice_auroc,
    pooled_voxel_ranking,
)

CRITERIA = ("iou_10", "iou_25", "iou_50", "any_overlap")
TEST_SUBJECT = """
    test_subject as (
        select subject_id, (row_number() over (order by subject_id) - 1)::usmallint as subject
        from cohort_subject
        where is_included and split = 'test'
    )"""
# of score_histogram `h`, in narrow types: the largest rows that a transform reads
HISTOGRAM_COLUMNS = """
    h.bin::usmallint as bin, h.positive_voxels::uinteger as positive_voxels,
    h.negative_voxels::uinteger as negative_voxels"""
SUBJECT_QUERY = f"with {TEST_SUBJECT} from test_subject order by subject"


def numbers(frame: pl.DataFrame, column: str) -> NDArray[Any]:
    """A column as an array, null as NaN."""
    return frame.get_column(column).to_numpy()


def dense(frame: pl.DataFrame, places: Sequence[Integers], shape: tuple[int, ...], column: str) -> NDArray[Any]:
    """Spread a column over an array; zero where there is no row."""
    values = numbers(frame, column)
    result = np.zeros(shape, values.dtype)
    result[tuple(places)] = values
    return result


def dice_values(predicted: Floats, true_positive: Floats, reference: Floats, empty_dice: str) -> Floats:
    """Dice by element; NaN without reference voxels unless the policy counts two empty masks as one."""
    dice = np.where(reference > 0, divided(2 * true_positive, predicted + reference), np.nan)
    return np.where(reference == 0, (predicted == 0).astype(np.float64), dice) if empty_dice != "exclude" else dice


def aggregated_dice(
    resample: Resample, predicted: Floats, true_positive: Floats, reference: Floats, choice: Integers, empty_dice: str
) -> Floats:
    """Mean, median and pooled Dice.

    Args:
        resample: Replicates of the subjects that were measured.
        predicted: Voxels, series x levels x subjects; likewise `true_positive` and `reference`.
        true_positive: See `predicted`.
        reference: See `predicted`; the same at all levels.
        choice: Points x replicates, positions of levels.
        empty_dice: Policy for subjects without reference voxels.

    Returns:
        Aggregations x series x points x replicates; NaN where undefined.
    """
    dice = dice_values(predicted, true_positive, reference, empty_dice)
    defined = ~np.isnan(dice[0, 0])
    inside = resample.among(defined)
    rounded = exact(dice[..., defined], inside.shape[1])
    pooled = chosen(divided(2 * resample.sums(true_positive), resample.sums(predicted + reference)), choice)
    mean = chosen(divided(inside.sums(rounded), inside.sizes), choice)
    return np.stack([mean, medians(inside, rounded, choice), pooled])


def aggregated_sensitivity(resample: Resample, hits: Floats, lesions: Floats, choice: Integers) -> Floats:
    """Mean, median and pooled lesion sensitivity.

    Args:
        resample: Replicates of the subjects.
        hits: Lesions hit, series x levels x subjects.
        lesions: Lesions of each subject; those without any are left out.
        choice: Points x replicates, positions of levels.

    Returns:
        Aggregations x series x points x replicates; NaN where undefined.
    """
    inside, hits = resample.among(lesions > 0), hits[..., lesions > 0]
    lesions = lesions[lesions > 0]
    rounded = exact(hits / lesions, inside.shape[1])
    pooled = chosen(divided(inside.sums(hits), inside.sums(lesions)), choice)
    mean = chosen(divided(inside.sums(rounded), inside.sizes), choice)
    return np.stack([mean, medians(inside, rounded, choice), pooled])


def mean_and_median(resample: Resample, values: Floats) -> tuple[Floats, Floats]:
    """Mean and median over the subjects whose value is not NaN, by replicate."""
    defined = ~np.isnan(values)
    inside = resample.among(defined)
    rounded = exact(values[defined], inside.shape[1])
    always = np.zeros((1, len(resample.counts)), np.int64)
    mean = divided(inside.sums(rounded), inside.sizes)
    if not defined.any():
        return mean, np.full(len(mean), np.nan)
    return mean, medians(inside, rounded[None, None], always)[0, 0]


def voxel_volume(cohort: pl.DataFrame) -> float:
    """The voxel volume of the test cohort, in mm3 (a study declares one)."""
    test = cohort.filter(pl.col("is_included") & (pl.col("split") == "test"))
    return float(test.get_column("voxel_mm3")[0]) if test.height else 1.0


def free_scores(
    resample: Resample,
    ranking: pl.DataFrame,
    histogram: pl.DataFrame,
    slices: pl.DataFrame | None,
    protocol: Protocol,
) -> dict[tuple[str, str], Floats]:
    """Threshold-free scores of one series by metric and aggregation, each by replicate."""
    ranking = ranking.sort("subject")
    scores: dict[tuple[str, str], Floats] = {}
    columns = {"voxel_auroc": "auroc", "voxel_ap": "average_precision"}
    for metric in ("voxel_auroc", "voxel_ap", "slice_auroc", "slice_aroc"):
        values = ranking.get_column(columns.get(metric, metric)).cast(pl.Float64).fill_null(np.nan).to_numpy()
        scores[metric, "mean"], scores[metric, "median"] = mean_and_median(resample, values)
    if not histogram.is_empty():
        places = [numbers(histogram, name).astype(np.int64) for name in ("bin", "subject")]
        shape = (protocol.parameters.histogram_bins, resample.shape[1])
        auroc, precision = pooled_voxel_ranking(
            resample, *(dense(histogram, places, shape, f"{sign}_voxels") for sign in ("positive", "negative"))
        )
        scores["voxel_auroc", "pooled"], scores["voxel_ap", "pooled"] = auroc, precision
    if slices is not None:
        scores["slice_auroc", "pooled"] = pooled_slice_auroc(
            resample,
            numbers(slices, "score_max").astype(np.float64),
            numbers(slices, "subject").astype(np.int64),
            numbers(slices, "is_positive").astype(np.bool_),
        )
    placements, matched = (
        ranking.get_column(name).cast(pl.Float64).fill_null(0.0).to_numpy()
        for name in ("placement_sum", "matched_count")
    )
    total = resample.sums(exact(placements, len(placements)))
    scores["slice_aroc", "pooled"] = 1 - divided(total, resample.sums(matched))
    return scores
