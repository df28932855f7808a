"""Every threshold, post-processing and lesion of one anomaly map in one pass.

Voxels are visited in descending score. A union-find keeps the connected components of what is predicted so far, so each
of the 201 levels is read off in passing instead of labelling the volume 201 times (component trees: Salembier et al.
1998, doi:10.1109/83.663500; flooding by union-find: Najman and Couprie 2006, doi:10.1109/TIP.2006.877518).

Levels and buckets. Level k predicts `A > float32(k / 200)`, and hysteresis at level k asks for a voxel with
`A > float32((k + 200) / 400)`. Both are points of the grid `float32(i / 400)`, at i = 2 k and i = k + 200. The bucket
of a score is the number of grid points below it: level k predicts the buckets above 2 k, and a component is kept by
hysteresis when it holds a bucket above k + 200.

Why running totals are enough. As k falls, components only grow or merge, and the bucket that hysteresis asks for falls
too. So a component that is kept stays part of a kept component, and a kept component of enough voxels keeps enough: the
kept sets only grow, and change only where a component grows, merges or qualifies. The first voxel of a component to be
visited has its highest bucket, and no predicted neighbour then: it is a birth. So a component qualifies when its
highest birth does; births are listed in visiting order, and each is looked at once.

Lesions. A fragment is the part of one lesion inside one component. Fragments are listed per lesion and brought up to
date at each level (their roots looked up, those of one component joined). A component that touches one lesion concerns
that lesion only, which keeps its best. Components that touch several (bridges) are assigned exactly where they share no
lesion, else by shortest augmenting paths in floating point with a proof that no other matching comes within 1e-9 of the
total. The rare groups without that proof, ties among them, are settled afterwards in integers
(`ingest.lesions.match_exactly`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled
from ingest.lesions import Connectivity, Edge, LabelledReference, match_exactly, neighbour_offsets, smallest_count

LEVELS = 201
BUCKETS = 401
POSTPROCESSES = ("plain", "hysteresis", "hysteresis_pruned")
LESION_FLOORS = ("floor", "all")
HIT_CRITERIA = ("iou_10", "iou_25", "iou_50", "any_overlap")
LARGEST_VOLUME = 2**30
"""Padded voxels. Up to it, `2 * voxels + 1` fits int32, and sums of products of two voxel counts fit int64."""

BLOCK = 32
"""Voxels whose neighbours are read ahead: their cache lines fit the first-level cache."""

TIE = 1e-9
"""Totals of IoU closer than this are compared in integers. Floating point errs by some 1e-16 per matched lesion."""

GRID = (np.arange(BUCKETS) / 400).astype(np.float32)

Counts = NDArray[np.int64]
Indices = NDArray[np.int32]
Reals = NDArray[np.float64]


class Workspace:
    """Buffers that a worker reuses from map to map: fresh memory would cost as much as the pass itself."""

    def __init__(self) -> None:
        """Start empty; buffers grow to the largest map seen."""
        self.serial = 0
        self._labels = np.zeros(0, np.int32)
        self._voxels = [np.empty(0, np.int32) for _ in range(5)]
        self._buckets = np.empty(0, np.int16)

    def lend(self, padded_voxels: int, components: int) -> tuple[Indices, Indices, Indices, Indices]:
        """Lend labels, all zero, and three arrays over components: parents, sizes, numbers."""
        labels, self._labels = self._labels, np.zeros(0, np.int32)
        labels = labels if labels.size >= padded_voxels else np.zeros(padded_voxels, np.int32)
        _, _, parents, sizes, numbers = self._grow(components)
        return labels, parents, sizes, numbers

    def take_back(self, labels: Indices) -> None:
        """Take back labels that are zero again. After an error they are not handed back, and made anew."""
        self._labels = labels

    def lend_lists(self, voxels: int) -> tuple[Indices, Indices, NDArray[np.int16]]:
        """Lend room for a visiting order, voxels as found, and their buckets."""
        order, found, *_ = self._grow(voxels + 1)
        if self._buckets.size < voxels:
            self._buckets = np.empty(voxels, np.int16)
        return order, found, self._buckets

    def _grow(self, size: int) -> list[Indices]:
        """All lists, of at least that size."""
        if self._voxels[0].size < size:
            self._voxels = [np.empty(size, np.int32) for _ in range(5)]
        return self._voxels


@dataclass(frozen=True)
class VisitingOrder:
    """The positive voxels of a map in a support, in descending score: all that both connectivities share.

    It lives in buffers of its workspace, so it is good until the next order from the same workspace.

    Attributes:
        scores: The map.
        voxels: Voxel numbers in the padded volume, by descending bucket.
        bounds: Element b is the number of voxels above bucket b, shape (401,).
        strides: Step of a voxel number along each axis of the map.
        padded_voxels: Voxels of the padded volume.
        workspace: Where the buffers come from.
        serial: Which order of its workspace this is.
    """

    scores: NDArray[np.float32]
    voxels: Indices
    bounds: Counts
    strides: Counts
    padded_voxels: int
    workspace: Workspace
    serial: int


@dataclass(frozen=True)
class Sweep:
    """Counts at the 201 levels. Axes are named in brackets; P is `POSTPROCESSES`, F is `LESION_FLOORS`.

    Attributes:
        predicted: Predicted voxels [voxel volume, P, level].
        true_positive: Of these, voxels of the reference [reference, voxel volume, P, level].
        hits: Lesions hit [reference, voxel volume, P, F, `HIT_CRITERIA`, level].
        lesion_count: Lesions [reference, voxel volume, F].
        lesion_ids: Lesions of the first reference above the floor under the first voxel volume [lesion].
        matched_iou: IoU of the component matched with each of these, 0 where there is none [lesion, P, level].
        overlap_voxels: Predicted voxels in each of these, matched or not [lesion, P, level].
        max_score: Highest score in each of these [lesion].
    """

    predicted: Counts
    true_positive: Counts
    hits: Counts
    lesion_count: Counts
    lesion_ids: Counts
    matched_iou: Reals
    overlap_voxels: Counts
    max_score: NDArray[np.float32]


def order_voxels(
    scores: NDArray[np.float32], support: NDArray[np.bool_], workspace: Workspace | None = None
) -> VisitingOrder:
    """List the positive voxels of a map inside a support in descending score.

    Args:
        scores: Clipped map, 3-D, values in [0, 1] inside the support. C or Fortran order is read in place.
        support: Mask of the same shape, fastest in the same memory order.
        workspace: Buffers to reuse; new ones by default.

    Returns:
        The order, to be handed to `sweep` once per connectivity. An empty support gives an empty order.

    Raises:
        ValueError: The shapes differ, a score in the support is outside [0, 1] or not a number, or the volume is beyond
            2**30 voxels.
    """
    if scores.ndim != 3 or scores.shape != support.shape:
        raise ValueError(f"scores {scores.shape} and support {support.shape} must be 3-D and of one shape")
    workspace = Workspace() if workspace is None else workspace
    reverse = scores.flags.f_contiguous and not scores.flags.c_contiguous
    along = np.ascontiguousarray(scores.T if reverse else scores)
    inside = np.ascontiguousarray(support.T if reverse else support)
    planes, rows, columns = along.shape
    strides = np.array([(rows + 1) * (columns + 1), columns + 1, 1], np.int64)
    padded_voxels = (planes + 2) * int(strides[0]) + int(strides[1]) + 1
    if padded_voxels > LARGEST_VOLUME:
        raise ValueError(f"a volume of shape {scores.shape} is beyond 2**30 voxels")
    voxels, found, buckets = workspace.lend_lists(int(np.count_nonzero(inside)))
    bounds = np.zeros(BUCKETS, np.int64)
    count = _find_positive(along, inside, GRID, strides, found, buckets, bounds)
    if count < 0:
        outside = scores[support]
        raise ValueError(f"scores in the support must lie in [0, 1]: found {outside.min()} to {outside.max()}")
    _sort_by_bucket(found[:count], buckets, bounds, voxels)
    workspace.serial += 1
    strides = strides[::-1].copy() if reverse else strides
    return VisitingOrder(scores, voxels[:count], bounds, strides, padded_voxels, workspace, workspace.serial)


class Forest(NamedTuple):
    """Components of the predicted voxels, numbered from 1 by birth: an older component was born at a higher score.

    A component that merges points to an older one, so a root is the oldest of its set, born at its highest bucket, and
    hysteresis keeps a component exactly when its root is among the births that qualify: `root < kept`.
    """

    labels: Indices
    """Component that each voxel of the padded volume was born in or joined; 0 where not predicted."""
    parents: Indices
    """Older component that a component has merged into; itself for a root."""
    sizes: Indices
    """Voxels of each root."""
    numbers: Indices
    """Number of a root among the `Components` at hand: of no meaning unless that one points back."""
    births: Counts
    """Element b is 1 + the number of births at bucket b or above."""
    steps: Counts
    """Steps to the neighbours of a voxel."""
    near: Counts
    near_labels: Indices
    """Scratch: the predicted neighbours of a voxel."""
    minimums: Counts
    """Smallest voxel counts of the kept sets, ascending; the first is 0: hysteresis without pruning."""
    totals: Counts
    """Voxels of each kept set."""


class Visits(NamedTuple):
    """Reference voxels in the order in which they are predicted."""

    voxels: Indices
    lesions: Indices
    bounds: Counts
    """[reference, level]: end of the visits at that level or above; [reference, 201] is the start of the reference."""


class Lesions(NamedTuple):
    """State of each lesion, all references in one list.

    F counts the sets of lesions (all, then those above each floor) and P the filters of components (all, then the kept
    sets); both are nested.
    """

    first: Counts
    """First lesion of each reference, and the number of all."""
    sizes: Counts
    floors: Counts
    """Smallest voxel counts of the sets of lesions, ascending; the first is 0."""
    rows: Counts
    """Row of the lesion in the outputs that follow lesions, or -1."""
    overlap: Counts
    """Predicted voxels [lesion, P]."""
    shared: Counts
    """Overlap of the component matched so far, 0 for none [lesion, F, P]."""
    union: Counts
    """Union with that component, 1 for none [lesion, F, P]."""
    head: Counts
    """First contact of the lesion, or -1."""
    degree: Counts
    """Bridges that would be better than what the lesion has."""
    leaf: Reals
    """IoU without any bridge."""
    dual: Reals
    match: Counts
    """Contact with the bridge assigned, or -1."""
    mark: Counts
    """0 not in a group yet, 1 in a group, 2 in a group with no other way to be matched as well."""
    queue: Counts
    present: Counts


class Fragments(NamedTuple):
    """Parts of lesions inside one component; those of one lesion stand together, with room for each of its voxels."""

    first: Counts
    held: Counts
    """Fragments of each lesion."""
    lesion: Indices
    root: Indices
    """Root of the component at the last update, or the label of a new voxel."""
    code: Indices
    """Code of the component at the last update."""
    overlap: Indices
    component: Indices
    following: Indices
    """Next fragment of the same component, or -1."""


class Components(NamedTuple):
    """The components that touch a lesion of one reference at one level."""

    root: Indices
    code: Indices
    rank: Indices
    """Number of the last filter passed: 0 predicted, 1 kept by hysteresis, 2... above the pruning sizes."""
    degree: Indices
    """Lesions of each set touched [component, F]."""
    head: Indices
    """First fragment, of the lowest lesion."""
    last: Indices
    """Last fragment."""
    bridges: Indices
    """The components that touch several lesions."""
    contacts: Indices
    """First contact, of the lowest lesion; the others stand behind it."""
    owner: Indices
    """Contact with the lesion assigned, or -1."""
    came: Indices
    """Contact through which the current search reached it."""
    done: Indices
    touched: Indices
    """Components reached by the current search."""
    reach: Reals
    dual: Reals


class Contacts(NamedTuple):
    """Pairs of a lesion and a bridge (a component that touches several lesions of the set), bridge by bridge."""

    lesion: Indices
    component: Indices
    overlap: Indices
    union: Indices
    weight: Reals
    following: Indices
    """Next contact of the same lesion, or -1."""
    active: Indices


class Output(NamedTuple):
    """What the pass writes; `source` is the level whose counts hold at a level, where nothing about lesions changed."""

    predicted: Counts
    true_positive: Counts
    hits: Counts
    source: Counts
    matched_iou: Reals
    overlap_voxels: Counts


def sweep(
    order: VisitingOrder,
    references: Sequence[LabelledReference],
    connectivity: Connectivity,
    voxel_volumes_mm3: Sequence[float],
    minimum_component_mm3: float,
    lesion_floor_mm3: float,
) -> Sweep:
    """Read off every level of a map: predicted and true-positive voxels, lesions hit, and the matches of each lesion.

    Args:
        order: The voxels of the map in its support, from `order_voxels`.
        references: Lesions of each reference in the same support, under the same connectivity; the first one is the
            reference whose lesions are followed one by one. May be empty.
        connectivity: 6 or 26, of components and lesions.
        voxel_volumes_mm3: The voxel volumes under which floors and pruning are read, the true one first.
        minimum_component_mm3: Smallest component that `hysteresis_pruned` keeps.
        lesion_floor_mm3: Smallest lesion above the floor.

    Returns:
        The counts, 0 wherever nothing is predicted, so also for an empty support, an empty reference, and at level 200.

    Raises:
        ValueError: The order is stale, there is no voxel volume, or a reference has another shape or connectivity.
    """
    _check_inputs(order, references, connectivity, voxel_volumes_mm3)
    pruned = [smallest_count(minimum_component_mm3, volume) for volume in voxel_volumes_mm3]
    floor = [smallest_count(lesion_floor_mm3, volume) for volume in voxel_volumes_mm3]
    minimums, floors = (np.unique(np.array([0, *counts], np.int64)) for counts in (pruned, floor))
    lesions = _lesions(references, floors, floor[0], filters=minimums.size + 1)
    output = _output(lesions, filters=minimums.size + 1)
    deferred = _run(order, references, connectivity, minimums, lesions, int(np.searchsorted(floors, floor[0])), output)
    _settle(deferred, int(np.searchsorted(floors, floor[0])), lesions, output)
    kept = [np.array([0, 1, 1 + int(np.searchsorted(minimums, count))]) for count in pruned]
    sets = [np.array([np.searchsorted(floors, count), 0]) for count in floor]
    return _assemble(order, references, lesions, output, kept, sets)


def _check_inputs(
    order: VisitingOrder,
    references: Sequence[LabelledReference],
    connectivity: Connectivity,
    voxel_volumes_mm3: Sequence[float],
) -> None:
    """Refuse what would silently give wrong counts."""
    if order.serial != order.workspace.serial:
        raise ValueError("the visiting order is stale: its workspace has been used for another map since")
    if not voxel_volumes_mm3:
        raise ValueError("at least one voxel volume is needed, the true one first")
    for reference in references:
        if reference.shape != order.scores.shape or reference.connectivity != connectivity:
            raise ValueError(
                f"a reference of shape {reference.shape} and connectivity {reference.connectivity} does not fit "
                f"a map of shape {order.scores.shape} and connectivity {connectivity}"
            )


def _lesions(references: Sequence[LabelledReference], floors: Counts, floor: int, filters: int) -> Lesions:
    """Lesions of all references in one list; the first reference's lesions above the true floor get output rows."""
    first = np.cumsum([0, *(reference.sizes.size for reference in references)], dtype=np.int64)
    sizes = np.concatenate([np.zeros(0, np.int64), *(reference.sizes for reference in references)])
    count = sizes.size
    rows = np.full(count, -1, np.int64)
    if references:
        followed = np.flatnonzero(references[0].sizes >= floor)
        rows[followed] = np.arange(followed.size)
    blank = [np.zeros(count, np.int64) for _ in range(5)]
    return Lesions(
        first=first,
        sizes=sizes,
        floors=floors,
        rows=rows,
        overlap=np.zeros((count, filters), np.int64),
        shared=np.zeros((count, floors.size, filters), np.int64),
        union=np.ones((count, floors.size, filters), np.int64),
        head=blank[4],
        degree=blank[0],
        leaf=np.zeros(count),
        dual=np.zeros(count),
        match=blank[1],
        mark=blank[2],
        queue=blank[3],
        present=np.zeros(count + 1, np.int64),
    )


def _output(lesions: Lesions, filters: int) -> Output:
    """Outputs of the pass, all 0; a level is its own source until it is found unchanged."""
    references, floors, followed = lesions.first.size - 1, lesions.floors.size, int(np.count_nonzero(lesions.rows >= 0))
    return Output(
        predicted=np.zeros((filters, LEVELS), np.int64),
        true_positive=np.zeros((references, filters, LEVELS), np.int64),
        hits=np.zeros((references, filters, floors, len(HIT_CRITERIA), LEVELS), np.int64),
        source=np.tile(np.arange(LEVELS), (references, 1)),
        matched_iou=np.zeros((LEVELS, filters, followed)),
        overlap_voxels=np.zeros((LEVELS, filters, followed), np.int64),
    )


def _run(
    order: VisitingOrder,
    references: Sequence[LabelledReference],
    connectivity: Connectivity,
    minimums: Counts,
    lesions: Lesions,
    followed_floor: int,
    output: Output,
) -> Counts:
    """Run the compiled pass in the buffers of the workspace; the groups left to exact matching."""
    labels, parents, sizes, numbers = order.workspace.lend(order.padded_voxels, order.voxels.size + 1)
    forest = Forest(
        labels=labels,
        parents=parents,
        sizes=sizes,
        numbers=numbers,
        births=np.zeros(BUCKETS + 1, np.int64),
        steps=neighbour_offsets(connectivity) @ order.strides,
        near=np.empty(connectivity + 1, np.int64),
        near_labels=np.empty(connectivity + 1, np.int32),
        minimums=minimums,
        totals=np.zeros(minimums.size, np.int64),
    )
    visits = _visits(order, references, lesions)
    most = max((reference.lesion_ids.size for reference in references), default=0)
    deferred = _sweep_levels(
        order.voxels,
        order.bounds,
        forest,
        visits,
        lesions,
        _fragments(lesions.sizes),
        _components(most, lesions.floors.size),
        _contacts(most),
        followed_floor,
        output,
    )
    order.workspace.take_back(labels)
    return deferred


def _visits(order: VisitingOrder, references: Sequence[LabelledReference], lesions: Lesions) -> Visits:
    """Reference voxels that are predicted at some level, each reference's by descending level."""
    bounds = np.zeros((len(references), LEVELS + 1), np.int64)
    voxels, owners = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    start = 0
    for index, reference in enumerate(references):
        scores = order.scores[tuple(reference.voxels.T)]
        levels = (np.searchsorted(GRID, scores).astype(np.int16) - 1) // 2
        sequence = np.argsort(-levels, kind="stable")[: np.count_nonzero(levels >= 0)]
        numbers = (reference.voxels[sequence] + np.int32(1)) @ order.strides
        voxels.append(numbers.astype(np.int32))
        owners.append((reference.lesion_ids[sequence] - 1 + lesions.first[index]).astype(np.int32))
        per_level = np.bincount(levels[sequence], minlength=LEVELS)
        bounds[index, :LEVELS] = start + np.cumsum(per_level[::-1])[::-1]
        bounds[index, LEVELS] = start
        start += sequence.size
    return Visits(np.concatenate(voxels), np.concatenate(owners), bounds)


def _fragments(sizes: Counts) -> Fragments:
    """No fragments yet, and room for as many as the lesions have voxels."""
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    blank = [np.empty(int(first[-1]), np.int32) for _ in range(5)]
    return Fragments(
        first=first,
        held=np.zeros(sizes.size, np.int64),
        lesion=np.repeat(np.arange(sizes.size, dtype=np.int32), sizes),
        root=blank[0],
        code=blank[1],
        overlap=blank[2],
        component=blank[3],
        following=blank[4],
    )


def _components(most: int, floors: int) -> Components:
    """Room for the components that touch a reference of so many voxels; pages not written cost nothing."""
    blank = [np.empty(most, np.int32) for _ in range(10)]
    return Components(
        root=blank[0],
        code=blank[1],
        rank=blank[2],
        degree=np.empty((most, floors), np.int32),
        head=blank[3],
        last=blank[4],
        bridges=blank[5],
        contacts=blank[6],
        owner=blank[7],
        came=blank[8],
        done=blank[9],
        touched=np.empty(most, np.int32),
        reach=np.empty(most),
        dual=np.empty(most),
    )


def _contacts(most: int) -> Contacts:
    """Room for the contacts of a reference of so many voxels."""
    blank = [np.empty(most, np.int32) for _ in range(6)]
    return Contacts(blank[0], blank[1], blank[2], blank[3], np.empty(most), blank[4], blank[5])


def _settle(deferred: Counts, followed_floor: int, lesions: Lesions, output: Output) -> None:
    """Match the deferred groups exactly, and add their lesions to the counts.

    A group is stored as reference, filter, floor, level, number of edges, and the edges.
    """
    position = 1
    known: dict[bytes, dict[int, tuple[int, int]]] = {}
    while position < deferred[0]:
        reference, kept, floor, level, count = (int(value) for value in deferred[position : position + 5])
        rows = deferred[position + 5 : position + 5 + 4 * count]
        position += 5 + 4 * count
        key = rows.tobytes()
        if key not in known:
            edges: list[Edge] = [(int(a), int(b), int(c), int(d)) for a, b, c, d in rows.reshape(-1, 4)]
            known[key] = match_exactly(edges)
        for lesion, (shared, union) in known[key].items():
            for criterion, factor in enumerate((10, 4, 2)):
                output.hits[reference, kept, floor, criterion, level] += shared * factor >= union
            if floor == followed_floor and lesions.rows[lesion] >= 0:
                output.matched_iou[level, kept, lesions.rows[lesion]] = shared / union


def _assemble(
    order: VisitingOrder,
    references: Sequence[LabelledReference],
    lesions: Lesions,
    output: Output,
    kept: Sequence[NDArray[np.int64]],
    sets: Sequence[NDArray[np.int64]],
) -> Sweep:
    """Fill the unchanged levels from their sources, and lay the counts out by voxel volume."""
    shape = (len(references), len(kept), len(POSTPROCESSES))
    true_positive = np.zeros((*shape, LEVELS), np.int64)
    hits = np.zeros((*shape, len(LESION_FLOORS), len(HIT_CRITERIA), LEVELS), np.int64)
    lesion_count = np.zeros((len(references), len(kept), len(LESION_FLOORS)), np.int64)
    for index, reference in enumerate(references):
        source = output.source[index]
        for volume, (filters, floors) in enumerate(zip(kept, sets, strict=True)):
            true_positive[index, volume] = output.true_positive[index][filters][:, source]
            hits[index, volume] = output.hits[index][np.ix_(filters, floors)][..., source]
            lesion_count[index, volume] = [np.count_nonzero(reference.sizes >= lesions.floors[f]) for f in floors]
    source = output.source[0] if references else np.arange(LEVELS)
    followed = np.flatnonzero(lesions.rows >= 0)
    return Sweep(
        predicted=np.stack([output.predicted[filters] for filters in kept]),
        true_positive=true_positive,
        hits=hits,
        lesion_count=lesion_count,
        lesion_ids=followed + 1,
        matched_iou=output.matched_iou[source][:, kept[0]].transpose(2, 1, 0),
        overlap_voxels=output.overlap_voxels[source][:, kept[0]].transpose(2, 1, 0),
        max_score=_peaks(order, references)[followed],
    )


def _peaks(order: VisitingOrder, references: Sequence[LabelledReference]) -> NDArray[np.float32]:
    """Highest score in each lesion of the first reference."""
    if not references:
        return np.zeros(0, np.float32)
    peaks = np.zeros(references[0].sizes.size, np.float32)
    np.maximum.at(peaks, references[0].lesion_ids - 1, order.scores[tuple(references[0].voxels.T)])
    return peaks


@compiled
def _find_positive(
    scores: NDArray[np.float32],
    support: NDArray[np.bool_],
    grid: NDArray[np.float32],
    strides: Counts,
    voxels: Indices,
    buckets: NDArray[np.int16],
    histogram: Counts,
) -> int:
    """List the voxels above 0 and their buckets in memory order, and count per bucket; -1 for a score beyond [0, 1]."""
    count = 0
    for plane in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            first = (plane + 1) * strides[0] + (row + 1) * strides[1] + 1
            for column in range(scores.shape[2]):
                if support[plane, row, column] and scores[plane, row, column] != 0:
                    score = scores[plane, row, column]
                    if not 0 <= score <= 1:
                        return -1
                    bucket = int(score * 400.0)
                    while bucket < grid.size and grid[bucket] < score:
                        bucket += 1
                    voxels[count] = first + column
                    buckets[count] = bucket
                    histogram[bucket] += 1
                    count += 1
    return count


@compiled
def _sort_by_bucket(found: Indices, buckets: NDArray[np.int16], histogram: Counts, voxels: Indices) -> None:
    """Counting sort by descending bucket, in memory order within a bucket; the histogram becomes the bounds."""
    above = 0
    for bucket in range(histogram.size - 1, -1, -1):
        count = histogram[bucket]
        histogram[bucket] = above
        above += count
    place = histogram.copy()
    for index in range(found.size):
        bucket = buckets[index]
        voxels[place[bucket]] = found[index]
        place[bucket] += 1


@compiled
def _sweep_levels(
    voxels: Indices,
    bounds: Counts,
    forest: Forest,
    visits: Visits,
    lesions: Lesions,
    fragments: Fragments,
    components: Components,
    contacts: Contacts,
    followed_floor: int,
    output: Output,
) -> Counts:
    """The pass: flood each level, keep what qualifies, read the lesions off. Leaves the labels zero."""
    deferred = np.ones(1024, np.int64)
    kept = 1
    forest.births[BUCKETS] = 1
    for level in range(LEVELS - 2, -1, -1):
        for bucket in (2 * level + 2, 2 * level + 1):
            forest.births[bucket] = _flood(
                forest, voxels, bounds[bucket], bounds[bucket - 1], forest.births[bucket + 1], kept
            )
        _keep(forest, kept, forest.births[level + LEVELS])
        kept = forest.births[level + LEVELS]
        output.predicted[0, level] = bounds[2 * level]
        output.predicted[1:, level] = forest.totals
        for reference in range(lesions.first.size - 1):
            _append_visits(visits, forest.labels, fragments, reference, level)
            present = lesions.present[: _list_present(lesions, fragments, reference)]
            if _is_unchanged(forest, fragments, present, kept):
                output.source[reference, level] = output.source[reference, level + 1]
            else:
                where = (reference, level, followed_floor)
                count, bridges = _update_fragments(forest, lesions, fragments, components, present)
                _describe(forest, components, count, kept)
                deferred = _read_lesions(
                    lesions, fragments, components, contacts, present, bridges, where, output, deferred
                )
    _clear(forest.labels, voxels)
    return deferred


@compiled
def _clear(labels: Indices, voxels: Indices) -> None:
    """Make the labels zero again, voxel by voxel where few were visited."""
    if voxels.size * 16 > labels.size:
        labels[:] = 0
    else:
        for voxel in voxels:
            labels[voxel] = 0


@compiled
def _root(parents: Indices, component: int) -> int:
    """Oldest component that a component has merged into, halving the path on the way."""
    parent = parents[component]
    while parent != component:
        parents[component] = parents[parent]
        component = parents[component]
        parent = parents[component]
    return component


@compiled
def _flood(forest: Forest, voxels: Indices, first: int, last: int, births: int, kept: int) -> int:
    """Predict the voxels of one bucket, joining them with their predicted neighbours; the births so far.

    Whether a neighbour is predicted is as good as random, so the predicted ones are listed without branching; and the
    neighbours of a block of voxels are read once beforehand, to have them in the cache when branches depend on them.
    Their labels are brought up to date in passing, which keeps the ways to the roots short.
    """
    labels, parents, sizes, totals = forest.labels, forest.parents, forest.sizes, forest.totals
    steps, near, near_labels, minimums = forest.steps, forest.near, forest.near_labels, forest.minimums
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        near_labels[steps.size] = _touch(labels, voxels, start, stop, steps)
        for index in range(start, stop):
            voxel = voxels[index]
            count = _list_predicted(labels, voxel, steps, near, near_labels)
            root = 0
            for place in range(count):
                label = int(near_labels[place])
                if label != root:
                    found = _root(parents, label)
                    labels[near[place]] = found
                    if root == 0:
                        root = found
                    elif found != root:
                        root = _join(parents, sizes, min(root, found), max(root, found), kept, minimums, totals)
            if root == 0:
                root = births
                births += 1
                parents[root] = root
                sizes[root] = 0
            sizes[root] += 1
            if root < kept:
                _add_voxel(sizes[root], minimums, totals)
            labels[voxel] = root
    return births


@compiled
def _touch(labels: Indices, voxels: Indices, first: int, last: int, steps: Counts) -> int:
    """Read the labels of all neighbours; the result only keeps the compiler from leaving that out."""
    seen = 0
    for index in range(first, last):
        voxel = voxels[index]
        for place in range(steps.size):
            seen ^= int(labels[voxel + steps[place]])
    return seen


@compiled
def _list_predicted(labels: Indices, voxel: int, steps: Counts, near: Counts, near_labels: Indices) -> int:
    """List the predicted neighbours of a voxel and their labels; their number."""
    count = 0
    for place in range(steps.size):
        neighbour = voxel + steps[place]
        label = labels[neighbour]
        near[count] = neighbour
        near_labels[count] = label
        count += label != 0
    return count


@compiled
def _add_voxel(size: int, minimums: Counts, totals: Counts) -> None:
    """Count the last of so many voxels of a kept component; it may be the one that brings the component into a set."""
    for index in range(minimums.size):
        if size > minimums[index]:
            totals[index] += 1
        elif size == minimums[index]:
            totals[index] += size


@compiled
def _add_component(size: int, sign: int, minimums: Counts, totals: Counts) -> None:
    """Count a kept component in the sets it is large enough for, or take it out."""
    for index in range(minimums.size):
        if size >= minimums[index]:
            totals[index] += sign * size


@compiled
def _join(
    parents: Indices, sizes: Indices, older: int, younger: int, kept: int, minimums: Counts, totals: Counts
) -> int:
    """Merge a component into an older one, which is kept if either is; the older."""
    size, other = int(sizes[older]), int(sizes[younger])
    if older < kept:
        _add_component(size, -1, minimums, totals)
        _add_component(size + other, 1, minimums, totals)
    if younger < kept:
        _add_component(other, -1, minimums, totals)
    sizes[older] = size + other
    parents[younger] = older
    return older


@compiled
def _keep(forest: Forest, first: int, last: int) -> None:
    """Count the components born in a range that have merged into none older: they are kept from now on."""
    for component in range(first, last):
        if forest.parents[component] == component:
            _add_component(forest.sizes[component], 1, forest.minimums, forest.totals)


@compiled
def _append_visits(visits: Visits, labels: Indices, fragments: Fragments, reference: int, level: int) -> None:
    """Add the reference voxels predicted at this level as fragments of one voxel."""
    for index in range(visits.bounds[reference, level + 1], visits.bounds[reference, level]):
        lesion = visits.lesions[index]
        slot = fragments.first[lesion] + fragments.held[lesion]
        fragments.root[slot] = labels[visits.voxels[index]]
        fragments.overlap[slot] = 1
        fragments.code[slot] = 0
        fragments.held[lesion] += 1


@compiled
def _code(sizes: Indices, root: int, kept: int) -> int:
    """Size of a component and whether it is kept, as one number: `2 * voxels + kept`."""
    return 2 * int(sizes[root]) + (root < kept)


@compiled
def _list_present(lesions: Lesions, fragments: Fragments, reference: int) -> int:
    """List the lesions of a reference that hold a predicted voxel, lowest first; their number."""
    count = 0
    for lesion in range(lesions.first[reference], lesions.first[reference + 1]):
        lesions.present[count] = lesion
        count += fragments.held[lesion] > 0
    return count


@compiled
def _is_unchanged(forest: Forest, fragments: Fragments, present: Counts, kept: int) -> bool:
    """Whether every component that touches the reference has the code of the last update; a new fragment has code 0."""
    for lesion in present:
        start = fragments.first[lesion]
        for slot in range(start, start + fragments.held[lesion]):
            root = int(fragments.root[slot])
            if forest.parents[root] != root or fragments.code[slot] != _code(forest.sizes, root, kept):
                return False
    return True


@compiled
def _update_fragments(
    forest: Forest, lesions: Lesions, fragments: Fragments, components: Components, present: Counts
) -> tuple[int, int]:
    """Look up the roots of the fragments, and join those of one lesion and one component.

    Returns the number of components, and of bridges among them.
    """
    parents, numbers, floors = forest.parents, forest.numbers, lesions.floors
    roots, overlaps, members, following = fragments.root, fragments.overlap, fragments.component, fragments.following
    component_roots, lasts, degrees = components.root, components.last, components.degree
    count, bridges = 0, 0
    for lesion in present:
        start = fragments.first[lesion]
        write = start
        for slot in range(start, start + fragments.held[lesion]):
            root = _root(parents, roots[slot])
            component = int(numbers[root])
            if not 0 <= component < count or component_roots[component] != root:
                component = count
                count += 1
                numbers[root] = component
                component_roots[component] = root
                components.head[component] = write
                lasts[component] = -1
                degrees[component] = 0
            last = lasts[component]
            if last >= start:
                overlaps[last] += overlaps[slot]
            else:
                roots[write] = root
                overlaps[write] = overlaps[slot]
                members[write] = component
                following[write] = -1
                if last >= 0:
                    following[last] = write
                lasts[component] = write
                for floor in range(floors.size):
                    degrees[component, floor] += lesions.sizes[lesion] >= floors[floor]
                if degrees[component, 0] == 2:
                    components.bridges[bridges] = component
                    bridges += 1
                write += 1
        fragments.held[lesion] = write - start
    return count, bridges


@compiled
def _describe(forest: Forest, components: Components, count: int, kept: int) -> None:
    """Set the code and rank of each component."""
    for component in range(count):
        code = _code(forest.sizes, components.root[component], kept)
        components.code[component] = code
        components.rank[component] = _rank(code, forest.minimums)


@compiled
def _rank(code: int, minimums: Counts) -> int:
    """Number of the last filter that a component passes; the filters are nested."""
    if not code & 1:
        return 0
    rank = 1
    while rank < minimums.size and code >> 1 >= minimums[rank]:
        rank += 1
    return rank


@compiled
def _read_lesions(
    lesions: Lesions,
    fragments: Fragments,
    components: Components,
    contacts: Contacts,
    present: Counts,
    bridges: int,
    where: tuple[int, int, int],
    output: Output,
    deferred: Counts,
) -> Counts:
    """Count overlaps and hits of one reference at one level, under every floor and filter."""
    reference, level, followed_floor = where
    _take_leaves(lesions, fragments, components, present)
    _carry_over(lesions.overlap, lesions.shared, lesions.union, present)
    for floor in range(lesions.floors.size):
        count = _list_contacts(lesions, fragments, components, contacts, bridges, floor)
        for kept in range(lesions.overlap.shape[1]):
            if count > 0:
                _activate(lesions, components, contacts, count, floor, kept)
                _reduce(lesions, components, contacts, bridges, floor, kept)
                group = (reference, kept, floor, level)
                deferred = _match_groups(lesions, components, contacts, count, group, deferred)
            _count_hits(lesions, present, floor, kept, output.hits[reference, kept, floor, :, level])
    _count_overlaps(lesions, present, reference, level, followed_floor, output)
    return deferred


@compiled
def _take_leaves(lesions: Lesions, fragments: Fragments, components: Components, present: Counts) -> None:
    """Sum overlaps, and give each lesion the best component that touches no other, per set and last filter passed."""
    shared, union, overlaps, floors = lesions.shared, lesions.union, lesions.overlap, lesions.floors
    codes, ranks, degrees = components.code, components.rank, components.degree
    for lesion in present:
        overlaps[lesion] = 0
        shared[lesion] = 0
        union[lesion] = 1
        size = lesions.sizes[lesion]
        start = fragments.first[lesion]
        for slot in range(start, start + fragments.held[lesion]):
            component = fragments.component[slot]
            overlap = fragments.overlap[slot]
            rank = int(ranks[component])
            joint = (codes[component] >> 1) + size - overlap
            fragments.code[slot] = codes[component]
            overlaps[lesion, rank] += overlap
            for floor in range(floors.size):
                if degrees[component, floor] == 1 and size >= floors[floor]:
                    _take_better(shared, union, lesion, floor, rank, overlap, joint)


@compiled
def _carry_over(overlaps: Counts, shared: Counts, union: Counts, present: Counts) -> None:
    """Carry what passes a filter over to the weaker filters before it."""
    for lesion in present:
        for kept in range(overlaps.shape[1] - 2, -1, -1):
            overlaps[lesion, kept] += overlaps[lesion, kept + 1]
            for floor in range(shared.shape[1]):
                overlap, joint = shared[lesion, floor, kept + 1], union[lesion, floor, kept + 1]
                _take_better(shared, union, lesion, floor, kept, overlap, joint)


@compiled
def _take_better(shared: Counts, union: Counts, lesion: int, floor: int, kept: int, overlap: int, joint: int) -> None:
    """Match a lesion with a component if that has the greater IoU."""
    if overlap * union[lesion, floor, kept] > shared[lesion, floor, kept] * joint:
        shared[lesion, floor, kept] = overlap
        union[lesion, floor, kept] = joint


@compiled
def _count_hits(lesions: Lesions, present: Counts, floor: int, kept: int, hits: Counts) -> None:
    """Count the lesions of a set hit under each criterion."""
    for lesion in present:
        shared, union = lesions.shared[lesion, floor, kept], lesions.union[lesion, floor, kept]
        hits[0] += shared * 10 >= union
        hits[1] += shared * 4 >= union
        hits[2] += shared * 2 >= union
        hits[3] += lesions.overlap[lesion, kept] > 0 and lesions.sizes[lesion] >= lesions.floors[floor]


@compiled
def _count_overlaps(
    lesions: Lesions, present: Counts, reference: int, level: int, followed_floor: int, output: Output
) -> None:
    """Sum the true positives, and write the match and overlap of each followed lesion."""
    for lesion in present:
        row = lesions.rows[lesion]
        for kept in range(lesions.overlap.shape[1]):
            overlap = lesions.overlap[lesion, kept]
            output.true_positive[reference, kept, level] += overlap
            if row >= 0:
                shared, union = (
                    lesions.shared[lesion, followed_floor, kept],
                    lesions.union[lesion, followed_floor, kept],
                )
                output.matched_iou[level, kept, row] = shared / union
                output.overlap_voxels[level, kept, row] = overlap


@compiled
def _list_contacts(
    lesions: Lesions, fragments: Fragments, components: Components, contacts: Contacts, bridges: int, floor: int
) -> int:
    """List the contacts of the bridges with the lesions of a set, and forget earlier ones; their number."""
    count = 0
    for component in components.bridges[:bridges]:
        slot = components.head[component]
        while slot >= 0:
            lesions.head[fragments.lesion[slot]] = -1
            slot = fragments.following[slot]
    for component in components.bridges[:bridges]:
        components.contacts[component] = count
        slot = components.head[component] if components.degree[component, floor] > 1 else -1
        while slot >= 0:
            lesion = fragments.lesion[slot]
            if lesions.sizes[lesion] >= lesions.floors[floor]:
                overlap = fragments.overlap[slot]
                contacts.lesion[count] = lesion
                contacts.component[count] = component
                contacts.overlap[count] = overlap
                contacts.union[count] = (components.code[component] >> 1) + lesions.sizes[lesion] - overlap
                contacts.weight[count] = contacts.overlap[count] / contacts.union[count]
                contacts.following[count] = lesions.head[lesion]
                lesions.head[lesion] = count
                count += 1
            slot = fragments.following[slot]
    return count


@compiled
def _activate(lesions: Lesions, components: Components, contacts: Contacts, count: int, floor: int, kept: int) -> None:
    """Mark the contacts that pass the filter and beat what the lesion has without bridges: no other can be needed."""
    for index in range(count):
        lesion = contacts.lesion[index]
        lesions.degree[lesion] = 0
        lesions.mark[lesion] = 0
    for index in range(count):
        lesion, component = contacts.lesion[index], contacts.component[index]
        shared, union = lesions.shared[lesion, floor, kept], lesions.union[lesion, floor, kept]
        gains = contacts.overlap[index] * union > shared * contacts.union[index]
        contacts.active[index] = gains and components.rank[component] >= kept
        lesions.degree[lesion] += contacts.active[index]


@compiled
def _reduce(lesions: Lesions, components: Components, contacts: Contacts, bridges: int, floor: int, kept: int) -> None:
    """Leave each bridge one of the lesions that no other bridge would serve: the one that gains most.

    A bridge with no other lesions is assigned at once. Ties go to the lower lesion, as everywhere.
    """
    for component in components.bridges[:bridges]:
        first, count = int(components.contacts[component]), int(components.degree[component, floor])
        best = _choose_single(lesions, contacts, first, first + count if count > 1 else first, floor, kept)
        if best >= 0:
            lesion = contacts.lesion[best]
            lesions.shared[lesion, floor, kept] = contacts.overlap[best]
            lesions.union[lesion, floor, kept] = contacts.union[best]
            contacts.active[best] = 0


@compiled
def _choose_single(lesions: Lesions, contacts: Contacts, first: int, last: int, floor: int, kept: int) -> int:
    """Put aside all but the best of the lesions that a bridge alone would serve; that contact if it has no others."""
    best, shared = -1, False
    for index in range(first, last):
        if contacts.active[index] and lesions.degree[contacts.lesion[index]] > 1:
            shared = True
        elif contacts.active[index] and best < 0:
            best = index
        elif contacts.active[index]:
            worse = index
            if _gains_more(lesions, contacts, index, best, floor, kept):
                best, worse = index, best
            contacts.active[worse] = 0
    return -1 if shared else best


@compiled
def _gains_more(lesions: Lesions, contacts: Contacts, one: int, other: int, floor: int, kept: int) -> bool:
    """Whether the first contact adds strictly more to the total IoU than the second, exactly.

    With IoUs a, b and what the lesions have without, a' and b': a - a' > b - b' exactly when a + b' > b + a'.
    """
    lesion, rival = contacts.lesion[one], contacts.lesion[other]
    shared, union = lesions.shared[lesion, floor, kept], lesions.union[lesion, floor, kept]
    rival_shared, rival_union = lesions.shared[rival, floor, kept], lesions.union[rival, floor, kept]
    return _is_greater(
        contacts.overlap[one] * rival_union + rival_shared * contacts.union[one],
        contacts.union[one] * rival_union,
        contacts.overlap[other] * union + shared * contacts.union[other],
        contacts.union[other] * union,
    )


@compiled
def _is_greater(a: int, b: int, c: int, d: int) -> bool:
    """Whether a / b > c / d, by continued fractions: the cross products would not fit 64 bits."""
    while True:
        whole, other_whole = a // b, c // d
        if whole != other_whole:
            return whole > other_whole
        a, c = a - whole * b, c - other_whole * d
        if a == 0 or c == 0:
            return a > c
        a, b, c, d = d, c, b, a


@compiled
def _match_groups(
    lesions: Lesions,
    components: Components,
    contacts: Contacts,
    count: int,
    group: tuple[int, int, int, int],
    deferred: Counts,
) -> Counts:
    """Match what is still open, group by group of lesions and bridges that hang together."""
    _, kept, floor, _ = group
    for index in range(count):
        seed = contacts.lesion[index]
        if contacts.active[index] and lesions.degree[seed] > 1 and lesions.mark[seed] == 0:
            members = lesions.queue[: _collect_group(lesions, components, contacts, seed, floor)]
            _prepare(lesions, components, contacts, members, floor, kept)
            for member in members:
                _augment(lesions, components, contacts, member)
            if not _is_settled(lesions, components, contacts, members):
                deferred = _defer(lesions, contacts, members, group, deferred)
            for member in members:
                match = lesions.match[member]
                if match >= 0:
                    lesions.shared[member, floor, kept] = contacts.overlap[match]
                    lesions.union[member, floor, kept] = contacts.union[match]
    return deferred


@compiled
def _collect_group(lesions: Lesions, components: Components, contacts: Contacts, seed: int, floor: int) -> int:
    """Queue the lesions that hang together with one through active contacts; their number."""
    lesions.queue[0] = seed
    lesions.mark[seed] = 1
    count, position = 1, 0
    while position < count:
        index = lesions.head[lesions.queue[position]]
        while index >= 0:
            component = contacts.component[index]
            first = components.contacts[component]
            for other in range(first, first + components.degree[component, floor] * contacts.active[index]):
                neighbour = contacts.lesion[other]
                if contacts.active[other] and lesions.mark[neighbour] == 0:
                    lesions.mark[neighbour] = 1
                    lesions.queue[count] = neighbour
                    count += 1
            index = contacts.following[index]
        position += 1
    return count


@compiled
def _prepare(
    lesions: Lesions, components: Components, contacts: Contacts, members: Counts, floor: int, kept: int
) -> None:
    """Clear the state of the lesions and bridges of a group."""
    for lesion in members:
        lesions.match[lesion] = -1
        lesions.dual[lesion] = 0.0
        lesions.leaf[lesion] = lesions.shared[lesion, floor, kept] / lesions.union[lesion, floor, kept]
        index = lesions.head[lesion]
        while index >= 0:
            component = contacts.component[index]
            components.owner[component] = -1
            components.done[component] = 0
            components.reach[component] = np.inf
            components.dual[component] = 0.0
            index = contacts.following[index]


@compiled
def _augment(lesions: Lesions, components: Components, contacts: Contacts, start: int) -> None:
    """Add a lesion to a best matching, along a shortest augmenting path of reduced costs (Dijkstra; cost is minus IoU).

    A path ends at a free bridge, or at a lesion that does without.
    """
    lesion, distance, touched, component = start, 0.0, 0, -1
    end, end_distance = start, np.inf
    while True:
        without = distance - lesions.leaf[lesion] - lesions.dual[lesion]
        if without < end_distance:
            end, end_distance = lesion, without
        touched = _relax(lesions, components, contacts, lesion, distance, touched)
        component = _nearest(components, touched)
        if component < 0 or components.reach[component] >= end_distance:
            component = -1
            break
        distance = components.reach[component]
        components.done[component] = 1
        if components.owner[component] < 0:
            end_distance = distance
            break
        lesion = int(contacts.lesion[components.owner[component]])
    _update_duals(lesions, components, contacts, start, end_distance, touched)
    if component < 0 and end != start:
        component = int(contacts.component[lesions.match[end]])
        lesions.match[end] = -1
    _hand_on(lesions, components, contacts, start, component)


@compiled
def _relax(
    lesions: Lesions, components: Components, contacts: Contacts, lesion: int, distance: float, touched: int
) -> int:
    """Shorten the ways to the bridges of a lesion; the number of bridges reached so far."""
    index = lesions.head[lesion]
    while index >= 0:
        component = contacts.component[index]
        if contacts.active[index] and not components.done[component]:
            reach = distance - contacts.weight[index] - lesions.dual[lesion] - components.dual[component]
            if components.reach[component] == np.inf:
                components.touched[touched] = component
                touched += 1
            if reach < components.reach[component]:
                components.reach[component] = reach
                components.came[component] = index
        index = contacts.following[index]
    return touched


@compiled
def _nearest(components: Components, touched: int) -> int:
    """The nearest bridge reached and not yet passed, or -1."""
    nearest = -1
    for component in components.touched[:touched]:
        if not components.done[component] and (nearest < 0 or components.reach[component] < components.reach[nearest]):
            nearest = int(component)
    return nearest


@compiled
def _update_duals(
    lesions: Lesions, components: Components, contacts: Contacts, start: int, distance: float, touched: int
) -> None:
    """Keep reduced costs non-negative, and zero along the path; forget the search."""
    lesions.dual[start] += distance
    for component in components.touched[:touched]:
        if components.done[component]:
            change = distance - components.reach[component]
            components.dual[component] -= change
            if components.owner[component] >= 0:
                lesions.dual[contacts.lesion[components.owner[component]]] += change
        components.done[component] = 0
        components.reach[component] = np.inf


@compiled
def _hand_on(lesions: Lesions, components: Components, contacts: Contacts, start: int, component: int) -> None:
    """Give a bridge to the lesion the search came from, the former bridge of that to the one before, to the start."""
    while component >= 0:
        index = components.came[component]
        lesion = contacts.lesion[index]
        former = lesions.match[lesion]
        lesions.match[lesion] = index
        components.owner[component] = index
        component = -1 if lesion == start else int(contacts.component[former])


@compiled
def _is_settled(lesions: Lesions, components: Components, contacts: Contacts, members: Counts) -> bool:
    """Whether every other matching of the group has a total smaller by more than `TIE`.

    Another matching differs by alternating cycles and paths, and costs more by the sum of the reduced costs of its own
    contacts. If no cycle, and no path to a free bridge or to a lesion that could do without, uses tight contacts only,
    that sum is above `TIE`. Lesions from which tight contacts lead to neither are set aside until none is left.
    """
    left, before = members.size, members.size + 1
    while 0 < left < before:
        before = left
        for lesion in members:
            if lesions.mark[lesion] == 1 and _leads_nowhere(lesions, components, contacts, lesion):
                lesions.mark[lesion] = 2
                left -= 1
    return left == 0


@compiled
def _leads_nowhere(lesions: Lesions, components: Components, contacts: Contacts, lesion: int) -> bool:
    """Whether the tight contacts of a lesion lead only to bridges of lesions set aside."""
    match = lesions.match[lesion]
    if match >= 0 and -lesions.leaf[lesion] - lesions.dual[lesion] <= TIE:
        return False
    index = lesions.head[lesion]
    while index >= 0:
        component = contacts.component[index]
        slack = -contacts.weight[index] - lesions.dual[lesion] - components.dual[component]
        if contacts.active[index] and index != match and slack <= TIE:
            owner = components.owner[component]
            if owner < 0 or lesions.mark[contacts.lesion[owner]] != 2:
                return False
        index = contacts.following[index]
    return True


@compiled
def _defer(
    lesions: Lesions, contacts: Contacts, members: Counts, group: tuple[int, int, int, int], deferred: Counts
) -> Counts:
    """Leave a group to exact matching: store its pairs, and take its lesions out of the counts."""
    reference, kept, floor, level = group
    deferred = _reserve(deferred, 5)
    start = deferred[0]
    _store(deferred, reference, kept, floor, level)
    deferred[0] += 1
    for lesion in members:
        deferred = _reserve(deferred, 4 + 4 * int(lesions.degree[lesion]))
        if lesions.shared[lesion, floor, kept] > 0:
            own = -1 - lesion
            _store(deferred, lesion, own, lesions.shared[lesion, floor, kept], lesions.union[lesion, floor, kept])
        index = lesions.head[lesion]
        while index >= 0:
            if contacts.active[index]:
                component, overlap = int(contacts.component[index]), int(contacts.overlap[index])
                _store(deferred, lesion, component, overlap, int(contacts.union[index]))
            index = contacts.following[index]
        lesions.match[lesion] = -1
        lesions.shared[lesion, floor, kept] = 0
        lesions.union[lesion, floor, kept] = 1
    deferred[start + 4] = (deferred[0] - start - 5) // 4
    return deferred


@compiled
def _reserve(deferred: Counts, size: int) -> Counts:
    """Make room for more: element 0 is the number of elements in use."""
    used = deferred[0]
    if used + size <= deferred.size:
        return deferred
    larger = np.empty(2 * (used + size), np.int64)
    larger[:used] = deferred[:used]
    return larger


@compiled
def _store(deferred: Counts, one: int, two: int, three: int, four: int) -> None:
    """Append four numbers."""
    end = deferred[0]
    deferred[end], deferred[end + 1], deferred[end + 2], deferred[end + 3] = one, two, three, four
    deferred[0] = end + 4
