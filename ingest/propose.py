"""Proposing a transform for a method from its own references: how were they stored, seen from the canonical ones?

Only masks are compared, never scores: a transform that is chosen where scores look best would flatter the method. Every
axis order, reversal, crop and scale that a study file can declare is in reach. Along one axis at a time, profiles of
the two masks (voxels by index) say cheaply which starts and extents are worth a look; what they leave is judged by the
overlap of the masks themselves.

Masks cannot say everything. One that was stored at half the resolution by taking every other voxel lies as well one
canonical voxel further on; and a mask that looks the same in a mirror does not say whether its axis runs backwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import permutations, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expectations.study import Study, TransformTable
from ingest.compiled import compiled
from ingest.grid import Index, Shape, Transform, field_of_view, nearest_table
from ingest.nifti import read_header
from ingest.plan import Entry, plan_study
from ingest.problems import BadInput
from ingest.volumes import load_own_reference, load_reference, resolve_transform

Mask = NDArray[np.bool_]
Start = int | Literal["centre"]
Extent = int | Literal["full"]
Along = tuple[Start, Extent]

# Canonical voxels per stored voxel that exports use, beside those that the shapes and the voxel counts imply.
SCALES = tuple(Fraction(text) for text in ("1", "2", "3", "4", "1/2", "1/3", "1/4", "3/2", "2/3", "4/3", "3/4"))
ALONG_KEPT = 8  # starts and extents kept per stored axis, canonical axis and reversal
PLACES_KEPT = 8  # combinations of them kept per axis order and reversals
REFINED = 6  # of all combinations, how many are moved by single voxels in search of better ones
SAMPLED_VOXELS = 4_000  # of each mask, while combinations are compared
SHOWN = 3


@dataclass(frozen=True)
class Pair:
    """The two masks of one subject: the own reference as stored, and the canonical one; neither is empty.

    Attributes:
        subject_id: The subject.
        own: The own reference as stored.
        reference: The canonical reference.
        thinned_to: How many voxels of each mask to compare at most, evenly chosen; all by default.
    """

    subject_id: str
    own: Mask
    reference: Mask
    thinned_to: int | None = None

    @property
    def shape(self) -> Shape:
        """Canonical shape."""
        first, second, third = self.reference.shape
        return first, second, third

    @cached_property
    def own_voxels(self) -> Index:
        """Indices of the own reference's voxels, shape (n, 3); of some of them in a thinned pair."""
        return self._thinned(np.argwhere(self.own))

    @cached_property
    def reference_voxels(self) -> Index:
        """Indices of the canonical reference's voxels, shape (n, 3); of some of them in a thinned pair."""
        return self._thinned(np.argwhere(self.reference))

    @cached_property
    def own_weight(self) -> float:
        """How many voxels of the own reference each one listed stands for."""
        return np.count_nonzero(self.own) / len(self.own_voxels)

    @cached_property
    def reference_weight(self) -> float:
        """How many voxels of the canonical reference each one listed stands for."""
        return np.count_nonzero(self.reference) / len(self.reference_voxels)

    def _thinned(self, voxels: Index) -> Index:
        step = 1 if self.thinned_to is None else -(-len(voxels) // self.thinned_to)
        return np.ascontiguousarray(voxels[::step])

    def own_profile(self, axis: int) -> NDArray[np.float64]:
        """Share of the own reference at each index of a stored axis."""
        return np.bincount(self.own_voxels[:, axis], minlength=self.own.shape[axis]) / len(self.own_voxels)

    def reference_profile(self, axis: int) -> NDArray[np.float64]:
        """Share of the canonical reference at each index of a canonical axis."""
        return np.bincount(self.reference_voxels[:, axis], minlength=self.shape[axis]) / len(self.reference_voxels)


@dataclass(frozen=True)
class Proposal:
    """A transform with the overlap that it gives.

    Attributes:
        table: The transform, as a study file declares it.
        overlaps: Per subject, Dice of the mapped own reference with the *whole* canonical reference: what a small field
            of view leaves out counts against it, so that a view of a few voxels cannot win.
        dice_in_view: Mean Dice inside the field of view, as the gate measures it; 0 where both are empty there.
        in_view_fraction: Mean share of the canonical reference inside the field of view.
    """

    table: TransformTable
    overlaps: tuple[float, ...]
    dice_in_view: float
    in_view_fraction: float

    @property
    def overlap(self) -> float:
        """Mean over the subjects."""
        return float(np.mean(self.overlaps))

    @property
    def study_lines(self) -> str:
        """The transform as lines of a study file."""
        return study_lines(self.table)


@dataclass(frozen=True)
class Search:
    """What a search came to.

    Attributes:
        subject_ids: The subjects that it used.
        proposals: The best transforms, best first.
        declared: The declared transform on the same subjects; None where it does not fit the arrays.
        declared_place: Where it stands among the proposals, from 0; None where it is none of them.
    """

    subject_ids: tuple[str, ...]
    proposals: tuple[Proposal, ...]
    declared: Proposal | None
    declared_place: int | None

    def likeness(self, proposal: Proposal, tolerance: float) -> str | None:
        """Whether a proposal can be told from the best one, in words; None where it can.

        Args:
            proposal: One of the proposals, not the best.
            tolerance: Mean overlaps closer than this are not told apart: the gate's overlap tolerance.
        """
        best = self.proposals[0]
        if proposal.overlaps == best.overlaps:
            return "has the same overlap in every subject: these references are too symmetric to tell them apart"
        if best.overlap - proposal.overlap < tolerance:
            return f"is {best.overlap - proposal.overlap:.4f} below the best: too close to tell them apart"
        return None


def propose(study: Study, method_id: str, subject_count: int = 10) -> Search:
    """Search a method's transform in the own references of a few subjects.

    Args:
        study: The study; what it declares as the method's transform is not used, only compared.
        method_id: The method.
        subject_count: How many subjects to use: the first by id, of either split, with two masks that are not empty.

    Raises:
        BadInput: The study has no such method, it declares no own reference, no subject has two masks with a voxel, or
            a file is refused.
    """
    entry, pairs = _load(study, method_id, subject_count)
    proposals, declared = search_transforms(pairs), _declared(entry, pairs)
    places = [_reading(proposal.table, pairs) for proposal in proposals]
    reading = None if declared is None else _reading(declared.table, pairs)
    place = places.index(reading) if reading in places else None
    return Search(tuple(pair.subject_id for pair in pairs), proposals, declared, place)


def search_transforms(pairs: Sequence[Pair], shown: int = SHOWN) -> tuple[Proposal, ...]:
    """The best transforms of some pairs of masks, best first; equal ones in order of what is simplest to declare.

    Args:
        pairs: At least one; canonical and stored shapes may differ between subjects.
        shown: How many to return at most.
    """
    along = {
        (stored, axis, is_reversed): _worthwhile(pairs, stored, axis, is_reversed)
        for stored, axis, is_reversed in product(range(3), range(3), (False, True))
    }
    sampled = [replace(pair, thinned_to=SAMPLED_VOXELS) for pair in pairs]
    coarse = _ranked((judged(table, sampled) for table in _combinations(along)), sampled)
    refined: dict[TransformTable, None] = {}
    for proposal in coarse[:REFINED]:
        refined |= dict.fromkeys(_climbed(proposal, sampled, along))
    tables = dict.fromkeys([*refined, *(proposal.table for proposal in coarse[: 4 * REFINED])])
    exact = _ranked((judged(table, pairs) for table in tables), pairs)
    better = [judged(table, pairs) for table in _climbed(exact[0], pairs, along)]
    return tuple(_ranked([*better, *exact], pairs)[:shown])


def study_lines(table: TransformTable) -> str:
    """A transform as the lines of a study file that declare it.

    >>> print(study_lines(TransformTable(source_axis=(1, 0, 2), start=(0, 0, "centre"), extent=("full", "full", 131))))
    source_axis = [1, 0, 2]
    start = [0, 0, "centre"]
    extent = ["full", "full", 131]
    reversed = [false, false, false]
    """
    fields = {"source_axis": table.source_axis, "start": table.start, "extent": table.extent}
    written = {**fields, "reversed": table.reversed}
    return "\n".join(f"{name} = [{', '.join(map(_toml, values))}]" for name, values in written.items())


def _toml(value: int | bool | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _load(study: Study, method_id: str, subject_count: int) -> tuple[Entry, list[Pair]]:
    """The method's entry and the pairs of its first subjects."""
    plan = plan_study(study)
    methods = {entry.method_id: entry for entry in plan.entries if entry.kind != "baseline"}
    if method_id not in methods:
        known = ", ".join(methods) or "none"
        raise BadInput(
            str(study.path), f"declares no method {method_id} (declared: {known})", "Name one that it declares"
        )
    entry, pairs = methods[method_id], list[Pair]()
    for subject in plan.subjects:
        inputs = plan.maps[method_id, subject.subject_id]
        if inputs.own_reference is None:
            found = f"declares no own_reference of {method_id}, and scores must not choose a transform"
            raise BadInput(str(study.path), found, "Store your label as the maps are stored, and declare it")
        own = load_own_reference(inputs.own_reference, read_header(inputs.map.url).shape)
        reference = load_reference(subject.reference)
        if own.any() and reference.any():
            pairs.append(Pair(subject.subject_id, np.ascontiguousarray(own), reference))
        if len(pairs) == subject_count:
            break
    if not pairs:
        found = f"has no subject for whom both the reference and the own reference of {method_id} hold a voxel"
        raise BadInput(str(study.path), found, "Check the label sets and the files")
    return entry, pairs


def _declared(entry: Entry, pairs: Sequence[Pair]) -> Proposal | None:
    """The declared transform, judged on the same subjects; None where its source_size is not the arrays'."""
    try:
        return judged(entry.transform, pairs)
    except ValueError:
        return None


# Along one axis


def _extents(pairs: Sequence[Pair], stored: int, axis: int) -> list[Extent]:
    """Extents worth a look: the whole axis, one voxel per voxel, and what scales, shapes and voxel counts imply."""
    sizes = {pair.own.shape[stored] for pair in pairs}
    lengths = {pair.shape[axis] for pair in pairs}
    extents: list[Extent] = ["full"]
    if len(sizes) > 1:
        return extents
    size, shared = sizes.pop(), lengths.pop() if len(lengths) == 1 else None
    seen = [] if shared is None else [shared]
    for scale in (*SCALES, *_implied_scales(pairs)):
        extent = round(size * scale)
        is_new = all(abs(extent - other) > 1 for other in seen) or (extent == size and size not in seen)
        if is_new and 1 <= extent <= 2 * max(pair.shape[axis] for pair in pairs):
            seen.append(extent)
            extents.append(extent)
    return extents


def _implied_scales(pairs: Sequence[Pair]) -> Iterator[Fraction]:
    """Scales at which some stored axis spans some canonical one, and at which the two masks have one volume."""
    first = pairs[0]
    for stored, axis in product(range(3), range(3)):
        yield Fraction(first.shape[axis], first.own.shape[stored])
    ratios = [len(pair.reference_voxels) / len(pair.own_voxels) for pair in pairs]
    yield Fraction(float(np.median(ratios)) ** (1 / 3))


def _worthwhile(pairs: Sequence[Pair], stored: int, axis: int, is_reversed: bool) -> list[Along]:
    """Starts and extents along one axis whose profiles overlap most, best first."""
    lengths = [pair.shape[axis] for pair in pairs]
    own, reference = ([p.own_profile(stored) for p in pairs], [p.reference_profile(axis) for p in pairs])
    found: dict[Along, float] = {}
    for extent in _extents(pairs, stored, axis):
        spans = [length if extent == "full" else extent for length in lengths]
        lowest, highest = 1 - max(spans), max(lengths)
        scores = np.stack(
            [
                profile_overlaps(_spread(p[::-1] if is_reversed else p, span), q, lowest, highest)
                for p, q, span in zip(own, reference, spans, strict=True)
            ]
        )
        mean = scores.mean(axis=0)
        starts = {lowest + int(mean.argmax()), 0}
        if len(set(lengths)) == 1:
            starts |= {(lengths[0] - spans[0]) // 2, lengths[0] - spans[0]}
        else:
            centres = [(n - span) // 2 - lowest for n, span in zip(lengths, spans, strict=True)]
            found["centre", extent] = float(np.mean([row[c] for row, c in zip(scores, centres, strict=True)]))
        found |= {(start, extent): float(mean[start - lowest]) for start in starts if lowest <= start < highest}
    return sorted(found, key=lambda place: -found[place])[:ALONG_KEPT]


def _spread(profile: NDArray[np.float64], extent: int) -> NDArray[np.float64]:
    """A stored profile as the nearest map spreads it over an extent, scaled to sum 1."""
    nearest = ((2 * np.arange(extent) + 1) * profile.size) // (2 * extent)
    spread = profile[nearest]
    return spread / max(float(spread.sum()), np.finfo(float).tiny)


@compiled
def profile_overlaps(
    own: NDArray[np.float64], reference: NDArray[np.float64], lowest: int, highest: int
) -> NDArray[np.float64]:
    """Overlap of two profiles for every start in a range, were the masks alike but for this axis.

    With f the share of the reference in view and o the overlap of the two profiles there, each of sum 1, this is the
    Dice ``2 o f / (1 + f)`` with the whole reference.
    """
    scores = np.zeros(highest - lowest)
    for number in range(scores.size):
        start = lowest + number
        first, stop = max(start, 0), min(start + own.size, reference.size)
        in_view = 0.0
        for x in range(first, stop):
            in_view += reference[x]
        shared = 0.0
        for x in range(first, stop):
            shared += min(own[x - start] * in_view, reference[x])
        scores[number] = 2.0 * shared / (1.0 + in_view)
    return scores


# All axes together


def _table(source: Sequence[int], is_reversed: Sequence[bool], places: Sequence[Along]) -> TransformTable:
    (first, second, third), (i, j, k), (r, s, t) = places, source, is_reversed
    return TransformTable(
        source_axis=(i, j, k),
        start=(first[0], second[0], third[0]),
        extent=(first[1], second[1], third[1]),
        reversed=(r, s, t),
    )


def _combinations(along: dict[tuple[int, int, bool], list[Along]]) -> Iterator[TransformTable]:
    """For every axis order and reversals, the combinations of what looks best along each axis."""
    ranks = sorted(product(range(ALONG_KEPT), repeat=3), key=lambda rank: (sum(rank), rank))
    for source, is_reversed in product(permutations(range(3)), product((False, True), repeat=3)):
        lists = [along[source[axis], axis, is_reversed[axis]] for axis in range(3)]
        fitting = [rank for rank in ranks if all(r < len(kept) for r, kept in zip(rank, lists, strict=True))]
        for rank in fitting[:PLACES_KEPT]:
            yield _table(source, is_reversed, [kept[r] for r, kept in zip(rank, lists, strict=True)])


def _climbed(
    proposal: Proposal, pairs: Sequence[Pair], along: dict[tuple[int, int, bool], list[Along]]
) -> list[TransformTable]:
    """The way from a proposal to a better one, changing one axis at a time until nothing helps."""
    way = [proposal]
    while True:
        table = way[-1].table
        neighbours: list[TransformTable] = []
        for axis in range(3):
            places: list[Along] = [(start, extent) for start, extent in zip(table.start, table.extent, strict=True)]
            start, extent = places[axis]
            nearby: list[Along] = [(start + step, extent) for step in (-2, -1, 1, 2)] if isinstance(start, int) else []
            for place in (*along[table.source_axis[axis], axis, table.reversed[axis]], *nearby):
                places[axis] = place
                neighbours.append(_table(table.source_axis, table.reversed, places))
        best = _ranked((judged(neighbour, pairs) for neighbour in neighbours), pairs)[0]
        if best.overlap <= way[-1].overlap:
            return [step.table for step in way]
        way.append(best)


def judged(table: TransformTable, pairs: Sequence[Pair]) -> Proposal:
    """A transform with its overlaps.

    Raises:
        ValueError: It does not fit a stored array.
    """
    measured = [_overlap(pair, resolve_transform(table, pair.own.shape, pair.shape)) for pair in pairs]
    overlaps, in_view_dice, fractions = zip(*measured, strict=True)
    return Proposal(table, overlaps, float(np.mean(in_view_dice)), float(np.mean(fractions)))


def _overlap(pair: Pair, transform: Transform) -> tuple[float, float, float]:
    """Dice with the whole reference, Dice in view, and share of the reference in view."""
    box = field_of_view(transform, pair.shape)
    tables = [nearest_table(transform, axis, box[axis]) for axis in range(3)]
    repeats = [np.bincount(table, minlength=size) for table, size in zip(tables, transform.size, strict=True)]
    own, corner = pair.own.transpose(transform.source_axis), np.array([window.start for window in box])
    in_view, shared = _counted(pair.reference_voxels, own, (tables[0], tables[1], tables[2]), corner)
    first, second, third = (pair.own_voxels[:, axis] for axis in transform.source_axis)
    mapped = int((repeats[0][first] * repeats[1][second] * repeats[2][third]).sum()) * pair.own_weight
    in_view, shared = in_view * pair.reference_weight, shared * pair.reference_weight
    whole = len(pair.reference_voxels) * pair.reference_weight
    return 2 * shared / (mapped + whole), 2 * shared / (mapped + in_view) if mapped + in_view else 0.0, in_view / whole


@compiled
def _counted(voxels: Index, own: Mask, tables: tuple[Index, Index, Index], corner: Index) -> tuple[int, int]:
    """How many of some canonical voxels lie in the field of view, and how many of those are in the own reference."""
    in_view, shared = 0, 0
    for number in range(voxels.shape[0]):
        x, y, z = voxels[number, 0] - corner[0], voxels[number, 1] - corner[1], voxels[number, 2] - corner[2]
        if 0 <= x < tables[0].size and 0 <= y < tables[1].size and 0 <= z < tables[2].size:
            in_view += 1
            if own[tables[0][x], tables[1][y], tables[2][z]]:
                shared += 1
    return in_view, shared


def _ranked(proposals: Iterable[Proposal], pairs: Sequence[Pair]) -> list[Proposal]:
    """Proposals by overlap, the simplest of equal ones first; of those that read the same, one is kept."""
    ordered = sorted(proposals, key=lambda proposal: (-proposal.overlap, *_oddities(proposal.table, pairs)))
    kept = {_reading(proposal.table, pairs): proposal for proposal in reversed(ordered)}
    return [proposal for proposal in ordered if kept[_reading(proposal.table, pairs)] is proposal]


def _reading(table: TransformTable, pairs: Sequence[Pair]) -> tuple[Transform, ...]:
    """What a transform is for each pair; the reversal of a single stored voxel changes nothing."""
    transforms = [resolve_transform(table, pair.own.shape, pair.shape) for pair in pairs]
    return tuple(
        replace(t, reversed=tuple(r and size > 1 for r, size in zip(t.reversed, t.size, strict=True)))
        for t in transforms
    )


def _oddities(table: TransformTable, pairs: Sequence[Pair]) -> tuple[int, ...]:
    """What sets a transform apart from the plain one: starts, extents, axes, reversals and words, in this order."""
    pair = pairs[0]
    transform = resolve_transform(table, pair.own.shape, pair.shape)
    ends = [
        (0, (length - extent) // 2, length - extent)
        for length, extent in zip(pair.shape, transform.extent, strict=True)
    ]
    return (
        sum(start not in plain for start, plain in zip(transform.start, ends, strict=True)),
        sum(e not in (n, s) for e, n, s in zip(transform.extent, pair.shape, transform.size, strict=True)),
        sum(axis != place for place, axis in enumerate(table.source_axis)),
        sum(table.reversed),
        table.start.count("centre"),
    )
