"""Reference lesions as connected components, and the exact one-to-one matching that decides ties.

A lesion is a connected component of the reference inside the support. Lesions are numbered from 1 by their first voxel
in C order, whatever the memory order of the arrays.

The matching is one to one and has the greatest total IoU. Among matchings of equal total, the one whose IoUs, listed by
`lesion_id`, come first in descending lexicographic order is taken: what can go either way goes to the lower
`lesion_id`. This fixes the IoU of every lesion, so nothing measured depends on how components are numbered.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Connectivity: TypeAlias = Literal[6, 26]
Edge: TypeAlias = tuple[int, int, int, int]
"""(lesion, component, overlap voxels, union voxels): one component that touches one lesion."""


@dataclass(frozen=True)
class LabelledReference:
    """The lesions of one reference in one support, as a list of voxels (a label volume would be a map's size).

    Attributes:
        shape: Shape of the volume, in voxels.
        connectivity: 6 (faces) or 26 (faces, edges and corners).
        voxels: Coordinates of the reference voxels in C order, shape (voxels, 3).
        lesion_ids: Lesion of each of these voxels, 1 to `len(sizes)`.
        sizes: Voxels of lesion 1, 2, ...
    """

    shape: tuple[int, int, int]
    connectivity: Connectivity
    voxels: NDArray[np.int32]
    lesion_ids: NDArray[np.int32]
    sizes: NDArray[np.int64]

    def volume(self) -> NDArray[np.int32]:
        """Label volume: 0 outside the lesions, `lesion_id` inside."""
        labels = np.zeros(self.shape, np.int32)
        labels[tuple(self.voxels.T)] = self.lesion_ids
        return labels

    def centroids(self) -> NDArray[np.float64]:
        """Mean voxel coordinates of each lesion, shape (lesions, 3), in voxels."""
        sums = [np.bincount(self.lesion_ids - 1, weights=axis, minlength=self.sizes.size) for axis in self.voxels.T]
        return np.stack(sums, axis=1) / self.sizes[:, None]

    def bounding_boxes(self) -> NDArray[np.int64]:
        """Bounds of each lesion, shape (lesions, 2, 3): first voxel, and one past the last."""
        boxes = np.empty((self.sizes.size, 2, 3), np.int64)
        boxes[:, 0] = self.shape
        boxes[:, 1] = 0
        np.minimum.at(boxes[:, 0], self.lesion_ids - 1, self.voxels)
        np.maximum.at(boxes[:, 1], self.lesion_ids - 1, self.voxels + 1)
        return boxes


def label_reference(
    reference: NDArray[np.bool_], support: NDArray[np.bool_], connectivity: Connectivity
) -> LabelledReference:
    """Find the lesions of a reference inside a support.

    Args:
        reference: Reference mask, 3-D, any memory order.
        support: Support mask of the same shape.
        connectivity: 6 or 26.

    Returns:
        The lesions, numbered by first voxel in C order; none where reference and support do not meet.

    Raises:
        ValueError: The shapes differ, the arrays are not 3-D, or the connectivity is neither 6 nor 26.
    """
    if reference.ndim != 3 or reference.shape != support.shape:
        raise ValueError(f"reference {reference.shape} and support {support.shape} must be 3-D and of one shape")
    offsets = neighbour_offsets(connectivity)
    voxels = _voxels_in_c_order(reference & support)
    _, rows, columns = reference.shape
    strides = np.array([(rows + 1) * (columns + 1), columns + 1, 1], np.int64)
    backward = offsets @ strides
    lesion_ids, count = _label_voxels(voxels @ strides, backward[backward < 0])
    sizes = np.bincount(lesion_ids, minlength=count + 1)[1:].astype(np.int64)
    return LabelledReference(reference.shape, connectivity, voxels, lesion_ids, sizes)


def neighbour_offsets(connectivity: Connectivity) -> NDArray[np.int64]:
    """Steps to the neighbours of a voxel, shape (connectivity, 3).

    Raises:
        ValueError: The connectivity is neither 6 nor 26.
    """
    if connectivity not in (6, 26):
        raise ValueError(f"connectivity is {connectivity}: must be 6 or 26")
    reach = 1 if connectivity == 6 else 3
    steps = [step for step in product((-1, 0, 1), repeat=3) if 0 < sum(map(abs, step)) <= reach]
    return np.array(steps, np.int64)


def smallest_count(volume_mm3: float, voxel_mm3: float) -> int:
    """Smallest number of voxels with `voxels * voxel_mm3 >= volume_mm3`, the product rounded to float64.

    Raises:
        ValueError: The voxel volume is not positive, or either is not finite.
    """
    if not (math.isfinite(volume_mm3) and math.isfinite(voxel_mm3) and voxel_mm3 > 0):
        raise ValueError(f"need a finite volume and a positive voxel volume, got {volume_mm3} and {voxel_mm3} mm3")
    voxels = max(0, math.floor(volume_mm3 / voxel_mm3) - 1)
    while voxels * voxel_mm3 < volume_mm3:
        voxels += 1
    return voxels


def match_exactly(edges: Iterable[Edge]) -> dict[int, tuple[int, int]]:
    """Match lesions with components in exact arithmetic, ties to the lower lesion.

    For the few groups of lesions and components in which two matchings come too close for floating point: the integers
    grow with the number of lesions and of distinct unions.

    Args:
        edges: Every pair of a lesion and a component that overlap, each pair once.

    Returns:
        Overlap and union, in voxels, of the component matched with each matched lesion.
    """
    pairs = {(lesion, component): (overlap, union) for lesion, component, overlap, union in edges if overlap > 0}
    weights = _tie_free_weights(pairs)
    owners: dict[int, int] = {}
    matched: dict[int, int] = {}
    for lesion in weights:
        _augment(lesion, weights, owners, matched)
    return {lesion: pairs[lesion, component] for lesion, component in matched.items()}


def _tie_free_weights(pairs: dict[tuple[int, int], tuple[int, int]]) -> dict[int, dict[int, int]]:
    """One integer per pair whose sums order matchings by total IoU, then by the IoU of the lowest lesion, and so on.

    Over the common denominator D every IoU is an integer digit 0..D. In base D + 1 the leading part sums all digits,
    and each lesion, which is matched at most once, owns one of the places below: no carries, so the integers compare as
    tuples do.
    """
    scale = math.lcm(*(union for _, union in pairs.values()))
    base = scale + 1
    lesions = sorted({lesion for lesion, _ in pairs})
    place = {lesion: base**position for position, lesion in enumerate(reversed(lesions))}
    total = base ** len(lesions)
    weights: dict[int, dict[int, int]] = {lesion: {} for lesion in lesions}
    for (lesion, component), (overlap, union) in pairs.items():
        weights[lesion][component] = overlap * (scale // union) * (total + place[lesion])
    return weights


def _augment(start: int, weights: dict[int, dict[int, int]], owners: dict[int, int], matched: dict[int, int]) -> None:
    """Add a lesion to a best matching of those before it, along the alternating path that gains most (Bellman-Ford)."""
    gains = {start: 0}
    taken_from: dict[int, int] = {}
    best: tuple[int, int, int | None] = (0, start, None)
    waiting = deque([start])
    while waiting:
        lesion = waiting.popleft()
        ends: list[tuple[int, int, int | None]] = [(gains[lesion], lesion, None)]
        for component, weight in weights[lesion].items():
            owner = owners.get(component)
            gain = gains[lesion] + weight
            if owner is None:
                ends.append((gain, lesion, component))
            elif gain - weights[owner][component] > gains.get(owner, -math.inf):
                gains[owner] = gain - weights[owner][component]
                taken_from[owner] = lesion
                waiting.append(owner)
        best = max(best, *ends, key=lambda end: end[0])
    _hand_on(start, best[1], best[2], taken_from, owners, matched)


def _hand_on(
    start: int,
    lesion: int,
    component: int | None,
    taken_from: dict[int, int],
    owners: dict[int, int],
    matched: dict[int, int],
) -> None:
    """Hand components on along a path from its end to its start; without a component, its end goes unmatched."""
    while True:
        given_up = matched.pop(lesion, None)
        if component is not None:
            matched[lesion] = component
            owners[component] = lesion
        if lesion == start:
            return
        lesion, component = taken_from[lesion], given_up


def _voxels_in_c_order(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Coordinates of the set voxels in C order, found by one walk through memory."""
    if mask.flags.f_contiguous and not mask.flags.c_contiguous:
        axes = np.unravel_index(np.flatnonzero(mask.T), mask.T.shape)[::-1]
        voxels = np.stack(axes, axis=1).astype(np.int32)
        return voxels[np.lexsort(voxels.T[::-1])]
    axes = np.unravel_index(np.flatnonzero(mask), mask.shape)
    return np.stack(axes, axis=1).astype(np.int32)


@compiled
def _find_first(parents: NDArray[np.int32], voxel: int) -> int:
    """First voxel of the set that holds a voxel, halving the path on the way."""
    while parents[voxel] != voxel:
        parents[voxel] = parents[parents[voxel]]
        voxel = parents[voxel]
    return voxel


@compiled
def _label_voxels(positions: NDArray[np.int64], offsets: NDArray[np.int64]) -> tuple[NDArray[np.int32], int]:
    """Lesion of each voxel, by union-find over the sorted positions in a padded volume; and the number of lesions.

    Positions ascend, so the neighbour at a fixed offset is found by a pointer that only moves forward. Roots are the
    first voxels of their sets: numbering them in passing numbers lesions by first voxel.
    """
    parents = np.arange(positions.size).astype(np.int32)
    for offset in offsets:
        other = 0
        for voxel in range(positions.size):
            target = positions[voxel] + offset
            while positions[other] < target:
                other += 1
            if positions[other] == target:
                first, second = _find_first(parents, voxel), _find_first(parents, other)
                parents[max(first, second)] = min(first, second)
    labels = np.empty(positions.size, np.int32)
    count = 0
    for voxel in range(positions.size):
        first = _find_first(parents, voxel)
        if first == voxel:
            count += 1
            labels[voxel] = count
        else:
            labels[voxel] = labels[first]
    return labels, count
