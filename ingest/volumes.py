"""The volumes of one subject on the canonical grid: reference, brain, and a method's map and own reference.

Everything that can be wrong with an image against the declarations is found here and refused with file, finding and
remedy. Definitions: protocol sections 1 and 2.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expectations.study import TransformTable
from ingest.grid import Transform, field_of_view, map_linear, map_nearest, scaled
from ingest.nifti import count_non_finite, read_labels, read_scores
from ingest.plan import Entry, MapInputs, Scale, Source, SubjectInputs
from ingest.problems import BadInput

Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]
Box = tuple[slice, slice, slice]
SupportStatus = Literal["brain_mask", "image_nonzero", "whole_array"]


@dataclass(frozen=True)
class SubjectVolumes:
    """Reference and brain support of a subject, on the canonical grid (the reference's array)."""

    reference: Mask
    brain: Mask
    support_status: SupportStatus


@dataclass(frozen=True)
class MappedScores:
    """A map on the canonical grid.

    `unclipped` holds scaled float32 scores, 0 outside the field of view; `view` is the field of view as a box.
    """

    unclipped: Scores
    view: Box
    transform: Transform


@lru_cache(maxsize=1)
def load_subject(inputs: "SubjectKey") -> SubjectVolumes:
    """Read a subject's reference and brain support; the last subject is kept, since its methods come one after another.

    Raises:
        BadInput: A file is refused, or the support has another shape than the reference.
    """
    reference = load_reference(inputs.reference)
    if inputs.brain is None:
        return SubjectVolumes(reference, np.ones(reference.shape, np.bool_), "whole_array")
    if inputs.is_mask:
        brain, status = read_labels(inputs.brain.url, None).mask, "brain_mask"
    else:
        brain, status = read_scores(inputs.brain.url).values != 0, "image_nonzero"
    check_shape(inputs.brain, brain.shape, reference.shape)
    return SubjectVolumes(reference, np.ascontiguousarray(brain), status)


@lru_cache(maxsize=1)
def load_reference(source: Source) -> Mask:
    """Read a subject's canonical reference, C-contiguous; the last one is kept.

    Raises:
        BadInput: The file is refused.
    """
    return np.ascontiguousarray(read_labels(source.url, source.labels).mask)


def brain_box(brain: Mask) -> Box:
    """Bounding box of a brain; one voxel where there is none."""
    counts = np.count_nonzero(brain, axis=2)
    if not counts.any():
        return slice(0, 1), slice(0, 1), slice(0, 1)
    rows, columns = _extent(counts.sum(axis=1)), _extent(counts.sum(axis=0))
    return rows, columns, _extent(np.count_nonzero(brain[rows, columns], axis=(0, 1)))


def _extent(counts: NDArray[np.signedinteger]) -> slice:
    """From the first place along an axis that holds a voxel to the last."""
    occupied = np.flatnonzero(counts)
    return slice(int(occupied[0]), int(occupied[-1]) + 1)


@dataclass(frozen=True)
class SubjectKey:
    """What `load_subject` reads; hashable, so that the last subject can be kept."""

    reference: Source
    brain: Source | None
    is_mask: bool

    @classmethod
    def of(cls, inputs: SubjectInputs) -> "SubjectKey":
        """The key of a subject's inputs."""
        return cls(inputs.reference, inputs.support, inputs.brain is not None)


def check_shape(source: Source, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a canonical image on another grid than the reference's.

    Raises:
        BadInput: The shapes differ.
    """
    if found != expected:
        remedy = "Give all canonical images of a subject one grid"
        raise BadInput(source.url, f"has shape {found}, the subject's reference has {expected}", remedy)


def resolve_transform(table: TransformTable, stored: tuple[int, ...], canonical: tuple[int, ...]) -> Transform:
    """Fill a declared transform with the shapes at hand.

    Args:
        table: The declaration; "full" extents and "centre" starts are filled per axis.
        stored: Shape of the stored array.
        canonical: Shape of the canonical grid.

    Raises:
        ValueError: `source_size` is declared and differs from the stored array.
    """
    size = (stored[table.source_axis[0]], stored[table.source_axis[1]], stored[table.source_axis[2]])
    if table.source_size is not None and table.source_size != size:
        raise ValueError(f"source_size is declared as {table.source_size}, the stored array gives {size}")
    extent = [c if e == "full" else e for e, c in zip(table.extent, canonical, strict=True)]
    start = [(c - e) // 2 if s == "centre" else s for s, e, c in zip(table.start, extent, canonical, strict=True)]
    return Transform(
        source_axis=table.source_axis,
        start=(start[0], start[1], start[2]),
        extent=(extent[0], extent[1], extent[2]),
        size=size,
        reversed=table.reversed,
        align=table.align,
    )


def declared_transform(entry: Entry, source: Source, stored: tuple[int, ...], shape: tuple[int, ...]) -> Transform:
    """A method's transform of one stored array.

    Raises:
        BadInput: The declared `source_size` is not the array's.
    """
    try:
        return resolve_transform(entry.transform, stored, shape)
    except ValueError as error:
        raise BadInput(source.url, str(error), "Mend source_size or source_axis of the method's transform") from error


def check_own_shape(source: Source, found: tuple[int, ...], stored: tuple[int, ...]) -> None:
    """Refuse an own reference of another shape than its map.

    Raises:
        BadInput: The shapes differ.
    """
    if found != stored:
        raise BadInput(source.url, f"has shape {found}, its map has {stored}", "Store it on the grid of its map")


def load_own_reference(source: Source, stored: tuple[int, ...]) -> Mask:
    """Read a method's own reference as stored.

    Args:
        source: The own reference of one subject.
        stored: Shape of its map, which it must share.

    Raises:
        BadInput: The file is refused, or its shape is not the map's.
    """
    mask = read_labels(source.url, source.labels).mask
    check_own_shape(source, mask.shape, stored)
    return mask


def load_scores(entry: Entry, inputs: MapInputs, volumes: SubjectVolumes) -> tuple[Scores, Transform]:
    """Read a map and bring it to the canonical grid, unscaled; 0 outside the field of view.

    A baseline's map is its image, z-scored inside the brain with the population SD (0 everywhere if it is constant).

    Raises:
        BadInput: The file is refused, holds NaN or infinity, leaves [0, 1] under `identity`, or does not fit.
    """
    shape, source = volumes.reference.shape, inputs.map
    if entry.kind == "baseline":
        return load_contrast(source, volumes.brain), declared_transform(entry, source, shape, shape)
    values, transform = load_stored(entry, source, volumes.brain)
    return map_linear(values, transform, volumes.reference.shape), transform


def load_stored(entry: Entry, source: Source, brain: Mask) -> tuple[Scores, Transform]:
    """Read a method's map as stored, unscaled, with its transform.

    Args:
        entry: The method.
        source: Its map of a subject.
        brain: Brain of the subject whose map it is, on the canonical grid.

    Raises:
        BadInput: The file is refused, holds NaN or infinity, leaves [0, 1] under `identity`, or does not fit.
    """
    values = read_scores(source.url).values
    transform = declared_transform(entry, source, values.shape, brain.shape)
    values = _finite(entry, source, values, transform, brain)
    if entry.fixed_scale is not None and entry.fixed_scale.kind == "identity":
        _check_unit_range(source, values)
    return values, transform


def load_contrast(source: Source, brain: Mask) -> Scores:
    """Read an image, z-scored inside the brain with the population SD; 0 outside it, and everywhere if it is constant.

    Raises:
        BadInput: The file is refused, has another shape than the brain, or NaN or infinity inside it.
    """
    image = read_scores(source.url).values
    check_shape(source, image.shape, brain.shape)
    return _z_scored(source, image, brain)


def scale_scores(mapped: Scores, transform: Transform, scale: Scale) -> MappedScores:
    """Scale mapped scores linearly; outside the field of view they become 0."""
    view = field_of_view(transform, mapped.shape)
    if scale.kind == "identity":
        return MappedScores(mapped, view, transform)
    return MappedScores(scaled(mapped, scale.low, scale.high, view), view, transform)


def _check_unit_range(source: Source, values: Scores) -> None:
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if low < 0 or high > 1:
        found = f"holds scores from {low:g} to {high:g} where score_scale is identity, which means [0, 1]"
        raise BadInput(source.url, found, "Declare score_scale = [low, high] or {quantiles = [0.001, 0.999]}")


def _finite(entry: Entry, source: Source, values: Scores, transform: Transform, brain: Mask) -> Scores:
    """The scores without NaN and infinity: refused, or set to 0 where declared and outside the brain."""
    count = count_non_finite(values)
    if count == 0:
        return values
    if entry.nan_outside_brain == "refuse":
        found = f"holds {count} NaN or infinite values"
        remedy = 'Mend the map, or declare nan_outside_brain = "zero" if they all lie outside the brain'
        raise BadInput(source.url, found, remedy)
    bad = ~np.isfinite(values)
    inside = int(np.count_nonzero(map_nearest(bad, transform, brain.shape) & brain))
    if inside:
        found = f"holds NaN or infinite values at {inside} voxels inside the brain"
        raise BadInput(source.url, found, 'Mend the map: nan_outside_brain = "zero" covers those outside only')
    return np.where(bad, np.float32(0), values)


def _z_scored(source: Source, image: Scores, brain: Mask) -> Scores:
    inside = image[brain].astype(np.float64)
    count = int(np.count_nonzero(~np.isfinite(inside)))
    if count:
        raise BadInput(source.url, f"holds {count} NaN or infinite values inside the brain", "Mend the image")
    spread = float(inside.std()) if inside.size else 0.0
    scores = np.zeros(image.shape, np.float32)
    if spread > 0:
        scores[brain] = (inside - inside.mean()) / spread
    return scores
