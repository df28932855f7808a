"""Critical thresholds of one subject: the score at which a budget stops being exceeded, exactly, whatever the grid.

A voxel is predicted at threshold t exactly when its score is above t. So more than b cm3 are predicted exactly when the
c-th largest score is above t, c being the fewest voxels whose volume exceeds b. Definitions: protocol section 6.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]

LARGEST_COUNT = 2**53  # float64 counts voxels exactly up to here

# The bits of a float32 above zero grow with it. Scores are binned by exponent and eight bits of mantissa: 256 bins an
# octave, so few scores share a bin, whatever the scale of a map, unless they tie.
BITS_OF_ONE = np.uint32(0x3F800000)
BIN_SHIFT = np.uint32(15)
BINS = int(BITS_OF_ONE >> BIN_SHIFT)


@dataclass(frozen=True)
class CriticalThresholds:
    """For each voxel count, the threshold below which at least so many voxels are predicted.

    A loss is 1 at threshold t exactly when the critical threshold is above t, in float32. It is 0, and the loss never
    1, where there are fewer voxels.

    Attributes:
        burden: For the loss 1[false-positive burden > b]: among the voxels outside the reference.
        volume: For the loss 1[predicted volume > b]: among all voxels.
    """

    burden: Scores
    volume: Scores


def exceeding_voxels(budget_cm3: float, voxel_mm3: float) -> int:
    """The fewest voxels whose volume is above a budget.

    Args:
        budget_cm3: Budget in cm3, not negative.
        voxel_mm3: Volume of a voxel in mm3, above zero.

    Returns:
        The smallest count c, at least 1, with ``c * voxel_mm3 / 1000 > budget_cm3`` in float64, evaluated as it stands:
        the expression that decides exceedance on the threshold grid. Rounding can put it a voxel off
        ``floor(1000 b / v) + 1``.

    Raises:
        ValueError: A value is out of range or not finite, or the count is beyond 2**53.
    """
    if not (0 <= budget_cm3 < math.inf and 0 < voxel_mm3 < math.inf):
        raise ValueError(f"a budget of {budget_cm3} cm3 and a voxel of {voxel_mm3} mm3 give no voxel count")
    if 1000 * budget_cm3 / voxel_mm3 >= LARGEST_COUNT:
        raise ValueError(f"a budget of {budget_cm3} cm3 holds more than 2**53 voxels of {voxel_mm3} mm3")
    count = math.floor(1000 * budget_cm3 / voxel_mm3) + 1
    while count * voxel_mm3 / 1000 <= budget_cm3:
        count += 1
    while (count - 1) * voxel_mm3 / 1000 > budget_cm3:
        count -= 1
    return count


def critical_thresholds(scores: Scores, positive: Mask, counts: Sequence[int]) -> CriticalThresholds:
    """The c-th largest score among the voxels outside the reference, and among all voxels, for several counts at once.

    Args:
        scores: Clipped scores of a support's voxels, 1-D. A NaN or a score below zero counts as zero, one above 1 as 1.
        positive: Whether each voxel is in the reference.
        counts: Voxel counts c, as from :func:`exceeding_voxels`, each at least 1; in any order, repeats allowed.

    Returns:
        One critical threshold per loss and count, in the order of the counts; zeros for an empty support.

    Raises:
        ValueError: The arrays are not 1-D and of one length, or a count is below 1.
        TypeError: The arrays are not of float32 and bool.
    """
    if scores.ndim != 1 or scores.shape != positive.shape:
        raise ValueError(f"scores {scores.shape} and labels {positive.shape} must be 1-D and of one length")
    if scores.dtype != np.float32 or positive.dtype != np.bool_:
        raise TypeError(f"scores are {scores.dtype} and labels {positive.dtype}; they must be float32 and bool")
    if any(count < 1 for count in counts):
        raise ValueError(f"voxel counts must be at least 1: found {list(counts)}")
    ranks = np.array([min(count, scores.size + 1) for count in counts], np.int64)
    flat, excluded = np.ascontiguousarray(scores), np.ascontiguousarray(positive)
    return CriticalThresholds(
        burden=_from_top(flat, excluded, ranks),
        volume=_from_top(flat, np.zeros_like(excluded), ranks),
    )


def _from_top(scores: Scores, excluded: Mask, ranks: Counts) -> Scores:
    """Scores at some ranks from the top, from 1, among the voxels that are not excluded; 0 where there are fewer.

    Only the scores in the bins where the ranks fall are gathered and partitioned.
    """
    histogram = _count_bins(scores, excluded)
    through = np.cumsum(histogram)
    bins = np.searchsorted(through, ranks)
    reached = bins < BINS
    wanted = np.unique(bins[reached])
    place = np.full(BINS, -1, np.int64)
    place[wanted] = np.cumsum(histogram[wanted]) - histogram[wanted]
    gathered = np.empty(histogram[wanted].sum(), np.float32)
    above = (through - histogram - place)[bins[reached]]  # scores of higher bins that are not gathered
    from_bottom = gathered.size - (ranks[reached] - above)
    _gather(scores, excluded, place, gathered)
    gathered.partition(np.unique(from_bottom))
    found = np.zeros(ranks.size, np.float32)
    found[reached] = gathered[from_bottom]
    return found


@compiled
def _count_bins(scores: Scores, excluded: Mask) -> Counts:
    """Scores above zero per bin, from the highest bin down, among the voxels that are not excluded."""
    bits = scores.view(np.uint32)
    counts = np.zeros(BINS, np.int64)
    for voxel in range(scores.size):
        if scores[voxel] > 0 and not excluded[voxel]:
            counts[(BITS_OF_ONE - min(bits[voxel], BITS_OF_ONE)) >> BIN_SHIFT] += 1
    return counts


@compiled
def _gather(scores: Scores, excluded: Mask, place: Counts, gathered: Scores) -> None:
    """Gather the scores of some bins, each bin's from its `place` on; a bin whose place is negative is left out."""
    bits = scores.view(np.uint32)
    for voxel in range(scores.size):
        if scores[voxel] > 0 and not excluded[voxel]:
            chosen = (BITS_OF_ONE - min(bits[voxel], BITS_OF_ONE)) >> BIN_SHIFT
            if place[chosen] >= 0:
                gathered[place[chosen]] = min(scores[voxel], np.float32(1))
                place[chosen] += 1
