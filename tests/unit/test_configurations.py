"""The training set as an eleventh axis, and the selection of one, against slow twins on small random data."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from expectations.protocol import protocol
from transforms.configurations import with_training_sets
from transforms.contrasts import Curve
from transforms.multiverse import Marginals
from transforms.resampling import Resample, draw
from transforms.selection import Candidate, budget_dice, choose, chosen_rows, mean_precision, median_dice, pooled_dice

Array = NDArray[Any]
FAST = settings(deadline=None, max_examples=40)
NAN = float("nan")


def marginals(scores: Array) -> Marginals:
    """The sums of one training set, from scores by methods x first axis x second axis x replicates."""
    methods, first, second, _ = scores.shape
    sums = np.concatenate([scores.sum(axis=2), scores.sum(axis=1)], axis=1)
    counts = np.array([second] * first + [first] * second, np.float64)
    assert sums.shape[:2] == (methods, first + second)
    return Marginals(sums, (scores**2).sum(axis=(0, 1, 2)), counts)


def sums_of_squares(scores: Array) -> dict[str, float]:
    """The protocol's formulas, written out: methods x first x second x training sets."""
    methods, size = len(scores), scores.size
    grand, by_method = scores.mean(), scores.mean(axis=(1, 2, 3))
    found = {"total": ((scores - grand) ** 2).sum(), "method": size / methods * ((by_method - grand) ** 2).sum()}
    for axis, name in enumerate(("first", "second", "configuration"), start=1):
        found[name] = found[f"method:{name}"] = 0.0
        levels = scores.shape[axis]
        for level in range(levels):
            here = scores.take(level, axis)
            found[name] += size / levels * (here.mean() - grand) ** 2
            for method in range(methods):
                rest = here[method].mean() - here.mean() - by_method[method] + grand
                found[f"method:{name}"] += size / (levels * methods) * rest**2
    found["axes"] = sum(value for name, value in found.items() if name not in ("total", "method"))
    found["remainder"] = found["total"] - found["method"] - found["axes"]
    return found


@pytest.mark.parametrize("shape", [(2, 2, 3, 2, 3), (4, 3, 1, 5, 2), (1, 2, 2, 2, 1)])
def test_the_training_set_is_an_axis_like_any_other(shape: tuple[int, ...]) -> None:
    methods, first, second, sets, replicates = shape
    scores = np.random.default_rng(7).random(shape)
    joined = with_training_sets([marginals(scores[:, :, :, k]) for k in range(sets)], slice(0, first))
    axes = {
        "first": slice(0, first),
        "second": slice(first, first + second),
        "configuration": slice(first + second, first + second + sets),
    }
    shares = joined.shares(axes)
    assert joined.sums.shape == (methods, first + second + sets, replicates)
    for replicate in range(replicates):
        expected = sums_of_squares(scores[..., replicate])
        assert shares.keys() == expected.keys()
        for term, value in expected.items():
            assert shares[term][replicate] == pytest.approx(value / expected["total"], abs=1e-12)


def test_training_sets_of_the_same_scores_explain_nothing() -> None:
    scores = np.random.default_rng(3).random((3, 2, 2, 4))
    axes = {"first": slice(0, 2), "second": slice(2, 4), "configuration": slice(4, 7)}
    shares = with_training_sets([marginals(scores)] * 3, slice(0, 2)).shares(axes)
    alone = marginals(scores).shares({"first": slice(0, 2), "second": slice(2, 4)})
    np.testing.assert_allclose(shares["configuration"], 0, atol=1e-12)
    np.testing.assert_allclose(shares["method:configuration"], 0, atol=1e-12)
    np.testing.assert_allclose(shares["method"], alone["method"], atol=1e-12)


LEVELS, SUBJECTS = 6, 5


@st.composite
def candidates(draw_from: st.DrawFn) -> Candidate:
    """Voxel counts that fall with the level; some subjects have no reference, and some no lesion."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    reference = rng.integers(0, 3, SUBJECTS) * rng.integers(1, 40, SUBJECTS)
    hit = np.sort(rng.integers(0, reference + 1, (LEVELS, SUBJECTS)), axis=0)[::-1]
    false = np.sort(rng.integers(0, 60, (LEVELS, SUBJECTS)), axis=0)[::-1]
    false[-1], hit[-1] = 0, 0
    lesions = np.where(reference > 0, rng.integers(0, 5, SUBJECTS), 0)
    hits = np.sort(rng.integers(0, lesions + 1, (LEVELS, SUBJECTS)), axis=0)[::-1]
    overrides: dict[str, object] = {"guard_share": draw_from(st.sampled_from([0.0, 0.03, 0.3]))}
    overrides["empty_dice"] = draw_from(st.sampled_from(["exclude", "one_if_both_empty"]))
    precision = np.where(reference > 0, rng.random(SUBJECTS), np.nan)
    repeated = np.broadcast_to(reference, (LEVELS, SUBJECTS))
    curve = Curve(*(part.astype(np.float64) for part in (hit + false, hit, repeated)))
    numbers = (hits.astype(np.float64), lesions.astype(np.float64), precision)
    return Candidate(curve, *numbers, protocol(overrides).parameters, 1000.0)


def dice_of(candidate: Candidate, level: int, subject: int) -> float | None:
    curve = candidate.curve
    predicted, hit, reference = (
        part[level, subject] for part in (curve.predicted, curve.true_positive, curve.reference)
    )
    if reference == 0:
        return None if candidate.parameters.empty_dice == "exclude" else float(predicted == 0)
    return 2 * hit / (predicted + reference)


def present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def slow_criteria(candidate: Candidate, taken: Sequence[int]) -> dict[str, float]:
    """Every criterion on the subjects that a replicate takes, each as often as it takes it."""
    curve, budget = candidate.curve, candidate.parameters.reference_budget_cm3
    pooled, medians, feasible = list[float](), list[float](), list[tuple[float, float | None]]()
    for level in range(LEVELS):
        size = sum(curve.predicted[level, i] + curve.reference[level, i] for i in taken)
        if size:
            pooled.append(2 * sum(curve.true_positive[level, i] for i in taken) / size)
        values = present([dice_of(candidate, level, i) for i in taken])
        if values:
            medians.append(statistics.median(values))
        burden = sum(curve.predicted[level, i] - curve.true_positive[level, i] for i in taken) / len(taken)
        if burden <= budget:
            hits = sum(candidate.hits[level, i] for i in taken)
            feasible.append((hits, statistics.fmean(values) if values else None))
    lesions = sum(candidate.lesions[i] for i in taken)
    tolerated = max(1, int(candidate.parameters.guard_share * lesions))
    most = max(hits for hits, _ in feasible)
    guarded = present([dice for hits, dice in feasible if hits >= most - tolerated])
    precision = [candidate.precision[i] for i in taken if not np.isnan(candidate.precision[i])]
    return {
        "pooled": max(pooled, default=NAN),
        "median": max(medians, default=NAN),
        "budget": max(guarded, default=NAN),
        "precision": statistics.fmean(precision) if precision else NAN,
    }


@FAST
@given(candidates())
def test_criteria_are_those_of_the_subjects_that_a_replicate_takes(candidate: Candidate) -> None:
    resample = draw(SUBJECTS, 7, 11)
    index = np.random.Generator(np.random.PCG64(11)).integers(0, SUBJECTS, (7, SUBJECTS))
    found = {
        "pooled": pooled_dice(candidate, resample),
        "median": median_dice(candidate, resample),
        "budget": budget_dice(candidate, resample),
        "precision": mean_precision(candidate, resample),
    }
    for replicate, taken in enumerate([list(range(SUBJECTS)), *index.tolist()]):
        for name, value in slow_criteria(candidate, taken).items():
            assert found[name][replicate] == pytest.approx(value, abs=1e-12, nan_ok=True), (name, replicate)


def test_a_cohort_without_any_reference_defines_no_criterion_but_pooled_dice() -> None:
    counts = np.array([[5.0, 2.0], [0.0, 0.0]])
    curve = Curve(counts, np.zeros((2, 2)), np.zeros((2, 2)))
    parameters = protocol().parameters
    candidate = Candidate(curve, np.zeros((2, 2)), np.zeros(2), np.full(2, np.nan), parameters, 1.0)
    resample = Resample(np.ones((1, 2), np.uint16))
    assert pooled_dice(candidate, resample).tolist() == [0.0]
    for criterion in (median_dice, budget_dice, mean_precision):
        assert np.isnan(criterion(candidate, resample)).all()


@FAST
@given(
    st.lists(st.lists(st.sampled_from([0.1, 0.1 + 1e-12, 0.2, NAN]), min_size=4, max_size=4), min_size=1, max_size=4)
)
def test_the_first_of_the_best_is_chosen(rows: list[list[float]]) -> None:
    values = np.array(rows)
    expected: list[int] = []
    for column in values.T.tolist():
        best = max((value for value in column if not np.isnan(value)), default=None)
        expected.append(-1 if best is None else next(k for k, value in enumerate(column) if value >= best - 1e-9))
    assert choose(values, 1e-9).tolist() == expected
    found = chosen_rows(values, 1e-9)
    assert [row[2] for row in found] == [expected[1:].count(k) for k in range(len(rows))]
    assert {row[3] for row in found} == {sum(k >= 0 for k in expected[1:])}
    assert [row[1] for row in found] == [expected[0] == k for k in range(len(rows))]
    for (value, is_chosen, _, _, status, reason), (first, *_) in zip(found, rows, strict=True):
        assert (value is None) == np.isnan(first) == (status == "unavailable") == (reason is not None)
        assert not (value is None and is_chosen)


def test_every_pair_of_terms_is_counted_once() -> None:
    """Shares of all terms of a design without interaction of axes add up to one."""
    method, axis, training = np.array([0.1, 0.5]), np.array([0.0, 0.2, 0.3]), np.array([0.0, 0.05])
    scores = np.zeros((2, 3, 2, 2, 1))
    for at in itertools.product(range(2), range(3), range(2), range(2)):
        scores[at] = method[at[0]] + axis[at[1]] + training[at[3]] * (1 + at[0])
    joined = with_training_sets([marginals(scores[:, :, :, k]) for k in range(2)], slice(0, 3))
    shares = joined.shares({"first": slice(0, 3), "second": slice(3, 5), "configuration": slice(5, 7)})
    assert shares["remainder"][0] == pytest.approx(0, abs=1e-12)
    assert shares["method:configuration"][0] > 0
    assert shares["second"][0] == pytest.approx(0, abs=1e-12)
