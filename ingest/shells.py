"""Local evidence: each lesion's scores against those of a shell around it of as many voxels (protocol, section 4).

The shell of a lesion is made of the voxels of the support outside the whole reference that are nearest to the lesion,
by Euclidean distance in mm between voxel centres; equal distances go to the voxel that comes first in C order. It has
as many voxels as the lesion, or fewer where the support has no more. Shells of neighbouring lesions may share voxels.

Distances are compared exactly: a squared distance is a whole number of square micrometres, since the square of each
voxel side is rounded to one. In floating point, whether a voxel at (3, 4) sides is as near as one at (5, 0) sides would
be a matter of rounding.

That the shell leaves out the whole reference, other lesions and those below the floor too, and that it may lie anywhere
in the brain, outside the field of view too (where a map scores 0), is our choice: the protocol asks for no more than an
equal volume.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled
from ingest.lesions import LabelledReference
from ingest.ranking import rank_voxels

Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]
Places = NDArray[np.int64]
Steps = NDArray[np.int16]
Weights: TypeAlias = tuple[int, int, int]

UM2_PER_MM2 = 1e6
GROWTH = 1.5  # of the reach in which a shell is sought
FAR = -1  # no voxel of the lesion within reach


@dataclass(frozen=True)
class Shell:
    """A lesion and the shell around it.

    Attributes:
        lesion_id: Number of the lesion.
        lesion: Its voxels, by their place among the voxels of the support in C order.
        shell: Those of the shell, likewise, ascending.
    """

    lesion_id: int
    lesion: Places
    shell: Places


@dataclass(frozen=True)
class Evidence:
    """How a lesion's scores compare with those of its shell.

    Attributes:
        auroc: AUROC of lesion against shell, tied scores at their mid-rank; None without a shell.
        average_precision: Average precision, tied scores collapsed; None without a shell.
    """

    auroc: float | None
    average_precision: float | None


def find_shells(
    lesions: LabelledReference,
    reference: Mask,
    support: Mask,
    voxel_size_mm: tuple[float, float, float],
    lesion_ids: Sequence[int],
) -> list[Shell]:
    """Find the shells of some lesions.

    Args:
        lesions: The lesions of the reference in the support.
        reference: Reference mask, 3-D.
        support: Support mask of the same shape.
        voxel_size_mm: Sides of a voxel.
        lesion_ids: The lesions to surround.

    Returns:
        One shell for each of these lesions, in their order; an empty one where no support lies outside the reference.
    """
    weights = squared_sides(voxel_size_mm)
    free = support & ~reference
    free_count = int(np.count_nonzero(free))
    inside = np.flatnonzero(support)
    by_lesion = np.argsort(lesions.lesion_ids, kind="stable")
    ends = np.cumsum(lesions.sizes)
    found: list[Shell] = []
    for lesion_id in lesion_ids:
        end, size = int(ends[lesion_id - 1]), int(lesions.sizes[lesion_id - 1])
        voxels = lesions.voxels[by_lesion[end - size : end]]
        every = free_count <= size
        near = np.flatnonzero(free) if every else _nearest(free, voxels, weights)
        own = np.searchsorted(inside, _flat(voxels, support.shape))
        found.append(Shell(lesion_id, own, np.searchsorted(inside, near)))
    return found


def weigh_evidence(shell: Shell, scores: Scores) -> Evidence:
    """Rank a lesion's voxels against those of its shell.

    Args:
        shell: The lesion and its shell.
        scores: Unclipped scores of the support's voxels, 1-D.
    """
    if shell.shell.size == 0:
        return Evidence(None, None)
    positive = np.zeros(shell.lesion.size + shell.shell.size, np.bool_)
    positive[: shell.lesion.size] = True
    ranked = rank_voxels(np.concatenate([scores[shell.lesion], scores[shell.shell]]), positive)
    return Evidence(ranked.auroc, ranked.average_precision)


def squared_sides(voxel_size_mm: tuple[float, float, float]) -> Weights:
    """Squared sides of a voxel in whole square micrometres, at least one."""
    first, second, third = (max(1, round(side * side * UM2_PER_MM2)) for side in voxel_size_mm)
    return first, second, third


def _nearest(free: Mask, voxels: NDArray[np.int32], weights: Weights) -> Places:
    """The free voxels nearest to a lesion, as many as it has itself: their places in the volume, ascending.

    There must be more free voxels than that.

    They are sought within a reach, in the lesion's box grown by that reach: a voxel outside that box differs from every
    voxel of the lesion by more than the reach along one axis. The reach grows until it holds enough.
    """
    size, low, high = len(voxels), voxels.min(axis=0), voxels.max(axis=0) + 1
    reach = _first_reach(voxels, weights)
    while True:
        limit = int(reach * reach)
        margin = np.array([math.isqrt(limit // weight) for weight in weights])
        first, stop = np.maximum(low - margin, 0), np.minimum(high + margin, free.shape)
        box = free[first[0] : stop[0], first[1] : stop[1], first[2] : stop[2]]
        steps = _steps_along_first_axis(box.shape, voxels - first)
        distances, places = _within(box, steps, weights, limit)
        if len(places) >= size:
            i, j, k = np.unravel_index(_take_nearest(distances, places, size), box.shape)
            return _flat(np.stack([i, j, k], axis=1) + first, free.shape)
        reach *= GROWTH


def _first_reach(voxels: NDArray[np.int32], weights: Weights) -> float:
    """About how thick a shell is, in micrometres: as around a smooth lesion of that volume and surface.

    Of the surface only what faces along the last axis is counted, for a sphere half of it. Around a sphere of radius r,
    a third of volume over surface, the shell of equal volume is 0.26 r thick.
    """
    first, second, third = (math.sqrt(weight) for weight in weights)
    continues = (np.diff(voxels[:, :2], axis=0) == 0).all(axis=1) & (np.diff(voxels[:, 2]) == 1)
    runs = len(voxels) - int(np.count_nonzero(continues))
    volume, surface = len(voxels) * first * second * third, 4 * runs * first * second
    return 0.78 * volume / surface + max(weights) ** 0.5


def _flat(voxels: NDArray[np.signedinteger], shape: tuple[int, ...]) -> Places:
    """Places of voxels in a volume in C order."""
    rows, columns = shape[1:]
    return (voxels[:, 0].astype(np.int64) * rows + voxels[:, 1]) * columns + voxels[:, 2]


def _take_nearest(distances: Places, places: Places, count: int) -> Places:
    """The places of the smallest distances; of equal ones, the first."""
    last = np.partition(distances, count - 1)[count - 1]
    is_taken = distances < last
    ties = np.flatnonzero(distances == last)
    is_taken[ties[: count - np.count_nonzero(is_taken)]] = True
    return places[is_taken]


@compiled
def _steps_along_first_axis(shape: tuple[int, int, int], voxels: Places) -> Steps:
    """Voxels to the nearest voxel of the lesion along the first axis, or `FAR`."""
    steps = np.full(shape, FAR, np.int16)
    for voxel in range(len(voxels)):
        steps[voxels[voxel, 0], voxels[voxel, 1], voxels[voxel, 2]] = 0
    for i in range(1, shape[0]):
        for j in range(shape[1]):
            for k in range(shape[2]):
                if steps[i, j, k] < 0 and steps[i - 1, j, k] >= 0:
                    steps[i, j, k] = steps[i - 1, j, k] + 1
    for back in range(1, shape[0]):
        i = shape[0] - 1 - back
        for j in range(shape[1]):
            for k in range(shape[2]):
                beyond = steps[i + 1, j, k]
                if beyond >= 0 and (steps[i, j, k] < 0 or steps[i, j, k] > beyond + 1):
                    steps[i, j, k] = beyond + 1
    return steps


@compiled
def _within(free: Mask, steps: Steps, weights: Weights, limit: int) -> tuple[Places, Places]:
    """Squared distances and places in the box of the free voxels within a limit, in C order.

    The other two axes are added plane by plane, by lower envelopes of parabolas (Meijster et al., 2000,
    doi:10.1007/0-306-47025-X_36), so that no volume of distances is held.
    """
    rows, columns = free.shape[1], free.shape[2]
    found = np.empty(free.size, np.int64)  # pages are taken only as they are written
    places = np.empty(free.size, np.int64)
    plane = np.empty((rows, columns), np.int64)
    turned = np.empty((columns, rows), np.int64)
    vertices = np.empty(max(rows, columns), np.int64)
    starts = np.empty(max(rows, columns), np.int64)
    line = np.empty(max(rows, columns), np.int64)
    count = 0
    for i in range(free.shape[0]):
        for j in range(rows):
            for k in range(columns):
                step = np.int64(steps[i, j, k])
                line[k] = weights[0] * step * step if step >= 0 else FAR
            _add_axis(line[:columns], weights[2], limit, vertices, starts, plane[j])
        for k in range(columns):
            for j in range(rows):
                line[j] = plane[j, k]
            _add_axis(line[:rows], weights[1], limit, vertices, starts, turned[k])
        for j in range(rows):
            for k in range(columns):
                if free[i, j, k] and turned[k, j] >= 0:
                    found[count] = turned[k, j]
                    places[count] = (np.int64(i) * rows + j) * columns + k
                    count += 1
    return found[:count].copy(), places[:count].copy()


@compiled
def _add_axis(line: Places, weight: int, limit: int, vertices: Places, starts: Places, out: Places) -> None:
    """Least of `line[v] + weight (u - v)^2` over all v that are not `FAR`, for every u; `FAR` above the limit.

    Parabolas are met in order; each holds from its start to that of the next.
    """
    top = -1
    for u in range(line.size):
        if line[u] < 0 or line[u] > limit:
            continue
        while top >= 0:
            ahead, own = starts[top] - vertices[top], starts[top] - u
            if line[vertices[top]] + weight * ahead * ahead <= line[u] + weight * own * own:
                break
            top -= 1
        if top < 0:
            top = 0
            vertices[0], starts[0] = u, 0
        else:
            other = vertices[top]
            meet = (weight * (u * u - other * other) + line[u] - line[other]) // (2 * weight * (u - other))
            if meet + 1 < line.size:
                top += 1
                vertices[top], starts[top] = u, meet + 1
    for back in range(line.size):
        u = line.size - 1 - back
        if top < 0:
            out[u] = FAR
            continue
        value = line[vertices[top]] + weight * (u - vertices[top]) * (u - vertices[top])
        out[u] = value if value <= limit else FAR
        if u == starts[top]:
            top -= 1
