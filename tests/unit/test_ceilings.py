"""The relaxed ceilings against trying every choice, and against a linear programme."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from expectations.protocol import protocol
from transforms.ceilings import Segments, ceiling_interval, ceiling_of, envelope_steps, segment_ceiling

Pair = tuple[int, int]
LARGE = 10**6

pairs = st.tuples(st.integers(0, 8), st.integers(1, 8))
curves = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=4), min_size=1, max_size=4)


def segments(rows: Sequence[tuple[int, int, int]]) -> Segments:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Segments(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def best(choices: Iterable[Sequence[Pair]], reference: int, most: int) -> Fraction:
    """Best Dice among choices of (false, true) positives that keep the budget, by trying all."""
    sums = ((sum(f for f, _ in choice), sum(t for _, t in choice)) for choice in choices)
    return max(Fraction(2 * t, f + t + reference) for f, t in sums if f <= most)


def dice_by_programme(table: Segments, reference: int, most: int) -> float:
    """Best Dice where any share of any segment may be taken: a fractional programme made linear (Charnes-Cooper)."""
    false, true = table.false_positive.astype(float), table.true_positive.astype(float)
    count = false.size
    bounds = np.hstack([np.eye(count), -np.ones((count, 1))])
    budget = np.append(false, -most)[None]
    found = optimize.linprog(
        -np.append(2 * true, 0),
        A_ub=np.vstack([bounds, budget]),
        b_ub=np.zeros(count + 1),
        A_eq=np.append(false + true, reference)[None],
        b_eq=[1],
    )
    assert found.success and found.fun is not None
    return -float(found.fun)


@settings(max_examples=200, deadline=None)
@given(st.lists(pairs, max_size=7), st.integers(0, 12), st.integers(0, 25))
def test_the_best_choice_of_components_lies_between_what_is_attained_and_the_bound(
    components: list[Pair], missed: int, most: int
) -> None:
    reference = sum(t for _, t in components) + missed + 1
    exact = best(subsets(components), reference, most)
    fitting = segments([(line, *pair) for line, pair in enumerate(components) if pair[0] <= most])
    found = ceiling_of(fitting, reference, most)
    assert found.attained_dice - 1e-12 <= exact <= found.dice + 1e-12
    assert found.false_positive <= most
    if sum(f for f, _ in components) <= most:
        assert found.dice == found.attained_dice == pytest.approx(float(exact), abs=1e-12)


def subsets(items: Sequence[Pair]) -> Iterable[list[Pair]]:
    for bits in product((False, True), repeat=len(items)):
        yield [item for item, taken in zip(items, bits, strict=True) if taken]


@settings(max_examples=100, deadline=None)
@given(st.lists(pairs, min_size=1, max_size=12), st.integers(0, 30), st.integers(0, 40))
def test_the_bound_is_that_of_the_linear_programme(components: list[Pair], missed: int, most: int) -> None:
    reference = sum(t for _, t in components) + missed
    table = segments([(line, *pair) for line, pair in enumerate(components)])
    found = ceiling_of(table, reference, most)
    assert found.dice == pytest.approx(dice_by_programme(table, reference, most), abs=1e-7)


def points_of(curve: Sequence[Pair]) -> list[Pair]:
    """Cumulative counts along a curve, from nothing predicted on."""
    sums = np.cumsum(np.array([(0, 0), *curve], np.int64), axis=0)
    return [(int(f), int(t)) for f, t in sums]


@settings(max_examples=200, deadline=None)
@given(curves, st.integers(0, 5), st.integers(0, 25))
def test_the_best_thresholds_of_regions_lie_between_what_is_attained_and_the_bound(
    steps: list[list[Pair]], missed: int, most: int
) -> None:
    regions = [points_of(curve) for curve in steps]
    reference = sum(points[-1][1] for points in regions) + missed + 1
    rows = [(line, f, t) for line, points in enumerate(regions) for f, t in points[1:] if f <= most]
    found = ceiling_of(envelope_steps(segments(rows)), reference, most)
    exact = best(product(*regions), reference, most)
    assert found.attained_dice - 1e-12 <= exact <= found.dice + 1e-12
    # unless the budget binds, a concave envelope's corners are points of the curve: nothing is taken in part
    unbound = ceiling_of(
        envelope_steps(segments([(line, f, t) for line, points in enumerate(regions) for f, t in points[1:]])),
        reference,
        LARGE,
    )
    assert unbound.dice == unbound.attained_dice == pytest.approx(float(best(product(*regions), reference, LARGE)))


@settings(max_examples=200, deadline=None)
@given(curves)
def test_steps_lead_along_the_concave_envelope(steps: list[list[Pair]]) -> None:
    for line, curve in enumerate(steps):
        points = points_of(curve)
        found = envelope_steps(segments([(line, f, t) for f, t in points[1:]]))
        assert (found.line == line).all() and (found.true_positive > 0).all()
        slopes = [Fraction(int(f), int(t)) for f, t in zip(found.false_positive, found.true_positive, strict=True)]
        assert slopes == sorted(set(slopes))
        corners = points_of(list(zip(found.false_positive.tolist(), found.true_positive.tolist(), strict=True)))
        assert set(corners) <= set(points) and corners[-1][1] == points[-1][1]
        along = [np.array(part, np.float64) for part in zip(*corners, strict=True)]
        for f, t in points:
            assert f == 0 or t <= np.interp(f, along[0], along[1]) + 1e-9


def test_nothing_to_take_attains_nothing() -> None:
    assert ceiling_of(segments([]), 7, 100) == (0.0, 0.0, 0.0)


def frame(columns: Mapping[str, Sequence[object]]) -> pl.DataFrame:
    return pl.DataFrame(columns, strict=False)


def bounds(components: pl.DataFrame, regions: pl.DataFrame, points: pl.DataFrame) -> list[tuple[object, ...]]:
    cohort = frame({"is_included": [True], "split": ["test"], "voxel_mm3": [2.0]})
    inputs = {"cohort_subject": cohort, "entry": frame({"method_id": ["a"], "entry": [0]}), "point": points}
    inputs |= {name: rows.with_columns(entry=0) for name, rows in (("region", regions), ("component", components))}
    return segment_ceiling.compute(protocol(), inputs).rows()


def test_rows_of_a_subject_by_hand_and_none_where_segments_are_missing() -> None:
    """A budget of 0.02 cm3 holds ten voxels of 2 mm3.

    Of the components, that of 30 false positives breaks it by itself, and so does level 0 of the second region. Two
    components of 2 and 8 true positives without false ones stand in one row. `late` has true positives that no
    component shows, and `void` is predicted nowhere.
    """
    points = frame(
        {
            "method_id": ["a"] * 3,
            "subject_id": ["late", "s", "void"],
            "subject": [0, 1, 2],
            "budget_cm3": [0.02] * 3,
            "true_positive_voxels": [5, 60, 0],
            "reference_voxels": [100, 100, 100],
            "most_predicted_voxels": [9, 200, 0],
        }
    )
    components = frame(
        {
            "subject": [1, 1, 1],
            "budget_cm3": [0.02] * 3,
            "component_count": [2, 1, 1],
            "false_positive": [0, 10, 30],
            "true_positive": [5, 20, 30],
        }
    )
    regions = frame(
        {
            "line": [2**32 + 1, 2**32 + 1, 2**32 + 2, 2**32 + 2],
            "false_positive": [4, 30, 6, 40],
            "true_positive": [20, 40, 10, 60],
        }
    )
    by_lesion, by_component = 2 * 30 / (100 + 40), 2 * 30 / (100 + 40)
    assert bounds(components, regions, points) == [
        ("a", "s", 0.02, "lesion_threshold", pytest.approx(by_lesion), pytest.approx(by_lesion), 0.02),
        ("a", "s", 0.02, "component_selection", pytest.approx(by_component), pytest.approx(by_component), 0.02),
        ("a", "void", 0.02, "lesion_threshold", 0.0, 0.0, 0.0),
        ("a", "void", 0.02, "component_selection", 0.0, 0.0, 0.0),
    ]


def test_subjects_whose_regions_all_break_the_budget_are_measured() -> None:
    points = frame(
        {
            "method_id": ["a"],
            "subject_id": ["s"],
            "subject": [0],
            "budget_cm3": [0.02],
            "true_positive_voxels": [0],
            "reference_voxels": [100],
            "most_predicted_voxels": [50],
        }
    )
    counts = ("component_count", "false_positive", "true_positive")
    nothing = pl.DataFrame(schema={"subject": pl.Int64, "budget_cm3": pl.Float64, **dict.fromkeys(counts, pl.Int64)})
    region = frame({"line": [1], "false_positive": [40], "true_positive": [10]})
    names = [row[3:] for row in bounds(nothing, region, points)]
    assert names == [("lesion_threshold", 0.0, 0.0, 0.0), ("component_selection", 0.0, 0.0, 0.0)]


def test_intervals_leave_out_subjects_without_a_ceiling() -> None:
    subjects = frame({"subject_id": ["r", "s", "t", "u"], "subject": [0, 1, 2, 3]})
    gain = frame(
        {
            "method_id": ["a"] * 3,
            "budget_cm3": [5.0] * 3,
            "ceiling_id": ["subject_threshold"] * 3,
            "subject_id": ["u", "r", "t"],
            "gain": [0.1, -0.05, 0.3],
        }
    )
    settled = protocol({"contrast_replicates": 4000})
    (row,) = ceiling_interval.compute(settled, {"test_subject": subjects, "gain": gain}).rows(named=True)
    generator = np.random.Generator(np.random.PCG64(settled.parameters.seed))
    drawn = generator.integers(0, 4, (4000, 4))
    values = np.array([-0.05, np.nan, 0.3, 0.1])[drawn]
    means = np.nanmean(values[(~np.isnan(values)).any(axis=1)], axis=1)
    assert row["n_replicates"] == means.size < 4000
    assert (row["gain_low"], row["gain_high"]) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1e-9)
