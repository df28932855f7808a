import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from ingest.grid import (
    Align,
    Candidate,
    Transform,
    candidates,
    field_of_view,
    linear_table,
    map_linear,
    map_nearest,
    memory_order,
    nearest_table,
    round_trip,
    round_trip_table,
    scaled,
)

Triple = tuple[int, int, int]
PERMUTATIONS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


def triples(low: int, high: int) -> st.SearchStrategy[Triple]:
    return st.tuples(*(st.integers(low, high) for _ in range(3)))


TRANSFORMS = st.builds(
    Transform,
    source_axis=st.sampled_from(PERMUTATIONS),
    start=triples(-3, 4),
    extent=triples(1, 9),
    size=triples(1, 7),
    reversed=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    align=st.sampled_from(cast(list[Align], ["centre", "corner"])),
)
LAYOUTS = st.tuples(st.sampled_from(PERMUTATIONS), st.booleans(), st.booleans())


def laid_out(values: NDArray[Any], layout: tuple[Triple, bool, bool]) -> NDArray[Any]:
    """The same values in another memory order, in reverse, or with gaps."""
    order, is_backwards, has_gaps = layout
    memory = np.ascontiguousarray(values.transpose(order))
    if is_backwards:
        memory = np.ascontiguousarray(memory[::-1, :, ::-1])[::-1, :, ::-1]
    if has_gaps:
        memory = np.repeat(memory, 2, axis=1)[:, ::2]
    return memory.transpose([order.index(axis) for axis in range(3)])


def stored_scores(transform: Transform, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1, transform.stored_shape).astype(np.float32)


def stored_mask(transform: Transform, seed: int) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random(transform.stored_shape) < 0.4


def in_view(transform: Transform, voxel: Triple) -> bool:
    return all(a <= x < a + n for a, x, n in zip(transform.start, voxel, transform.extent, strict=True))


def position(transform: Transform, axis: int, x: int) -> float:
    a, n, size = transform.start[axis], transform.extent[axis], transform.size[axis]
    if transform.align == "centre":
        c = (2 * (x - a) + 1) * size / (2 * n) - 0.5
    else:
        c = 0.0 if n == 1 else (x - a) * (size - 1) / (n - 1)
    return min(max(c, 0.0), float(size - 1))


def nearest_index(transform: Transform, axis: int, x: int) -> int:
    a, n, size = transform.start[axis], transform.extent[axis], transform.size[axis]
    if transform.align == "centre":
        index = ((2 * (x - a) + 1) * size) // (2 * n)
    else:
        index = 0 if n == 1 else (2 * (x - a) * (size - 1) + (n - 1)) // (2 * (n - 1))
    index = min(max(index, 0), size - 1)
    return size - 1 - index if transform.reversed[axis] else index


def linear_by_voxel(stored: NDArray[np.float32], transform: Transform, shape: Triple, dz: int) -> NDArray[np.float32]:
    volume = stored.transpose(transform.source_axis)
    result = np.zeros(shape, np.float32)
    for voxel in np.ndindex(shape):
        if not in_view(transform, voxel):
            continue
        ends: list[tuple[int, int]] = []
        weights: list[float] = []
        for axis in range(3):
            c, size = position(transform, axis, voxel[axis] + (dz if axis == 2 else 0)), transform.size[axis]
            low = math.floor(c)
            high = min(low + 1, size - 1)
            ends.append((size - 1 - low, size - 1 - high) if transform.reversed[axis] else (low, high))
            weights.append(c - low)
        w_0, w_1, w_2 = weights
        corners = {
            (i, j, k): float(volume[ends[0][i], ends[1][j], ends[2][k]]) for i in (0, 1) for j in (0, 1) for k in (0, 1)
        }
        edges = {(j, k): corners[0, j, k] + w_0 * (corners[1, j, k] - corners[0, j, k]) for j in (0, 1) for k in (0, 1)}
        faces = [edges[0, k] + w_1 * (edges[1, k] - edges[0, k]) for k in (0, 1)]
        result[voxel] = np.float32(faces[0] + w_2 * (faces[1] - faces[0]))
    return result


def nearest_by_voxel(stored: NDArray[np.bool_], transform: Transform, shape: Triple, dz: int) -> NDArray[np.bool_]:
    volume = stored.transpose(transform.source_axis)
    result = np.zeros(shape, np.bool_)
    for x_0, x_1, x_2 in np.ndindex(shape):
        if in_view(transform, (x_0, x_1, x_2)):
            place = tuple(nearest_index(transform, axis, x) for axis, x in enumerate((x_0, x_1, x_2 + dz)))
            result[x_0, x_1, x_2] = volume[place]
    return result


def round_trip_by_grid(reference: NDArray[np.bool_], transform: Transform) -> NDArray[np.bool_]:
    """To the stored grid voxel by voxel, then back by the nearest map."""
    volume = np.zeros(transform.size, np.bool_)
    for stored in np.ndindex(transform.size):
        voxel: list[int] = []
        for axis, index in enumerate(stored):
            a, n, size = transform.start[axis], transform.extent[axis], transform.size[axis]
            u = size - 1 - index if transform.reversed[axis] else index
            if transform.align == "centre":
                voxel.append(a + ((2 * u + 1) * n) // (2 * size))
            else:
                voxel.append(a if size == 1 else a + (2 * u * (n - 1) + (size - 1)) // (2 * (size - 1)))
        if all(0 <= x < limit for x, limit in zip(voxel, reference.shape, strict=True)):
            volume[stored] = reference[tuple(voxel)]
    back = [transform.source_axis.index(axis) for axis in range(3)]
    first, second, third = reference.shape
    return nearest_by_voxel(volume.transpose(back), transform, (first, second, third), 0)


@settings(deadline=None)
@given(TRANSFORMS, triples(0, 8), st.integers(-3, 3), LAYOUTS, st.integers(0, 99))
def test_linear_map_equals_its_definition_to_the_last_bit(
    transform: Transform, shape: Triple, dz: int, layout: tuple[Triple, bool, bool], seed: int
) -> None:
    stored = stored_scores(transform, seed)
    mapped = map_linear(laid_out(stored, layout), transform, shape, dz)
    assert mapped.dtype == np.float32
    assert mapped.flags.c_contiguous
    assert np.array_equal(mapped, linear_by_voxel(stored, transform, shape, dz))


@settings(deadline=None)
@given(TRANSFORMS, triples(0, 8), st.integers(-3, 3), LAYOUTS, st.integers(0, 99))
def test_nearest_map_equals_its_definition(
    transform: Transform, shape: Triple, dz: int, layout: tuple[Triple, bool, bool], seed: int
) -> None:
    stored = stored_mask(transform, seed)
    expected = nearest_by_voxel(stored, transform, shape, dz)
    assert np.array_equal(map_nearest(laid_out(stored, layout), transform, shape, dz), expected)
    assert np.array_equal(map_nearest(stored.astype(np.uint8) * np.uint8(6), transform, shape, dz), expected)


@settings(deadline=None)
@given(TRANSFORMS, triples(0, 8), LAYOUTS, st.integers(0, 99))
def test_round_trip_equals_mapping_there_and_back(
    transform: Transform, shape: Triple, layout: tuple[Triple, bool, bool], seed: int
) -> None:
    reference = np.random.default_rng(seed).random(shape) < 0.4
    assert np.array_equal(round_trip(laid_out(reference, layout), transform), round_trip_by_grid(reference, transform))


@settings(deadline=None)
@given(TRANSFORMS, st.tuples(st.booleans(), st.booleans(), st.booleans()), st.integers(-3, 3), st.integers(0, 99))
def test_an_array_stored_flipped_and_declared_reversed_maps_to_the_same_bits(
    transform: Transform, flips: tuple[bool, bool, bool], dz: int, seed: int
) -> None:
    flipped = Transform(
        transform.source_axis,
        transform.start,
        transform.extent,
        transform.size,
        cast(tuple[bool, bool, bool], tuple(a != b for a, b in zip(transform.reversed, flips, strict=True))),
        transform.align,
    )
    axes = tuple(transform.source_axis[axis] for axis in range(3) if flips[axis])
    scores, mask = stored_scores(transform, seed), stored_mask(transform, seed)
    shape = (7, 8, 6)
    assert np.array_equal(
        map_linear(np.flip(scores, axes), flipped, shape, dz), map_linear(scores, transform, shape, dz)
    )
    assert np.array_equal(map_nearest(np.flip(mask, axes), flipped, shape, dz), map_nearest(mask, transform, shape, dz))


@settings(deadline=None)
@given(TRANSFORMS, st.booleans(), st.booleans(), st.booleans())
def test_a_candidate_swaps_what_axes_0_and_1_read_and_nothing_else(
    transform: Transform, transposed: bool, flip_0: bool, flip_1: bool
) -> None:
    member = transform.candidate(transposed, flip_0, flip_1)
    order = [1, 0, 2] if transposed else [0, 1, 2]
    assert list(member.source_axis) == [transform.source_axis[axis] for axis in order]
    assert list(member.size) == [transform.size[axis] for axis in order]
    assert member.reversed == (transform.reversed[0] ^ flip_0, transform.reversed[1] ^ flip_1, transform.reversed[2])
    assert (member.start, member.extent, member.align) == (transform.start, transform.extent, transform.align)
    assert member.stored_shape == transform.stored_shape
    assert member.candidate(transposed, flip_0, flip_1) == transform


@pytest.mark.parametrize("source_axis", PERMUTATIONS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_linear_map_equals_scipy(source_axis: Triple, order: Any) -> None:
    size, shape = (13, 30, 8), (24, 17, 19)
    values = np.random.default_rng(1).random(size).astype(np.float32)
    back = [source_axis.index(axis) for axis in range(3)]
    stored = np.array(values.transpose(back), order=order)
    transform = Transform(source_axis, (0, 0, 0), shape, size, (False, False, False))
    axes = [(np.arange(n) + 0.5) * s / n - 0.5 for n, s in zip(shape, size, strict=True)]
    expected = map_coordinates(values, np.array(np.meshgrid(*axes, indexing="ij")), order=1, mode="nearest")
    assert np.allclose(map_linear(stored, transform, shape), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("source_axis", PERMUTATIONS)
@pytest.mark.parametrize("align", ["centre", "corner"])
def test_equal_sizes_copy_exactly_and_spread_nothing(source_axis: Triple, align: Align) -> None:
    size = (4, 5, 6)
    values = np.random.default_rng(2).normal(0, 1, size).astype(np.float32)
    values[1, 2, 3], values[0, 0, 0], values[3, 4, 5] = np.nan, np.inf, -np.inf
    transform = Transform(source_axis, (1, -1, 0), size, size, (False, True, False), align)
    stored = np.ascontiguousarray(values.transpose([source_axis.index(axis) for axis in range(3)]))
    mapped = map_linear(stored, transform, (6, 5, 6))
    expected = np.zeros((6, 5, 6), np.float32)
    expected[1:5, :4] = values[:, 3::-1]
    assert np.array_equal(mapped, expected, equal_nan=True)


@pytest.mark.parametrize("source_axis", PERMUTATIONS)
def test_infinity_does_not_spread_along_copied_axes(source_axis: Triple) -> None:
    size, shape = (3, 5, 4), (6, 5, 4)
    values = np.zeros(size, np.float32)
    values[0, 2, 1] = np.inf
    transform = Transform(source_axis, (0, 0, 0), shape, size, (False, False, False))
    stored = np.ascontiguousarray(values.transpose([source_axis.index(axis) for axis in range(3)]))
    mapped = map_linear(stored, transform, shape)
    finite = np.isfinite(mapped)
    assert finite.sum() == mapped.size - 3
    assert not finite[:3, 2, 1].any()
    # The face voxel lies before the first stored centre: its weight is zero, and it copies.
    assert mapped[0, 2, 1] == np.inf


@pytest.mark.parametrize("dz", [-2, 3])
def test_through_plane_offset_reads_further_along_and_keeps_the_field_of_view(dz: int) -> None:
    values = np.random.default_rng(3).random((3, 4, 9)).astype(np.float32)
    transform = Transform((0, 1, 2), (0, 0, 2), (3, 4, 9), (3, 4, 9), (False, False, False))
    expected = np.zeros((3, 4, 13), np.float32)
    expected[:, :, 2:11] = values[:, :, np.clip(np.arange(9) + dz, 0, 8)]
    assert np.array_equal(map_linear(values, transform, (3, 4, 13), dz), expected)
    assert np.array_equal(map_nearest(values > 0.5, transform, (3, 4, 13), dz), expected > 0.5)


def test_written_examples_of_the_tables() -> None:
    centre = Transform((0, 1, 2), (0, 0, 2), (4, 4, 6), (2, 8, 3), (False, True, False))
    assert linear_table(centre, 0, slice(0, 4)).lower.tolist() == [0, 0, 0, 1]
    assert linear_table(centre, 0, slice(0, 4)).weight.tolist() == [0.0, 0.25, 0.75, 0.0]
    assert linear_table(centre, 1, slice(0, 2)).lower.tolist() == [7, 5]
    assert linear_table(centre, 1, slice(0, 2)).upper.tolist() == [6, 4]
    assert nearest_table(centre, 0, slice(0, 4)).tolist() == [0, 0, 1, 1]
    assert nearest_table(centre, 1, slice(0, 4)).tolist() == [6, 4, 2, 0]
    assert nearest_table(centre, 2, slice(2, 8), dz=2).tolist() == [1, 1, 2, 2, 2, 2]
    assert round_trip_table(centre, 2, slice(2, 8)).tolist() == [3, 3, 5, 5, 7, 7]
    corner = Transform((0, 1, 2), (0, 0, 0), (5, 1, 4), (3, 3, 2), (False, False, False), "corner")
    assert linear_table(corner, 0, slice(0, 5)).weight.tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]
    assert nearest_table(corner, 0, slice(0, 5)).tolist() == [0, 1, 1, 2, 2]
    assert nearest_table(corner, 1, slice(0, 1)).tolist() == [0]
    assert round_trip_table(corner, 2, slice(0, 4)).tolist() == [0, 0, 3, 3]


def test_candidates_are_56_in_a_fixed_order() -> None:
    members = candidates(20)
    assert len(members) == len(set(members)) == 56
    assert list(members) == sorted(members)
    assert members[3] == Candidate(False, False, False, 0)
    assert {member.dz for member in members} == {-3, -2, -1, 0, 1, 2, 3}


def test_one_slice_has_8_candidates() -> None:
    members = candidates(1)
    assert len(set(members)) == 8
    assert members[0] == (False, False, False, 0)
    assert {member.dz for member in members} == {0}


def test_field_of_view_is_cut_to_the_array() -> None:
    transform = Transform((0, 1, 2), (-2, 3, 9), (5, 10, 2), (5, 10, 2), (False, False, False))
    assert field_of_view(transform, (8, 8, 12)) == (slice(0, 3), slice(3, 8), slice(9, 11))
    first, second, third = field_of_view(transform, (8, 2, 4))
    assert (first.stop - first.start, second.stop - second.start, third.stop - third.start) == (3, 0, 0)
    assert not round_trip(np.ones((8, 2, 4), np.bool_), transform).any()


def test_buffers_are_overwritten_everywhere() -> None:
    transform = Transform((1, 0, 2), (1, -1, 2), (4, 4, 3), (3, 5, 2), (True, False, False))
    scores, mask = stored_scores(transform, 0), stored_mask(transform, 0)
    volume, labels = np.full((6, 5, 7), np.nan, np.float32), np.ones((6, 5, 7), np.bool_)
    assert map_linear(scores, transform, (6, 5, 7), out=volume) is volume
    assert map_nearest(mask, transform, (6, 5, 7), out=labels) is labels
    assert np.array_equal(volume, map_linear(scores, transform, (6, 5, 7)))
    assert np.array_equal(labels, map_nearest(mask, transform, (6, 5, 7)))


def test_scaling_is_one_rounding_of_float64_and_zero_outside_the_box() -> None:
    mapped = np.random.default_rng(4).normal(0, 3, (5, 6, 7)).astype(np.float32)
    box = (slice(1, 4), slice(0, 6), slice(2, 5))
    expected = np.zeros_like(mapped)
    expected[box] = ((mapped[box].astype(np.float64) - -0.3) / (1.7 - -0.3)).astype(np.float32)
    assert np.array_equal(scaled(mapped, -0.3, 1.7, box), expected)
    assert scaled(mapped, -0.3, 1.7, box, out=mapped) is mapped
    assert np.array_equal(mapped, expected)


def test_axes_of_one_voxel_count_as_slowest_in_memory() -> None:
    assert memory_order(np.zeros((4, 5, 1), order="F")) == (2, 1, 0)
    assert memory_order(np.zeros((4, 5, 1))) == (2, 0, 1)
    assert memory_order(np.zeros((2, 3, 4))) == (0, 1, 2)


def test_a_transform_that_cannot_be_is_refused() -> None:
    ones, no = (1, 1, 1), (False, False, False)
    with pytest.raises(ValueError, match="source_axis"):
        Transform((0, 1, 1), (0, 0, 0), ones, ones, no)
    with pytest.raises(ValueError, match="extent"):
        Transform((0, 1, 2), (0, 0, 0), (1, 0, 1), ones, no)
    with pytest.raises(ValueError, match="size"):
        Transform((0, 1, 2), (0, 0, 0), ones, (1, -1, 1), no)
    with pytest.raises(ValueError, match="start"):
        Transform((0, 1, 2), cast(Any, (0, 0)), ones, ones, no)
    with pytest.raises(ValueError, match="align"):
        Transform((0, 1, 2), (0, 0, 0), ones, ones, no, cast(Any, "edge"))


def test_arrays_that_do_not_fit_are_refused() -> None:
    transform = Transform((0, 1, 2), (0, 0, 0), (3, 4, 5), (3, 4, 5), (False, False, False))
    scores = np.zeros((3, 4, 5), np.float32)
    with pytest.raises(ValueError, match=r"expects \(3, 4, 5\)"):
        map_linear(np.zeros((3, 5, 4), np.float32), transform, (3, 4, 5))
    with pytest.raises(TypeError, match="float64"):
        map_linear(cast(Any, np.zeros((3, 4, 5))), transform, (3, 4, 5))
    with pytest.raises(TypeError, match="bool or uint8"):
        map_nearest(cast(Any, scores), transform, (3, 4, 5))
    with pytest.raises(ValueError, match="C order"):
        map_linear(scores, transform, (3, 4, 5), out=np.zeros((3, 4, 5), np.float32, order="F"))
    with pytest.raises(TypeError, match="buffer"):
        map_nearest(scores > 0, transform, (3, 4, 5), out=cast(Any, np.zeros((3, 4, 5), np.uint8)))
    with pytest.raises(ValueError, match="larger"):
        scaled(scores, 1.0, 1.0, field_of_view(transform, (3, 4, 5)))
    with pytest.raises(ValueError, match="three axes"):
        round_trip(np.zeros((3, 4), np.bool_), transform)
