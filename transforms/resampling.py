"""Paired resampling of test subjects: one shared matrix of counts, and statistics of every resampled cohort at once.

Replicate 0 takes every subject once, so it is the point estimate; every other replicate draws as many subjects as there
are, with replacement (Efron, 1979, doi:10.1214/aos/1176344552). All methods and metrics share the draws. Values are
rounded so that a weighted sum is exact in float64: neither the order of summation nor the number of threads changes a
bit of it.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Counts = NDArray[np.uint16]
Flags = NDArray[np.bool_]
Totals = NDArray[np.float32 | np.float64]
Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 1000  # replicates whose weights are held as floats at once
HISTOGRAM_BLOCK = 250  # replicates whose pooled histograms are held at once
FLOAT32_EXACT = 2**24  # whole numbers up to here are exact in float32
THREADS = max(1, min(4, os.cpu_count() or 1))
INFEASIBLE = -1  # in an array of choices: this replicate has no threshold


@dataclass(frozen=True)
class Resample:
    """Replicates of a cohort.

    Attributes:
        counts: How often each replicate (rows) takes each subject (columns, sorted by id).
    """

    counts: Counts

    @cached_property
    def weights(self) -> Floats:
        """The counts as float64."""
        return self.counts.astype(np.float64)

    @cached_property
    def sizes(self) -> Integers:
        """How many subjects each replicate takes, repetitions counted."""
        return self.counts.sum(axis=1, dtype=np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """Replicates and subjects."""
        return self.counts.shape[0], self.counts.shape[1]

    def among(self, subjects: Flags) -> "Resample":
        """The same replicates without the subjects that are not flagged."""
        return self if bool(subjects.all()) else Resample(np.ascontiguousarray(self.counts[:, subjects]))

    def blocks(self, size: int = BLOCK) -> list["Resample"]:
        """The replicates in runs of at most `size`; none for no replicate."""
        return [Resample(self.counts[start : start + size]) for start in range(0, len(self.counts), size)]

    def sums(self, values: NDArray[np.generic]) -> Floats:
        """Weighted sums over subjects.

        Args:
            values: Exact values (see `exact`, or whole numbers), subjects on the last axis.

        Returns:
            The sums, with replicates on the last axis in place of subjects.
        """
        by_row = values.reshape(math.prod(values.shape[:-1]), values.shape[-1]).astype(np.float64, copy=False)
        return (by_row @ self.weights.T).reshape(*values.shape[:-1], len(self.counts))


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do independent work on a few threads (kernels let go of the interpreter); results in the order of the items."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))


def by_block(resample: Resample, work: Callable[[Resample], Floats]) -> Floats:
    """A statistic of every replicate (the last axis), worked out on a few threads, a block of replicates each."""
    return np.concatenate(in_threads(work, resample.blocks()), axis=-1)


def draw(subjects: int, replicates: int, seed: int) -> Resample:
    """Replicate 0, which takes every subject once, and `replicates` draws of n from n with replacement.

    The draws are the rows of one index matrix from PCG64, so a longer matrix begins with the shorter one.

    Args:
        subjects: Number of subjects n; with none every replicate is empty.
        replicates: Number of draws.
        seed: Declared seed.
    """
    counts = np.ones((replicates + 1, subjects), np.uint16)
    generator = np.random.Generator(np.random.PCG64(seed))
    for start in range(1, replicates + 1, BLOCK) if subjects else ():
        rows = min(BLOCK, replicates + 1 - start)
        index = generator.integers(0, subjects, (rows, subjects)) + subjects * np.arange(rows)[:, None]
        counts[start : start + rows] = np.bincount(index.ravel(), minlength=rows * subjects).reshape(rows, subjects)
    return Resample(counts)


def exact(values: Floats, subjects: int) -> Floats:
    """Round values so that every sum of `subjects` of them is exact in float64; NaN stays.

    Values in [0, 1] become multiples of 2^-40 or finer for up to 4,095 subjects: the finer, the fewer there are.
    """
    largest = float(np.nanmax(np.abs(values), initial=0.0, where=~np.isnan(values)))
    scale = 2.0 ** (52 - int(subjects).bit_length() - int(np.ceil(np.log2(max(largest, 1.0)))))
    return np.rint(values * scale) / scale


def chosen(statistic: Floats, choice: Integers) -> Floats:
    """Pick, in every replicate, the level that a point reads there.

    Args:
        statistic: Series x levels x replicates.
        choice: Points x replicates, positions of levels, or `INFEASIBLE`.

    Returns:
        Series x points x replicates, NaN where infeasible.
    """
    picked = np.take_along_axis(statistic, np.maximum(choice, 0)[None], axis=1)
    picked[:, choice == INFEASIBLE] = np.nan
    return picked


def medians(resample: Resample, values: Floats, choice: Integers) -> Floats:
    """Medians of the resampled cohorts: the mean of the two middle values where their number is even.

    Args:
        resample: Replicates of the subjects.
        values: Series x levels x subjects, without NaN.
        choice: Points x replicates, positions of levels, or `INFEASIBLE`.

    Returns:
        Series x points x replicates, NaN where infeasible or where a replicate takes no subject.
    """
    order = np.argsort(values, axis=-1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=-1)
    result = np.full((len(values), *choice.shape), np.nan)
    _walk(resample.counts, resample.sizes, order, ranked, choice, result)
    return result


@compiled
def _walk(counts: Counts, sizes: Integers, order: Integers, ranked: Floats, choice: Integers, result: Floats) -> None:
    """Walk each sorted column to half of a replicate's weight."""
    for series in range(order.shape[0]):
        for point in range(choice.shape[0]):
            for replicate in range(choice.shape[1]):
                level = choice[point, replicate]
                size = sizes[replicate]
                if level < 0 or size == 0:
                    continue
                weights = counts[replicate]
                column = order[series, level]
                place, passed = 0, np.int64(weights[column[0]])
                while passed <= (size - 1) // 2:
                    place += 1
                    passed += np.int64(weights[column[place]])
                low = ranked[series, level, place]
                while passed <= size // 2:
                    place += 1
                    passed += np.int64(weights[column[place]])
                result[series, point, replicate] = (low + ranked[series, level, place]) / 2


def divided(numerator: Floats, denominator: NDArray[np.generic]) -> Floats:
    """The quotient, NaN where the denominator is zero."""
    below = np.broadcast_to(denominator.astype(np.float64), numerator.shape)
    return np.divide(numerator, below, out=np.full(numerator.shape, np.nan), where=below != 0)


def mean_burdens(resample: Resample, false_positives: NDArray[np.generic], voxel_mm3: float) -> Floats:
    """Mean false-positive burden in cm3 at every level and replicate.

    Args:
        resample: Replicates of the subjects.
        false_positives: Voxels, levels x subjects.
        voxel_mm3: Volume of a voxel.

    Returns:
        Levels x replicates, in the arithmetic of the SQL marts: voxels are summed, then scaled and divided once.
    """
    return divided(resample.sums(false_positives) * voxel_mm3 / 1000, resample.sizes)


def matched_levels(burdens: Floats, budgets: Floats) -> Integers:
    """Smallest level whose mean burden keeps each budget.

    Args:
        burdens: Levels x replicates, not rising with the level, zero at the last.
        budgets: In cm3.

    Returns:
        Budgets x replicates; `INFEASIBLE` where even level 0 keeps the budget, so that it is never reached.
    """
    above = np.stack([(burdens > budget).sum(axis=0) for budget in budgets.tolist()])
    return np.where(above == 0, INFEASIBLE, above)


def pooled_voxel_ranking(
    resample: Resample, positive: NDArray[np.generic], negative: NDArray[np.generic]
) -> tuple[Floats, Floats]:
    """AUROC and average precision of all voxels of each resampled cohort.

    Args:
        resample: Replicates of the subjects.
        positive: Voxels of the reference, bins x subjects, bins by rising score.
        negative: Voxels outside it, likewise.

    Returns:
        AUROC and average precision by replicate; NaN without positive (or, for AUROC, negative) voxels.
    """
    occupied = positive.any(axis=1) | negative.any(axis=1)
    parts = [_Pooling.of(part[occupied], int(resample.sizes.max())) for part in (positive, negative)]

    def rank(block: Resample) -> tuple[Floats, Floats]:
        return _rank_pooled(parts[0].sums(block), parts[1].sums(block))

    results = in_threads(rank, resample.blocks(HISTOGRAM_BLOCK))
    return np.concatenate([auroc for auroc, _ in results]), np.concatenate([ap for _, ap in results])


@dataclass(frozen=True)
class _Pooling:
    """Histograms made ready for weighted sums: bins of few voxels in float32, where their sums are exact, too."""

    few: NDArray[np.float32]
    many: Floats
    is_many: Flags

    @staticmethod
    def of(histogram: NDArray[np.generic], size: int) -> "_Pooling":
        """Split the bins of a histogram (bins x subjects) of which replicates take at most `size` subjects."""
        largest = histogram.max(axis=1, initial=0).astype(np.float64)
        is_many = largest * size >= FLOAT32_EXACT
        few = np.ascontiguousarray(histogram[~is_many].T, np.float32)
        return _Pooling(few, np.ascontiguousarray(histogram[is_many].T, np.float64), is_many)

    def sums(self, resample: Resample) -> Floats:
        """Pooled histograms, replicates x bins."""
        pooled = np.empty((len(resample.counts), len(self.is_many)))
        _spread(resample.counts.astype(np.float32) @ self.few, np.flatnonzero(~self.is_many), pooled)
        _spread(resample.weights @ self.many, np.flatnonzero(self.is_many), pooled)
        return pooled


@compiled
def _spread(totals: Totals, columns: Integers, pooled: Floats) -> None:
    """Write columns to their places; NumPy's fancy assignment takes as long as the sums themselves."""
    for replicate in range(totals.shape[0]):
        for place in range(totals.shape[1]):
            pooled[replicate, columns[place]] = totals[replicate, place]


@compiled
def _rank_pooled(positive: Floats, negative: Floats) -> tuple[Floats, Floats]:
    """Rank pooled histograms (replicates x bins) from the highest bin down."""
    replicates, bins = positive.shape
    auroc = np.full(replicates, np.nan)
    precision = np.full(replicates, np.nan)
    for replicate in range(replicates):
        above, below, doubled, area = 0.0, 0.0, 0.0, 0.0
        for index in range(bins):
            bin_ = bins - 1 - index
            hits, misses = positive[replicate, bin_], negative[replicate, bin_]
            doubled += misses * (2.0 * above + hits)
            above += hits
            below += misses
            if hits > 0:
                area += hits * (above / (above + below))
        if above > 0:
            precision[replicate] = area / above
            if below > 0:
                auroc[replicate] = doubled / (2.0 * above * below)
    return auroc, precision


def pooled_slice_auroc(resample: Resample, score: Floats, subject: Integers, is_positive: Flags) -> Floats:
    """AUROC over all slices of each resampled cohort, ties counting half.

    Args:
        resample: Replicates of the subjects.
        score: Score of each slice.
        subject: Position of each slice's subject.
        is_positive: Whether it holds a reference voxel.

    Returns:
        One value per replicate; NaN without a positive or a negative slice.
    """
    order = np.argsort(score, kind="stable")
    rank = np.unique(score, return_inverse=True)[1].astype(np.int64)
    by_subject = np.ascontiguousarray(resample.counts.T)
    doubled, positives, negatives = _rank_slices(by_subject, rank[order], subject[order], is_positive[order])
    return divided(doubled, 2 * positives * negatives)


@compiled
def _rank_slices(
    counts: Counts, rank: Integers, subject: Integers, is_positive: Flags
) -> tuple[Floats, Floats, Floats]:
    """Add slices by rising score: twice the pairs won, and the positives and negatives of every replicate."""
    replicates, slices = counts.shape[1], len(rank)
    doubled, positives, below = np.zeros(replicates), np.zeros(replicates), np.zeros(replicates)
    hits, misses = np.zeros(replicates), np.zeros(replicates)
    for index in range(slices):
        taken = counts[subject[index]]
        is_first = index == 0 or rank[index - 1] != rank[index]
        is_last = index + 1 == slices or rank[index + 1] != rank[index]
        if is_first and is_last:  # no tie, as most often: a fraction of the work
            if is_positive[index]:
                for replicate in range(replicates):
                    doubled[replicate] += 2.0 * taken[replicate] * below[replicate]
                    positives[replicate] += taken[replicate]
            else:
                for replicate in range(replicates):
                    below[replicate] += taken[replicate]
            continue
        group = hits if is_positive[index] else misses
        for replicate in range(replicates):
            group[replicate] += taken[replicate]
        if is_last:
            for replicate in range(replicates):
                doubled[replicate] += hits[replicate] * (2.0 * below[replicate] + misses[replicate])
                positives[replicate] += hits[replicate]
                below[replicate] += misses[replicate]
                hits[replicate] = 0.0
                misses[replicate] = 0.0
    return doubled, positives, below


def interval(values: Floats, level: float) -> tuple[Floats, Floats, Integers]:
    """Percentile intervals over the last axis by linear quantiles; what is undefined is left out.

    Args:
        values: Replicates on the last axis, replicate 0 not among them; NaN where undefined.
        level: Share of the replicates inside, such as 0.95.

    Returns:
        Low ends, high ends (NaN where no replicate is defined) and how many replicates are.
    """
    flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    defined = (~np.isnan(flat)).sum(axis=1)
    quantiles = ((1 - level) / 2, (1 + level) / 2)
    if flat.size and bool((defined == flat.shape[1]).all()):  # the four places of interest, without a full sort
        places = {min(int((flat.shape[1] - 1) * q) + step, flat.shape[1] - 1) for q in quantiles for step in (0, 1)}
        flat = np.partition(flat, sorted(places), axis=1)
    else:
        flat = np.sort(flat, axis=1)  # NaN goes last
    ends = [_quantile(flat, defined, q).reshape(values.shape[:-1]) for q in quantiles]
    return ends[0], ends[1], defined.astype(np.int64).reshape(values.shape[:-1])


def _quantile(ranked: Floats, defined: NDArray[np.intp], q: float) -> Floats:
    """Linear quantile of the first `defined` values of each sorted row."""
    place = np.maximum(defined - 1, 0) * q
    low = np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(defined - 1, 0))
    rows = np.arange(len(ranked))
    if ranked.shape[1] == 0:
        return np.full(len(ranked), np.nan)
    return ranked[rows, low] + (place - low) * (ranked[rows, high] - ranked[rows, low])


def p_values(differences: Floats) -> Floats:
    """Two-sided percentile p-values over the last axis (protocol section 9).

    Args:
        differences: Replicates of a contrast on the last axis, replicate 0 not among them; NaN where undefined.

    Returns:
        min(1, 2 (1 + min(#{d <= 0}, #{d >= 0})) / (B + 1)), B the replicates that are defined; NaN without any.
    """
    defined = (~np.isnan(differences)).sum(axis=-1)
    smaller = np.minimum((differences <= 0).sum(axis=-1), (differences >= 0).sum(axis=-1))
    return np.where(defined == 0, np.nan, np.minimum(1.0, 2.0 * (1 + smaller) / (defined + 1)))
