"""Every threshold, post-processing and lesion of one anomaly map in one pass.

Voxels are visited in descending score. A union-find keeps the connected components of what is predicted so far, so each
of the 201 levels is read off in passing instead of labelling the volume 201 times (component trees: Salembier et al.
1998, doi:10.1109/83.663500; flooding by union-find: Najman and Couprie 2006, doi:10.1109/TIP.2006.877518).

Levels and buckets. Level k predicts `A > float32(k / 200)`, and hysteresis at level k asks for a voxel with
`A > float32((k + 200) / 400)`. Both are points of the grid `float32(i / 400)`, at i = 2 k and i = k + 200. The bucket
of a score is the number of grid points below it: level k predicts the buckets above 2 k, and a component is kept by
hysteresis when it holds a bucket above k + 200.

What hysteresis keeps. As k falls, components only grow or merge, and the bucket that hysteresis asks for falls too: a
component that is kept stays part of a kept one, so the list of those kept is brought up to date level by level instead
of made anew. The first voxel of a component to be visited has its highest bucket, and no predicted neighbour then: it
is a birth. Components are numbered by birth and a younger one merges into the older, so the root of a component tells
its highest bucket, and the births that qualify at a level are a range of numbers.

Lesions. A fragment is the part of one lesion inside one component. Fragments are listed per lesion and brought up to
date at each level (their roots looked up, those of one component joined). A component that touches one lesion concerns
that lesion only, which keeps its best. Components that touch several (bridges) are assigned at once where they share no
lesion, by exact comparison; the few groups of lesions and bridges that remain are stored, and matched after the pass
(`ingest.lesions.match_lesions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingest.compiled import compiled
from ingest.lesions import Connectivity, LabelledReference, match_lesions, neighbour_offsets, smallest_count

LEVELS = 201
BUCKETS = 401
POSTPROCESSES = ("plain", "hysteresis", "hysteresis_pruned")
LESION_FLOORS = ("floor", "all")
HIT_CRITERIA = ("iou_10", "iou_25", "iou_50", "any_overlap")
LARGEST_VOLUME = 2**30
"""Padded voxels. Up to it, `2 * voxels + 1` fits int32, and sums of products of two voxel counts fit int64."""

BLOCK = 32
"""Voxels whose neighbours are read ahead: their cache lines fit the first-level cache."""

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

    def lend(self, padded_voxels: int, components: int) -> tuple[Indices, Indices, Indices, Indices, Indices]:
        """Lend labels, all zero, and four arrays over components."""
        labels, self._labels = self._labels, np.zeros(0, np.int32)
        labels = labels if labels.size >= padded_voxels else np.zeros(padded_voxels, np.int32)
        _, parents, sizes, numbers, alive = self._grow(components)
        return labels, parents, sizes, numbers, alive

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
        scores: The map; it must stay as it is while the order is in use.
        support: The support.
        voxels: Voxel numbers in the padded volume, by descending bucket.
        bounds: Element b is the number of voxels above bucket b, shape (401,).
        strides: Step of a voxel number along each axis of the map.
        padded_voxels: Voxels of the padded volume.
        workspace: Where the buffers come from.
        serial: Which order of its workspace this is.
    """

    scores: NDArray[np.float32]
    support: NDArray[np.bool_]
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
        hits: Lesions hit [reference, voxel volume, P, F, `HIT_CRITERIA`, level]. The IoU is that of the
            matching of largest total IoU, ties to the lower lesion (`ingest.lesions`).
        lesion_count: Lesions [reference, voxel volume, F].
        lesion_ids: Lesions of the first reference above the floor under the first voxel volume [lesion].
        matched_iou: IoU of the component matched with each of these, 0 where there is none [lesion, P, level].
        overlap_voxels: Predicted voxels in each of these, matched or not [lesion, P, level].
        max_score: Highest score in each of these [lesion].
        components: One row per level and plain component that overlaps the first reference, by descending level: level,
            voxels, and how many of them are reference voxels. None unless they are asked for.
    """

    predicted: Counts
    true_positive: Counts
    hits: Counts
    lesion_count: Counts
    lesion_ids: Counts
    matched_iou: Reals
    overlap_voxels: Counts
    max_score: NDArray[np.float32]
    components: Counts


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
        ValueError: The shapes or types do not fit, a score in the support is outside [0, 1] or not a number, or the
            volume is beyond 2**30 voxels.
    """
    if scores.ndim != 3 or scores.shape != support.shape:
        raise ValueError(f"scores {scores.shape} and support {support.shape} must be 3-D and of one shape")
    if scores.dtype != np.float32 or support.dtype != np.bool_:
        raise ValueError(f"scores must be float32 and the support bool, not {scores.dtype} and {support.dtype}")
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
    return VisitingOrder(scores, support, voxels[:count], bounds, strides, padded_voxels, workspace, workspace.serial)


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
    alive: Indices
    """The roots that hysteresis keeps."""
    steps: Counts
    """Steps to the neighbours of a voxel."""
    lines: Counts
    """Steps to the lines of memory that hold them."""
    near: Counts
    near_labels: Indices
    """Scratch: the predicted neighbours of a voxel."""
    minimums: Counts
    """Smallest voxel counts of the kept sets, ascending; the first is 0: hysteresis without pruning."""


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
    peaks: NDArray[np.float32]
    """Highest score."""
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
    is_seen: NDArray[np.bool_]
    """Whether a lesion is in a group."""
    queue: Counts
    """Lesions of the group at hand."""
    present: Counts
    """Lesions of the reference at hand that hold a predicted voxel."""


class Fragments(NamedTuple):
    """Parts of lesions inside one component; those of one lesion stand together, with room for each of its voxels."""

    first: Counts
    held: Counts
    """Fragments of each lesion."""
    lesion: Counts
    root: Counts
    """Root of the component at the last update, or the label of a new voxel."""
    code: Counts
    """Code of the component at the last update."""
    overlap: Counts
    component: Counts
    following: Counts
    """Next fragment of the same component, or -1."""


class Components(NamedTuple):
    """The components that touch a lesion of one reference at one level."""

    root: Counts
    code: Counts
    rank: Counts
    """Number of the last filter passed: 0 predicted, 1 kept by hysteresis, 2... above the pruning sizes."""
    degree: Counts
    """Lesions of each set touched [component, F]."""
    head: Counts
    """First fragment, of the lowest lesion."""
    last: Counts
    """Last fragment."""
    bridges: Counts
    """The components that touch several lesions."""
    contacts: Counts
    """First contact, of the lowest lesion; the others stand behind it."""


class Contacts(NamedTuple):
    """Pairs of a lesion and a bridge (a component that touches several lesions of the set), bridge by bridge."""

    lesion: Counts
    component: Counts
    overlap: Counts
    union: Counts
    following: Counts
    """Next contact of the same lesion, or -1."""
    active: Counts


class Output(NamedTuple):
    """What the pass writes; `source` is the level whose counts hold at a level, where nothing about lesions changed."""

    predicted: Counts
    true_positive: Counts
    hits: Counts
    source: Counts
    matched_iou: Reals
    overlap_voxels: Counts


class Passed(NamedTuple):
    """What the pass leaves behind in lists of its own length; element 0 of each is the number of elements in use."""

    groups: Counts
    """Groups of lesions and bridges that are left to be matched."""
    components: Counts
    """Four numbers per component that overlaps the first reference, where that changed: level, voxels, overlap, 0."""


def sweep(
    order: VisitingOrder,
    references: Sequence[LabelledReference],
    connectivity: Connectivity,
    voxel_volumes_mm3: Sequence[float],
    minimum_component_mm3: float,
    lesion_floor_mm3: float,
    *,
    lists_components: bool = False,
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
        lists_components: Whether to list the components that overlap the first reference at each level.

    Returns:
        The counts, 0 wherever nothing is predicted, so also for an empty support, an empty reference, and at level 200.

    Raises:
        ValueError: The order is stale, there is no voxel volume, or a reference has another shape, support or
            connectivity.
    """
    _check_inputs(order, references, connectivity, voxel_volumes_mm3)
    pruned = [smallest_count(minimum_component_mm3, volume) for volume in voxel_volumes_mm3]
    floor = [smallest_count(lesion_floor_mm3, volume) for volume in voxel_volumes_mm3]
    minimums, floors = (np.unique(np.array([0, *counts], np.int64)) for counts in (pruned, floor))
    lesions = _lesions(references, floors, floor[0], filters=minimums.size + 1)
    output = _output(lesions, filters=minimums.size + 1)
    followed_floor = int(np.searchsorted(floors, floor[0]))
    passed = _run(order, references, connectivity, minimums, lesions, (followed_floor, lists_components), output)
    _match_groups(passed.groups, followed_floor, lesions, output)
    kept = [np.array([0, 1, 1 + int(np.searchsorted(minimums, count))]) for count in pruned]
    sets = [np.array([np.searchsorted(floors, count), 0]) for count in floor]
    components = passed.components[1 : passed.components[0]].reshape(-1, 4)[:, :3]
    return _assemble(references, lesions, output, kept, sets, components)


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
        if not order.support[tuple(reference.voxels.T)].all():
            raise ValueError("a reference holds voxels outside the support of the map: label it in the same support")


def _lesions(references: Sequence[LabelledReference], floors: Counts, floor: int, filters: int) -> Lesions:
    """Lesions of all references in one list; the first reference's lesions above the true floor get output rows."""
    first = np.cumsum([0, *(reference.sizes.size for reference in references)], dtype=np.int64)
    sizes = np.concatenate([np.zeros(0, np.int64), *(reference.sizes for reference in references)])
    count = sizes.size
    rows = np.full(count, -1, np.int64)
    if references:
        followed = np.flatnonzero(references[0].sizes >= floor)
        rows[followed] = np.arange(followed.size)
    return Lesions(
        first=first,
        sizes=sizes,
        floors=floors,
        rows=rows,
        peaks=np.zeros(count, np.float32),
        overlap=np.zeros((count, filters), np.int64),
        shared=np.zeros((count, floors.size, filters), np.int64),
        union=np.ones((count, floors.size, filters), np.int64),
        head=np.zeros(count, np.int64),
        degree=np.zeros(count, np.int64),
        is_seen=np.zeros(count, np.bool_),
        queue=np.zeros(count, np.int64),
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
    wanted: tuple[int, bool],
    output: Output,
) -> Passed:
    """Run the compiled pass in the buffers of the workspace.

    Wanted are the lesions above some floor, followed one by one, and perhaps the components that overlap the reference.
    """
    offsets = neighbour_offsets(connectivity)
    labels, parents, sizes, numbers, alive = order.workspace.lend(order.padded_voxels, order.voxels.size + 1)
    forest = Forest(
        labels=labels,
        parents=parents,
        sizes=sizes,
        numbers=numbers,
        alive=alive,
        steps=offsets @ order.strides,
        lines=np.unique(offsets @ np.where(order.strides == 1, 0, order.strides)),
        near=np.empty(connectivity + 1, np.int64),
        near_labels=np.empty(connectivity + 1, np.int32),
        minimums=minimums,
    )
    visits = _visits(order, references, lesions)
    most = max((reference.lesion_ids.size for reference in references), default=0)
    passed = _sweep_levels(
        order.voxels,
        order.bounds,
        forest,
        visits,
        lesions,
        _fragments(lesions.sizes),
        _components(most, lesions.floors.size),
        _contacts(most),
        wanted,
        output,
    )
    order.workspace.take_back(labels)
    return passed


def _visits(order: VisitingOrder, references: Sequence[LabelledReference], lesions: Lesions) -> Visits:
    """Reference voxels that are predicted at some level, each reference's by descending level."""
    size = sum(reference.lesion_ids.size for reference in references)
    visits = Visits(
        voxels=np.empty(size, np.int32),
        lesions=np.empty(size, np.int32),
        bounds=np.zeros((len(references), LEVELS + 1), np.int64),
    )
    start = 0
    for index, reference in enumerate(references):
        scores = order.scores[tuple(reference.voxels.T)]
        _place_visits(
            reference.voxels, scores, reference.lesion_ids, order.strides, GRID, start, index, lesions, visits
        )
        start += scores.size
    return visits


def _fragments(sizes: Counts) -> Fragments:
    """No fragments yet, and room for as many as the lesions have voxels."""
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    blank = [np.empty(int(first[-1]), np.int64) for _ in range(5)]
    return Fragments(
        first=first,
        held=np.zeros(sizes.size, np.int64),
        lesion=np.repeat(np.arange(sizes.size, dtype=np.int64), sizes),
        root=blank[0],
        code=blank[1],
        overlap=blank[2],
        component=blank[3],
        following=blank[4],
    )


def _components(most: int, floors: int) -> Components:
    """Room for the components that touch a reference of so many voxels; pages not written cost nothing."""
    blank = [np.empty(most, np.int64) for _ in range(7)]
    return Components(
        root=blank[0],
        code=blank[1],
        rank=blank[2],
        degree=np.empty((most, floors), np.int64),
        head=blank[3],
        last=blank[4],
        bridges=blank[5],
        contacts=blank[6],
    )


def _contacts(most: int) -> Contacts:
    """Room for the contacts of a reference of so many voxels."""
    blank = [np.empty(most, np.int64) for _ in range(6)]
    return Contacts(*blank)


def _match_groups(groups: Counts, followed_floor: int, lesions: Lesions, output: Output) -> None:
    """Match the groups that the pass has stored, and add their lesions to the counts."""
    position = 1
    known: dict[bytes, Counts] = {}
    while position < groups[0]:
        reference, kept, floor, level, count = (int(value) for value in groups[position : position + 5])
        pairs = groups[position + 5 : position + 5 + 4 * count].reshape(-1, 4)
        position += 5 + 4 * count
        key = pairs.tobytes()
        if key not in known:
            known[key] = match_lesions(pairs)
        matched, shared, union = known[key].T
        for criterion, factor in enumerate((10, 4, 2)):
            output.hits[reference, kept, floor, criterion, level] += np.count_nonzero(shared * factor >= union)
        rows = lesions.rows[matched]
        if floor == followed_floor:
            output.matched_iou[level, kept, rows[rows >= 0]] = (shared / union)[rows >= 0]


def _assemble(
    references: Sequence[LabelledReference],
    lesions: Lesions,
    output: Output,
    kept: Sequence[NDArray[np.int64]],
    sets: Sequence[NDArray[np.int64]],
    components: Counts,
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
        max_score=lesions.peaks[followed],
        components=_at_every_level(components, source),
    )


def _at_every_level(components: Counts, source: Counts) -> Counts:
    """Rows by descending level, those of an unchanged level repeated from its source."""
    held = np.bincount(components[:, 0], minlength=LEVELS)
    first = components.shape[0] - np.cumsum(held)
    levels = np.repeat(np.arange(LEVELS)[::-1], held[source][::-1])
    start = np.searchsorted(-levels, -levels)  # of the level, among the rows to come
    rows = components[first[source][levels] + np.arange(levels.size) - start]
    rows[:, 0] = levels
    return rows


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
                    bucket = _bucket(score, grid)
                    voxels[count] = first + column
                    buckets[count] = bucket
                    histogram[bucket] += 1
                    count += 1
    return count


@compiled
def _bucket(score: float, grid: NDArray[np.float32]) -> int:
    """Number of grid points below a score: `400 * score`, which is exact in float64, is within one of it."""
    bucket = int(score * 400.0)
    while bucket < grid.size and grid[bucket] < score:
        bucket += 1
    return bucket


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
def _place_visits(
    coordinates: Indices,
    scores: NDArray[np.float32],
    lesion_ids: Indices,
    strides: Counts,
    grid: NDArray[np.float32],
    start: int,
    reference: int,
    lesions: Lesions,
    visits: Visits,
) -> None:
    """Counting sort of the voxels of a reference by descending level; and the highest score in each lesion."""
    levels = np.empty(scores.size, np.int64)
    ends = visits.bounds[reference]
    for index in range(scores.size):
        lesion = lesions.first[reference] + lesion_ids[index] - 1
        lesions.peaks[lesion] = max(lesions.peaks[lesion], scores[index])
        levels[index] = (_bucket(scores[index], grid) + 1) // 2 - 1
        if levels[index] >= 0:
            ends[levels[index]] += 1
    ends[LEVELS] = start
    for level in range(LEVELS - 1, -1, -1):
        ends[level] += ends[level + 1]
    places = ends.copy()
    for index in range(scores.size):
        if levels[index] >= 0:
            place = places[levels[index] + 1]
            places[levels[index] + 1] += 1
            voxel = 0
            for axis in range(3):
                voxel += (coordinates[index, axis] + 1) * strides[axis]
            visits.voxels[place] = voxel
            visits.lesions[place] = lesions.first[reference] + lesion_ids[index] - 1


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
    wanted: tuple[int, bool],
    output: Output,
) -> Passed:
    """The pass: flood each level, keep what qualifies, read the lesions off. Leaves the labels zero."""
    followed_floor, lists_components = wanted
    groups, listed = np.ones(1024, np.int64), np.ones(1024, np.int64)
    births = np.ones(BUCKETS + 1, np.int64)
    kept = births[BUCKETS]
    alive = kept - 1
    for level in range(LEVELS - 2, -1, -1):
        for bucket in (2 * level + 2, 2 * level + 1):
            births[bucket] = _flood(forest, voxels, bounds[bucket], bounds[bucket - 1], births[bucket + 1])
        born, kept = kept, births[level + LEVELS]
        output.predicted[0, level] = bounds[2 * level]
        alive = _count_kept(forest, alive, born, kept, output.predicted, level)
        for reference in range(lesions.first.size - 1):
            _append_visits(visits, forest.labels, fragments, reference, level)
            present = lesions.present[: _list_present(lesions, fragments, reference)]
            if _is_unchanged(forest, fragments, present, kept):
                output.source[reference, level] = output.source[reference, level + 1]
            else:
                where = (reference, level, followed_floor)
                count, bridges = _update_fragments(forest, lesions, fragments, components, present)
                _describe(forest, components, count, kept)
                if lists_components and reference == 0:
                    listed = _list_components(fragments, components, count, level, listed)
                groups = _read_lesions(
                    lesions, fragments, components, contacts, present, bridges, where, output, groups
                )
    _clear(forest.labels, voxels)
    return Passed(groups, listed)


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
def _flood(forest: Forest, voxels: Indices, first: int, last: int, births: int) -> int:
    """Predict the voxels of one bucket, joining them with their predicted neighbours; 1 + the births so far.

    Whether a neighbour is predicted is as good as random, so the predicted ones are listed without branching; and the
    neighbours of a block of voxels are read once beforehand, to have them in the cache when branches depend on them.
    Their labels are brought up to date in passing, which keeps the ways to the roots short.
    """
    labels, parents, sizes = forest.labels, forest.parents, forest.sizes
    steps, near, near_labels = forest.steps, forest.near, forest.near_labels
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        near_labels[steps.size] = _touch(labels, voxels, start, stop, forest.lines)
        for index in range(start, stop):
            voxel = voxels[index]
            count = 0
            for step in range(steps.size):
                label = labels[voxel + steps[step]]
                near[count] = voxel + steps[step]
                near_labels[count] = label
                count += label != 0
            root = 0
            for place in range(count):
                label = int(near_labels[place])
                if label != root:
                    found = _root(parents, label)
                    labels[near[place]] = found
                    if root == 0:
                        root = found
                    elif found != root:
                        older, younger = min(root, found), max(root, found)
                        parents[younger] = older
                        sizes[older] += sizes[younger]
                        root = older
            if root == 0:
                root = births
                births += 1
                parents[root] = root
                sizes[root] = 0
            sizes[root] += 1
            labels[voxel] = root
    return births


@compiled
def _touch(labels: Indices, voxels: Indices, first: int, last: int, lines: Counts) -> int:
    """Read the memory around voxels; the result only keeps the compiler from leaving that out."""
    seen = 0
    for index in range(first, last):
        voxel = voxels[index]
        for line in range(lines.size):
            seen ^= int(labels[voxel + lines[line]])
    return seen


@compiled
def _count_kept(forest: Forest, alive: int, born: int, kept: int, predicted: Counts, level: int) -> int:
    """Sum the voxels of the components that hysteresis keeps, in each kept set; list those, and return their number.

    Those of the level before stay unless they have merged into older ones; of the births that qualify at this level
    (from `born` up to `kept`), the roots join them.
    """
    parents, sizes, roots, minimums = forest.parents, forest.sizes, forest.alive, forest.minimums
    count = 0
    for index in range(alive + kept - born):
        root = int(roots[index]) if index < alive else born + index - alive
        if parents[root] == root:
            roots[count] = root
            count += 1
            for place in range(minimums.size):
                if sizes[root] >= minimums[place]:
                    predicted[1 + place, level] += sizes[root]
    return count


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
def _list_components(fragments: Fragments, components: Components, count: int, level: int, listed: Counts) -> Counts:
    """List the components that touch a lesion at one level: level, voxels, and voxels in lesions."""
    for component in range(count):
        overlap = 0
        slot = components.head[component]
        while slot >= 0:
            overlap += int(fragments.overlap[slot])
            slot = fragments.following[slot]
        listed = _append(listed, level, int(components.code[component] >> 1), overlap, 0)
    return listed


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
    groups: Counts,
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
                groups = _store_groups(lesions, components, contacts, count, group, groups)
            _count_hits(lesions, present, output.hits, (reference, kept, floor, level))
    _count_overlaps(lesions, present, reference, level, followed_floor, output)
    return groups


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
def _count_hits(lesions: Lesions, present: Counts, hits: Counts, group: tuple[int, int, int, int]) -> None:
    """Count the lesions of a set hit under each criterion."""
    reference, kept, floor, level = group
    for lesion in present:
        shared, union = lesions.shared[lesion, floor, kept], lesions.union[lesion, floor, kept]
        hits[reference, kept, floor, 0, level] += shared * 10 >= union
        hits[reference, kept, floor, 1, level] += shared * 4 >= union
        hits[reference, kept, floor, 2, level] += shared * 2 >= union
        hits[reference, kept, floor, 3, level] += (
            lesions.overlap[lesion, kept] > 0 and lesions.sizes[lesion] >= lesions.floors[floor]
        )


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
                union = lesions.union[lesion, followed_floor, kept]
                output.matched_iou[level, kept, row] = lesions.shared[lesion, followed_floor, kept] / union
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
        lesions.is_seen[lesion] = False
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
    for bridge in range(bridges):
        component = components.bridges[bridge]
        first = int(components.contacts[component])
        last = first + int(components.degree[component, floor]) * (components.degree[component, floor] > 1)
        best = _choose_single(lesions, contacts, first, last, floor, kept)
        if best < last:
            lesion = contacts.lesion[best]
            lesions.shared[lesion, floor, kept] = contacts.overlap[best]
            lesions.union[lesion, floor, kept] = contacts.union[best]
            contacts.active[best] = 0


@compiled
def _choose_single(lesions: Lesions, contacts: Contacts, first: int, last: int, floor: int, kept: int) -> int:
    """Put aside all but the best of the lesions that a bridge alone would serve.

    Returns that contact, or `last` where there is none, or where the bridge has other lesions too.
    """
    best = last
    is_shared = False
    for index in range(first, last):
        if contacts.active[index] and lesions.degree[contacts.lesion[index]] > 1:
            is_shared = True
        elif contacts.active[index] and best == last:
            best = index
        elif contacts.active[index]:
            worse = index
            if _gains_more(lesions, contacts, index, best, floor, kept):
                best, worse = index, best
            contacts.active[worse] = 0
    return last if is_shared else best


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
def _store_groups(
    lesions: Lesions,
    components: Components,
    contacts: Contacts,
    count: int,
    group: tuple[int, int, int, int],
    groups: Counts,
) -> Counts:
    """Store the groups of lesions and bridges that hang together through active contacts, and leave them unmatched."""
    _, kept, floor, _ = group
    for index in range(count):
        seed = int(contacts.lesion[index])
        if contacts.active[index] and lesions.degree[seed] > 1 and not lesions.is_seen[seed]:
            members = _collect_group(lesions, components, contacts, seed, floor)
            groups = _store_group(lesions, contacts, members, group, groups)
            for member in range(members):
                lesions.shared[lesions.queue[member], floor, kept] = 0
                lesions.union[lesions.queue[member], floor, kept] = 1
    return groups


@compiled
def _collect_group(lesions: Lesions, components: Components, contacts: Contacts, seed: int, floor: int) -> int:
    """Queue the lesions that hang together with one; their number."""
    lesions.queue[0] = seed
    lesions.is_seen[seed] = True
    count, position = 1, 0
    while position < count:
        index = lesions.head[lesions.queue[position]]
        while index >= 0:
            component = contacts.component[index]
            first = components.contacts[component]
            for other in range(first, first + components.degree[component, floor] * contacts.active[index]):
                neighbour = contacts.lesion[other]
                if contacts.active[other] and not lesions.is_seen[neighbour]:
                    lesions.is_seen[neighbour] = True
                    lesions.queue[count] = neighbour
                    count += 1
            index = contacts.following[index]
        position += 1
    return count


@compiled
def _store_group(
    lesions: Lesions, contacts: Contacts, members: int, group: tuple[int, int, int, int], groups: Counts
) -> Counts:
    """Store reference, filter, floor, level, the number of pairs, and the pairs: lesion, component, overlap, union.

    What a lesion has without bridges is a pair with a component of its own.
    """
    reference, kept, floor, level = group
    start = groups[0]
    groups = _append(groups, reference, kept, floor, level)
    groups[0] += 1
    for member in range(members):
        lesion = lesions.queue[member]
        shared, union = lesions.shared[lesion, floor, kept], lesions.union[lesion, floor, kept]
        if shared > 0:
            groups = _append(groups, lesion, -1 - lesion, shared, union)
        index = lesions.head[lesion]
        while index >= 0:
            if contacts.active[index]:
                component, overlap = int(contacts.component[index]), int(contacts.overlap[index])
                groups = _append(groups, lesion, component, overlap, int(contacts.union[index]))
            index = contacts.following[index]
    groups[start + 4] = (groups[0] - start - 5) // 4
    return groups


@compiled
def _append(groups: Counts, one: int, two: int, three: int, four: int) -> Counts:
    """Append four numbers, and leave room for one more; element 0 is the number of elements in use."""
    end = groups[0]
    if end + 5 > groups.size:
        larger = np.empty(2 * groups.size, np.int64)
        for index in range(end):
            larger[index] = groups[index]
        groups = larger
    groups[end] = one
    groups[end + 1] = two
    groups[end + 2] = three
    groups[end + 3] = four
    groups[0] = end + 4
    return groups
