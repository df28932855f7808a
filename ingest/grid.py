"""The declared transform: stored arrays mapped to the canonical grid by index arithmetic, never by a file header.

A :class:`Transform` says, for each canonical axis, which stored axis it reads, where on the canonical grid the stored
array lies, and whether it runs backwards. Along every axis the map is a table of indices (and weights), so a volume is
resampled one axis after the other, in an order that follows the memory layout of the stored array.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Align = Literal["centre", "corner"]
Box = tuple[slice, slice, slice]
Shape = tuple[int, int, int]
Index = NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)

THROUGH_PLANE_OFFSETS = range(-3, 4)


@dataclass(frozen=True)
class Transform:
    """Where a stored array lies on the canonical grid; every triple is indexed by the canonical axis.

    Attributes:
        source_axis: The stored axis that each canonical axis reads: a permutation of (0, 1, 2).
        start: First canonical voxel of the field of view; may be negative.
        extent: Canonical voxels that the stored array spans; may reach beyond the grid.
        size: Stored voxels along that axis.
        reversed: Whether the stored axis runs against the canonical one.
        align: ``centre`` aligns the outer faces of the two grids (voxel centres at half steps); ``corner`` aligns the
            centres of their first and last voxels.

    Raises:
        ValueError: If ``source_axis`` is no permutation, an extent or a size is below 1, or ``align`` is unknown.
    """

    source_axis: tuple[int, int, int]
    start: tuple[int, int, int]
    extent: tuple[int, int, int]
    size: tuple[int, int, int]
    reversed: tuple[bool, bool, bool]
    align: Align = "centre"

    def __post_init__(self) -> None:
        """Refuse what cannot be a transform."""
        if sorted(self.source_axis) != [0, 1, 2]:
            raise ValueError(f"source_axis is {self.source_axis}; it must hold 0, 1 and 2 once each")
        if len(self.start) != 3 or len(self.reversed) != 3:
            raise ValueError(f"start {self.start} and reversed {self.reversed} must each have three values")
        for name, values in (("extent", self.extent), ("size", self.size)):
            if len(values) != 3 or min(values) < 1:
                raise ValueError(f"{name} is {values}; it must be three numbers of voxels, each at least 1")
        if self.align not in ("centre", "corner"):
            raise ValueError(f"align is {self.align!r}; it must be 'centre' or 'corner'")

    @property
    def stored_shape(self) -> Shape:
        """Shape of the stored array that the transform fits, along the stored axes."""
        first, second, third = (self.size[self.source_axis.index(axis)] for axis in range(3))
        return first, second, third

    def candidate(self, transposed: bool, flip_0: bool, flip_1: bool) -> "Transform":
        """The in-plane member of the candidate set Theta on top of this transform.

        Args:
            transposed: Swap the stored axes, and their sizes, that canonical axes 0 and 1 read; start, extent and
                reversal stay with the canonical axis.
            flip_0: Toggle the reversal of canonical axis 0.
            flip_1: Toggle the reversal of canonical axis 1.

        Returns:
            A transform that fits the same stored shape. The through-plane offset dz is an argument of the maps.
        """
        first, second = (1, 0) if transposed else (0, 1)
        return replace(
            self,
            source_axis=(self.source_axis[first], self.source_axis[second], self.source_axis[2]),
            size=(self.size[first], self.size[second], self.size[2]),
            reversed=(self.reversed[0] != flip_0, self.reversed[1] != flip_1, self.reversed[2]),
        )


class Candidate(NamedTuple):
    """A member of the candidate set Theta, relative to the declared transform."""

    transposed: bool
    flip_0: bool
    flip_1: bool
    dz: int


def candidates(slices: int) -> tuple[Candidate, ...]:
    """The candidate set Theta: in-plane transposes and flips, and through-plane offsets.

    Args:
        slices: Canonical voxels along axis 2.

    Returns:
        The 56 members with ``transposed`` varying slowest, then ``flip_0``, ``flip_1`` and ``dz`` from -3 to 3, False
        before True; 8 members with dz 0 where there is one slice. The declared transform is (False, False, False, 0).
    """
    offsets = THROUGH_PLANE_OFFSETS if slices > 1 else range(1)
    return tuple(Candidate(*member) for member in product((False, True), (False, True), (False, True), offsets))


def field_of_view(transform: Transform, shape: Shape) -> Box:
    """The canonical voxels that the stored array covers, cut to the canonical array.

    Args:
        transform: The declared transform.
        shape: Canonical shape.

    Returns:
        One slice per canonical axis, with start and stop inside the array; empty where the two do not meet.
    """
    spans: list[slice] = []
    for start, extent, voxels in zip(transform.start, transform.extent, shape, strict=True):
        first = min(max(start, 0), voxels)
        spans.append(slice(first, max(first, min(start + extent, voxels))))
    return spans[0], spans[1], spans[2]


class LinearTable(NamedTuple):
    """Where each canonical voxel of a window reads one stored axis: ``a + weight * (b - a)``, a at lower, b at upper.

    ``is_exact`` says that every weight is zero, so that the axis is copied and not interpolated.
    """

    lower: Index
    upper: Index
    weight: NDArray[np.float64]
    is_exact: bool


def linear_table(transform: Transform, axis: int, window: slice, dz: int = 0) -> LinearTable:
    """Indices and weights of linear interpolation along one canonical axis.

    ``centre``: ``c = ((2 (x + dz - a) + 1) S) / (2 L) - 1/2``. ``corner``: ``c = (x + dz - a) (S - 1) / (L - 1)``, 0
    where L is 1. Then c is clipped to [0, S - 1], and reversal mirrors the two indices after rounding.

    Args:
        transform: The transform.
        axis: Canonical axis.
        window: Canonical voxels along it, with start and stop.
        dz: Offset in canonical voxels at which to read.

    Returns:
        The table, one entry per voxel of the window.
    """
    extent, size = transform.extent[axis], transform.size[axis]
    offset = np.arange(window.start, window.stop, dtype=np.int64) + (dz - transform.start[axis])
    if transform.align == "centre":
        position = (2 * offset + 1) * size / (2 * extent) - 0.5
    else:
        position = offset * (size - 1) / max(extent - 1, 1) * (extent > 1)
    position = np.clip(position, 0.0, float(size - 1))
    lower = np.floor(position).astype(np.int64)
    weight = position - lower
    upper = np.where(weight == 0.0, lower, np.minimum(lower + 1, size - 1))
    if transform.reversed[axis]:
        lower, upper = size - 1 - lower, size - 1 - upper
    return LinearTable(lower, upper, weight, not weight.any())


def nearest_table(transform: Transform, axis: int, window: slice, dz: int = 0) -> Index:
    """Stored index that each canonical voxel reads along one axis, in integer arithmetic.

    ``centre``: ``n = ((2 (x + dz - a) + 1) S) // (2 L)``. ``corner``: ``(x + dz - a) (S - 1) / (L - 1)`` rounded,
    halves up, 0 where L is 1. Then n is clipped to [0, S - 1], and reversal mirrors it after rounding.

    Args:
        transform: The transform.
        axis: Canonical axis.
        window: Canonical voxels along it, with start and stop.
        dz: Offset in canonical voxels at which to read.

    Returns:
        The stored index for each voxel of the window.
    """
    extent, size = transform.extent[axis], transform.size[axis]
    offset = np.arange(window.start, window.stop, dtype=np.int64) + (dz - transform.start[axis])
    index = np.clip(_rescaled(offset, size, extent, transform.align), 0, size - 1)
    return size - 1 - index if transform.reversed[axis] else index


def round_trip_table(transform: Transform, axis: int, window: slice) -> Index:
    """Canonical voxel whose label reaches each voxel of a window after a trip to the stored grid and back.

    The inverse map is the nearest map with extent and size exchanged, ``x = a + ((2 u + 1) L) // (2 S)`` for
    ``centre``; reversal cancels.

    Args:
        transform: The transform.
        axis: Canonical axis.
        window: Canonical voxels along it, with start and stop.

    Returns:
        Canonical indices, never decreasing; they lie inside the declared extent, which may reach beyond the array.
    """
    extent, size = transform.extent[axis], transform.size[axis]
    offset = np.arange(window.start, window.stop, dtype=np.int64) - transform.start[axis]
    stored = np.clip(_rescaled(offset, size, extent, transform.align), 0, size - 1)
    return transform.start[axis] + _rescaled(stored, extent, size, transform.align)


def map_linear(
    stored: NDArray[np.float32],
    transform: Transform,
    shape: Shape,
    dz: int = 0,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Map a stored volume to the canonical grid by linear interpolation.

    Reads float32, computes ``a + w (b - a)`` along canonical axes 0, 1, 2 in float64 and rounds once to float32. Axes
    on which every weight is zero (S = L among them) are copied, so a neighbour that is not finite does not spread.

    Args:
        stored: Shape ``transform.stored_shape``, any memory order. A view with gaps or negative strides is copied.
        transform: The transform.
        shape: Canonical shape.
        dz: Read at ``x_2 + dz``, clipped to the stored array; the field of view stays as declared.
        out: Buffer of the canonical shape in C order to write to; a new one by default.

    Returns:
        Canonical volume in C order; 0 outside the field of view.

    Raises:
        ValueError: If ``stored`` does not fit the transform, or ``out`` does not fit ``shape``.
        TypeError: If ``stored`` or ``out`` is not of native float32.
    """
    if stored.dtype != np.float32:
        raise TypeError(f"the stored volume is of type {stored.dtype}; it must be float32")
    memory, strides, fastest = _flat(_canonical_axes(stored, transform))
    target = np.empty(shape, np.float32) if out is None else _fitting(out, shape, np.dtype(np.float32))
    box = field_of_view(transform, shape)
    _clear_outside(target, box)
    first, second, third = (linear_table(transform, axis, box[axis], dz if axis == 2 else 0) for axis in range(3))
    if first.lower.size and second.lower.size and third.lower.size:
        kernel = (_linear_fastest_0, _linear_fastest_1, _linear_fastest_2)[fastest]
        kernel(memory, strides, transform.size, (first, second, third), target, _corner(box))
    return target


def map_linear_beyond(
    stored: NDArray[np.float32], transform: Transform, shape: Shape, margin: int
) -> NDArray[np.float32]:
    """Map a stored volume inside its field of view by linear interpolation, with further slices at either end.

    One mapping gives every through-plane offset: of a field of view of n slices, ``margin + dz`` to ``margin + dz + n``
    are :func:`map_linear` at ``dz`` to the last bit, clipped to the stored array as there.

    Args:
        stored: Shape ``transform.stored_shape``, any memory order. A view with gaps or negative strides is copied.
        transform: The transform.
        shape: Canonical shape.
        margin: Further slices at either end of canonical axis 2.

    Returns:
        The field of view alone, in C order, ``2 * margin`` longer along axis 2; empty where it does not meet the grid.

    Raises:
        ValueError: If ``stored`` does not fit the transform.
        TypeError: If ``stored`` is not of native float32.
    """
    if stored.dtype != np.float32:
        raise TypeError(f"the stored volume is of type {stored.dtype}; it must be float32")
    memory, strides, fastest = _flat(_canonical_axes(stored, transform))
    box = field_of_view(transform, shape)
    longer = slice(box[2].start - margin, box[2].stop + margin)
    first, second, third = (linear_table(transform, axis, window) for axis, window in enumerate((*box[:2], longer)))
    target = np.empty((first.lower.size, second.lower.size, third.lower.size), np.float32)
    if target.size:
        kernel = (_linear_fastest_0, _linear_fastest_1, _linear_fastest_2)[fastest]
        kernel(memory, strides, transform.size, (first, second, third), target, (0, 0, 0))
    return target


def map_nearest_scores(stored: NDArray[np.float32], transform: Transform, shape: Shape) -> NDArray[np.float32]:
    """Map stored scores to the canonical grid by the nearest stored voxel, without interpolation.

    Args:
        stored: Shape ``transform.stored_shape``, any memory order.
        transform: The transform.
        shape: Canonical shape.

    Returns:
        Canonical volume in C order; 0 outside the field of view.

    Raises:
        ValueError: If ``stored`` does not fit the transform.
    """
    box = field_of_view(transform, shape)
    tables = [nearest_table(transform, axis, window) for axis, window in enumerate(box)]
    target = np.zeros(shape, np.float32)
    target[box] = _canonical_axes(stored, transform)[np.ix_(*tables)]
    return target


def map_nearest(
    stored: NDArray[np.bool_] | NDArray[np.uint8],
    transform: Transform,
    shape: Shape,
    dz: int = 0,
    out: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Map a stored mask to the canonical grid by the nearest stored voxel.

    Args:
        stored: Shape ``transform.stored_shape``; anything but 0 is set. Any memory order; a view with gaps or negative
            strides is copied.
        transform: The transform.
        shape: Canonical shape.
        dz: Read at ``x_2 + dz``, clipped to the stored array; the field of view stays as declared.
        out: Buffer of the canonical shape in C order to write to; a new one by default.

    Returns:
        Canonical mask in C order; False outside the field of view.

    Raises:
        ValueError: If ``stored`` does not fit the transform, or ``out`` does not fit ``shape``.
        TypeError: If ``stored`` is neither bool nor uint8, or ``out`` is not bool.
    """
    memory, strides, fastest = _flat(_canonical_axes(mask_bytes(stored), transform))
    target = np.empty(shape, np.bool_) if out is None else _fitting(out, shape, np.dtype(np.bool_))
    box = field_of_view(transform, shape)
    _clear_outside(target, box)
    first, second, third = (nearest_table(transform, axis, box[axis], dz if axis == 2 else 0) for axis in range(3))
    _gather(memory, strides, fastest, (first, second, third), target, _corner(box))
    return target


def round_trip(reference: NDArray[np.bool_], transform: Transform) -> NDArray[np.bool_]:
    """What a canonical mask looks like after a trip to the stored grid and back.

    Args:
        reference: Canonical mask, any memory order.
        transform: The transform. A stored voxel that would read beyond the canonical array is False.

    Returns:
        Canonical mask in C order; False outside the field of view. Empty in, empty out.

    Raises:
        ValueError: If the reference has not three axes.
        TypeError: If it is neither bool nor uint8.
    """
    shape = reference.shape
    if len(shape) != 3:
        raise ValueError(f"the reference has shape {shape}; it must have three axes")
    target = np.zeros(shape, np.bool_)
    memory, strides, fastest = _flat(mask_bytes(reference))
    tables: list[Index] = []
    corner: list[int] = []
    for axis, window in enumerate(field_of_view(transform, shape)):
        table = round_trip_table(transform, axis, window)
        first, stop = np.searchsorted(table, [0, shape[axis]])
        tables.append(table[first:stop])
        corner.append(window.start + int(first))
    _gather(memory, strides, fastest, (tables[0], tables[1], tables[2]), target, (corner[0], corner[1], corner[2]))
    return target


def scaled(
    mapped: NDArray[np.float32],
    low: float,
    high: float,
    box: Box,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The unclipped score: a mapped volume scaled linearly so that ``low`` becomes 0 and ``high`` becomes 1.

    Computes ``(s - low) / (high - low)`` in float64 and rounds once to float32.

    Args:
        mapped: Canonical volume in C order.
        low: Value that scores 0.
        high: Value that scores 1.
        box: Field of view inside the volume, from :func:`field_of_view`.
        out: Buffer of the same shape in C order to write to (``mapped`` itself will do); a new one by default.

    Returns:
        Scores, not clipped; 0 outside the field of view, whatever a 0 would scale to.

    Raises:
        ValueError: If ``high`` is not above ``low``, or an array is not in C order or does not fit.
        TypeError: If an array is not of float32.
    """
    if not high > low:
        raise ValueError(f"the scale runs from {low} to {high}; the second must be the larger")
    source = _fitting(mapped, mapped.shape, np.dtype(np.float32))
    target = np.empty_like(source) if out is None else _fitting(out, source.shape, np.dtype(np.float32))
    _scale_box(source, float(low), float(high), _corner(box), (box[0].stop, box[1].stop, box[2].stop), target)
    _clear_outside(target, box)
    return target


def mask_bytes(mask: NDArray[np.bool_] | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same memory as unsigned bytes.

    Args:
        mask: Of bool or uint8.

    Returns:
        A view, 0 where the mask is not set.

    Raises:
        TypeError: If the mask is of another type.
    """
    if mask.dtype == np.bool_ or mask.dtype == np.uint8:
        return mask.view(np.uint8)
    raise TypeError(f"the mask is of type {mask.dtype}; it must be bool or uint8")


def memory_order(volume: NDArray[np.generic]) -> tuple[int, int, int]:
    """The axes of a volume from the slowest in memory to the fastest; axes of one voxel count as slowest.

    Args:
        volume: An array of three axes.

    Returns:
        A permutation of (0, 1, 2); transposed by it, the volume lies in C order, if it has neither gaps nor reversals.
    """
    slow, middle, fast = sorted(range(3), key=lambda axis: (volume.shape[axis] > 1, -abs(volume.strides[axis])))
    return slow, middle, fast


def _rescaled(offset: Index, size: int, extent: int, align: Align) -> Index:
    """Nearest index on a grid of ``size`` voxels for an offset on a grid of ``extent`` voxels, not clipped."""
    if align == "centre":
        return ((2 * offset + 1) * size) // (2 * extent)
    if extent == 1:
        return np.zeros_like(offset)
    return (2 * offset * (size - 1) + (extent - 1)) // (2 * (extent - 1))


def _canonical_axes(stored: NDArray[Scalar], transform: Transform) -> NDArray[Scalar]:
    """A stored array with its axes in canonical order."""
    if stored.shape != transform.stored_shape:
        raise ValueError(f"the stored array has shape {stored.shape}; its transform expects {transform.stored_shape}")
    return np.transpose(stored, transform.source_axis)


def _flat(volume: NDArray[Scalar]) -> tuple[NDArray[Scalar], tuple[int, int, int], int]:
    """A volume as it lies in memory: flat, the step in it of each axis, and the axis whose step is 1."""
    order = memory_order(volume)
    flat = np.ascontiguousarray(np.transpose(volume, order)).reshape(-1)
    strides = [0, 0, 0]
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= volume.shape[axis]
    return flat, (strides[0], strides[1], strides[2]), order[2]


def _fitting(buffer: NDArray[Scalar], shape: tuple[int, ...], dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
    """The buffer itself, if a kernel may write a volume of that shape to it."""
    if buffer.dtype != dtype:
        raise TypeError(f"the buffer is of type {buffer.dtype}; it must be {dtype}")
    if buffer.shape != shape or not buffer.flags.c_contiguous:
        raise ValueError(f"the buffer of shape {buffer.shape} must have shape {shape} and lie in C order")
    return buffer


def _corner(box: Box) -> tuple[int, int, int]:
    return box[0].start, box[1].start, box[2].start


def _clear_outside(volume: NDArray[np.generic], box: Box) -> None:
    """Set everything outside the box to zero."""
    first, second, third = box
    volume[: first.start] = 0
    volume[first.stop :] = 0
    volume[first, : second.start] = 0
    volume[first, second.stop :] = 0
    volume[first, second, : third.start] = 0
    volume[first, second, third.stop :] = 0


def _gather(
    memory: NDArray[np.uint8],
    strides: tuple[int, int, int],
    fastest: int,
    tables: tuple[Index, Index, Index],
    out: NDArray[np.bool_],
    corner: tuple[int, int, int],
) -> None:
    """Write the mask that three index tables read to ``out``, from a corner on."""
    if not all(table.size for table in tables):
        return
    if fastest == 2:
        _gather_rows(memory, strides, tables, out, corner)
    else:
        _gather_planes(memory, strides, fastest, tables, out, corner)


@compiled
def _pitch(length: int) -> int:
    """Row length of a scratch plane: an odd number of cache lines, so that its columns do not share cache sets."""
    return (((length + 15) // 16) | 1) * 16


@compiled
def _blend_rows(
    memory: NDArray[np.float32], at_lower: int, at_upper: int, weight: float, row: NDArray[np.float64]
) -> None:
    """Interpolate between two runs of memory that start at two indices."""
    if weight == 0.0:
        for u in range(row.size):
            row[u] = memory[np.uintp(at_lower + u)]
    else:
        for u in range(row.size):
            a = np.float64(memory[np.uintp(at_lower + u)])
            row[u] = a + weight * (np.float64(memory[np.uintp(at_upper + u)]) - a)


@compiled
def _blend_planes(
    lower: NDArray[np.float64], upper: NDArray[np.float64], weight: float, blended: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolate between two scratch arrays; a weight of zero hands back the first."""
    if weight == 0.0:
        return lower
    for u in range(lower.size):
        blended[u] = lower[u] + weight * (upper[u] - lower[u])
    return blended


@compiled
def _blend_line(
    values: NDArray[np.float32] | NDArray[np.float64],
    start: int,
    step: int,
    table: LinearTable,
    line: NDArray[np.float32] | NDArray[np.float64],
) -> None:
    """Interpolate along a line of evenly spaced values, by table, rounding to the type of the result."""
    if table.is_exact:
        for x in range(line.size):
            line[x] = values[np.uintp(start + table.lower[x] * step)]
    else:
        for x in range(line.size):
            a = np.float64(values[np.uintp(start + table.lower[x] * step)])
            b = np.float64(values[np.uintp(start + table.upper[x] * step)])
            # A weight of zero copies, so that a neighbour that is not finite does not spread.
            line[x] = a if table.weight[x] == 0.0 else a + table.weight[x] * (b - a)


@compiled
def _blend_down(plane: NDArray[np.float64], table: LinearTable, result: NDArray[np.float32]) -> None:
    """Interpolate between the rows of a flat plane, by table, and round to float32."""
    pitch = result.size // table.lower.size
    for k in range(table.lower.size):
        lower, upper, weight = table.lower[k] * pitch, table.upper[k] * pitch, table.weight[k]
        if weight == 0.0:
            for u in range(pitch):
                result[k * pitch + u] = np.float32(plane[np.uintp(lower + u)])
        else:
            for u in range(pitch):
                a, b = plane[np.uintp(lower + u)], plane[np.uintp(upper + u)]
                result[k * pitch + u] = np.float32(a + weight * (b - a))


@compiled
def _linear_fastest_0(
    memory: NDArray[np.float32],
    strides: tuple[int, int, int],
    size: tuple[int, int, int],
    tables: tuple[LinearTable, LinearTable, LinearTable],
    out: NDArray[np.float32],
    corner: tuple[int, int, int],
) -> None:
    """Linear map where canonical axis 0 is contiguous: per canonical x_1, two planes already mapped along axis 0."""
    along_0, along_1, along_2 = tables
    pitch = _pitch(along_0.lower.size)
    planes = np.zeros((2, size[2] * pitch))
    blended = np.zeros(size[2] * pitch)
    turned = np.zeros(along_2.lower.size * pitch, np.float32)
    held = np.full(2, -1)
    for j in range(along_1.lower.size):
        lower, upper = along_1.lower[j], along_1.upper[j]
        for s in (lower, upper):
            if held[s & 1] != s:
                held[s & 1] = s
                for u in range(size[2]):
                    line = planes[s & 1, u * pitch : u * pitch + along_0.lower.size]
                    _blend_line(memory, s * strides[1] + u * strides[2], 1, along_0, line)
        plane = _blend_planes(planes[lower & 1], planes[upper & 1], along_1.weight[j], blended)
        _blend_down(plane, along_2, turned)
        for i in range(along_0.lower.size):
            line = out[corner[0] + i, corner[1] + j, corner[2] : corner[2] + along_2.lower.size]
            for k in range(line.size):
                line[k] = turned[np.uintp(k * pitch + i)]


@compiled
def _linear_fastest_1(
    memory: NDArray[np.float32],
    strides: tuple[int, int, int],
    size: tuple[int, int, int],
    tables: tuple[LinearTable, LinearTable, LinearTable],
    out: NDArray[np.float32],
    corner: tuple[int, int, int],
) -> None:
    """Linear map where canonical axis 1 is contiguous: per canonical x_0, one plane mapped along axes 0 and 1."""
    along_0, along_1, along_2 = tables
    pitch = _pitch(along_1.lower.size)
    plane = np.zeros(size[2] * pitch)
    turned = np.zeros(along_2.lower.size * pitch, np.float32)
    row = np.empty(size[1])
    for i in range(along_0.lower.size):
        for u in range(size[2]):
            at_lower = along_0.lower[i] * strides[0] + u * strides[2]
            at_upper = along_0.upper[i] * strides[0] + u * strides[2]
            _blend_rows(memory, at_lower, at_upper, along_0.weight[i], row)
            _blend_line(row, 0, 1, along_1, plane[u * pitch : u * pitch + along_1.lower.size])
        _blend_down(plane, along_2, turned)
        for j in range(along_1.lower.size):
            line = out[corner[0] + i, corner[1] + j, corner[2] : corner[2] + along_2.lower.size]
            for k in range(line.size):
                line[k] = turned[np.uintp(k * pitch + j)]


@compiled
def _linear_fastest_2(
    memory: NDArray[np.float32],
    strides: tuple[int, int, int],
    size: tuple[int, int, int],
    tables: tuple[LinearTable, LinearTable, LinearTable],
    out: NDArray[np.float32],
    corner: tuple[int, int, int],
) -> None:
    """Linear map where canonical axis 2 is contiguous: per canonical x_0, two rows mapped along axis 0."""
    along_0, along_1, along_2 = tables
    rows = np.empty((2, size[2]))
    blended = np.empty(size[2])
    held = np.empty(2, np.int64)
    for i in range(along_0.lower.size):
        held[:] = -1
        for j in range(along_1.lower.size):
            lower, upper = along_1.lower[j], along_1.upper[j]
            for s in (lower, upper):
                if held[s & 1] != s:
                    held[s & 1] = s
                    at_lower = along_0.lower[i] * strides[0] + s * strides[1]
                    at_upper = along_0.upper[i] * strides[0] + s * strides[1]
                    _blend_rows(memory, at_lower, at_upper, along_0.weight[i], rows[s & 1])
            row = _blend_planes(rows[lower & 1], rows[upper & 1], along_1.weight[j], blended)
            line = out[corner[0] + i, corner[1] + j, corner[2] : corner[2] + along_2.lower.size]
            _blend_line(row, 0, 1, along_2, line)


@compiled
def _gather_rows(
    memory: NDArray[np.uint8],
    strides: tuple[int, int, int],
    tables: tuple[Index, Index, Index],
    out: NDArray[np.bool_],
    corner: tuple[int, int, int],
) -> None:
    """Nearest map where canonical axis 2 is contiguous."""
    table_0, table_1, table_2 = tables
    for i in range(table_0.size):
        for j in range(table_1.size):
            base = table_0[i] * strides[0] + table_1[j] * strides[1]
            line = out[corner[0] + i, corner[1] + j, corner[2] : corner[2] + table_2.size]
            for k in range(table_2.size):
                line[k] = memory[np.uintp(base + table_2[k])] != 0


@compiled
def _gather_planes(
    memory: NDArray[np.uint8],
    strides: tuple[int, int, int],
    fastest: int,
    tables: tuple[Index, Index, Index],
    out: NDArray[np.bool_],
    corner: tuple[int, int, int],
) -> None:
    """Nearest map where canonical axis 0 or 1 is contiguous: planes across the other of them, then turned."""
    along, across, through = tables[fastest], tables[1 - fastest], tables[2]
    pitch = _pitch(along.size)
    plane = np.zeros(through.size * pitch, np.uint8)
    for j in range(across.size):
        for k in range(through.size):
            base = across[j] * strides[1 - fastest] + through[k] * strides[2]
            for i in range(along.size):
                plane[k * pitch + i] = memory[np.uintp(base + along[i])]
        for i in range(along.size):
            x_0, x_1 = (i, j) if fastest == 0 else (j, i)
            line = out[corner[0] + x_0, corner[1] + x_1, corner[2] : corner[2] + through.size]
            for k in range(through.size):
                line[k] = plane[np.uintp(k * pitch + i)] != 0


@compiled
def _scale_box(
    source: NDArray[np.float32],
    low: float,
    high: float,
    first: tuple[int, int, int],
    stop: tuple[int, int, int],
    out: NDArray[np.float32],
) -> None:
    """Scale linearly in float64 inside a box."""
    span = high - low
    for i in range(first[0], stop[0]):
        for j in range(first[1], stop[1]):
            for k in range(first[2], stop[2]):
                out[i, j, k] = np.float32((np.float64(source[i, j, k]) - low) / span)
