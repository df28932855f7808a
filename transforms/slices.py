"""Slice-level AUROC and what is left of it once brain area and position are adjusted for (protocol, section 7).

A lesion shows in large, central slices, and so does a high score: the marginal AUROC rewards a method for knowing where
the brain is. The adjusted AROC (Janes & Pepe, 2009, doi:10.1093/biomet/asp002) places every positive slice among
comparable negative slices of its own subject only. Two scorers know nothing of the map and must come out at one half if
the adjustment works: the slice's brain area, and its nearness to the middle.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.interpolate import BSpline

from expectations.protocol import Protocol
from ingest.compiled import compiled
from transforms.catalog import Inputs, declared
from transforms.replicates import SUBJECT_QUERY, TEST_SUBJECT, mean_and_median, numbers
from transforms.resampling import (
    Floats,
    Integers,
    Resample,
    divided,
    draw,
    exact,
    in_threads,
    interval,
    pooled_slice_auroc,
)

Flags = NDArray[np.bool_]
SUMMARIES = ("score_max", "score_p99", "score_mean")
CONTROLS = ("brain_area", "central_position")
AGGREGATIONS = ("mean", "median", "pooled")
QUINTILES = (0.2, 0.4, 0.6, 0.8)
SPLINE_KNOTS = 3  # inner knots, at quartiles of the covariate
DEGREE = 3


@dataclass(frozen=True)
class Profile:
    """Slices of a cohort in order of subject and slice, scored by one scorer.

    Attributes:
        score: Score of each slice.
        positive: Whether it holds a reference voxel.
        area: Brain area, mm2.
        position: From 0 at the subject's first brain slice to 1 at its last.
        start: Where each subject's slices begin, and the end: subjects + 1 entries.
    """

    score: Floats
    positive: Flags
    area: Floats
    position: Floats
    start: Integers

    @property
    def subject(self) -> Integers:
        """Subject of each slice."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))


@dataclass(frozen=True)
class Placement:
    """How a cohort's positive slices lie among their comparable negative ones, by subject.

    Attributes:
        total: Sum of placement values: the share of comparable negatives that score higher, ties counting half.
        matched: Positive slices with a comparable negative one.
    """

    total: Floats
    matched: Integers


def strata_placement(profile: Profile, stratum: Integers) -> Placement:
    """Place every positive slice among the negative slices of its subject and stratum."""
    total, matched = np.zeros(len(profile.start) - 1), np.zeros(len(profile.start) - 1, np.int64)
    _place_in_strata(profile.score, profile.positive, stratum, profile.start, total, matched)
    return Placement(total, matched)


def area_quintile(profile: Profile) -> Integers:
    """How many of the four quintile edges of the subject's slice areas lie strictly below the slice's area."""
    stratum = np.zeros(len(profile.area), np.int64)
    for first, end in zip(profile.start[:-1].tolist(), profile.start[1:].tolist(), strict=True):
        if end > first:
            edges = np.quantile(profile.area[first:end], QUINTILES)
            stratum[first:end] = (edges < profile.area[first:end, None]).sum(axis=1)
    return stratum


def caliper_placement(profile: Profile, width: float, uses_position: bool = False) -> Placement:
    """Place every positive slice among the nearest negative slices of its subject, with replacement.

    Args:
        profile: The slices.
        width: How far the nearest may be, in standard deviations of each covariate over the cohort's slices.
        uses_position: Whether relative position is matched too; distances are then Euclidean.

    Returns:
        Placements; negatives at equal distance are averaged, a positive without one inside the caliper is left out.
    """
    scaled = [_standardised(profile.area)] + ([_standardised(profile.position)] if uses_position else [])
    total, matched = np.zeros(len(profile.start) - 1), np.zeros(len(profile.start) - 1, np.int64)
    _place_nearest(profile.score, profile.positive, np.stack(scaled), width, profile.start, total, matched)
    return Placement(total, matched)


def covariate_splines(profile: Profile) -> Floats:
    """Intercept and splines of area and position, slices x columns: cubic, additive, inner knots at the quartiles."""
    return np.column_stack([np.ones(len(profile.area)), _spline(profile.area), _spline(profile.position)])


def spline_placement(profile: Profile, design: Floats) -> Placement:
    """Place residuals of a regression of the negative slices' scores on their covariates.

    By least squares over the cohort's negative slices; a positive slice's residual is placed among those of its own
    subject's negatives.

    Args:
        profile: The slices.
        design: Their covariates, slices x columns (see `covariate_splines`).
    """
    negative = ~profile.positive
    weights = np.linalg.lstsq(design[negative], profile.score[negative])[0] if negative.any() else 0 * design[:1].sum(0)
    largest = np.abs(profile.score).max(initial=0.0) or 1.0
    residual = np.round((profile.score - design @ weights) / largest, 9)  # those that differ by rounding are equal
    adjusted = Profile(residual, profile.positive, profile.area, profile.position, profile.start)
    return strata_placement(adjusted, np.zeros(len(residual), np.int64))


def borrowed_auroc(profile: Profile, donors: int) -> Floats:
    """AUROC of other subjects' score profiles against each subject's labels.

    Profiles are aligned at the first brain slice; slices beyond a donor's last are left out.

    Args:
        profile: The slices.
        donors: How many subjects of closest mean brain area lend theirs (all others where there are fewer).

    Returns:
        Mean over donors by subject; NaN where none gives a positive and a negative slice.
    """
    subjects = len(profile.start) - 1
    sums = np.add.reduceat(np.append(profile.area, 0.0), profile.start[:-1]) if subjects else np.zeros(0)
    mean_area = divided(sums, np.diff(profile.start))
    result = np.full(subjects, np.nan)
    for target in range(subjects):
        distance = np.abs(mean_area - mean_area[target])
        distance[target] = np.inf
        nearest = np.argsort(distance, kind="stable")[: min(donors, subjects - 1)]
        result[target] = _borrowed(profile.score, profile.positive, profile.start, target, nearest)
    return result


def _standardised(values: Floats) -> Floats:
    spread = values.std() if len(values) else 0.0
    return values / spread if spread > 0 else np.zeros(len(values))


def _spline(values: Floats) -> Floats:
    """B-spline basis of a covariate, one column left out beside an intercept; none for a constant."""
    if not len(values) or values.min() == values.max():
        return np.zeros((len(values), 0))
    inner = np.unique(np.quantile(values, np.linspace(0, 1, SPLINE_KNOTS + 2)))[1:-1]
    knots = np.concatenate([np.repeat(values.min(), DEGREE + 1), inner, np.repeat(values.max(), DEGREE + 1)])
    return BSpline.design_matrix(values, knots, DEGREE).toarray()[:, 1:]


@compiled
def _place_in_strata(
    score: Floats, positive: Flags, stratum: Integers, start: Integers, total: Floats, matched: Integers
) -> None:
    for subject in range(len(start) - 1):
        for one in range(start[subject], start[subject + 1]):
            if not positive[one]:
                continue
            above, count = 0.0, 0
            for other in range(start[subject], start[subject + 1]):
                if not positive[other] and stratum[other] == stratum[one]:
                    count += 1
                    above += 1.0 if score[other] > score[one] else 0.5 if score[other] == score[one] else 0.0
            if count > 0:
                total[subject] += above / count
                matched[subject] += 1


@compiled
def _place_nearest(
    score: Floats,
    positive: Flags,
    covariates: Floats,
    width: float,
    start: Integers,
    total: Floats,
    matched: Integers,
) -> None:
    for subject in range(len(start) - 1):
        for one in range(start[subject], start[subject + 1]):
            if not positive[one]:
                continue
            nearest, above, count = np.inf, 0.0, 0
            for other in range(start[subject], start[subject + 1]):
                if positive[other]:
                    continue
                squared, inside = 0.0, True
                for covariate in range(covariates.shape[0]):
                    apart = abs(covariates[covariate, other] - covariates[covariate, one])
                    inside = inside and apart <= width
                    squared += apart * apart
                if not inside or squared > nearest:
                    continue
                if squared < nearest:
                    nearest, above, count = squared, 0.0, 0
                count += 1
                above += 1.0 if score[other] > score[one] else 0.5 if score[other] == score[one] else 0.0
            if count > 0:
                total[subject] += above / count
                matched[subject] += 1


@compiled
def _borrowed(score: Floats, positive: Flags, start: Integers, target: int, donors: Integers) -> float:
    """Mean AUROC over donors of their scores against the target's labels."""
    first, length = start[target], start[target + 1] - start[target]
    total, count = 0.0, 0
    for donor in donors:
        lent = start[donor]
        shared = min(length, start[donor + 1] - lent)
        won, pairs = 0.0, 0
        for one in range(shared):
            if not positive[first + one]:
                continue
            for other in range(shared):
                if positive[first + other]:
                    continue
                pairs += 1
                difference = score[lent + one] - score[lent + other]
                won += 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
        if pairs > 0:
            total += won / pairs
            count += 1
    return total / count if count > 0 else np.nan


@dataclass(frozen=True)
class _Estimate:
    """An estimator's value by aggregation and replicate, with the subjects and the share of positives behind it."""

    values: Mapping[str, Floats]
    subjects: int
    matched: int
    positives: int


def _adjusted(resample: Resample, profile: Profile, placement: Placement) -> _Estimate:
    by_subject = 1 - divided(placement.total, placement.matched)
    mean, median = mean_and_median(resample, by_subject)
    total = resample.sums(exact(placement.total, len(placement.total)))
    pooled = 1 - divided(total, resample.sums(placement.matched))
    values = {"mean": mean, "median": median, "pooled": pooled}
    return _counted(values, by_subject, int(placement.matched.sum()), profile)


def _counted(values: Mapping[str, Floats], by_subject: Floats, matched: int, profile: Profile) -> _Estimate:
    return _Estimate(values, int(np.isfinite(by_subject).sum()), matched, int(profile.positive.sum()))


@dataclass(frozen=True)
class _Scorer:
    """Who scores, by which summary of a slice, in which support, and the slices so scored."""

    scorer: str
    summary: str
    support: str
    profile: Profile


def _of_same_slices(resample: Resample, scorers: Sequence[_Scorer], protocol: Protocol) -> list[dict[str, _Estimate]]:
    """Every estimator of scorers of the same slices, whose strata and splines are worked out once."""
    stratum, design = area_quintile(scorers[0].profile), covariate_splines(scorers[0].profile)
    return [
        _estimates(resample, one.profile, protocol, stratum, design, lends=one.summary == SUMMARIES[0])
        for one in scorers
    ]


def _estimates(
    resample: Resample, profile: Profile, protocol: Protocol, stratum: Integers, design: Floats, *, lends: bool
) -> dict[str, _Estimate]:
    """Every estimator of one profile; borrowed profiles only where they lend."""
    everything = strata_placement(profile, np.zeros(len(profile.score), np.int64))
    marginal = _adjusted(resample, profile, everything)
    pooled = pooled_slice_auroc(resample, profile.score, profile.subject, profile.positive)
    result = {"marginal": _Estimate({**marginal.values, "pooled": pooled}, *_numbers(marginal))}
    result["area_quintile"] = _adjusted(resample, profile, strata_placement(profile, stratum))
    for width in protocol.parameters.slice_calipers_sd:
        result[f"area_caliper_{width:g}"] = _adjusted(resample, profile, caliper_placement(profile, width))
    widest = max(protocol.parameters.slice_calipers_sd)
    both = caliper_placement(profile, widest, uses_position=True)
    result[f"area_position_caliper_{widest:g}"] = _adjusted(resample, profile, both)
    result["area_position_spline"] = _adjusted(resample, profile, spline_placement(profile, design))
    if lends:
        observed = 1 - divided(everything.total, everything.matched)
        borrowed = borrowed_auroc(profile, protocol.parameters.borrowed_donor_count)
        for name, values in (("borrowed", borrowed), ("observed_less_borrowed", observed - borrowed)):
            mean, median = mean_and_median(resample, values)
            result[name] = _counted({"mean": mean, "median": median}, values, int(profile.positive.sum()), profile)
    return result


def _numbers(estimate: _Estimate) -> tuple[int, int, int]:
    return estimate.subjects, estimate.matched, estimate.positives


@declared(
    name="slice_auroc",
    row="One row per scorer (a method, or a control that knows no map), summary of a slice, estimator, support and "
    "aggregation over the test cohort, canonical reference.",
    key=("scorer_id", "slice_summary", "estimator_id", "support_id", "aggregation_id"),
    columns=("value?", "value_low?", "value_high?", "n_subjects", "positive_count", "matched_fraction?"),
    inputs=("ranked_method", "cohort_subject", "slice_score"),
    queries={
        "test_subject": SUBJECT_QUERY,
        "slice": f"""
            with {TEST_SUBJECT}
            select
                m.method_id, m.position, s.support_id, t.subject, s.slice_index, s.score_max, s.score_p99, s.score_mean,
                s.reference_voxels_canonical > 0 as is_positive, s.brain_area_mm2, s.relative_position
            from slice_score as s
            join ranked_method as m using (method_id)
            join test_subject as t using (subject_id)
            where m.is_ranked
            order by m.position, s.support_id, t.subject, s.slice_index""",
    },
)
def slice_auroc(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Marginal and adjusted slice AUROC of every method, and of the two controls inside the brain.

    Intervals come from the replicates of the multiverse. A value is null where no subject has both kinds of slices.
    """
    parameters = protocol.parameters
    resample = draw(inputs["test_subject"].height, parameters.multiverse_replicates, parameters.seed)
    rows: list[tuple[object, ...]] = []
    parts = inputs["slice"].partition_by("method_id", "support_id", maintain_order=True)
    groups = list(_scorers(parts, resample.shape[1]))
    found = in_threads(lambda scorers: _of_same_slices(resample, scorers, protocol), groups)
    for one, estimates in zip(chain(*groups), chain(*found), strict=True):
        for estimator, estimate in estimates.items():
            for aggregation in AGGREGATIONS:
                if aggregation in estimate.values:
                    key = (one.scorer, one.summary, estimator, one.support, aggregation)
                    rows.append((*key, *_shown(estimate, aggregation, parameters.interval_level)))
    return slice_auroc.table.frame(rows)


def _shown(estimate: _Estimate, aggregation: str, level: float) -> tuple[object, ...]:
    values = estimate.values[aggregation]
    low, high, _ = interval(values[None, 1:], level)
    ends = [None if np.isnan(value) else float(value) for value in (values[0], low[0], high[0])]
    share = estimate.matched / estimate.positives if estimate.positives else None
    return (*ends, estimate.subjects, estimate.positives, share)


def _scorers(parts: list[pl.DataFrame], subjects: int) -> Iterator[list[_Scorer]]:
    """Scorers of the same slices together; the controls are read off the first method's brain slices."""
    has_controls = False
    for part in parts:
        method, support = str(part.item(0, "method_id")), str(part.item(0, "support_id"))
        start = np.searchsorted(numbers(part, "subject"), np.arange(subjects + 1)).astype(np.int64)
        area, position = (numbers(part, name).astype(np.float64) for name in ("brain_area_mm2", "relative_position"))
        positive = numbers(part, "is_positive").astype(np.bool_)
        scores = {(method, summary): numbers(part, summary).astype(np.float64) for summary in SUMMARIES}
        if support == "brain" and not has_controls:
            has_controls = True
            central = -np.abs(position - 0.5)
            scores |= dict(zip([(control, "control") for control in CONTROLS], (area, central), strict=True))
        yield [
            _Scorer(scorer, summary, support, Profile(score, positive, area, position, start))
            for (scorer, summary), score in scores.items()
        ]
