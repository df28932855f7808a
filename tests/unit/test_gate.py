import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion

from ingest.gate import CandidateOverlaps, candidate_overlaps, overlap
from ingest.grid import Align, Transform, candidates, map_nearest, round_trip

Triple = tuple[int, int, int]
Mask = NDArray[np.bool_]

PERMUTATIONS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
UNIT_MM = (1.0, 1.0, 1.0)
SHAPE = (64, 56, 48)
CENTRE = (22, 33, 20)


def triples(low: int, high: int) -> st.SearchStrategy[Triple]:
    return st.tuples(*(st.integers(low, high) for _ in range(3)))


TRANSFORMS = st.builds(
    Transform,
    source_axis=st.sampled_from(PERMUTATIONS),
    start=triples(-2, 3),
    extent=triples(1, 9),
    size=triples(1, 7),
    reversed=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    align=st.sampled_from(cast(list[Align], ["centre", "corner"])),
)


def in_view(mask: Mask, transform: Transform) -> Mask:
    inside = np.zeros(mask.shape, np.bool_)
    inside[tuple(slice(max(a, 0), max(a + n, 0)) for a, n in zip(transform.start, transform.extent, strict=True))] = (
        True
    )
    return mask & inside


def dice_by_mask(first: Mask, second: Mask) -> float:
    total = int(first.sum() + second.sum())
    return 2 * int((first & second).sum()) / total if total else math.nan


def distance_by_mask(first: Mask, second: Mask, voxel_mm: tuple[float, float, float]) -> float:
    if not first.any() or not second.any():
        return math.nan
    centres = [np.mean(np.argwhere(mask), axis=0) * voxel_mm for mask in (first, second)]
    return float(np.linalg.norm(centres[0] - centres[1]))


def assert_maps_one_by_one(
    found: CandidateOverlaps, own: Mask, reference: Mask, transform: Transform, voxel_mm: tuple[float, float, float]
) -> None:
    first, second, third = reference.shape
    target = in_view(reference, transform)
    members = candidates(third)
    assert found.dice.shape == found.centroid_mm.shape == (len(members),)
    for number, member in enumerate(members):
        applied = transform.candidate(member.transposed, member.flip_0, member.flip_1)
        mapped = map_nearest(own, applied, (first, second, third), member.dz)
        assert np.array_equal(found.dice[number], dice_by_mask(mapped, target), equal_nan=True), member
        assert found.centroid_mm[number] == pytest.approx(
            distance_by_mask(mapped, target, voxel_mm), abs=1e-9, nan_ok=True
        ), member


@settings(deadline=None, max_examples=60)
@given(
    TRANSFORMS,
    triples(1, 8),
    st.tuples(*(st.floats(0.5, 4.0) for _ in range(3))),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    st.sampled_from(cast(list[Any], ["C", "F"])),
    st.integers(0, 99),
)
def test_candidate_overlaps_equal_mapping_once_per_member(
    transform: Transform,
    shape: Triple,
    voxel_mm: tuple[float, float, float],
    own_share: float,
    share: float,
    order: Any,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    own = np.array(generator.random(transform.stored_shape) < own_share, order=order)
    reference = np.array(generator.random(shape) < share, order=order)
    found = candidate_overlaps(own, reference, transform, voxel_mm)
    assert_maps_one_by_one(found, own, reference, transform, voxel_mm)


def test_columns_longer_than_a_word() -> None:
    shape = (5, 6, 150)
    transform = Transform((2, 0, 1), (1, 0, 3), (4, 6, 140), (6, 3, 131), (False, True, True))
    generator = np.random.default_rng(5)
    own, reference = generator.random(transform.stored_shape) < 0.3, generator.random(shape) < 0.3
    found = candidate_overlaps(own, reference, transform, (1.0, 2.0, 3.0))
    assert_maps_one_by_one(found, own, reference, transform, (1.0, 2.0, 3.0))


@settings(deadline=None, max_examples=60)
@given(TRANSFORMS, triples(1, 8), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.2]), st.integers(0, 99))
def test_overlap_equals_its_definition(
    transform: Transform, shape: Triple, own_share: float, share: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    own, reference = generator.random(transform.stored_shape) < own_share, generator.random(shape) < share
    mapped, returned = map_nearest(own, transform, shape), round_trip(reference, transform)
    target = in_view(reference, transform)
    found = overlap(own, reference, transform, (1.0, 0.5, 3.0))
    assert found.own_voxels == own.sum()
    assert found.own_in_view_voxels == mapped.sum()
    assert (found.reference_voxels, found.reference_in_view_voxels) == (reference.sum(), target.sum())
    expected = target.sum() / reference.sum() if reference.any() else math.nan
    assert found.in_view_fraction == pytest.approx(expected, abs=1e-15, nan_ok=True)
    assert found.round_trip_dice == pytest.approx(dice_by_mask(mapped, returned), abs=1e-15, nan_ok=True)
    distance = distance_by_mask(mapped, target, (1.0, 0.5, 3.0))
    assert found.centroid_mm == pytest.approx(distance, abs=1e-9, nan_ok=True)
    at_hand = overlap(own, np.asfortranarray(reference), transform, (1.0, 0.5, 3.0), mapped=mapped, returned=returned)
    assert np.array_equal(list(vars(found).values()), list(vars(at_hand).values()), equal_nan=True)


def test_members_are_named_and_the_declared_one_is_applied() -> None:
    transform = Transform((0, 1, 2), (0, 0, 0), (4, 4, 4), (4, 4, 4), (False, False, False))
    found = candidate_overlaps(np.ones((4, 4, 4), np.bool_), np.ones((4, 4, 4), np.bool_), transform, UNIT_MM)
    members = list(zip(found.transposed, found.flip_0, found.flip_1, found.dz, strict=True))
    assert members == list(candidates(4))
    assert np.flatnonzero(found.is_applied).tolist() == [members.index((False, False, False, 0))]


# The synthetic spheres of the gate: off centre and off the diagonal, judged by its criteria.


def sphere(radius: float, centre: Triple = CENTRE, shape: Triple = SHAPE) -> Mask:
    offset = np.indices(shape) - np.reshape(centre, (3, 1, 1, 1))
    return np.square(offset).sum(axis=0) <= radius**2


def whole_grid(shape: Triple = SHAPE) -> Transform:
    return Transform((0, 1, 2), (0, 0, 0), shape, shape, (False, False, False))


def failures(own: Mask, reference: Mask, transform: Transform) -> set[str]:
    """The subject criteria of the gate that fail."""
    found = candidate_overlaps(own, reference, transform, UNIT_MM)
    dice, distance = float(found.dice[found.is_applied][0]), float(found.centroid_mm[found.is_applied][0])
    holds = {"i": distance <= 3, "ii-b": dice >= found.dice.max() - 0.01, "iii": dice >= 0.85}
    return {name for name, held in holds.items() if not held}


@pytest.mark.parametrize("radius", [4, 10, 16])
def test_identity_passes(radius: float) -> None:
    assert failures(sphere(radius), sphere(radius), whole_grid()) == set()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_field_of_view_that_removes_40_percent_passes(axis: int) -> None:
    reference = sphere(12)
    kept = np.cumsum(reference.sum(axis=tuple({0, 1, 2} - {axis}))) / reference.sum()
    stop = int(np.abs(kept - 0.6).argmin()) + 1
    extent = cast(Triple, tuple(stop if j == axis else SHAPE[j] for j in range(3)))
    transform = Transform((0, 1, 2), (0, 0, 0), extent, extent, (False, False, False))
    own = reference[: extent[0], : extent[1], : extent[2]]
    assert failures(own, reference, transform) == set()
    assert overlap(own, reference, transform, UNIT_MM).in_view_fraction == pytest.approx(0.6, abs=0.04)


@pytest.mark.parametrize("radius", [10, 12, 16])
def test_a_one_voxel_erosion_passes(radius: float) -> None:
    assert failures(binary_erosion(sphere(radius)), sphere(radius), whole_grid()) == set()


@pytest.mark.parametrize("radius", [8, 12, 16])
def test_a_dilation_by_a_fifth_of_the_volume_passes(radius: float) -> None:
    reference, own = sphere(radius), sphere(radius * 1.2 ** (1 / 3))
    assert own.sum() / reference.sum() == pytest.approx(1.2, abs=0.05)
    assert failures(own, reference, whole_grid()) == set()


@pytest.mark.parametrize("radius", [4, 10, 16])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_in_plane_flip_fails(radius: float, axis: int) -> None:
    reference = sphere(radius)
    assert {"i", "ii-b"} <= failures(np.flip(reference, axis), reference, whole_grid())


@pytest.mark.parametrize("radius", [4, 10, 16])
def test_a_transpose_fails_and_its_candidate_mends_it(radius: float) -> None:
    shape = (64, 64, 48)
    reference = sphere(radius, shape=shape)
    own = reference.transpose(1, 0, 2)
    assert {"i", "ii-b"} <= failures(own, reference, whole_grid(shape))
    found = candidate_overlaps(own, reference, whole_grid(shape), UNIT_MM)
    best = int(found.dice.argmax())
    assert (found.dice[best], found.centroid_mm[best]) == (1.0, 0.0)
    assert (found.transposed[best], found.flip_0[best], found.flip_1[best], found.dz[best]) == (True, False, False, 0)


@pytest.mark.parametrize("radius", [4, 10, 16])
@pytest.mark.parametrize("slices", [-2, 2])
def test_a_two_slice_offset_fails_by_its_candidates_alone(radius: float, slices: int) -> None:
    reference = sphere(radius)
    own = np.roll(reference, slices, axis=2)
    assert "ii-b" in failures(own, reference, whole_grid())
    assert "i" not in failures(own, reference, whole_grid())
    found = candidate_overlaps(own, reference, whole_grid(), UNIT_MM)
    assert (found.dz[found.dice.argmax()], found.dice.max()) == (slices, 1.0)


def test_nested_masks_tie_within_one_slice() -> None:
    found = candidate_overlaps(sphere(8), sphere(12), whole_grid(), UNIT_MM)
    plain = ~(found.transposed | found.flip_0 | found.flip_1)
    dice = dict(zip(found.dz[plain].tolist(), found.dice[plain].tolist(), strict=True))
    assert dice[-1] == dice[0] == dice[1] == found.dice.max()


@settings(deadline=None, max_examples=30)
@given(TRANSFORMS, st.tuples(st.booleans(), st.booleans(), st.booleans()), st.integers(0, 99))
def test_an_array_stored_flipped_and_declared_reversed_gives_the_same_bits(
    transform: Transform, flips: tuple[bool, bool, bool], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    own, reference = generator.random(transform.stored_shape) < 0.4, generator.random((7, 6, 8)) < 0.4
    first, second, third = (is_reversed != flip for is_reversed, flip in zip(transform.reversed, flips, strict=True))
    declared = Transform(
        transform.source_axis,
        transform.start,
        transform.extent,
        transform.size,
        (first, second, third),
        transform.align,
    )
    stored = np.flip(own, tuple(transform.source_axis[axis] for axis in range(3) if flips[axis]))
    expected = candidate_overlaps(own, reference, transform, UNIT_MM)
    found = candidate_overlaps(stored, reference, declared, UNIT_MM)
    # Reversal stays with the canonical axis, so under a transpose one flip more in plane renames the members.
    odd = flips[0] != flips[1]
    members = candidates(8)
    renamed = [members.index((t, f_0 ^ (t and odd), f_1 ^ (t and odd), dz)) for t, f_0, f_1, dz in members]
    assert np.array_equal(found.dice, expected.dice[renamed], equal_nan=True)
    assert np.array_equal(found.centroid_mm, expected.centroid_mm[renamed], equal_nan=True)
    expected_overlap, found_overlap = (
        overlap(mask, reference, declaration, UNIT_MM) for mask, declaration in ((own, transform), (stored, declared))
    )
    assert np.array_equal(list(vars(found_overlap).values()), list(vars(expected_overlap).values()), equal_nan=True)


def test_one_slice_has_8_candidates_without_offsets() -> None:
    shape = (40, 30, 1)
    reference = sphere(6, (12, 20, 0), shape)
    found = candidate_overlaps(reference, reference, whole_grid(shape), UNIT_MM)
    assert found.dice.shape == (8,)
    assert not found.dz.any()
    assert found.dice.argmax() == 0
    assert found.is_applied.tolist() == [True] + [False] * 7
    assert_maps_one_by_one(found, reference, reference, whole_grid(shape), UNIT_MM)


def test_empty_masks_and_an_empty_field_of_view() -> None:
    full, empty = sphere(5), np.zeros(SHAPE, np.bool_)
    both = candidate_overlaps(empty, empty, whole_grid(), UNIT_MM)
    assert np.isnan(both.dice).all()
    assert np.isnan(both.centroid_mm).all()
    for own, reference in ((full, empty), (empty, full)):
        one = candidate_overlaps(own, reference, whole_grid(), UNIT_MM)
        assert not one.dice.any()
        assert np.isnan(one.centroid_mm).all()
    nothing = overlap(empty, empty, whole_grid(), UNIT_MM)
    assert np.isnan([nothing.in_view_fraction, nothing.round_trip_dice, nothing.centroid_mm]).all()
    away = Transform((0, 1, 2), (100, 0, 0), SHAPE, SHAPE, (False, False, False))
    assert np.isnan(candidate_overlaps(full, full, away, UNIT_MM).dice).all()
    assert overlap(full, full, away, UNIT_MM).in_view_fraction == 0


def test_masks_that_do_not_fit_are_refused() -> None:
    transform = Transform((0, 1, 2), (0, 0, 0), (4, 5, 6), (2, 3, 4), (False, False, False))
    own, reference = np.zeros((2, 3, 4), np.bool_), np.zeros((4, 5, 6), np.bool_)
    for function in (candidate_overlaps, overlap):
        with pytest.raises(ValueError, match=r"expects \(2, 3, 4\)"):
            function(reference, reference, transform, UNIT_MM)
        with pytest.raises(ValueError, match="three axes"):
            function(own, reference[0], transform, UNIT_MM)
