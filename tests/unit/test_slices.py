import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ingest.slices import SliceRanking, SliceScores, rank_slices, slice_scores

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]
Reals = NDArray[np.float64]
Volumes = tuple[Scores, Mask, list[Mask]]
Slices = tuple[Reals, Mask, Reals]

roc_auc_score = cast(Callable[[Mask, Reals], float], import_module("sklearn.metrics").roc_auc_score)

VOXEL_MM = (0.9, 1.3, 5.0)
# Multiples of 2**-59: their sums are exact, so that a mean must be right to the last bit.
EXACT_VALUES = st.sampled_from([0.0, -0.0, 0.25, 0.5, float(np.float32(0.1)), 1.0]) | st.floats(2**-30, 1, width=32)
LAYOUTS: list[Callable[[NDArray[Any]], NDArray[Any]]] = [
    np.ascontiguousarray,
    np.asfortranarray,
    lambda volume: np.ascontiguousarray(volume.transpose(1, 2, 0)).transpose(2, 0, 1),
    lambda volume: np.ascontiguousarray(volume[::-1, :, ::-1])[::-1, :, ::-1],
    lambda volume: np.repeat(volume, 2, axis=2)[:, :, ::2],
]


@st.composite
def volumes(draw: st.DrawFn, values: st.SearchStrategy[float] = EXACT_VALUES) -> Volumes:
    """A map of a few different scores, a support and up to three references, each mask of any density."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    palette = np.array(draw(st.lists(values, min_size=1, max_size=8)), np.float32)
    densities = draw(st.lists(st.sampled_from([0.5, 0.9, 0.1, 1.0, 0.0]), min_size=1, max_size=4))
    support, *references = [generator.random(shape) < density for density in densities]
    return generator.choice(palette, shape), support, references


@st.composite
def slices(draw: st.DrawFn, areas: st.SearchStrategy[float] | None = None) -> Slices:
    size = draw(st.integers(0, 40))
    values = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, math.inf, -math.inf]) | st.floats(0, 1)
    score = draw(hnp.arrays(np.float64, size, elements=values))
    chosen = st.integers(1, 9).map(lambda voxels: voxels * 1.17) if areas is None else areas
    return score, draw(hnp.arrays(np.bool_, size)), draw(hnp.arrays(np.float64, size, elements=chosen))


def by_slice(clipped: Scores, support: Mask, references: Sequence[Mask]) -> SliceScores:
    held = [z for z in range(clipped.shape[2]) if support[:, :, z].any()]
    inside = [clipped[:, :, z][support[:, :, z]].astype(np.float64) for z in held]
    reached = held[-1] - held[0] if held else 0
    return SliceScores(
        slice_index=np.array(held, np.int64),
        score_max=np.array([values.max() for values in inside]),
        score_p99=np.array([np.quantile(values, 0.99) for values in inside]),
        score_mean=np.array([math.fsum(values) / values.size for values in inside]),
        reference_voxels=np.array(
            [[np.sum(mask[:, :, z] & support[:, :, z]) for z in held] for mask in references], np.int64
        ).reshape(len(references), len(held)),
        area_mm2=np.array([values.size * (VOXEL_MM[0] * VOXEL_MM[1]) for values in inside]),
        relative_position=np.array([(z - held[0]) / reached if reached else 0.0 for z in held]),
    )


def by_pairs(score: Reals, positive: Mask, area: Reals) -> SliceRanking:
    strata = [sum(edge < a for edge in np.quantile(area, [0.2, 0.4, 0.6, 0.8])) for a in area]
    wins: list[float] = []
    placements: list[float] = []
    for i in np.flatnonzero(positive):
        wins += [float(score[i] > s) + 0.5 * float(score[i] == s) for s in score[~positive]]
        stratum = [score[j] for j in np.flatnonzero(~positive) if strata[j] == strata[i]]
        if stratum:
            placements.append(float(np.mean([float(s > score[i]) + 0.5 * float(s == score[i]) for s in stratum])))
    positives = int(positive.sum())
    return SliceRanking(
        sum(wins) / len(wins) if wins else None,
        math.fsum(placements),
        len(placements),
        positives,
        positive.size - positives,
    )


def assert_same(found: SliceScores, expected: SliceScores) -> None:
    for name, value in vars(expected).items():
        column = getattr(found, name)
        assert column.shape == value.shape, name
        assert column.dtype == (np.int64 if name in {"slice_index", "reference_voxels"} else np.float64), name
        assert np.array_equal(column, value), name


@settings(deadline=None, max_examples=150)
@given(volumes(), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_scores_equal_a_loop_over_slices_to_the_last_bit(
    drawn: Volumes, arrange_scores: Callable[[Scores], Scores], arrange_masks: Callable[[Mask], Mask]
) -> None:
    clipped, support, references = drawn
    arranged = arrange_scores(clipped), arrange_masks(support), [arrange_masks(mask) for mask in references]
    assert_same(slice_scores(*arranged, VOXEL_MM), by_slice(clipped, support, references))


@settings(deadline=None)
@given(volumes(st.floats(0, 1, width=32)), st.permutations(range(5)), st.permutations(range(6)))
def test_the_order_of_voxels_in_a_slice_does_not_matter(drawn: Volumes, rows: list[int], columns: list[int]) -> None:
    clipped, support, references = drawn
    moved = np.ix_([i for i in rows if i < clipped.shape[0]], [j for j in columns if j < clipped.shape[1]])
    found = slice_scores(clipped[moved], support[moved], [mask[moved] for mask in references], VOXEL_MM)
    assert_same(found, slice_scores(clipped, support, references, VOXEL_MM))


@settings(deadline=None)
@given(volumes())
def test_reversed_slices_give_reversed_columns(drawn: Volumes) -> None:
    clipped, support, references = drawn
    found = slice_scores(clipped, support, references, VOXEL_MM)
    back = slice_scores(clipped[..., ::-1], support[..., ::-1], [mask[..., ::-1] for mask in references], VOXEL_MM)
    assert np.array_equal(back.slice_index[::-1], clipped.shape[2] - 1 - found.slice_index)
    for name in ("score_max", "score_p99", "score_mean", "reference_voxels", "area_mm2"):
        assert np.array_equal(getattr(back, name)[..., ::-1], getattr(found, name)), name
    if found.slice_index.size > 1:
        assert back.relative_position[::-1] == pytest.approx(1 - found.relative_position, abs=1e-15)


MAPS: dict[str, Callable[[Reals], Reals]] = {
    "smooth": lambda scores: scores,
    "eight bits": lambda scores: np.round(scores * 255) / 255,
    "tiny": lambda scores: scores * 1e-6,
    "in one bin": lambda scores: 0.5 + scores * 1e-4,
    "sparse": lambda scores: np.maximum(scores - 0.45, 0),
    "constant": lambda scores: np.full_like(scores, 0.3),
    "zero": lambda scores: np.zeros_like(scores),
    "subnormal": lambda scores: scores * 1e-40,
}


@pytest.mark.parametrize("name", MAPS)
def test_large_slices_equal_numpy(name: str) -> None:
    generator = np.random.default_rng(4)
    clipped = MAPS[name](np.clip(generator.gamma(1, 0.1, (61, 53, 9)), 0, 1)).astype(np.float32)
    support = generator.random(clipped.shape) < np.linspace(0, 1, 9)
    reference = generator.random(clipped.shape) < 0.01
    found = slice_scores(clipped, support, [reference], VOXEL_MM)
    expected = by_slice(clipped, support, [reference])
    assert expected.slice_index.tolist() == list(range(1, 9))
    assert found.score_mean == pytest.approx(expected.score_mean, rel=1e-15, abs=2**-60)
    assert_same(replace(found, score_mean=expected.score_mean), expected)


def test_scores_by_hand() -> None:
    clipped = np.zeros((2, 2, 6), np.float32)
    clipped[:, :, 1] = [[0.5, 0.25], [1.0, 0.75]]
    clipped[:, :, 2] = 1.0
    clipped[0, 0, 5] = 0.125
    support = np.zeros(clipped.shape, np.bool_)
    support[:, :, 1] = [[True, True], [False, True]]
    support[:, :, 3] = True
    support[0, 0, 5] = True
    reference = np.zeros(clipped.shape, np.bool_)
    reference[:, :, 1] = [[True, False], [True, True]]
    found = slice_scores(clipped, support, [reference, ~reference], (2.0, 3.0, 5.0))
    assert found.slice_index.tolist() == [1, 3, 5]
    assert found.score_max.tolist() == [0.75, 0.0, 0.125]
    # Three values: rank 0.99 * 2 = 1.98, so 0.98 of the way from 0.5 to 0.75.
    assert found.score_p99.tolist() == [pytest.approx(0.745, abs=1e-15), 0.0, 0.125]
    assert found.score_mean.tolist() == [0.5, 0.0, 0.125]
    assert found.reference_voxels.tolist() == [[2, 0, 0], [1, 4, 1]]
    assert found.positive.tolist() == [[True, False, False], [True, True, True]]
    assert found.area_mm2.tolist() == [18.0, 24.0, 6.0]
    assert found.relative_position.tolist() == [0.0, 0.5, 1.0]


def test_a_single_slice_is_at_position_zero() -> None:
    support = np.zeros((2, 2, 4), np.bool_)
    support[0, 1, 2] = True
    found = slice_scores(np.zeros(support.shape, np.float32), support, [], VOXEL_MM)
    assert (found.slice_index.tolist(), found.relative_position.tolist()) == ([2], [0.0])
    assert found.reference_voxels.shape == found.positive.shape == (0, 1)


def test_an_empty_support_gives_empty_columns_and_an_empty_ranking() -> None:
    for shape in ((3, 2, 4), (3, 0, 4), (0, 2, 4), (3, 2, 0)):
        scores, reference = np.ones(shape, np.float32), np.ones(shape, np.bool_)
        found = slice_scores(scores, np.zeros(shape, np.bool_), [reference], VOXEL_MM)
        assert_same(found, by_slice(scores, np.zeros(shape, np.bool_), [reference]))
        assert found.reference_voxels.shape == (1, 0)
        assert all(column.size == 0 for column in vars(found).values())
        ranking = rank_slices(found.score_max, found.positive[0], found.area_mm2)
        assert ranking == SliceRanking(None, 0.0, 0, 0, 0)


@pytest.mark.parametrize("value", [-0.001, 1.001, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("arrange", LAYOUTS[:2])
def test_only_scores_inside_the_support_must_be_clipped(value: float, arrange: Callable[[Scores], Scores]) -> None:
    clipped, support = np.full((3, 4, 2), 0.5, np.float32), np.ones((3, 4, 2), np.bool_)
    clipped[1, 2, 1] = value
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        slice_scores(arrange(clipped), support, [], VOXEL_MM)
    support[1, 2, 1] = False
    assert slice_scores(arrange(clipped), support, [], VOXEL_MM).score_max.tolist() == [0.5, 0.5]


def test_inputs_keep_their_values_and_may_be_read_only() -> None:
    generator = np.random.default_rng(8)
    clipped, support = generator.random((4, 5, 3)).astype(np.float32), generator.random((4, 5, 3)) < 0.7
    expected = by_slice(clipped, support, [support])
    kept = clipped.copy()
    clipped.flags.writeable = support.flags.writeable = False
    assert_same(slice_scores(clipped, support, [support], VOXEL_MM), expected)
    assert np.array_equal(clipped, kept)


def test_volumes_that_do_not_fit_are_refused() -> None:
    def refused(scores: Any, support: Any, references: list[Any], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            slice_scores(scores, support, references, VOXEL_MM)

    scores, mask = np.zeros((2, 2, 2), np.float32), np.zeros((2, 2, 2), np.bool_)
    refused(scores, mask[:1], [], ValueError, "one shape")
    refused(scores, mask, [mask, mask[:, :1]], ValueError, "one shape")
    refused(scores[0], mask[0], [], ValueError, "3-D")
    refused(scores.astype(np.float64), mask, [], TypeError, "float64")
    refused(scores, mask.astype(np.uint8), [], TypeError, "uint8")
    refused(scores, mask, [mask.astype(np.uint8)], TypeError, "uint8")


@settings(deadline=None, max_examples=150)
@given(slices())
def test_ranking_equals_pairwise_counts(drawn: Slices) -> None:
    if drawn[0].size:
        assert rank_slices(*drawn) == by_pairs(*drawn)
    else:
        assert rank_slices(*drawn) == SliceRanking(None, 0.0, 0, 0, 0)


@settings(deadline=None)
@given(slices(st.floats(1, 1e5)))
def test_ranking_equals_pairwise_counts_on_any_area(drawn: Slices) -> None:
    if drawn[0].size:
        assert rank_slices(*drawn) == by_pairs(*drawn)


@pytest.mark.parametrize("digits", [1, 2, 9])
def test_auroc_equals_scikit_learn(digits: int) -> None:
    generator = np.random.default_rng(digits)
    positive = generator.random(139) < 0.3
    score = np.round(generator.random(139) + 0.3 * positive, digits)
    found = rank_slices(score, positive, generator.random(139))
    assert found.auroc == pytest.approx(roc_auc_score(positive, score), abs=1e-14)
    assert (found.positive_count, found.negative_count) == (positive.sum(), (~positive).sum())


@settings(deadline=None)
@given(slices(st.just(23.4)))
def test_one_stratum_makes_the_adjusted_area_the_marginal_one(drawn: Slices) -> None:
    found = rank_slices(*drawn)
    if found.auroc is None:
        assert (found.matched_count, found.placement_sum) == (0, 0.0)
    else:
        assert found.matched_count == found.positive_count
        assert 1 - found.placement_sum / found.matched_count == pytest.approx(found.auroc, abs=1e-14)


@settings(deadline=None)
@given(slices(), st.randoms(use_true_random=False))
def test_neither_order_nor_an_increasing_transform_matters(drawn: Slices, random: Any) -> None:
    score, positive, area = drawn
    order = np.array(random.sample(range(score.size), score.size), np.int64)
    found = rank_slices(*drawn)
    assert rank_slices(score[order], positive[order], area[order]) == found
    assert rank_slices(np.searchsorted(np.unique(score), score).astype(np.float64), positive, area) == found


@settings(deadline=None)
@given(slices())
def test_counts_and_placements_stay_in_range(drawn: Slices) -> None:
    found = rank_slices(*drawn)
    assert 0 <= found.placement_sum <= found.matched_count <= found.positive_count
    assert found.positive_count + found.negative_count == drawn[0].size
    assert (found.auroc is None) == (found.positive_count == 0 or found.negative_count == 0)


def test_ranking_by_hand() -> None:
    # Areas 1 to 6: the edges are exactly 2, 3, 4 and 5, so the strata are {1, 2}, {3}, {4}, {5}, {6}.
    area = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    score = np.array([0.5, 0.5, 0.9, 0.1, 0.9, 0.2])
    positive = np.array([True, False, True, False, False, True])
    found = rank_slices(score, positive, area)
    # Only the first has a negative in its stratum, a tie. Pairs: 0.5 beats 0.1, ties 0.5; 0.9 beats two, ties one;
    # 0.2 beats 0.1.
    assert found == SliceRanking((1.5 + 2.5 + 1) / 9, 0.5, 1, 3, 3)


def test_placements_by_hand() -> None:
    area = np.full(5, 7.0)
    score = np.array([0.4, 0.8, 0.4, 0.1, 0.6])
    positive = np.array([True, True, False, False, False])
    # Of 0.4, 0.1 and 0.6, one and a half lie above 0.4, none above 0.8.
    assert rank_slices(score, positive, area) == SliceRanking(1 - 1.5 / 6, 0.5, 2, 2, 3)


def test_a_score_that_follows_area_is_adjusted_away() -> None:
    # Positives are the larger slices, and the score is area alone: within a stratum of equal areas all scores tie.
    area = np.repeat([10.0, 20.0, 30.0, 40.0, 50.0], 4)
    positive = np.arange(20) % 4 < np.repeat([1, 1, 2, 3, 3], 4)
    found = rank_slices(area.copy(), positive, area)
    assert found.auroc is not None
    assert found.auroc > 0.6
    assert 1 - found.placement_sum / found.matched_count == 0.5


def test_slices_that_do_not_fit_are_refused() -> None:
    ones, mask = np.ones(3), np.zeros(3, np.bool_)
    for score, positive, area in ((ones[:2], mask, ones), (ones, mask[:2], ones), (ones, mask, ones[:2])):
        with pytest.raises(ValueError, match="one length"):
            rank_slices(score, positive, area)
    with pytest.raises(ValueError, match="1-D"):
        rank_slices(ones[None], mask[None], ones[None])
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            rank_slices(ones, mask, np.array([1.0, value, 1.0]))
    with pytest.raises(ValueError, match="NaN"):
        rank_slices(np.array([1.0, math.nan, 1.0]), mask, ones)
