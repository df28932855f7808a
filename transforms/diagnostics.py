"""The power of the diagnostics of geometry: how often a cohort of a given size shows an injected corruption.

A diagnostic is computed on resampled cohorts with and without a corruption. Its decision threshold is a quantile of the
values without, so that its false-alarm rate is fixed; its power is the share of values with the corruption beyond that
threshold (protocol, section 2, and hypothesis H7). No corruption means, for rank stability, a benign re-export of the
maps (`benign_reexport`), and for the anti-location rate the declared maps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.protocol import Parameters, Protocol
from ingest.compiled import compiled
from transforms.catalog import Inputs, declared

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Aurocs = Mapping[str, Mapping[str, float]]  # by variant and subject

DIAGNOSTICS = ("rank_stability", "anti_location")
CORRUPTIONS = (
    "flip_left_right",
    "flip_anterior_posterior",
    "transpose",
    "shift_minus_2",
    "shift_plus_2",
    "reference_dilated",
    "ids_permuted",
)
FEWEST = 3  # subjects: of two, every rank correlation is 1 or -1
NO_SPREAD = "without corruption all resampled cohorts give the same value: their false alarms say nothing of others"
CHANCE = 0.5  # AUROC of a map that does not locate


@dataclass(frozen=True)
class Draws:
    """Resampled cohorts.

    Attributes:
        index: Subject at each place of each cohort, shape (cohorts, size).
        subjects: Number of subjects that are drawn from.
    """

    index: Integers
    subjects: int

    def counts(self) -> Integers:
        """How often each cohort takes each subject, shape (cohorts, subjects)."""
        return self._counts(self.index, self.subjects)

    def counts_exchanged(self, exchanged: int) -> Integers:
        """How often each cohort takes each subject as it is, then each subject exchanged: (cohorts, 2 subjects).

        Args:
            exchanged: Places of each cohort, the first ones, whose subject is exchanged. Places are drawn alike and on
                their own, so any will do.
        """
        index = self.index.copy()
        index[:, :exchanged] += self.subjects
        return self._counts(index, 2 * self.subjects)

    def _counts(self, index: Integers, items: int) -> Integers:
        flat = index + items * np.arange(len(index))[:, None]
        return np.bincount(flat.ravel(), minlength=len(index) * items).reshape(len(index), items)


def draw_cohorts(subjects: int, size: int, cohorts: int, seed: int) -> Draws:
    """Draw cohorts of a size with replacement, from PCG64 with the declared seed."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return Draws(generator.integers(0, subjects, (cohorts, size)), subjects)


def rank_correlations(first: Floats, second: Floats, counts: Integers) -> Floats:
    """Spearman correlation of two values in every resampled cohort, with mid-ranks.

    Twice a mid-rank less its mean is a whole number, so sums are exact and each correlation is rounded twice only.

    Args:
        first: One value of each item.
        second: The other.
        counts: How often each cohort takes each item, shape (cohorts, items).

    Returns:
        One correlation per cohort; NaN where all of its items have the same first, or the same second value.
    """
    sums = _rank_moments(counts, *_tie_runs(first), *_tie_runs(second)).astype(np.float64)
    scale = np.sqrt(sums[:, 1] * sums[:, 2])
    return np.divide(sums[:, 0], scale, out=np.full(len(counts), np.nan), where=scale > 0)


def _tie_runs(values: Floats) -> tuple[Integers, Integers]:
    """Items in ascending order, and where each run of equal values starts in it, with the end of the last."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=np.nan) != 0)
    return order, np.append(starts, values.size)


@compiled
def _rank_moments(
    counts: Integers, order: Integers, starts: Integers, other_order: Integers, other_starts: Integers
) -> Integers:
    """Sums over each cohort of the products of two centred ranks, and of the squares of either: (cohorts, 3)."""
    sums = np.zeros((counts.shape[0], 3), np.int64)
    ranks, other = np.empty(counts.shape[1], np.int64), np.empty(counts.shape[1], np.int64)
    for cohort in range(counts.shape[0]):
        _centre_ranks(counts[cohort], order, starts, ranks)
        _centre_ranks(counts[cohort], other_order, other_starts, other)
        for item in range(ranks.size):
            weighted = counts[cohort, item] * ranks[item]
            sums[cohort, 0] += weighted * other[item]
            sums[cohort, 1] += weighted * ranks[item]
            sums[cohort, 2] += counts[cohort, item] * other[item] * other[item]
    return sums


@compiled
def _centre_ranks(counts: Integers, order: Integers, starts: Integers, ranks: Integers) -> None:
    """Write twice the mid-rank of every item of one cohort, less its mean: whole numbers that sum to 0 over it."""
    size, below = counts.sum(), 0
    for run in range(starts.size - 1):
        tied = 0
        for place in range(starts[run], starts[run + 1]):
            tied += counts[order[place]]
        for place in range(starts[run], starts[run + 1]):
            ranks[order[place]] = 2 * below + tied - size
        below += tied


def anti_location_rates(aurocs: Floats, counts: Integers) -> Floats:
    """Share of each resampled cohort whose AUROC is below chance."""
    return (counts * (aurocs < CHANCE)).sum(axis=1) / counts.sum(axis=1)


def statistic(diagnostic_id: str, declared_aurocs: Floats, aurocs: Floats, counts: Integers) -> Floats:
    """A diagnostic in every resampled cohort: `rank_stability` against the declared maps, or `anti_location`."""
    if diagnostic_id == "rank_stability":
        return rank_correlations(declared_aurocs, aurocs, counts)
    return anti_location_rates(aurocs, counts)


@dataclass(frozen=True)
class Case:
    """One method under one corruption: AUROC of the subjects that have all three, sorted by id.

    Attributes:
        declared: Of the declared maps.
        benign: Of the benign re-export.
        corrupted: Under the corruption.
        is_partial: Whether the corruption reaches some subjects of a cohort only: those that are exchanged.
    """

    declared: Floats
    benign: Floats
    corrupted: Floats
    is_partial: bool

    def uncorrupted(self, diagnostic_id: str, draws: Draws) -> Floats:
        """A diagnostic in every cohort without corruption."""
        aurocs = self.benign if diagnostic_id == "rank_stability" else self.declared
        return statistic(diagnostic_id, self.declared, aurocs, draws.counts())

    def under_corruption(self, diagnostic_id: str, draws: Draws, exchanged: int) -> Floats:
        """A diagnostic in every cohort with the corruption."""
        if not self.is_partial:
            return statistic(diagnostic_id, self.declared, self.corrupted, draws.counts())
        twice = np.concatenate([self.declared, self.declared])
        aurocs = np.concatenate([self.declared, self.corrupted])
        return statistic(diagnostic_id, twice, aurocs, draws.counts_exchanged(exchanged))


@dataclass(frozen=True)
class Power:
    """How well a diagnostic shows a corruption in cohorts of one size."""

    power: float
    decision_threshold: float
    false_alarm_rate: float
    has_spread: bool


def measure_power(case: Case, diagnostic_id: str, draws: Draws, exchanged: int, rate: float) -> Power | None:
    """Power of a diagnostic at a fixed false-alarm rate.

    Args:
        case: The method and corruption.
        diagnostic_id: `rank_stability`, which a corruption lowers, or `anti_location`, which it raises.
        draws: Resampled cohorts.
        exchanged: Exchanged subjects of each cohort, where the corruption is partial.
        rate: False-alarm rate.

    Returns:
        The share of corrupted cohorts strictly beyond the `rate` quantile (rank stability) or `1 - rate` quantile
        (anti-location, linear quantiles) of those without, and the share of these beyond it. A cohort in which the
        diagnostic is not defined shows nothing. None where it is defined in no cohort without corruption.
    """
    null = case.uncorrupted(diagnostic_id, draws)
    found = case.under_corruption(diagnostic_id, draws, exchanged)
    if np.isnan(null).all():
        return None
    sign = -1 if diagnostic_id == "rank_stability" else 1
    threshold = float(np.nanquantile(sign * null, 1 - rate))
    return Power(
        power=float(np.mean(sign * found > threshold)),
        decision_threshold=sign * threshold,
        false_alarm_rate=float(np.mean(sign * null > threshold)),
        has_spread=bool(np.nanmin(null) < np.nanmax(null)),
    )


def exchanged_count(size: int, share: float) -> int:
    """Subjects of a cohort whose ids are permuted: a share of it, halves up, at least two, at most all."""
    return min(max(2, int(np.floor(share * size + 0.5))), size)


@declared(
    name="diagnostic_power",
    row="One row per diagnostic, method, injected corruption and cohort size: how often the diagnostic shows it.",
    key=("diagnostic_id", "method_id", "variant_id", "sample_id"),
    columns=(
        "sample_size",
        "n_subjects",
        "observed?",
        "power?",
        "decision_threshold?",
        "false_alarm_rate?",
        "smallest_sample?",
        "benign_variant_id?",
        "status",
        "reason?",
    ),
    inputs=("cohort_subject", "ranked_method", "variant_metric", "benign_reexport"),
    queries={
        "auroc": """
            select method_id, subject_id, variant_id, value
            from variant_metric
            where metric_id = 'voxel_auroc' and value is not null
            order by method_id, subject_id, variant_id""",
        "method": "select method_id from ranked_method where is_ranked and kind = 'method' order by position",
    },
)
def diagnostic_power(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Power of both diagnostics for every method, corruption and cohort size, or the reason why there is none."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for method_id, subject_id, variant_id, value in inputs["auroc"].iter_rows():
        found.setdefault(method_id, {}).setdefault(variant_id, {})[subject_id] = value
    benign = dict(inputs["benign_reexport"].select("method_id", "variant_id").iter_rows())
    rows: list[tuple[object, ...]] = []
    for method_id in inputs["method"].get_column("method_id"):
        for variant_id in CORRUPTIONS:
            case = _case(found.get(method_id, {}), benign.get(method_id), variant_id)
            for diagnostic_id in DIAGNOSTICS:
                measured = list(_sizes(case, diagnostic_id, protocol.parameters))
                enough = [
                    row[1] for row in measured if row[4] is not None and row[4] >= protocol.parameters.target_power
                ]
                smallest = min(enough, default=None)
                used = benign.get(method_id) if diagnostic_id == "rank_stability" else "declared"
                for sample_id, size, count, observed, power, threshold, alarms, status, reason in measured:
                    numbers = (size, count, observed, power, threshold, alarms, smallest, used, status, reason)
                    rows.append((diagnostic_id, method_id, variant_id, sample_id, *numbers))
    return diagnostic_power.table.frame(rows)


Row = tuple[str, int, int, float | None, float | None, float | None, float | None, str, str | None]


def _case(aurocs: Aurocs, benign: str | None, variant_id: str) -> Case | None:
    """The subjects that have the declared AUROC, the benign one and the corrupted one; None without diagnostics."""
    is_partial = variant_id == "ids_permuted"
    names = ("declared", benign or "", "exchanged" if is_partial else variant_id)
    if any(name not in aurocs for name in names):
        return None
    shared = sorted(subject for subject in aurocs[names[0]] if all(subject in aurocs[name] for name in names))
    declared_, kept, corrupted = (np.array([aurocs[name][s] for s in shared], np.float64) for name in names)
    return Case(declared_, kept, corrupted, is_partial)


def _sizes(case: Case | None, diagnostic_id: str, parameters: Parameters) -> Iterator[Row]:
    """Rows of one diagnostic, method and corruption, by cohort size."""
    count = 0 if case is None else case.declared.size
    samples = [(f"{size}", size) for size in parameters.diagnostic_sample_sizes] + [("all", count)]
    for sample_id, size in samples:
        if case is None or count < FEWEST:
            reason = "not measured: run it with --diagnostics, or there is no such variant on this grid"
            few = f"{count} test subjects have an AUROC under both: a rank correlation needs {FEWEST}"
            yield sample_id, size, count, None, None, None, None, "unavailable", reason if case is None else few
            continue
        exchanged = exchanged_count(size, parameters.permuted_id_share)
        draws = draw_cohorts(count, size, parameters.multiverse_replicates, parameters.seed)
        whole = Draws(np.arange(count)[None], count)
        observed = None if case.is_partial else _number(case.under_corruption(diagnostic_id, whole, 0)[0])
        power = measure_power(case, diagnostic_id, draws, exchanged, parameters.false_alarm_rate)
        if power is None:
            found = "all subjects have the same AUROC: there is no rank to correlate"
            yield sample_id, size, count, observed, None, None, None, "unavailable", found
            continue
        reasons = [] if size <= count else [f"larger than the cohort of {count}: its subjects are drawn more often"]
        reasons += [] if power.has_spread else [NO_SPREAD]
        status, reason = ("degraded", "; ".join(reasons)) if reasons else ("ok", None)
        numbers = (power.power, power.decision_threshold, power.false_alarm_rate)
        yield sample_id, size, count, observed, *numbers, status, reason


def _number(value: np.float64) -> float | None:
    """A number, or None for NaN."""
    return None if np.isnan(value) else float(value)
