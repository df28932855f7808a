"""The regions of a subject's lesions: which lesion each voxel of a support is nearest to.

Regions divide the support, so thresholds of their own per lesion are thresholds of their own per region: what is
predicted of a region is its lesion's affair, true positives and false positives alike (protocol, section 9).

Distances are exact, axis by axis as lower envelopes of parabolas that carry the lesion they come from (Felzenszwalb and
Huttenlocher 2012, doi:10.4086/toc.2012.v008a019). SciPy's transform takes about twice as long here, and keeps three
coordinates of the nearest voxel where this keeps a label and a distance.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled
from ingest.lesions import LabelledReference, label_reference
from ingest.volumes import SubjectKey, brain_box, load_subject

Mask = NDArray[np.bool_]
Indices = NDArray[np.int32]


@lru_cache(maxsize=1)
def load_regions(inputs: SubjectKey, voxel_size_mm: tuple[float, float, float]) -> Indices:
    """Regions of the 6-connected lesions in a subject's brain; the last subject's are kept, as its volumes are.

    Args:
        inputs: What to read of the subject.
        voxel_size_mm: Voxel size of the canonical grid.

    Returns:
        As `nearest_lesion`, for the voxels of the brain.

    Raises:
        BadInput: A file is refused.
    """
    volumes = load_subject(inputs)
    box = brain_box(volumes.brain)
    brain = volumes.brain[box].copy()
    return nearest_lesion(label_reference(volumes.reference[box].copy(), brain, 6), brain, voxel_size_mm)


def nearest_lesion(labelled: LabelledReference, support: Mask, voxel_size_mm: tuple[float, float, float]) -> Indices:
    """Lesion that each voxel of a support is nearest to, from voxel centre to voxel centre.

    Args:
        labelled: The lesions of a reference in that support.
        support: Mask, 3-D.
        voxel_size_mm: Size of a voxel along each axis.

    Returns:
        `lesion_id` of each voxel of the support, 1-D in C order. A voxel as near to two lesions (to float32) belongs to
        either of them, for every map to the same; 0 everywhere where there is no lesion.
    """
    if labelled.sizes.size < 2:
        return np.full(np.count_nonzero(support), labelled.sizes.size, np.int32)
    labels = labelled.volume()
    _spread_labels(labels, voxel_size_mm)
    return labels[support]


class _Envelope(NamedTuple):
    """The parabolas that are lowest somewhere along a line, in order."""

    site: NDArray[np.int64]
    """Voxel of the vertex."""
    square: NDArray[np.float64]
    """Height of the vertex: squared distance across the line, in mm2."""
    label: Indices
    start: NDArray[np.float64]
    """Where the parabola becomes the lowest, in voxels."""


@compiled
def _spread_labels(labels: Indices, voxel_size_mm: tuple[float, float, float]) -> None:
    """Give every voxel the label of the nearest one that has a label, in place."""
    planes, rows, columns = labels.shape
    longest = max(planes, rows, columns)
    envelope = _Envelope(np.empty(longest, np.int64), np.empty(longest), np.empty(longest, np.int32), np.empty(longest))
    squares = np.empty(labels.shape, np.float32)
    for plane in range(planes):
        for row in range(rows):
            for column in range(columns):
                squares[plane, row, column] = 0 if labels[plane, row, column] > 0 else np.inf
            _spread_along(labels[plane, row], squares[plane, row], voxel_size_mm[2], envelope)
        for column in range(columns):
            _spread_along(labels[plane, :, column], squares[plane, :, column], voxel_size_mm[1], envelope)
    for row in range(rows):
        for column in range(columns):
            _spread_along(labels[:, row, column], squares[:, row, column], voxel_size_mm[0], envelope)


@compiled
def _spread_along(labels: Indices, squares: NDArray[np.float32], step_mm: float, envelope: _Envelope) -> None:
    """Spread labels and squared distances along one line; nothing where the line has none yet."""
    sites, heights, owners, starts = envelope.site, envelope.square, envelope.label, envelope.start
    count = 0
    for voxel in range(labels.size):
        height = float(squares[voxel])
        if height < np.inf:
            start = -np.inf
            while count > 0:
                site = sites[count - 1]
                rise = (height - heights[count - 1]) / (step_mm * step_mm)
                start = (rise / (voxel - site) + (voxel + site)) / 2
                if start > starts[count - 1]:
                    break
                count -= 1
                start = -np.inf
            sites[count], heights[count], owners[count], starts[count] = voxel, height, labels[voxel], start
            count += 1
    place = 0
    for voxel in range(labels.size if count > 0 else 0):
        while place + 1 < count and starts[place + 1] < voxel:
            place += 1
        away = step_mm * (voxel - sites[place])
        labels[voxel] = owners[place]
        squares[voxel] = heights[place] + away * away
