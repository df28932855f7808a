"""Reference lesions as connected components, and the exact one-to-one matching that decides ties.

A lesion is a connected component of the reference inside the support. Lesions are numbered from 1 by their first voxel
in C order, whatever the memory order of the arrays.

The matching is one to one and has the greatest total IoU. Among matchings of equal total, the one whose IoUs, listed by
`lesion_id`, come first in descending lexicographic order is taken: what can go either way goes to the lower
`lesion_id`. This fixes the IoU of every lesion, so nothing measured depends on how components are numbered.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled

Connectivity: TypeAlias = Literal[6, 26]

TIE = 1e-9
"""Totals of IoU closer than this are compared in integers. Floating point errs by some 1e-16 per matched lesion."""


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


def match_lesions(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Match lesions with components one to one: greatest total IoU, ties to the lower lesion.

    Shortest augmenting paths in floating point, which also prove for most lesions that every other matching of them has
    a total smaller by more than `TIE`. Lesions without that proof are matched again in integers.

    Args:
        pairs: One row per pair that overlaps, each pair once: lesion, component, overlap and union in voxels.

    Returns:
        One row per matched lesion, in ascending order: lesion, overlap and union with its component.
    """
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    lesions, first, rows = np.unique(pairs[:, 0], return_index=True, return_inverse=True)
    components, columns = np.unique(pairs[:, 1], return_inverse=True)
    graph = _Graph(
        first=np.append(first, rows.size).astype(np.int64),
        rows=rows.astype(np.int64),
        columns=columns.astype(np.int64),
        weights=pairs[:, 2] / pairs[:, 3],
        match=np.full(lesions.size, -1, np.int64),
        owner=np.full(components.size, -1, np.int64),
        row_duals=np.zeros(lesions.size),
        column_duals=np.zeros(components.size),
        is_settled=np.zeros(lesions.size, np.bool_),
        reach=np.full(components.size, np.inf),
        came=np.zeros(components.size, np.int64),
        is_done=np.zeros(components.size, np.bool_),
        touched=np.zeros(components.size, np.int64),
    )
    _match(graph)
    matched = graph.match[graph.is_settled & (graph.match >= 0)]
    found = [pairs[matched][:, (0, 2, 3)], match_exactly(pairs[_list_open(graph)])]
    return np.concatenate(found)[np.argsort(np.concatenate([part[:, 0] for part in found]))]


def match_exactly(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """What `match_lesions` does, in integers: slow where many lesions and components hang together."""
    weights: dict[int, dict[int, int]] = {}
    for part in _connected_parts(pairs):
        weights |= _tie_free_weights([pairs[index] for index in part])
    owners: dict[int, int] = {}
    matched: dict[int, int] = {}
    for lesion in sorted(weights):
        _augment_exactly(lesion, weights, owners, matched)
    kept = [matched.get(int(lesion)) == component for lesion, component in pairs[:, :2]]
    found = pairs[np.array(kept, np.bool_)][:, (0, 2, 3)]
    return found[np.argsort(found[:, 0])]


def _connected_parts(pairs: NDArray[np.int64]) -> list[list[int]]:
    """Indices of the pairs that hang together through lesions and components, part by part."""
    of_lesion: dict[int, list[int]] = {}
    of_component: dict[int, list[int]] = {}
    for index, (lesion, component) in enumerate(pairs[:, :2].tolist()):
        of_lesion.setdefault(lesion, []).append(index)
        of_component.setdefault(component, []).append(index)
    parts: list[list[int]] = []
    seen: set[int] = set()
    for start in range(len(pairs)):
        part = [] if start in seen else [start]
        seen.add(start)
        for index in part:
            lesion, component = int(pairs[index, 0]), int(pairs[index, 1])
            fresh = {*of_lesion[lesion], *of_component[component]} - seen
            seen |= fresh
            part.extend(sorted(fresh))
        parts.append(part)
    return [part for part in parts if part]


def _tie_free_weights(pairs: list[NDArray[np.int64]]) -> dict[int, dict[int, int]]:
    """One integer per pair whose sums order matchings by total IoU, then by the IoU of the lowest lesion, and so on.

    Over the common denominator D every IoU is an integer digit 0..D. In base D + 1 the leading part sums all digits,
    and each lesion, which is matched at most once, owns one of the places below: no carries, so the integers compare as
    tuples do.
    """
    edges = [(int(lesion), int(component), int(overlap), int(union)) for lesion, component, overlap, union in pairs]
    scale = math.lcm(*(union for *_, union in edges))
    base = scale + 1
    lesions = sorted({lesion for lesion, *_ in edges})
    place = {lesion: base**position for position, lesion in enumerate(reversed(lesions))}
    total = base ** len(lesions)
    weights: dict[int, dict[int, int]] = {lesion: {} for lesion in lesions}
    for lesion, component, overlap, union in edges:
        weights[lesion][component] = overlap * (scale // union) * (total + place[lesion])
    return weights


def _augment_exactly(
    start: int, weights: dict[int, dict[int, int]], owners: dict[int, int], matched: dict[int, int]
) -> None:
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
    _hand_on_exactly(start, best[1], best[2], taken_from, owners, matched)


def _hand_on_exactly(
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


class _Graph(NamedTuple):
    """Lesions (rows), components (columns) and the edges between them, with the state of the search for a matching."""

    first: NDArray[np.int64]
    """First edge of each row, and the number of edges."""
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    weights: NDArray[np.float64]
    """IoU of each edge."""
    match: NDArray[np.int64]
    """Edge of each row in the matching, or -1."""
    owner: NDArray[np.int64]
    """Edge of each column in the matching, or -1."""
    row_duals: NDArray[np.float64]
    column_duals: NDArray[np.float64]
    is_settled: NDArray[np.bool_]
    """Rows that no other matching as good can change."""
    reach: NDArray[np.float64]
    """Distance of each column in the current search."""
    came: NDArray[np.int64]
    """Edge through which it was reached."""
    is_done: NDArray[np.bool_]
    touched: NDArray[np.int64]
    """Columns reached by the current search."""


@compiled
def _match(graph: _Graph) -> None:
    """Find a best matching, row by row, and the rows it settles.

    Another matching differs by alternating cycles and paths, and its total is smaller by the sum of the slacks of its
    own edges. A row is settled when its tight edges (slack at most `TIE`) lead neither to a free column, nor to doing
    without, nor round a cycle: when all columns they lead to belong to settled rows.
    """
    for row in range(graph.match.size):
        _augment(graph, row)
    left, before = graph.match.size, graph.match.size + 1
    while 0 < left < before:
        before = left
        for row in range(graph.match.size):
            if not graph.is_settled[row] and _leads_nowhere(graph, row):
                graph.is_settled[row] = True
                left -= 1


@compiled
def _augment(graph: _Graph, start: int) -> None:
    """Add a row to a best matching, along a shortest path of slacks (Dijkstra; the cost of an edge is minus its IoU).

    A path ends at a free column, or at a row that does without one, at cost 0.
    """
    row, distance, column = start, 0.0, -1
    count = np.zeros(1, np.int64)
    end, end_distance = start, np.inf
    while True:
        if distance - graph.row_duals[row] < end_distance:
            end, end_distance = row, distance - graph.row_duals[row]
        _relax(graph, row, distance, count)
        column = _nearest(graph, count)
        if column < 0 or graph.reach[column] >= end_distance:
            column = -1
            break
        distance = graph.reach[column]
        graph.is_done[column] = True
        if graph.owner[column] < 0:
            end_distance = distance
            break
        row = int(graph.rows[graph.owner[column]])
    _update_duals(graph, start, end_distance, count)
    if column < 0 and end != start:
        column = int(graph.columns[graph.match[end]])
        graph.match[end] = -1
    _hand_on(graph, start, column)


@compiled
def _slack(graph: _Graph, edge: int) -> float:
    """Reduced cost of an edge: at least 0 up to rounding, and 0 on the matching."""
    return -graph.weights[edge] - graph.row_duals[graph.rows[edge]] - graph.column_duals[graph.columns[edge]]


@compiled
def _relax(graph: _Graph, row: int, distance: float, count: NDArray[np.int64]) -> None:
    """Shorten the ways to the columns of a row."""
    for edge in range(graph.first[row], graph.first[row + 1]):
        column = graph.columns[edge]
        if not graph.is_done[column]:
            if graph.reach[column] == np.inf:
                graph.touched[count[0]] = column
                count[0] += 1
            if distance + _slack(graph, edge) < graph.reach[column]:
                graph.reach[column] = distance + _slack(graph, edge)
                graph.came[column] = edge


@compiled
def _nearest(graph: _Graph, count: NDArray[np.int64]) -> int:
    """The nearest column reached and not yet passed, or -1."""
    nearest = -1
    for index in range(count[0]):
        column = graph.touched[index]
        if not graph.is_done[column] and (nearest < 0 or graph.reach[column] < graph.reach[nearest]):
            nearest = column
    return nearest


@compiled
def _update_duals(graph: _Graph, start: int, distance: float, count: NDArray[np.int64]) -> None:
    """Keep slacks non-negative, and zero along the path; forget the search."""
    graph.row_duals[start] += distance
    for index in range(count[0]):
        column = graph.touched[index]
        if graph.is_done[column]:
            change = distance - graph.reach[column]
            graph.column_duals[column] -= change
            if graph.owner[column] >= 0:
                graph.row_duals[graph.rows[graph.owner[column]]] += change
        graph.is_done[column] = False
        graph.reach[column] = np.inf


@compiled
def _hand_on(graph: _Graph, start: int, column: int) -> None:
    """Give a column to the row the search came from, the former column of that to the row before, up to the start."""
    while column >= 0:
        edge = graph.came[column]
        row = graph.rows[edge]
        former = graph.match[row]
        graph.match[row] = edge
        graph.owner[column] = edge
        column = -1 if row == start else int(graph.columns[former])


@compiled
def _leads_nowhere(graph: _Graph, row: int) -> bool:
    """Whether all tight edges of a row, its match aside, lead to columns of settled rows."""
    if graph.match[row] >= 0 and -graph.row_duals[row] <= TIE:
        return False
    for edge in range(graph.first[row], graph.first[row + 1]):
        if edge != graph.match[row] and _slack(graph, edge) <= TIE:
            owner = graph.owner[graph.columns[edge]]
            if owner < 0 or not graph.is_settled[graph.rows[owner]]:
                return False
    return True


def _list_open(graph: _Graph) -> NDArray[np.int64]:
    """The edges that rows not settled can have in a best matching: tight, and to no column of a settled row."""
    taken = np.zeros(graph.owner.size, np.bool_)
    taken[graph.columns[graph.match[graph.is_settled & (graph.match >= 0)]]] = True
    slacks = -graph.weights - graph.row_duals[graph.rows] - graph.column_duals[graph.columns]
    return np.flatnonzero(~graph.is_settled[graph.rows] & (slacks <= TIE) & ~taken[graph.columns])
