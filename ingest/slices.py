"""Slices of one subject: the score of each, and how well the scores rank the slices that hold reference voxels.

Slices lie along canonical axis 2, and only those that hold support voxels count. Definitions: protocol section 7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]
Reals = NDArray[np.float64]
Keys = NDArray[np.uint32]
Voxel = TypeVar("Voxel", bound=np.generic)

UPPER_QUANTILE = 0.99
QUINTILE_EDGES = (0.2, 0.4, 0.6, 0.8)

# The bits of a float32 above zero grow with it, and up to 1 they are 30: three digits.
DIGIT_BITS = 10
DIGITS = 1 << DIGIT_BITS
TOP_SHIFT = 2 * DIGIT_BITS

# Adding and subtracting 1.5 * 2**k rounds a smaller float64 to a multiple of 2**(k - 52): here 2**-29, then 2**-59.
COARSE = 1.5 * 2.0**23
FINE = 1.5 * 2.0**-7


@dataclass(frozen=True)
class SliceScores:
    """The slices along canonical axis 2 that hold support voxels, in order.

    Attributes:
        slice_index: Index along axis 2 of each of these slices.
        score_max: Highest score in the slice's support.
        score_p99: 99th percentile of those scores, linear between order statistics: ``numpy.quantile`` in float64.
        score_mean: Mean of those scores.
        reference_voxels: Reference voxels in the slice's support, shape (references, slices).
        area_mm2: Area of the slice's support, in mm2.
        relative_position: 0 at the first of these slices and 1 at the last, linear in the slice index (slices without
            support between them count as distance); 0 where there is only one.
    """

    slice_index: Counts
    score_max: Reals
    score_p99: Reals
    score_mean: Reals
    reference_voxels: Counts
    area_mm2: Reals
    relative_position: Reals

    @property
    def positive(self) -> Mask:
        """Whether each slice holds a reference voxel in its support, shape (references, slices)."""
        return self.reference_voxels > 0


@dataclass(frozen=True)
class SliceRanking:
    """How well a score ranks the positive slices of a subject above the negative ones.

    The AUROC adjusted for support area is ``1 - placement_sum / matched_count``, over subjects with both sums pooled.

    Attributes:
        auroc: Area under the ROC curve, tied scores at their mid-rank; None without positives or without negatives.
        placement_sum: Sum of the placement values of the matched positive slices; 0 where none is matched.
        matched_count: Positive slices with a negative slice in their stratum.
        positive_count: Slices that hold reference voxels.
        negative_count: The other slices.
    """

    auroc: float | None
    placement_sum: float
    matched_count: int
    positive_count: int
    negative_count: int


def slice_scores(
    clipped: Scores, support: Mask, references: Sequence[Mask], voxel_mm: tuple[float, float, float]
) -> SliceScores:
    """Summarise a map slice by slice inside a support.

    No result depends on the memory order, nor on the order of the voxels in a slice (of up to 2**24): scores are cut to
    multiples of 2**-59 and summed without rounding.

    Args:
        clipped: Clipped map, 3-D, values in [0, 1] inside the support. C or Fortran order is read in place.
        support: Mask of the same shape, fastest in the same memory order.
        references: Reference masks of the same shape, likewise; none is allowed.
        voxel_mm: Edges of a voxel along the canonical axes, in mm.

    Returns:
        The slices that hold support voxels; empty arrays for an empty support.

    Raises:
        ValueError: The arrays are not 3-D and of one shape, or a score in the support is outside [0, 1] or not a
            number.
        TypeError: The arrays are not of float32 and bool.
    """
    _check_volumes(clipped, support, references)
    reverse = clipped.flags.f_contiguous and not clipped.flags.c_contiguous
    inside = _rows(support, reverse)
    voxels = _count_voxels(inside, inside, reverse)
    held = np.flatnonzero(voxels)
    values, first = np.empty(voxels.sum(), np.float32), np.cumsum(voxels) - voxels
    stop = first.copy()
    if _deal_above_zero(_rows(clipped, reverse), inside, reverse, values, stop):
        outside = clipped[support]
        raise ValueError(f"scores in the support must lie in [0, 1]: found {outside.min()} to {outside.max()}")
    area = voxels[held].astype(np.float64)
    rank = UPPER_QUANTILE * (area - 1)
    lower = np.floor(rank)
    (maximum, total), bits = _summarise(values, first[held], stop[held], voxels[held] - lower.astype(np.int64))
    around = bits.view(np.float32).astype(np.float64)
    counts = [_count_voxels(_rows(reference, reverse), inside, reverse)[held] for reference in references]
    return SliceScores(
        slice_index=held,
        score_max=maximum,
        score_p99=_between(around[0], around[1], rank - lower),
        score_mean=total / area,
        reference_voxels=np.array(counts, np.int64).reshape(len(counts), held.size),
        area_mm2=area * (voxel_mm[0] * voxel_mm[1]),
        relative_position=(held - held[:1]) / np.maximum(held[-1:] - held[:1], 1),
    )


def rank_slices(score: Reals, positive: Mask, area_mm2: Reals) -> SliceRanking:
    """Rank the slices of one subject by a score, alone and among slices of similar support area.

    A positive slice is placed among the negative slices of its stratum: the share of them that score more, ties half
    (Janes and Pepe 2009, doi:10.1093/biomet/asp002). Its stratum is the number of quintile edges of the subject's
    areas, linear quantiles, that lie strictly below its area. A positive slice without negatives in its stratum is left
    out. Each area and placement is one division of two integers, and the placements' sum is rounded once.

    Args:
        score: Score of each slice, 1-D; infinite scores rank as the extremes that they are.
        positive: Whether each slice holds reference voxels.
        area_mm2: Support area of each slice, in mm2.

    Returns:
        The ranking: no area under the curve and zeros where there are no slices.

    Raises:
        ValueError: The arrays are not 1-D and of one length, a score is NaN, or an area is not finite.
    """
    if score.ndim != 1 or not score.shape == positive.shape == area_mm2.shape:
        shapes = f"{score.shape}, {positive.shape} and {area_mm2.shape}"
        raise ValueError(f"scores, labels and areas must be 1-D and of one length: found {shapes}")
    if np.isnan(score).any() or not np.isfinite(area_mm2).all():
        raise ValueError("a slice's score is NaN, or its area not finite; a ranking needs numbers")
    positives, negatives = int(np.count_nonzero(positive)), int(np.count_nonzero(~positive))
    wins = int(_wins_doubled(score[positive], score[~positive]).sum())
    placements = _placements(score, positive, _strata(area_mm2))
    return SliceRanking(
        auroc=wins / (2 * positives * negatives) if positives and negatives else None,
        placement_sum=math.fsum(placements),
        matched_count=len(placements),
        positive_count=positives,
        negative_count=negatives,
    )


def _check_volumes(clipped: Scores, support: Mask, references: Sequence[Mask]) -> None:
    """Refuse arrays that are not one map and its masks."""
    masks = [support, *references]
    if clipped.ndim != 3 or any(mask.shape != clipped.shape for mask in masks):
        shapes = [mask.shape for mask in masks]
        raise ValueError(f"scores {clipped.shape} and masks {shapes} must be 3-D and of one shape")
    if clipped.dtype != np.float32 or any(mask.dtype != np.bool_ for mask in masks):
        types = [str(mask.dtype) for mask in masks]
        raise TypeError(f"scores are {clipped.dtype} and masks {types}; they must be float32 and bool")


def _rows(volume: NDArray[Voxel], reverse: bool) -> NDArray[Voxel]:
    """The volume in memory order, on two axes: slices are the columns, or the rows in `reverse` (Fortran) order."""
    first, second, slices = volume.shape
    if reverse:
        return np.ascontiguousarray(volume.T).reshape(slices, first * second)
    return np.ascontiguousarray(volume).reshape(first * second, slices)


def _between(lower: Reals, upper: Reals, weight: Reals) -> Reals:
    """Interpolate from the nearer end, as ``numpy.quantile`` does, to the last bit."""
    step = upper - lower
    return np.where(weight < 0.5, lower + step * weight, upper - step * (1 - weight))


def _strata(area_mm2: Reals) -> Counts:
    """How many quintile edges of the areas lie strictly below each area."""
    if area_mm2.size == 0:
        return np.zeros(0, np.int64)
    edges = np.quantile(area_mm2, QUINTILE_EDGES)
    return np.count_nonzero(edges[:, None] < area_mm2, axis=0)


def _placements(score: Reals, positive: Mask, stratum: Counts) -> list[float]:
    """Placement values of the positive slices that have negative slices in their stratum."""
    placements: list[float] = []
    for number in range(len(QUINTILE_EDGES) + 1):
        inside = stratum == number
        among = score[inside & ~positive]
        if among.size:
            losses = 2 * among.size - _wins_doubled(score[inside & positive], among)
            placements += (losses / (2 * among.size)).tolist()
    return placements


def _wins_doubled(scores: Reals, among: Reals) -> Counts:
    """Twice the number of `among` below each score, plus the number that ties with it."""
    among = np.sort(among)
    return np.searchsorted(among, scores, side="left") + np.searchsorted(among, scores, side="right")


@compiled
def _count_voxels(mask: Mask, support: Mask, reverse: bool) -> Counts:
    """Voxels of a mask inside the support, per slice."""
    rows, columns = mask.shape
    counts = np.zeros(rows if reverse else columns, np.int64)
    for row in range(rows):
        if reverse:
            total = 0
            for column in range(columns):
                total += mask[row, column] & support[row, column]
            counts[row] = total
        else:
            for column in range(columns):
                counts[column] += mask[row, column] & support[row, column]
    return counts


@compiled
def _deal_above_zero(scores: Scores, support: Mask, reverse: bool, values: Scores, stop: Counts) -> bool | np.bool_:
    """Deal the scores above zero in the support to their slices.

    Args:
        scores: Map in memory order.
        support: Support in the same order.
        reverse: Whether slices are the rows.
        values: Receives the scores, slice by slice.
        stop: First place of each slice in `values`; becomes the place after its last score.

    Returns:
        Whether a score in the support is outside [0, 1] or not a number.
    """
    rows, columns = scores.shape
    refused = False
    for row in range(rows):
        for column in range(columns):
            if support[row, column]:
                score = scores[row, column]
                refused |= not (score >= 0 and score <= 1)
                if score > 0:
                    number = row if reverse else column
                    values[stop[number]] = score
                    stop[number] += 1
    return refused


@compiled
def _summarise(values: Scores, first: Counts, stop: Counts, lower_rank: Counts) -> tuple[Reals, Keys]:
    """Summarise the scores of each slice.

    Args:
        values: Scores above zero, slice by slice; all others of the support are zero.
        first: Place of each slice's first score.
        stop: Place after its last one.
        lower_rank: Rank from the top, from 1, of the order statistic at or below the upper quantile.

    Returns:
        Maximum and sum, shape (2, slices); bits of the order statistics at `lower_rank` and one above it (at the top,
        the same one again), shape (2, slices).
    """
    summary = np.zeros((2, first.size))
    order_statistics = np.zeros((2, first.size), np.uint32)
    for number in range(first.size):
        scores = values[first[number] : stop[number]]
        summary[0, number], summary[1, number] = _maximum_and_sum(scores)
        bits = scores.view(np.uint32)
        counts = _count_digits(bits, TOP_SHIFT)
        order_statistics[0, number] = _from_top(bits, counts, lower_rank[number])
        order_statistics[1, number] = _from_top(bits, counts, max(lower_rank[number] - 1, 1))
    return summary, order_statistics


@compiled
def _maximum_and_sum(scores: Scores) -> tuple[float, float]:
    """Maximum and sum of the scores of a slice.

    Each score is split into a multiple of 2**-29, one of 2**-59 and a rest of at most 2**-60, which is dropped: up to
    2**24 scores of each kind are then summed without rounding, in any order (Demmel and Nguyen 2015,
    doi:10.1109/TC.2014.2345391).
    """
    maximum, coarse_sum, fine_sum = 0.0, 0.0, 0.0
    for place in range(scores.size):
        score = np.float64(scores[place])
        coarse = (score + COARSE) - COARSE
        coarse_sum += coarse
        fine_sum += ((score - coarse) + FINE) - FINE
        maximum = max(maximum, score)
    return maximum, coarse_sum + fine_sum


@compiled
def _from_top(bits: Keys, counts: Counts, rank: int | np.int64) -> np.uint32:
    """Select the score at a rank from the top, digit by digit; 0 where there are fewer scores.

    Args:
        bits: Bits of the scores, which grow with them.
        counts: How many of the scores have each leading digit.
        rank: Rank, from 1.

    Returns:
        The bits of the selected score.
    """
    found, shift = np.uint32(0), TOP_SHIFT
    if rank > bits.size:
        return found
    while True:
        digit = DIGITS - 1
        while rank > counts[digit]:
            rank -= counts[digit]
            digit -= 1
        found |= np.uint32(digit) << np.uint32(shift)
        if shift == 0:
            return found
        bits = _with_digit(bits, shift, digit, counts[digit])
        shift -= DIGIT_BITS
        counts = _count_digits(bits, shift)


@compiled
def _count_digits(bits: Keys, shift: int) -> Counts:
    """How many scores have each value of one digit."""
    counts = np.zeros(DIGITS, np.int64)
    for place in range(bits.size):
        counts[np.intp(bits[place] >> np.uint32(shift)) & (DIGITS - 1)] += 1
    return counts


@compiled
def _with_digit(bits: Keys, shift: int, digit: int, size: int | np.int64) -> Keys:
    """Those scores that have a value of one digit, given how many there are."""
    alike = np.empty(size, np.uint32)
    found = 0
    for place in range(bits.size):
        if np.intp(bits[place] >> np.uint32(shift)) & (DIGITS - 1) == digit:
            alike[found] = bits[place]
            found += 1
    return alike
