import math
from collections.abc import Callable
from itertools import count
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingest.critical import CriticalThresholds, critical_thresholds, exceeding_voxels

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]

LEVELS = [float(np.float32(k / 200)) for k in range(201)]
NEIGHBOURS = [
    float(np.nextafter(np.float32(level), np.float32(side))) for level in LEVELS for side in (0, 1)
]  # 0 and 1 themselves at the ends
CLIPPED = st.sampled_from(LEVELS) | st.sampled_from(NEIGHBOURS) | st.floats(0, 1, width=32) | st.just(-0.0)
FEW_VALUES = st.sampled_from([0.0, 1e-40, 0.25, 0.5, float(np.float32(0.1)), 1.0])
VOXEL_MM3 = st.sampled_from([1.0, 0.8, 0.3, 1.2, 0.125, 2.75]) | st.floats(0.01, 100)

MAPS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "smooth": lambda scores: scores,
    "eight bits": lambda scores: np.round(scores * 255) / 255,
    "tiny": lambda scores: scores * 1e-6,
    "in one bin": lambda scores: 0.5 + scores * 1e-4,
    "sparse": lambda scores: np.maximum(scores - 0.25, 0),
    "constant": lambda scores: np.full_like(scores, 0.3),
    "zero": lambda scores: np.zeros_like(scores),
}


@st.composite
def labelled_scores(draw: st.DrawFn) -> tuple[Scores, Mask]:
    """Up to 40 voxels of a few different scores, so that many tie."""
    palette = np.array(
        draw(st.lists(draw(st.sampled_from([CLIPPED, FEW_VALUES])), min_size=1, max_size=12)), np.float32
    )
    size, density = draw(st.integers(0, 40)), draw(st.sampled_from([0.2, 0.5, 0.0, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.choice(palette, size), generator.random(size) < density


@st.composite
def budgets(draw: st.DrawFn, voxel_mm3: float) -> float:
    """A budget of up to 25 voxels: anywhere, or as near to a whole number of them as it can be stored."""
    voxels = draw(st.integers(0, 25))
    stored = st.sampled_from(
        [voxels * voxel_mm3 / 1000, voxels * (voxel_mm3 / 1000), round(voxels * voxel_mm3, 6) / 1e3]
    )
    return draw(stored | st.floats(0, 25 * voxel_mm3 / 1000))


def by_sorting(scores: Scores, positive: Mask, counts: list[int]) -> tuple[list[float], list[float]]:
    others, every = sorted(scores[~positive].tolist(), reverse=True), sorted(scores.tolist(), reverse=True)
    burden = [others[c - 1] if c <= len(others) else 0.0 for c in counts]
    return burden, [every[c - 1] if c <= len(every) else 0.0 for c in counts]


def as_lists(found: CriticalThresholds) -> tuple[list[float], list[float]]:
    assert found.burden.dtype == found.volume.dtype == np.float32
    return found.burden.tolist(), found.volume.tolist()


@given(st.data(), VOXEL_MM3)
def test_count_is_the_first_to_exceed(data: st.DataObject, voxel_mm3: float) -> None:
    budget = data.draw(budgets(voxel_mm3))
    assert exceeding_voxels(budget, voxel_mm3) == next(c for c in count() if c * voxel_mm3 / 1000 > budget)


@given(st.integers(0, 10**9), st.floats(1e-3, 1e3))
def test_count_is_minimal_for_large_budgets(voxels: int, voxel_mm3: float) -> None:
    for budget in (voxels * voxel_mm3 / 1000, voxels * (voxel_mm3 / 1000), float(voxels)):
        found = exceeding_voxels(budget, voxel_mm3)
        assert found * voxel_mm3 / 1000 > budget >= (found - 1) * voxel_mm3 / 1000
        assert abs(found - (1000 * budget / voxel_mm3 + 1)) <= 2


@pytest.mark.parametrize(
    ("budget_cm3", "voxel_mm3", "expected"),
    [
        (20.0, 1.0, 20_001),
        (0.0, 1.0, 1),
        (0.0, 5e-324, 501),  # fewer voxels underflow to a volume of 0
        (1e-9, 1.0, 1),
        (5.0, 3.0, 1_667),
        (1.001, 1.0, 1_002),  # 1000 b rounds below 1001, so the formula alone says 1001
        (0.0136, 0.8, 17),  # 17 voxels round above the budget, so the formula alone says 18
    ],
)
def test_count_by_hand(budget_cm3: float, voxel_mm3: float, expected: int) -> None:
    assert exceeding_voxels(budget_cm3, voxel_mm3) == expected


def test_rounding_moves_the_formula_both_ways() -> None:
    formula = [math.floor(1000 * budget / voxel) + 1 for budget, voxel in ((1.001, 1.0), (0.0136, 0.8))]
    assert formula == [1_001, 18]


def test_duckdb_decides_alike_at_the_border() -> None:
    cases = [(round(k * voxel / 1000, 6), voxel) for voxel in (1.0, 0.8, 1.1, 0.343) for k in range(1, 200)]
    counts = [exceeding_voxels(budget, voxel) for budget, voxel in cases]
    rows = [(c - less, v, b) for (b, v), c in zip(cases, counts, strict=True) for less in (0, 1)]
    values = ", ".join(f"({c}::uinteger, {v!r}::double, {b!r}::double)" for c, v, b in rows)
    with duckdb.connect() as connection:
        found = connection.execute(f"select c * v / 1000 > b from (values {values}) as t(c, v, b)").fetchall()
    assert [row[0] for row in found] == [True, False] * len(cases)


@pytest.mark.parametrize(
    ("budget_cm3", "voxel_mm3"),
    [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_values_that_give_no_count_are_refused(budget_cm3: float, voxel_mm3: float) -> None:
    with pytest.raises(ValueError, match="no voxel count"):
        exceeding_voxels(budget_cm3, voxel_mm3)


@pytest.mark.parametrize(("budget_cm3", "voxel_mm3"), [(1e13, 1.0), (1.0, 5e-324), (1e308, 1.0)])
def test_counts_beyond_float64_are_refused(budget_cm3: float, voxel_mm3: float) -> None:
    with pytest.raises(ValueError, match=r"2\*\*53"):
        exceeding_voxels(budget_cm3, voxel_mm3)


@settings(deadline=None, max_examples=150)
@given(labelled_scores(), st.lists(st.integers(1, 45), max_size=6))
def test_thresholds_equal_sorting(pair: tuple[Scores, Mask], counts: list[int]) -> None:
    assert as_lists(critical_thresholds(*pair, counts)) == by_sorting(*pair, counts)


@settings(deadline=None, max_examples=150)
@given(labelled_scores(), VOXEL_MM3, st.data())
def test_loss_at_every_level_is_whether_the_critical_threshold_is_above(
    pair: tuple[Scores, Mask], voxel_mm3: float, data: st.DataObject
) -> None:
    scores, positive = pair
    budget = data.draw(budgets(voxel_mm3))
    found = critical_thresholds(scores, positive, [exceeding_voxels(budget, voxel_mm3)])
    for k in range(201):
        predicted = scores > np.float32(k / 200)
        false_positives, voxels = int(np.sum(predicted & ~positive)), int(np.sum(predicted))
        assert (false_positives * voxel_mm3 / 1000 > budget) == (found.burden[0] > np.float32(k / 200))
        assert (voxels * voxel_mm3 / 1000 > budget) == (found.volume[0] > np.float32(k / 200))


@settings(deadline=None)
@given(labelled_scores(), st.integers(1, 44))
def test_thresholds_fall_with_the_count_and_burden_never_exceeds_volume(pair: tuple[Scores, Mask], voxels: int) -> None:
    found = critical_thresholds(*pair, [voxels, voxels + 1])
    assert found.burden[0] >= found.burden[1]
    assert found.volume[0] >= found.volume[1]
    assert (found.burden <= found.volume).all()


@pytest.mark.parametrize("name", MAPS)
def test_many_voxels_equal_sorting(name: str) -> None:
    generator = np.random.default_rng(5)
    scores = MAPS[name](np.clip(generator.gamma(1, 0.1, 60_000), 0, 1)).astype(np.float32)
    positive = generator.random(60_000) < 0.05
    counts = [5_001, 1, 60_000, 40_001, 5_001, 56_000, 10**12, 300, 301]
    assert as_lists(critical_thresholds(scores, positive, counts)) == by_sorting(scores, positive, counts)


def test_thresholds_by_hand() -> None:
    scores = np.array([0.9, 0.2, 0.9, 0.5, 0.0, 0.2], np.float32)
    positive = np.array([True, False, False, False, False, False])
    found = critical_thresholds(scores, positive, [1, 2, 3, 4, 5, 6, 7])
    assert found.burden.tolist() == [scores[0], scores[3], scores[1], scores[1], 0, 0, 0]
    assert found.volume.tolist() == [scores[0], scores[0], scores[3], scores[1], scores[1], 0, 0]


def test_nothing_to_rank_gives_zeros() -> None:
    empty = np.zeros(0, np.float32), np.zeros(0, np.bool_)
    assert as_lists(critical_thresholds(*empty, [1, 8])) == ([0, 0], [0, 0])
    assert as_lists(critical_thresholds(*empty, [])) == ([], [])
    full = np.ones(3, np.float32), np.ones(3, np.bool_)
    assert as_lists(critical_thresholds(*full, [1, 3, 4])) == ([0, 0, 0], [1, 1, 0])


def test_scores_off_the_unit_interval_count_as_clipped() -> None:
    scores = np.array([np.nan, np.inf, -np.inf, -1, 2, 1, 0.5, -0.0], np.float32)
    positive = np.zeros(8, np.bool_)
    found = critical_thresholds(scores, positive, list(range(1, 10)))
    assert as_lists(found) == ([1, 1, 1, 0.5, 0, 0, 0, 0, 0],) * 2
    assert not np.signbit(found.volume).any()


def test_inputs_keep_their_values_and_may_be_strided_or_read_only() -> None:
    generator = np.random.default_rng(2)
    scores, positive = generator.random(500).astype(np.float32), generator.random(500) < 0.3
    kept = scores.copy(), positive.copy()
    scores.flags.writeable = positive.flags.writeable = False
    expected = as_lists(critical_thresholds(scores, positive, [3, 400]))
    assert as_lists(critical_thresholds(np.repeat(scores, 2)[::2], np.repeat(positive, 2)[::2], [3, 400])) == expected
    assert np.array_equal(scores, kept[0])
    assert np.array_equal(positive, kept[1])


def test_arrays_and_counts_that_do_not_fit_are_refused() -> None:
    def refused(scores: Any, positive: Any, counts: list[int], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            critical_thresholds(scores, positive, counts)

    refused(np.zeros(3, np.float32), np.zeros(4, np.bool_), [1], ValueError, "one length")
    refused(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.bool_), [1], ValueError, "1-D")
    refused(np.zeros(3), np.zeros(3, np.bool_), [1], TypeError, "float32")
    refused(np.zeros(3, np.float32), np.zeros(3, np.uint8), [1], TypeError, "bool")
    refused(np.zeros(3, np.float32), np.zeros(3, np.bool_), [2, 0], ValueError, "at least 1")
