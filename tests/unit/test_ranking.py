import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy.stats import rankdata

from ingest.ranking import (
    HISTOGRAM_BINS,
    LEVELS,
    Ranking,
    curve_counts,
    rank_voxels,
    ranking_scratch,
    score_histogram,
    thresholds,
)

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]

metrics = import_module("sklearn.metrics")
roc_auc_score = cast(Callable[[Mask, Scores], float], metrics.roc_auc_score)
average_precision_score = cast(Callable[[Mask, Scores], float], metrics.average_precision_score)

FEW_VALUES = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.1, 0.5, 1.0, 1e-40, 3e38, float("inf"), float("-inf")])
ANY_VALUE = st.floats(width=32, allow_nan=False)
CLIPPED = st.floats(0, 1, width=32) | st.integers(0, 200).map(lambda k: float(np.float32(k / 200)))


@st.composite
def labelled_scores(draw: st.DrawFn, values: st.SearchStrategy[float]) -> tuple[Scores, Mask]:
    size = draw(st.integers(0, 60))
    scores = draw(hnp.arrays(np.float32, size, elements=values))
    return scores, draw(hnp.arrays(np.bool_, size))


def by_pairs(scores: Scores, positive: Mask) -> Ranking:
    positives, negatives = int(positive.sum()), int((~positive).sum())
    above = scores[positive][:, None] > scores[~positive][None, :]
    equal = scores[positive][:, None] == scores[~positive][None, :]
    first = np.flatnonzero(positive)[:, None] > np.flatnonzero(~positive)[None, :]
    order = np.argsort(-scores, kind="stable")
    ordinal = [positive[order[: k + 1]].mean() for k in range(scores.size) if positive[order[k]]]
    collapsed = [positive[scores >= score].mean() for score in scores[positive]]
    shared = [np.count_nonzero(scores == score) > 1 for score in scores]
    return Ranking(
        auroc=float((above + 0.5 * equal).mean()) if positives and negatives else None,
        average_precision=float(np.mean(collapsed)) if positives else None,
        positive_voxels=positives,
        negative_voxels=negatives,
        tied_fraction=float(np.mean(shared)) if scores.size else None,
        ordinal_auroc=float((above | (equal & first)).mean()) if positives and negatives else None,
        ordinal_average_precision=float(np.mean(ordinal)) if positives else None,
    )


def assert_same(found: Ranking, expected: Ranking) -> None:
    for name, value in vars(expected).items():
        assert getattr(found, name) == (value if value is None else pytest.approx(value, abs=1e-12)), name


def random_scores(size: int, digits: int | None, seed: int) -> tuple[Scores, Mask]:
    generator = np.random.default_rng(seed)
    positive = generator.random(size) < 0.05
    scores = generator.normal(0, 1, size) + positive
    return (scores if digits is None else np.round(scores, digits)).astype(np.float32), positive


@settings(deadline=None)
@given(labelled_scores(FEW_VALUES))
def test_ranking_equals_pairwise_counts_with_many_ties(pair: tuple[Scores, Mask]) -> None:
    assert_same(rank_voxels(*pair), by_pairs(*pair))


@settings(deadline=None)
@given(labelled_scores(ANY_VALUE))
def test_ranking_equals_pairwise_counts_on_any_float(pair: tuple[Scores, Mask]) -> None:
    assert_same(rank_voxels(*pair), by_pairs(*pair))


@pytest.mark.parametrize("digits", [None, 2, 0])
@pytest.mark.parametrize("floor", [-np.inf, 0.0, 1.5])
def test_ranking_equals_scikit_learn_and_scipy(digits: int | None, floor: float) -> None:
    scores, positive = random_scores(50_000, digits, seed=7)
    scores = np.maximum(scores, np.float32(floor))
    found = rank_voxels(scores, positive)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(scores, method="ordinal")[positive]
    precision = np.cumsum(positive[np.argsort(-scores, kind="stable")]) / np.arange(1, scores.size + 1)
    assert found.auroc == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)
    assert found.average_precision == pytest.approx(average_precision_score(positive, scores), abs=1e-12)
    assert found.ordinal_auroc == (int(ranks.sum()) - positives * (positives + 1) // 2) / (positives * negatives)
    assert found.ordinal_average_precision == pytest.approx(
        precision[positive[np.argsort(-scores, kind="stable")]].mean(), abs=1e-12
    )


def test_sums_of_precisions_lose_no_digits() -> None:
    generator = np.random.default_rng(9)
    scores, positive = np.arange(200_000, 0, -1, dtype=np.float32), generator.random(200_000) < 0.5
    terms = (np.cumsum(positive) / np.arange(1, 200_001))[positive]
    exact = math.fsum(terms) / terms.size
    found = rank_voxels(scores, positive)
    assert found.average_precision == found.ordinal_average_precision == pytest.approx(exact, rel=2.3e-16, abs=0)


def test_constant_map_is_undecided() -> None:
    positive = np.array([True, False, False, True, False])
    for value in (0.0, 0.25, -3.0):
        found = rank_voxels(np.full(5, value, np.float32), positive)
        assert (found.auroc, found.tied_fraction, found.average_precision) == (0.5, 1.0, 0.4)
        # Positives at places 0 and 3: none and two of three negatives come before them.
        assert found.ordinal_auroc == 2 / 6
        assert found.ordinal_average_precision == pytest.approx((1 / 1 + 2 / 4) / 2, abs=1e-15)


def test_single_class_and_empty_support() -> None:
    scores = np.array([0.2, 0.2, 0.9], np.float32)
    assert rank_voxels(scores, np.zeros(3, np.bool_)) == Ranking(None, None, 0, 3, 2 / 3, None, None)
    assert rank_voxels(scores, np.ones(3, np.bool_)) == Ranking(None, 1.0, 3, 0, 2 / 3, None, 1.0)
    assert rank_voxels(scores[:0], np.zeros(0, np.bool_)) == Ranking(None, None, 0, 0, None, None, None)


def test_negative_zero_ties_with_zero() -> None:
    found = rank_voxels(np.array([-0.0, 0.0], np.float32), np.array([True, False]))
    assert (found.auroc, found.tied_fraction, found.ordinal_auroc) == (0.5, 1.0, 0.0)


def test_scratch_is_reused_and_layout_does_not_matter() -> None:
    scores, positive = random_scores(3_000, 1, seed=3)
    scratch = ranking_scratch(5_000)
    scratch[:] = 0xFFFFFFFF
    expected = rank_voxels(scores, positive)
    assert rank_voxels(scores, positive, scratch) == expected
    assert rank_voxels(np.repeat(scores, 2)[::2], np.repeat(positive, 2)[::2], scratch) == expected
    scores.flags.writeable = False
    positive.flags.writeable = False
    assert rank_voxels(scores, positive, scratch) == expected


@settings(deadline=None)
@given(labelled_scores(CLIPPED))
def test_auroc_falls_when_labels_are_swapped(pair: tuple[Scores, Mask]) -> None:
    scores, positive = pair
    found, swapped = rank_voxels(scores, positive), rank_voxels(scores, ~positive)
    assert (found.auroc is None) == (swapped.auroc is None)
    if found.auroc is not None and swapped.auroc is not None:
        assert found.auroc + swapped.auroc == pytest.approx(1.0, abs=1e-15)


def test_thresholds_are_hundredths_and_halves_in_float32() -> None:
    levels = thresholds()
    assert levels.dtype == np.float32
    assert levels.size == LEVELS == 201
    assert [levels[0], levels[20], levels[100], levels[200]] == [0, np.float32(0.1), 0.5, 1]


def levels_by_comparison(scores: Scores, positive: Mask) -> tuple[list[int], list[int]]:
    above = [scores > np.float32(k / 200) for k in range(201)]
    return [int(mask.sum()) for mask in above], [int((mask & positive).sum()) for mask in above]


@settings(deadline=None)
@given(labelled_scores(CLIPPED))
def test_curve_counts_equal_comparisons(pair: tuple[Scores, Mask]) -> None:
    predicted, true_positive = curve_counts(*pair)
    assert (predicted.tolist(), true_positive.tolist()) == levels_by_comparison(*pair)


def test_curve_counts_at_every_threshold_and_its_neighbours() -> None:
    levels = thresholds()
    scores = np.concatenate([levels, np.nextafter(levels, np.float32(2)), np.nextafter(levels, np.float32(-1))])
    positive = np.arange(scores.size) % 3 == 0
    predicted, true_positive = curve_counts(scores, positive)
    assert (predicted.tolist(), true_positive.tolist()) == levels_by_comparison(scores, positive)


def test_curve_counts_are_safe_outside_the_unit_interval() -> None:
    scores = np.array([np.nan, np.inf, -np.inf, -1, 2, 1], np.float32)
    predicted, true_positive = curve_counts(scores, np.ones(6, np.bool_))
    assert predicted.tolist() == true_positive.tolist() == [3] * 200 + [2]


def test_clipped_scores_are_never_predicted_at_the_last_level() -> None:
    predicted, _ = curve_counts(np.ones(4, np.float32), np.zeros(4, np.bool_))
    assert predicted.tolist() == [4] * 200 + [0]


def test_empty_support_counts_nothing() -> None:
    empty = np.zeros(0, np.float32), np.zeros(0, np.bool_)
    assert not np.any(curve_counts(*empty))
    assert not np.any(score_histogram(*empty))


@settings(deadline=None)
@given(labelled_scores(CLIPPED | st.just(1e-40)))
def test_histogram_equals_its_formula(pair: tuple[Scores, Mask]) -> None:
    scores, positive = pair
    place = np.ceil(scores * np.float32(4095)).astype(int)
    for counts, chosen in zip(score_histogram(scores, positive), (positive, ~positive), strict=True):
        assert np.array_equal(counts, np.bincount(place[chosen], minlength=HISTOGRAM_BINS))
        assert counts[0] == np.count_nonzero(scores[chosen] == 0)


@pytest.mark.parametrize("function", [curve_counts, score_histogram, rank_voxels])
def test_arrays_that_are_no_pair_are_refused(function: Callable[[Any, Any], object]) -> None:
    with pytest.raises(ValueError, match="one length"):
        function(np.zeros(3, np.float32), np.zeros(4, np.bool_))
    with pytest.raises(ValueError, match="1-D"):
        function(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.bool_))
    with pytest.raises(TypeError, match="float32"):
        function(np.zeros(3, np.float64), np.zeros(3, np.bool_))


def test_nan_and_small_scratch_are_refused() -> None:
    scores, positive = np.array([0.1, np.nan, np.nan], np.float32), np.array([True, False, False])
    with pytest.raises(ValueError, match="2 of 3 scores are NaN"):
        rank_voxels(scores, positive)
    with pytest.raises(ValueError, match="cannot hold 3 voxels"):
        rank_voxels(np.zeros(3, np.float32), positive, ranking_scratch(2))
    with pytest.raises(TypeError, match="uint32"):
        rank_voxels(np.zeros(3, np.float32), positive, cast(Any, np.zeros((2, 3), np.uint64)))
