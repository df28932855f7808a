"""The geometry gate's measurements: does a method's own reference land on the canonical one under its transform?

Only overlaps and distances are measured here; the verdicts are queries over them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled
from ingest.grid import (
    Box,
    Candidate,
    Index,
    Shape,
    Transform,
    candidates,
    field_of_view,
    map_nearest,
    memory_order,
    nearest_table,
    round_trip,
)

Mask = NDArray[np.bool_]
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class CandidateOverlaps:
    """Overlap of one subject's own reference with the canonical one under every candidate transform.

    Every array has one entry per member of :func:`ingest.grid.candidates`, in its order: 56, or 8 for one slice.

    Attributes:
        transposed: Whether the member swaps the stored axes of canonical axes 0 and 1.
        flip_0: Whether it toggles the reversal of axis 0.
        flip_1: Whether it toggles the reversal of axis 1.
        dz: Through-plane offset in canonical voxels.
        is_applied: True at the one member that is the declared transform.
        dice: ``2 |T n C| / (|T| + |C|)`` inside the field of view; NaN where both are empty, 0 where exactly one is.
        centroid_mm: Distance between the two centroids; NaN where either mask is empty.
    """

    transposed: NDArray[np.bool_]
    flip_0: NDArray[np.bool_]
    flip_1: NDArray[np.bool_]
    dz: NDArray[np.int8]
    is_applied: NDArray[np.bool_]
    dice: NDArray[np.float64]
    centroid_mm: NDArray[np.float64]


@dataclass(frozen=True)
class Overlap:
    """Overlap of one subject's own reference with the canonical one under the declared transform.

    Attributes:
        in_view_fraction: Share of the canonical reference inside the field of view; NaN where the reference is empty.
        own_voxels: Voxels of the own reference as stored.
        own_in_view_voxels: Voxels of the own reference once mapped, inside the field of view.
        reference_voxels: Voxels of the canonical reference.
        reference_in_view_voxels: Those inside the field of view.
        round_trip_dice: Dice of the mapped own reference with the round trip of the canonical one, inside the field of
            view; NaN where both are empty, 0 where exactly one is.
        centroid_mm: Distance between the centroids of the mapped own reference and of the canonical one inside the
            field of view; NaN where either is empty.
    """

    in_view_fraction: float
    own_voxels: int
    own_in_view_voxels: int
    reference_voxels: int
    reference_in_view_voxels: int
    round_trip_dice: float
    centroid_mm: float


def candidate_overlaps(
    own: Mask, reference: Mask, transform: Transform, voxel_mm: tuple[float, float, float]
) -> CandidateOverlaps:
    """Dice and centroid distance of the own reference under all 56 candidate transforms.

    Counts are exact, and equal to those of mapping the own reference once per member. Instead, its columns along
    canonical axis 2 are packed into bits, once per offset, and only columns that hold a voxel are visited.

    Args:
        own: The method's own reference as stored, shape ``transform.stored_shape``, any memory order.
        reference: The canonical reference, any memory order.
        transform: The declared transform.
        voxel_mm: Size of a canonical voxel along each axis.

    Returns:
        56 overlaps, or 8 where the canonical volume has one slice.

    Raises:
        ValueError: If ``own`` does not fit the transform, or the reference has not three axes.
    """
    shape = _checked_shape(own, reference, transform)
    box = field_of_view(transform, shape)
    members = candidates(shape[2])
    offsets = sorted({member.dz for member in members})
    mapped = _own_columns(own, transform, box, offsets)
    target = _reference_columns(reference, box)
    sizes: list[Index] = []
    shared: list[Index] = []
    for orientation in members[:: len(offsets)]:
        tables = _in_plane_tables(transform, orientation, box)
        sizes.append(_oriented_moments(mapped, transform, orientation, tables))
        shared.append(_shared_voxels(mapped, target, tables[0], tables[1], orientation.transposed))
    whole = _moments(target, *(_identity_moments(window.stop - window.start) for window in box[:2]))[0]
    dice, centroid_mm = _dice_and_distance(np.concatenate(sizes), whole, np.concatenate(shared), voxel_mm)
    return CandidateOverlaps(
        transposed=np.array([member.transposed for member in members]),
        flip_0=np.array([member.flip_0 for member in members]),
        flip_1=np.array([member.flip_1 for member in members]),
        dz=np.array([member.dz for member in members], np.int8),
        is_applied=np.array([not any(member) for member in members]),
        dice=dice,
        centroid_mm=centroid_mm,
    )


def overlap(
    own: Mask,
    reference: Mask,
    transform: Transform,
    voxel_mm: tuple[float, float, float],
    *,
    mapped: Mask | None = None,
    returned: Mask | None = None,
) -> Overlap:
    """Overlap of the own reference with the canonical one under the declared transform, and what the grid itself costs.

    Args:
        own: The method's own reference as stored, shape ``transform.stored_shape``, any memory order.
        reference: The canonical reference, any memory order.
        transform: The declared transform.
        voxel_mm: Size of a canonical voxel along each axis.
        mapped: ``map_nearest(own, transform, reference.shape)``, where it is at hand.
        returned: ``round_trip(reference, transform)``, where it is at hand.

    Returns:
        The overlap; see its attributes for empty masks.

    Raises:
        ValueError: If ``own`` does not fit the transform, or the reference has not three axes.
    """
    shape = _checked_shape(own, reference, transform)
    box = field_of_view(transform, shape)
    mapped = map_nearest(own, transform, shape) if mapped is None else mapped
    returned = round_trip(reference, transform) if returned is None else returned
    moments = _box_moments(mapped[box], np.ascontiguousarray(reference[box]), returned[box])
    size, whole, (returned_voxels, shared_voxels) = moments[:4], moments[4:8], moments[8:]
    _, centroid_mm = _dice_and_distance(size[None], whole, np.zeros(1, np.int64), voxel_mm)
    reference_voxels = int(np.count_nonzero(reference))
    return Overlap(
        in_view_fraction=int(whole[0]) / reference_voxels if reference_voxels else np.nan,
        own_voxels=int(np.count_nonzero(own)),
        own_in_view_voxels=int(size[0]),
        reference_voxels=reference_voxels,
        reference_in_view_voxels=int(whole[0]),
        round_trip_dice=_dice(int(shared_voxels), int(size[0] + returned_voxels)),
        centroid_mm=float(centroid_mm[0]),
    )


class _Columns(NamedTuple):
    """The columns of a mask along canonical axis 2 that hold a voxel, under each through-plane offset.

    ``place`` is the number of a column by its in-plane indices, -1 where it is empty; ``first`` and ``second`` are
    those indices by number. By number and offset: ``words`` holds the column's canonical voxels as bits, ``voxels``
    counts them, ``heights`` sums their indices.
    """

    place: NDArray[np.int32]
    first: Index
    second: Index
    words: Words
    voxels: Index
    heights: Index


def _checked_shape(own: Mask, reference: Mask, transform: Transform) -> Shape:
    """Shape of the reference, once both masks are known to fit."""
    if own.shape != transform.stored_shape:
        raise ValueError(f"the own reference has shape {own.shape}; its transform expects {transform.stored_shape}")
    if reference.ndim != 3:
        raise ValueError(f"the reference has shape {reference.shape}; it must have three axes")
    first, second, third = reference.shape
    return first, second, third


def _own_columns(own: Mask, transform: Transform, box: Box, offsets: list[int]) -> _Columns:
    """Columns of the own reference on its stored in-plane grid, mapped along axis 2 under each offset."""
    runs = [_runs(nearest_table(transform, 2, box[2], dz), transform.size[2]) for dz in offsets]
    first, stop = (np.stack(ends) for ends in zip(*runs, strict=True))
    voxels = _set_voxels(np.transpose(own, transform.source_axis))
    return _pack(voxels, (transform.size[0], transform.size[1]), first, stop, box[2].stop - box[2].start)


def _reference_columns(reference: Mask, box: Box) -> _Columns:
    """Columns of the canonical reference inside the box, under no offset; indices count from the box's corner."""
    voxels = _set_voxels(reference)
    inside = np.ones(voxels[0].size, np.bool_)
    for index, window in zip(voxels, box, strict=True):
        inside &= (index >= window.start) & (index < window.stop)
    first, second, third = (index[inside] - window.start for index, window in zip(voxels, box, strict=True))
    width, depth, height = (window.stop - window.start for window in box)
    start = np.arange(height, dtype=np.int64)[None]
    return _pack((first, second, third), (width, depth), start, start + 1, height)


def _set_voxels(volume: Mask) -> tuple[Index, Index, Index]:
    """Indices of the voxels that are set, in the order in which they lie in memory."""
    order = memory_order(volume)
    memory = np.ascontiguousarray(np.transpose(volume, order))
    places = np.unravel_index(np.flatnonzero(memory), memory.shape)
    first, second, third = (places[order.index(axis)] for axis in range(3))
    return first, second, third


def _runs(table: Index, size: int) -> tuple[Index, Index]:
    """First canonical voxel that reads each stored index, and one past the last; they are neighbours."""
    first = np.zeros(size, np.int64)
    backwards = np.arange(table.size - 1, -1, -1)
    first[table[backwards]] = backwards
    return first, first + np.bincount(table, minlength=size)


def _in_plane_tables(transform: Transform, orientation: Candidate, box: Box) -> tuple[Index, Index]:
    """Nearest tables of an orientation along canonical axes 0 and 1."""
    member = transform.candidate(orientation.transposed, orientation.flip_0, orientation.flip_1)
    return nearest_table(member, 0, box[0]), nearest_table(member, 1, box[1])


def _oriented_moments(
    mapped: _Columns, transform: Transform, orientation: Candidate, tables: tuple[Index, Index]
) -> Index:
    """Moments of the own reference under an orientation and each offset, by canonical axis."""
    if not orientation.transposed:
        return _moments(mapped, *(_table_moments(tables[axis], transform.size[axis]) for axis in (0, 1)))
    moments = _moments(mapped, *(_table_moments(tables[1 - axis], transform.size[axis]) for axis in (0, 1)))
    return moments[:, [0, 2, 1, 3]]


def _table_moments(table: Index, size: int) -> Index:
    """How many canonical voxels read each stored index, and the sum of their indices: shape (2, size)."""
    moments = np.zeros((2, size), np.int64)
    np.add.at(moments[0], table, 1)
    np.add.at(moments[1], table, np.arange(table.size))
    return moments


def _identity_moments(voxels: int) -> Index:
    """The moments of a table that reads every voxel where it is."""
    return _table_moments(np.arange(voxels), voxels)


def _dice(shared: int, total: int) -> float:
    """Dice coefficient from counts; NaN where both masks are empty."""
    return 2 * shared / total if total else np.nan


def _dice_and_distance(
    size: Index, whole: Index, shared: Index, voxel_mm: tuple[float, float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Dice and centroid distance of masks against one other, from their moments (count, sum per axis)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        dice = 2 * shared / (size[:, 0] + whole[0])
        offset = size[:, 1:] / size[:, :1] - whole[1:] / whole[0]
    offset[(size[:, 0] == 0) | (whole[0] == 0)] = np.nan
    return dice, np.sqrt(np.sum(np.square(offset * np.array(voxel_mm)), axis=1))


@compiled
def _pack(
    set_voxels: tuple[Index, Index, Index], in_plane: tuple[int, int], first: Index, stop: Index, height: int
) -> _Columns:
    """Pack the set voxels of a mask into columns of bits.

    Args:
        set_voxels: Indices of the set voxels.
        in_plane: Size of the grid of columns.
        first: Bit at which the run of a voxel starts, by offset and index along the column.
        stop: One past its last bit.
        height: Bits of a column.
    """
    place = np.full(in_plane, np.int32(-1), np.int32)
    count = 0
    for v in range(set_voxels[0].size):
        if place[set_voxels[0][v], set_voxels[1][v]] < 0:
            place[set_voxels[0][v], set_voxels[1][v]] = count
            count += 1
    columns = _Columns(
        place,
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.zeros((count, first.shape[0], (height + 63) // 64), np.uint64),
        np.zeros((count, first.shape[0]), np.int64),
        np.zeros((count, first.shape[0]), np.int64),
    )
    for v in range(set_voxels[0].size):
        column = place[set_voxels[0][v], set_voxels[1][v]]
        columns.first[column] = set_voxels[0][v]
        columns.second[column] = set_voxels[1][v]
        for offset in range(first.shape[0]):
            for bit in range(first[offset, set_voxels[2][v]], stop[offset, set_voxels[2][v]]):
                columns.words[column, offset, bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
                columns.voxels[column, offset] += 1
                columns.heights[column, offset] += bit
    return columns


@compiled
def _moments(columns: _Columns, along_first: Index, along_second: Index) -> Index:
    """Voxels and index sums by offset, where each column is repeated over canonical columns.

    Args:
        columns: The columns.
        along_first: How often each first index is read, and the sum of the canonical indices that read it.
        along_second: The same for the second index.

    Returns:
        Shape (offsets, 4): voxels, and sums of canonical indices along the first, second and last axis.
    """
    moments = np.zeros((columns.voxels.shape[1], 4), np.int64)
    for column in range(columns.first.size):
        u, v = columns.first[column], columns.second[column]
        repeats = along_first[0, u] * along_second[0, v]
        for offset in range(moments.shape[0]):
            voxels = columns.voxels[column, offset]
            moments[offset, 0] += repeats * voxels
            moments[offset, 1] += along_first[1, u] * along_second[0, v] * voxels
            moments[offset, 2] += along_first[0, u] * along_second[1, v] * voxels
            moments[offset, 3] += repeats * columns.heights[column, offset]
    return moments


@compiled
def _set_bits(word: np.uint64) -> np.uint64:
    """Number of bits set in a 64-bit word; the compiler turns this pattern into one instruction."""
    bits = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (bits * np.uint64(0x0101010101010101)) >> np.uint64(56)


@compiled
def _shared_voxels(mapped: _Columns, target: _Columns, table_0: Index, table_1: Index, is_transposed: bool) -> Index:
    """Voxels that the own reference under an orientation shares with the canonical one, by offset."""
    shared = np.zeros(mapped.words.shape[1], np.int64)
    for number in range(target.first.size):
        u, v = table_0[target.first[number]], table_1[target.second[number]]
        column = mapped.place[v, u] if is_transposed else mapped.place[u, v]
        if column >= 0:
            for offset in range(shared.size):
                for word in range(target.words.shape[2]):
                    common = mapped.words[column, offset, word] & target.words[number, 0, word]
                    shared[offset] += np.int64(_set_bits(common))
    return shared


@compiled
def _box_moments(mapped: Mask, reference: Mask, returned: Mask) -> Index:
    """Moments of two masks, and the size of a third and of its intersection with the first.

    Args:
        mapped: First mask.
        reference: Second mask, of the same shape.
        returned: Third mask, of the same shape.

    Returns:
        Ten numbers: voxels and index sums along axes 0, 1, 2 of the first mask, the same of the second, voxels of the
        third, voxels that the first and the third share.
    """
    moments = np.zeros(10, np.int64)
    for i in range(mapped.shape[0]):
        for j in range(mapped.shape[1]):
            own_voxels, own_height, voxels, height, returned_voxels, shared_voxels = 0, 0, 0, 0, 0, 0
            for k in range(mapped.shape[2]):
                own_voxels += mapped[i, j, k]
                own_height += k * mapped[i, j, k]
                voxels += reference[i, j, k]
                height += k * reference[i, j, k]
                returned_voxels += returned[i, j, k]
                shared_voxels += mapped[i, j, k] & returned[i, j, k]
            moments[0] += own_voxels
            moments[1] += own_voxels * i
            moments[2] += own_voxels * j
            moments[3] += own_height
            moments[4] += voxels
            moments[5] += voxels * i
            moments[6] += voxels * j
            moments[7] += height
            moments[8] += returned_voxels
            moments[9] += shared_voxels
    return moments
