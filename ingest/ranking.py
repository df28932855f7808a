"""Measures of a score's ranking of voxels, and counts along the threshold grid, for one map inside one support."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]
Keys = NDArray[np.uint32]

LEVELS = 201
HISTOGRAM_BINS = 4096

# Counters of one bin that take turns, so that a run of equal scores does not wait for its own last addition.
LANES = 4

# A key is the label below the 31 bits that order the scores of one sign; three digits cover them.
DIGIT_BITS = 11
DIGITS = 3


@dataclass(frozen=True)
class Ranking:
    """How well a score ranks the positive voxels of a support above the negative ones.

    Attributes:
        auroc: Area under the ROC curve, tied scores at their mid-rank; None without positives or without negatives.
        average_precision: Average precision, tied scores collapsed to one threshold; None without positives, 1 without
            negatives, as in scikit-learn.
        positive_voxels: Voxels of the support in the reference.
        negative_voxels: The other voxels of the support.
        tied_fraction: Share of voxels whose score another voxel also has; None for an empty support.
        ordinal_auroc: AUROC where tied scores rank in array order (of two, the earlier lower); None as for ``auroc``.
        ordinal_average_precision: Average precision where every voxel is a threshold of its own, tied scores in array
            order (of two, the earlier first); None as for ``average_precision``.
    """

    auroc: float | None
    average_precision: float | None
    positive_voxels: int
    negative_voxels: int
    tied_fraction: float | None
    ordinal_auroc: float | None
    ordinal_average_precision: float | None


def thresholds() -> Scores:
    """The threshold of each level: ``float32(k / 200)`` for k = 0..200."""
    return (np.arange(LEVELS) / (LEVELS - 1)).astype(np.float32)


def curve_counts(scores: Scores, positive: Mask) -> tuple[Counts, Counts]:
    """Predicted and truly predicted voxels at every level.

    Args:
        scores: Clipped scores of a support's voxels, 1-D. A NaN is never predicted.
        positive: Whether each voxel is in the reference.

    Returns:
        Voxels with ``score > float32(k / 200)`` for k = 0..200, and those of them in the reference. Zeros where the
        support is empty.

    Raises:
        ValueError: If the two arrays are not 1-D and of one length.
        TypeError: If they are not of float32 and bool.
    """
    _check_pair(scores, positive)
    padded = np.concatenate([[-np.inf], thresholds(), [np.inf]]).astype(np.float32)
    counts = _count_levels(np.ascontiguousarray(scores), np.ascontiguousarray(positive), padded)
    at_least = np.cumsum(counts[:, ::-1], axis=1)[:, -2::-1]
    return at_least.sum(axis=0), at_least[1].copy()


def level_counts(scores: Scores, groups: NDArray[np.int32], count: int) -> Counts:
    """Predicted voxels of each group at every level.

    Args:
        scores: Clipped scores, 1-D. A NaN is never predicted.
        groups: Group of each of these voxels, 1 to `count`.
        count: Number of groups.

    Returns:
        Voxels with ``score > float32(k / 200)`` for k = 0..200, shape (groups, levels); zeros for a group without any.
    """
    padded = np.concatenate([[-np.inf], thresholds(), [np.inf]]).astype(np.float32)
    counts = np.zeros((count, LEVELS + 1), np.int64)
    _count_grouped(np.ascontiguousarray(scores), np.ascontiguousarray(groups), padded, counts)
    return np.cumsum(counts[:, ::-1], axis=1)[:, -2::-1]


def score_histogram(scores: Scores, positive: Mask) -> tuple[Counts, Counts]:
    """Histograms of the clipped score over the voxels in the reference and over the others.

    Args:
        scores: Clipped scores of a support's voxels, 1-D, in [0, 1].
        positive: Whether each voxel is in the reference.

    Returns:
        Counts of positive and of negative voxels in 4,096 bins: bin 0 holds zeros only, the rest go to
        ``ceil(score * float32(4095))`` in float32. Zeros where the support is empty.

    Raises:
        ValueError: If the two arrays are not 1-D and of one length.
        TypeError: If they are not of float32 and bool.
    """
    _check_pair(scores, positive)
    counts = _count_bins(np.ascontiguousarray(scores), np.ascontiguousarray(positive))
    return counts[1], counts[0]


def ranking_scratch(voxels: int) -> Keys:
    """A buffer that :func:`rank_voxels` can reuse for any number of voxels up to this one: 8 bytes a voxel."""
    return np.empty((2, voxels), np.uint32)


def rank_voxels(scores: Scores, positive: Mask, scratch: Keys | None = None) -> Ranking:
    """Rank the voxels of a support by score, exactly, with and without regard to ties.

    Counts are integers: twice the pairs of a positive and a negative voxel, at most half the square of the number of
    voxels, which 64 bits hold up to 4e9 voxels. Each AUROC is one division of two of them, and sums of precisions are
    compensated. The negative zero equals zero. Zeros are set aside and the rest is sorted by radix, stably.

    Args:
        scores: Unclipped scores of a support's voxels, 1-D. Infinite scores rank as the extremes that they are.
        positive: Whether each voxel is in the reference.
        scratch: Buffer from :func:`ranking_scratch`, overwritten; a new one by default.

    Returns:
        The ranking. A constant map has AUROC 0.5 and a tied fraction of 1.

    Raises:
        ValueError: If the arrays are not 1-D and of one length, a score is NaN, or the scratch is too small.
        TypeError: If they are not of float32 and bool, or the scratch not of uint32.
    """
    _check_pair(scores, positive)
    voxels = scores.size
    buffer = ranking_scratch(voxels) if scratch is None else scratch
    if buffer.dtype != np.uint32:
        raise TypeError(f"the scratch is of type {buffer.dtype}; it must be uint32")
    if buffer.ndim != 2 or buffer.shape[0] != 2 or buffer.shape[1] < voxels:
        raise ValueError(f"the scratch of shape {buffer.shape} cannot hold {voxels} voxels; see ranking_scratch")
    census = _census(np.ascontiguousarray(scores), np.ascontiguousarray(positive))
    if census.nan:
        raise ValueError(f"{census.nan} of {voxels} scores are NaN; a ranking needs numbers")
    tally = _rank(np.ascontiguousarray(scores), np.ascontiguousarray(positive), census, buffer[0], buffer[1])
    return _ranking(tally, census.positive, voxels - census.positive)


class _Census(NamedTuple):
    """Voxels of a support by kind."""

    positive: int
    nan: int
    below_zero: int
    above_zero: int
    positive_at_zero: int


class _Tally(NamedTuple):
    """What the walk down the ranking counts.

    ``pairs_doubled`` counts pairs of a positive and a negative voxel twice where the positive scores more and once
    where they tie; ``ordinal_pairs`` those where the positive ranks higher in stable order; the precisions are summed
    over the positive voxels.
    """

    pairs_doubled: int
    ordinal_pairs: int
    tied: int
    precision: float
    ordinal_precision: float


def _check_pair(scores: Scores, positive: Mask) -> None:
    """Refuse arrays that are not one score and one label for each voxel."""
    if scores.ndim != 1 or scores.shape != positive.shape:
        raise ValueError(f"scores {scores.shape} and labels {positive.shape} must be 1-D and of one length")
    if scores.dtype != np.float32 or positive.dtype != np.bool_:
        raise TypeError(f"scores are {scores.dtype} and labels {positive.dtype}; they must be float32 and bool")


def _ranking(tally: _Tally, positives: int, negatives: int) -> Ranking:
    """Divide the counts, where there is something to divide by."""
    voxels, pairs = positives + negatives, positives * negatives
    return Ranking(
        auroc=tally.pairs_doubled / (2 * pairs) if pairs else None,
        average_precision=tally.precision / positives if positives else None,
        positive_voxels=positives,
        negative_voxels=negatives,
        tied_fraction=tally.tied / voxels if voxels else None,
        ordinal_auroc=tally.ordinal_pairs / pairs if pairs else None,
        ordinal_average_precision=tally.ordinal_precision / positives if positives else None,
    )


@compiled
def _count_levels(scores: Scores, positive: Mask, padded: Scores) -> Counts:
    """Voxels by label and by how many thresholds they exceed: shape (2, thresholds + 1).

    Args:
        scores: Scores.
        positive: Labels.
        padded: Thresholds ``float32(k / (n - 1))``, one value below and one above all scores around them.
    """
    levels = padded.size - 2
    counts = np.zeros((LANES, 2, levels + 1), np.int64)
    for voxel in range(scores.size):
        counts[voxel % LANES, np.intp(positive[voxel]), _exceeded(scores[voxel], padded)] += 1
    return counts.sum(axis=0)


@compiled
def _count_grouped(scores: Scores, groups: NDArray[np.int32], padded: Scores, counts: Counts) -> None:
    """Count voxels by group and by how many thresholds they exceed."""
    for voxel in range(scores.size):
        counts[groups[voxel] - 1, _exceeded(scores[voxel], padded)] += 1


@compiled
def _exceeded(value: float, padded: Scores) -> int:
    """How many thresholds a score exceeds.

    Rounding can put the guess one level off to either side, so three thresholds are compared, without a branch.
    """
    score = value if value > 0 else np.float32(0)
    guess = np.intp(min(score, np.float32(1)) * np.float32(padded.size - 3))
    return guess + (score > padded[guess]) + (score > padded[guess + 1]) + (score > padded[guess + 2]) - 1


@compiled
def _count_bins(scores: Scores, positive: Mask) -> Counts:
    """Voxels by label and by bin: shape (2, bins)."""
    counts = np.zeros((LANES, 2, HISTOGRAM_BINS), np.int64)
    for voxel in range(scores.size):
        score = scores[voxel] if scores[voxel] > 0 else np.float32(0)
        place = np.intp(np.ceil(min(score, np.float32(1)) * np.float32(HISTOGRAM_BINS - 1)))
        counts[voxel % LANES, np.intp(positive[voxel]), place] += 1
    return counts.sum(axis=0)


@compiled
def _census(scores: Scores, positive: Mask) -> _Census:
    """Count the voxels by kind."""
    positives, nan, below_zero, above_zero, positive_at_zero = 0, 0, 0, 0, 0
    for voxel in range(scores.size):
        score = scores[voxel]
        positives += positive[voxel]
        nan += score != score
        below_zero += score < 0
        above_zero += score > 0
        positive_at_zero += (score == 0) & positive[voxel]
    return _Census(positives, nan, below_zero, above_zero, positive_at_zero)


@compiled
def _split(scores: Scores, positive: Mask, census: _Census, keys: Keys) -> None:
    """Write sortable keys, in array order: first of the scores below zero, then of those above.

    The bits of a float32 without its sign grow with its magnitude; below zero they are complemented. The lowest bit of
    a key is the label. Zeros get no key: for the positive ones among them, their place among the zeros is written after
    the keys.
    """
    bits = scores.view(np.uint32)
    at_below, at_above, at_zero = 0, census.below_zero, census.below_zero + census.above_zero
    zeros = 0
    for voxel in range(scores.size):
        score = scores[voxel]
        label = np.uint32(positive[voxel])
        if score > 0:
            keys[at_above] = (bits[voxel] << np.uint32(1)) | label
            at_above += 1
        elif score < 0:
            keys[at_below] = (~bits[voxel] << np.uint32(1)) | label
            at_below += 1
        else:
            if positive[voxel]:
                keys[at_zero] = zeros
                at_zero += 1
            zeros += 1


@compiled
def _sort(keys: Keys, spare: Keys) -> Keys:
    """Sort keys by all but their lowest bit, stably: radix sort from the last digit. Either array holds the result."""
    size = 1 << DIGIT_BITS
    counts = np.zeros((DIGITS, size), np.int64)
    for place in range(keys.size):
        key = np.int64(keys[place])
        for digit in range(DIGITS):
            counts[digit, (key >> (1 + digit * DIGIT_BITS)) & (size - 1)] += 1
    for digit in range(DIGITS):
        if counts[digit].max() < keys.size:
            _deal(keys, spare, 1 + digit * DIGIT_BITS, counts[digit])
            keys, spare = spare, keys
    return keys


@compiled
def _deal(keys: Keys, dealt: Keys, shift: int, counts: Counts) -> None:
    """Deal keys into the order of one digit, given how often each value of it occurs."""
    start = 0
    for value in range(counts.size):
        start, counts[value] = start + counts[value], start
    for place in range(keys.size):
        key = keys[place]
        value = (np.int64(key) >> shift) & (counts.size - 1)
        dealt[np.uintp(counts[value])] = key
        counts[value] += 1


class _Walk(NamedTuple):
    """Where a walk down the ranking stands.

    ``counts``: positive voxels passed, negative voxels passed, and the three counts of :class:`_Tally`. The two sums of
    precisions carry their rounding errors along.
    """

    counts: Counts
    precision: NDArray[np.float64]
    ordinal_precision: NDArray[np.float64]


@compiled
def _rank(scores: Scores, positive: Mask, census: _Census, keys: Keys, spare: Keys) -> _Tally:
    """Sort the voxels and walk down from the highest score."""
    _split(scores, positive, census, keys)
    walk = _Walk(np.zeros(5, np.int64), np.zeros(2), np.zeros(2))
    negatives = scores.size - census.positive
    zeros = scores.size - census.below_zero - census.above_zero
    sorted_stop = census.below_zero + census.above_zero
    above = slice(census.below_zero, sorted_stop)
    _walk_keys(_sort(keys[above], spare[above]), negatives, walk)
    _walk_zeros(keys[sorted_stop : sorted_stop + census.positive_at_zero], zeros, negatives, walk)
    _walk_keys(_sort(keys[: census.below_zero], spare[: census.below_zero]), negatives, walk)
    _, _, pairs_doubled, ordinal_pairs, tied = walk.counts
    return _Tally(pairs_doubled, ordinal_pairs, tied, walk.precision.sum(), walk.ordinal_precision.sum())


@compiled
def _walk_keys(keys: Keys, negatives: int, walk: _Walk) -> None:
    """Pass sorted keys from the highest down, a block of equal scores at a time, each block in array order."""
    stop = keys.size
    while stop > 0:
        start = stop - 1
        while start > 0 and keys[start - 1] >> np.uint32(1) == keys[stop - 1] >> np.uint32(1):
            start -= 1
        positives = 0
        for place in range(start, stop):
            if keys[place] & np.uint32(1):
                _pass_positive(place - start, positives, walk)
                positives += 1
        _pass_block(positives, stop - start - positives, negatives, walk)
        stop = start


@compiled
def _walk_zeros(places: Keys, zeros: int, negatives: int, walk: _Walk) -> None:
    """Pass the block of zeros, given the places among them that are positive."""
    for positives in range(places.size):
        _pass_positive(np.int64(places[positives]), positives, walk)
    _pass_block(places.size, zeros - places.size, negatives, walk)


@compiled
def _pass_positive(ahead: int | np.int64, positives_ahead: int, walk: _Walk) -> None:
    """Count a positive voxel in stable order, given how many voxels of its block come before it."""
    walk.counts[3] += ahead - positives_ahead
    passed = walk.counts[0] + walk.counts[1] + ahead + 1
    _add(walk.ordinal_precision, (walk.counts[0] + positives_ahead + 1) / passed)


@compiled
def _pass_block(positives: int, tied_negatives: int, negatives: int, walk: _Walk) -> None:
    """Count a block of equal scores, and pass it."""
    below = negatives - walk.counts[1] - tied_negatives
    walk.counts[0] += positives
    walk.counts[1] += tied_negatives
    walk.counts[2] += positives * (2 * below + tied_negatives)
    walk.counts[3] += positives * below
    if positives + tied_negatives > 1:
        walk.counts[4] += positives + tied_negatives
    if positives > 0:
        _add(walk.precision, positives * walk.counts[0] / (walk.counts[0] + walk.counts[1]))


@compiled
def _add(total: NDArray[np.float64], term: float) -> None:
    """Add to a sum of positive terms that carries its rounding error along (Neumaier, doi:10.1002/zamm.19740540106)."""
    rounded = total[0] + term
    total[1] += (total[0] - rounded) + term if total[0] >= term else (term - rounded) + total[0]
    total[0] = rounded
