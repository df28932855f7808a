"""The law of the exceedance: what a calibrated threshold promises before any test data, and what random splits show.

A conformal rule takes the smallest threshold at which at most j of n calibration subjects exceed a budget: the order
statistic t_(n-j) of their critical thresholds. The share of all subjects above it, the true exceedance, is then
Beta(j + 1, n - j) over calibration sets (exactly so for critical thresholds without ties; ties and the grid of levels
only lower it), and the number of n_test new subjects above it is beta-binomial. Definitions: protocol section 6,
Lemma 1 of MIRTO (Kafee Hernashki & Chatterjee, 2026); Vovk (2012), "Conditional validity of inductive conformal
predictors", arXiv:1209.2673.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import stats

from expectations.protocol import Protocol, ThresholdRule, protocol
from ingest.ranking import thresholds
from transforms.catalog import Inputs, declared
from transforms.thresholds import allowed_by_crc, allowed_by_rcps, smallest_count

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Levels = NDArray[np.uint8]

TAIL = 0.025  # of a two-sided 95 % interval, on each side
FEWEST_HELD_OUT = 10  # an exceedance of 0.10, the protocol's middle alpha, is one of ten subjects
SPLITS_AT_ONCE = 1000
LAW_COLUMNS = tuple(
    f"{law}_{what}?"
    for law in ("beta", "betabinomial")
    for what in ("exceedance_mean", "exceedance_low", "exceedance_high", "within_alpha")
)


@dataclass(frozen=True)
class Infeasible:
    """There is no law: why not."""

    reason: str


@dataclass(frozen=True)
class BetaLaw:
    """Law of the true exceedance over calibration sets, Beta(first, second)."""

    first: int
    second: int

    @property
    def mean(self) -> float:
        """Mean exceedance."""
        return self.first / (self.first + self.second)

    def within(self, alpha: Fraction) -> float:
        """Probability of an exceedance of at most alpha."""
        return float(stats.beta.cdf(float(alpha), self.first, self.second))

    def quantile(self, share: float) -> float:
        """The exceedance that a share of calibration sets stays at or below."""
        return float(stats.beta.ppf(share, self.first, self.second))


@dataclass(frozen=True)
class BetaBinomialLaw:
    """Law of the exceedance observed on `n_test` subjects, BetaBinomial(n_test, first, second) / n_test."""

    n_test: int
    first: int
    second: int

    @property
    def mean(self) -> float:
        """Mean exceedance, that of the true one."""
        return self.first / (self.first + self.second)

    @cached_property
    def cumulative(self) -> Floats:
        """Probability of at most k exceedances, for k = 0..n_test."""
        mass = stats.betabinom.pmf(np.arange(self.n_test + 1), self.n_test, self.first, self.second)
        return np.minimum(np.cumsum(mass), 1.0)

    def within(self, alpha: Fraction) -> float:
        """Probability of an exceedance of at most alpha; the comparison of counts is exact."""
        return float(self.cumulative[math.floor(alpha * self.n_test)])

    def quantile(self, share: float) -> float:
        """The smallest exceedance that can be observed whose cumulative probability reaches a share."""
        return min(int(np.searchsorted(self.cumulative, share)), self.n_test) / self.n_test


def exceedance_law(n: int, j: int) -> BetaLaw | Infeasible:
    """The law of the true exceedance once n subjects have calibrated: Beta(j + 1, n - j).

    Args:
        n: Calibration subjects.
        j: How many of them the rule lets exceed the budget; negative where not even none keeps alpha.

    Raises:
        ValueError: All calibration subjects, or more, may exceed: such a rule controls nothing.

    >>> exceedance_law(24, 1)
    BetaLaw(first=2, second=23)
    """
    if j < 0:
        return Infeasible(f"{n} calibration subjects are too few: not even none above the budget keeps alpha")
    if j >= n:
        raise ValueError(f"{j} of {n} calibration subjects may exceed the budget: that is no control")
    return BetaLaw(j + 1, n - j)


def observed_law(n: int, j: int, n_test: int) -> BetaBinomialLaw | Infeasible:
    """The law of the exceedance that `n_test` new subjects show: BetaBinomial(n_test, j + 1, n - j) over n_test.

    It holds too for the held-out subjects of a random split of one cohort, whatever the cohort.

    Args:
        n: Calibration subjects.
        j: How many of them the rule lets exceed the budget; negative where not even none keeps alpha.
        n_test: Subjects on which the exceedance is observed.

    Raises:
        ValueError: As :func:`exceedance_law`.
    """
    law = exceedance_law(n, j)
    if isinstance(law, Infeasible):
        return law
    if n_test < 1:
        return Infeasible("no test subject shows an exceedance")
    return BetaBinomialLaw(n_test, law.first, law.second)


def clopper_pearson(counts: Counts, total: int) -> tuple[Floats, Floats]:
    """Exact 95 % intervals of a proportion (Clopper & Pearson, 1934, doi:10.1093/biomet/26.4.404).

    Args:
        counts: Subjects with the property, each in 0..total.
        total: Subjects, at least 1.

    Returns:
        Lower and upper ends, in the order of the counts; 0 below none and 1 above all.
    """
    low = np.where(counts > 0, stats.beta.ppf(TAIL, np.maximum(counts, 1), total - counts + 1), 0.0)
    high = np.where(counts < total, stats.beta.isf(TAIL, counts + 1, np.maximum(total - counts, 1)), 1.0)
    return low, high


def _numbers(law: BetaLaw | BetaBinomialLaw | Infeasible, alpha: Fraction) -> tuple[float | None, ...]:
    """Mean, both ends of the central 95 % and the probability of keeping alpha; nothing where there is no law."""
    if isinstance(law, Infeasible):
        return (None,) * 4
    return law.mean, law.quantile(TAIL), law.quantile(1 - TAIL), law.within(alpha)


def law_numbers(n: int, j: int, n_test: int, alpha: Fraction) -> tuple[float | None, ...]:
    """The values of `LAW_COLUMNS`; nulls where there is no law."""
    return (*_numbers(exceedance_law(n, j), alpha), *_numbers(observed_law(n, j, n_test), alpha))


def _state(n: int, j: int, n_test: int, smallest: int) -> tuple[str, str | None]:
    """Status and reason of a law."""
    if j < 0:
        return "infeasible", f"needs {smallest} calibration subjects, there are {n}"
    if n_test < 1:
        return "degraded", "the cohort has no test subject, so no law of an observed exceedance"
    return "ok", None


def _allowed(rule: ThresholdRule, alpha: Fraction, n: int, delta: float) -> int:
    return allowed_by_rcps(n, alpha, delta) if rule.kind == "rcps" else allowed_by_crc(n, alpha)


def _cohort(inputs: Inputs, split: str) -> pl.Series:
    """Subjects of a split that take part, in order."""
    included = inputs["cohort_subject"].filter((pl.col("split") == split) & pl.col("is_included"))
    return included.get_column("subject_id").sort()


def _crc_rules(study: Protocol) -> list[tuple[ThresholdRule, Fraction]]:
    """The CRC rules with their exact alphas, in declared order."""
    return [(r, r.exact_alpha) for r in study.threshold_rules if r.kind == "crc" and r.exact_alpha is not None]


@declared(
    name="rule_law",
    row="One row per conformal rule: the law of its exceedance for the validation and test subjects at hand.",
    key=("threshold_rule_id",),
    columns=(
        "rule_kind",
        "alpha",
        "n_calibration",
        "n_test",
        "allowed_exceedances",
        "smallest_n",
        "status",
        "reason?",
        *LAW_COLUMNS,
    ),
    inputs=("cohort_subject",),
)
def rule_law(study: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Conformal rules with their law."""
    return plan_table(len(_cohort(inputs, "validation")), len(_cohort(inputs, "test")), study.parameters.rcps_delta)


def plan_table(n_validation: int, n_test: int, delta: float) -> pl.DataFrame:
    """What every conformal rule can promise before any data.

    The law of a label-free rule speaks of all predicted volume, which it controls; false positives exceed no oftener.

    Args:
        n_validation: Validation subjects, which calibrate.
        n_test: Test subjects, on which the exceedance will be observed; 0 leaves the beta-binomial columns null.
        delta: RCPS: one minus the confidence of the upper bound.

    Returns:
        One row per conformal rule in declared order, with the columns of `rule_law`. A rule that is infeasible has a
        status and a reason, and no numbers.

    Raises:
        ValueError: A number of subjects is negative.
    """
    if n_validation < 0 or n_test < 0:
        raise ValueError(f"{n_validation} validation and {n_test} test subjects: neither may be negative")
    rows: list[tuple[object, ...]] = []
    for rule in protocol().threshold_rules:
        if (alpha := rule.exact_alpha) is None:
            continue
        j, smallest = _allowed(rule, alpha, n_validation, delta), smallest_count(rule, delta)
        about = (rule.id, rule.kind, float(alpha), n_validation, n_test, j, smallest)
        state = _state(n_validation, j, n_test, smallest)
        rows.append((*about, *state, *law_numbers(n_validation, j, n_test, alpha)))
    return rule_law.table.frame(rows)


def planned_universes(study: Protocol, lacking: Collection[tuple[str, str]] = ()) -> dict[str, int]:
    """How many universes a study will have.

    Args:
        study: Its protocol; `protocol()` for the default one.
        lacking: Levels that it cannot measure, as (axis column, level): ("voxel_volume_id", "legacy") where no method
            declares a legacy voxel volume.

    Returns:
        Universes per universe set, `defensible` and `all`; 0 where an axis has no level left.

    Raises:
        KeyError: There is no such level.
    """
    counts = {"defensible": 1, "all": 1}
    for axis in study.axes:
        gone = {level for column, level in lacking if column == axis.column}
        left = [level for level in axis.levels if level.id not in gone]
        counts["all"] *= len(left)
        counts["defensible"] *= sum(level.defensible for level in left)
    if unknown := [(c, level) for c, level in lacking if level not in study.level_ids(c)]:
        raise KeyError(unknown[0])
    return counts


@declared(
    name="conformal_law",
    row="One row per number of calibration subjects and alpha: the law of the exceedance under conformal risk control.",
    key=("n_calibration", "alpha"),
    columns=("is_study_size", "n_test", "allowed_exceedances", "status", "reason?", *LAW_COLUMNS),
    inputs=("cohort_subject",),
)
def conformal_law(study: Protocol, inputs: Inputs) -> pl.DataFrame:
    """The law at the declared sizes and at the study's own."""
    own, n_test = len(_cohort(inputs, "validation")), len(_cohort(inputs, "test"))
    rows: list[tuple[object, ...]] = []
    for n in sorted({own, *study.parameters.conformal_split_sizes}):
        for rule, alpha in _crc_rules(study):
            j = allowed_by_crc(n, alpha)
            state = _state(n, j, n_test, smallest_count(rule, study.parameters.rcps_delta))
            rows.append((n, float(alpha), n == own, n_test, j, *state, *law_numbers(n, j, n_test, alpha)))
    return conformal_law.table.frame(rows)


@declared(
    name="exceedance_interval",
    row="One row per number of test subjects that exceed a budget: the Clopper-Pearson interval of their share.",
    key=("n_subjects", "exceedance_count"),
    columns=("exceedance_low", "exceedance_high"),
    inputs=("cohort_subject",),
)
def exceedance_interval(_study: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Intervals of every count that the test subjects can show; none without test subjects."""
    total = len(_cohort(inputs, "test"))
    if total == 0:
        return exceedance_interval.table.frame()
    counts = np.arange(total + 1)
    low, high = clopper_pearson(counts, total)
    columns = {
        "n_subjects": np.full(total + 1, total),
        "exceedance_count": counts,
        "exceedance_low": low,
        "exceedance_high": high,
    }
    return pl.DataFrame(columns, schema=exceedance_interval.table.polars_schema)


def critical_levels(critical: Floats) -> Levels:
    """The smallest level whose threshold is at or above each critical threshold: from there on no budget is exceeded.

    Args:
        critical: Critical thresholds in [0, 1], float32 values held in float64, of any shape.

    Returns:
        Levels 0..200, of the same shape.
    """
    return np.searchsorted(thresholds(), critical).astype(np.uint8)


@dataclass(frozen=True)
class SplitSize:
    """A number of calibration subjects drawn from the test cohort, and how it stands there."""

    n: int
    status: str
    reason: str | None

    @property
    def is_drawn(self) -> bool:
        """Whether there are splits of this size."""
        return self.status != "unavailable"


def split_sizes(cohort: int, declared_sizes: Collection[int]) -> list[SplitSize]:
    """Which calibration sizes a cohort can be split at, in rising order.

    A declared size fits if it leaves at least ten subjects, so that one exceedance among them is no more than 0.10.
    Where none fits, half of the cohort calibrates instead, and says so.

    Args:
        cohort: Subjects to split.
        declared_sizes: Sizes wanted, each at least 1.
    """
    sizes = {n: SplitSize(n, "ok", None) for n in declared_sizes if n <= cohort - FEWEST_HELD_OUT}
    half = cohort // 2
    if not sizes and half > 0:
        reason = f"half of {cohort} test subjects calibrate: no declared size leaves {FEWEST_HELD_OUT}"
        sizes[half] = SplitSize(half, "degraded", reason)
    for n in set(declared_sizes) - set(sizes):
        reason = f"{n} calibration subjects leave fewer than {FEWEST_HELD_OUT} of {cohort} test subjects"
        sizes[n] = SplitSize(n, "unavailable", reason)
    return [sizes[n] for n in sorted(sizes)]


def draw_calibration(cohort: int, largest: int, split_count: int, seed: int) -> Counts:
    """Random calibration sets: the subjects of the smallest of independent uniform keys, one key per subject and split.

    Args:
        cohort: Subjects to draw from.
        largest: Subjects to draw.
        split_count: How often.
        seed: Of a PCG64 generator; keys are drawn split by split, subject by subject.

    Returns:
        Subject numbers, `split_count` rows of `largest`. The first n of a row are the calibration set of size n, so
        sizes share their splits.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = np.empty((split_count, largest), np.int64)
    for first in range(0, split_count, SPLITS_AT_ONCE):
        block = drawn[first : first + SPLITS_AT_ONCE]
        block[:] = np.argsort(generator.random((len(block), cohort)), axis=1, kind="stable")[:, :largest]
    return drawn


def held_out_exceedances(levels: Levels, drawn: Counts, allowed: Sequence[int]) -> Counts:
    """How many of the subjects that did not calibrate exceed the budget at the calibrated level, split by split.

    The level is the smallest at which at most j calibration subjects exceed: the order statistic n - j of their
    critical levels. Subjects exceed where their critical level is above it.

    Args:
        levels: Critical level of every subject of the cohort, 1-D.
        drawn: Calibration sets, a row of n subject numbers per split.
        allowed: Exceedances j that rules allow, each in 0..n - 1.

    Returns:
        Counts, a row per j and a column per split.
    """
    n = drawn.shape[1]
    calibration = levels[drawn]
    places = n - 1 - np.array(allowed, np.int64)
    ordered = np.partition(calibration, places, axis=1)
    above = levels.size - np.cumsum(np.bincount(levels, minlength=len(thresholds())))
    found = np.empty((len(allowed), len(drawn)), np.int64)
    for row, place in zip(found, places, strict=True):
        chosen = ordered[:, place]
        row[:] = above[chosen] - np.count_nonzero(ordered > chosen[:, None], axis=1)
    return found


SPLIT_COLUMNS = ("split_exceedance_mean?", "split_exceedance_low?", "split_exceedance_high?", "split_within_alpha?")


@declared(
    name="conformal_split",
    row="One row per method, number of calibration subjects, alpha and budget: the exceedance over random splits of the"
    " test cohort, beside its law.",
    key=("method_id", "n_calibration", "alpha", "budget_cm3"),
    columns=(
        "n_test",
        "allowed_exceedances",
        "split_count",
        "status",
        "reason?",
        *SPLIT_COLUMNS,
        *(name for name in LAW_COLUMNS if name.startswith("betabinomial")),
    ),
    inputs=("cohort_subject", "ranked_method", "critical_threshold"),
)
def conformal_split(study: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Conformal risk control on random calibration splits of the test cohort: canonical, brain, true, plain."""
    cohort = len(_cohort(inputs, "test"))
    sizes = split_sizes(cohort, study.parameters.conformal_split_sizes)
    largest = max((size.n for size in sizes if size.is_drawn), default=0)
    drawn = draw_calibration(cohort, largest, study.parameters.conformal_split_count, study.parameters.seed)
    series = _critical_series(study, inputs)
    rows = [row for size in sizes for row in _split_rows(study, size, cohort, series, drawn[:, : size.n])]
    return conformal_split.table.frame(rows).sort(conformal_split.table.key)


def _critical_series(study: Protocol, inputs: Inputs) -> dict[tuple[str, float], Levels]:
    """Critical levels of the test subjects in order of their ids, by method and budget."""
    names = {"reference_id": "canonical", "support_id": "brain", "voxel_volume_id": "true", "loss": "false_positive"}
    places = [pl.col(name) == level for name, level in names.items()]
    measured = (
        inputs["critical_threshold"]
        .filter(*places)
        .join(_cohort(inputs, "test").to_frame(), on="subject_id", how="semi")
        .sort("method_id", "budget_cm3", "subject_id")
    )
    methods = inputs["ranked_method"].filter(pl.col("is_ranked")).get_column("method_id").sort().to_list()
    found = {(str(m), b): np.empty(0, np.uint8) for m in methods for b in study.parameters.budgets_cm3}
    for (method_id, budget), frame in measured.group_by("method_id", "budget_cm3", maintain_order=True):
        if (str(method_id), budget) in found:
            found[str(method_id), budget] = critical_levels(frame.get_column("threshold").to_numpy())
    return found


def _split_rows(
    study: Protocol, size: SplitSize, cohort: int, series: Mapping[tuple[str, float], Levels], drawn: Counts
) -> list[tuple[object, ...]]:
    """The rows of one calibration size."""
    held_out, delta = max(cohort - size.n, 0), study.parameters.rcps_delta
    rules = [(alpha, allowed_by_crc(size.n, alpha), smallest_count(rule, delta)) for rule, alpha in _crc_rules(study)]
    feasible = [j for _, j, _ in rules if j >= 0]
    laws = {alpha: _numbers(observed_law(size.n, j, held_out), alpha) for alpha, j, _ in rules}
    rows: list[tuple[object, ...]] = []
    for (method_id, budget), levels in series.items():
        status, reason = _series_state(size, levels.size, cohort)
        is_drawn = status != "unavailable"
        found = dict(zip(feasible, held_out_exceedances(levels, drawn, feasible), strict=True)) if is_drawn else {}
        for alpha, j, smallest in rules:
            about = (method_id, size.n, float(alpha), budget, held_out, j)
            if j in found:
                numbers = (*_shares(found[j], held_out, alpha), *laws[alpha])
                rows.append((*about, len(drawn), status, reason, *numbers))
            elif is_drawn:
                rows.append((*about, 0, *_state(size.n, j, held_out, smallest), *(None,) * 8))
            else:
                rows.append((*about, 0, status, reason, *(None,) * 8))
    return rows


def _series_state(size: SplitSize, measured: int, cohort: int) -> tuple[str, str | None]:
    if size.is_drawn and measured < cohort:
        return "unavailable", f"critical thresholds are there for {measured} of {cohort} test subjects"
    return size.status, size.reason


def _shares(counts: Counts, held_out: int, alpha: Fraction) -> tuple[float, float, float, float]:
    """Mean, central 95 % (linear quantiles) and the share at most alpha of the exceedances of all splits."""
    low, high = np.quantile(counts, [TAIL, 1 - TAIL]) / held_out
    within = np.count_nonzero(counts <= math.floor(alpha * held_out)) / counts.size
    return int(counts.sum()) / (counts.size * held_out), float(low), float(high), within
