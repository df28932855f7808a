"""What one (method, subject) gives to measure: references, supports, scores, and the passes over them.

Everything is read or computed once, and only when a table asks for it. Definitions: protocol sections 1, 2 and 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from expectations.protocol import Parameters
from ingest.grid import Transform, map_nearest, round_trip
from ingest.lesions import Connectivity, LabelledReference, label_reference, smallest_count
from ingest.nifti import read_header
from ingest.plan import Task
from ingest.regions import load_regions
from ingest.shells import Shell, find_shells
from ingest.slices import SliceScores, slice_scores
from ingest.sweep import Sweep, VisitingOrder, Workspace, order_voxels, sweep
from ingest.volumes import (
    Box,
    MappedScores,
    Mask,
    Scores,
    SubjectKey,
    SubjectVolumes,
    brain_box,
    declared_transform,
    load_contrast,
    load_own_reference,
    load_reference,
    load_scores,
    load_subject,
    scale_scores,
)

SupportId = Literal["brain", "brain_in_view"]
Voxel = TypeVar("Voxel", bound=np.generic)
BOTH: tuple[Connectivity, Connectivity] = (6, 26)
LesionsOfSupport = Mapping[Connectivity, Mapping[str, LabelledReference]]
WORKSPACE = Workspace()  # one per worker process: each has one thread


@dataclass(frozen=True)
class Support:
    """One support of a map, inside the brain's bounding box: nothing outside it is measured.

    Attributes:
        support_ids: Its name; where the view holds the whole brain, one support goes by both names.
        mask: Its voxels, 3-D.
        clipped: The clipped map, 3-D.
        unclipped: Unclipped scores of its voxels, 1-D.
        references: The references, 3-D, by name; the canonical one first.
    """

    support_ids: tuple[SupportId, ...]
    mask: Mask
    clipped: Scores
    unclipped: Scores
    references: Mapping[str, Mask]

    @cached_property
    def positive(self) -> dict[str, NDArray[np.bool_]]:
        """For each reference, whether each voxel of the support is in it, 1-D."""
        return {name: reference[self.mask] for name, reference in self.references.items()}

    @cached_property
    def clipped_inside(self) -> Scores:
        """Clipped scores of the support's voxels, 1-D."""
        return self.clipped[self.mask]


class Measurement:
    """What one task reads, each file at most once and only when a table needs it."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def key(self) -> tuple[str, str]:
        """Method and subject."""
        return self.task.entry.method_id, self.task.subject.subject_id

    @property
    def parameters(self) -> Parameters:
        """Parameters of the protocol."""
        return self.task.parameters

    @property
    def voxel_volumes_mm3(self) -> dict[str, float]:
        """The voxel volumes to measure under: the true one, then the method's own where it declares one."""
        volumes = {"true": float(np.prod(self.task.voxel_size_mm))}
        legacy = self.task.entry.legacy_voxel_mm3
        return volumes if legacy is None else volumes | {"legacy": legacy}

    @cached_property
    def volumes(self) -> SubjectVolumes:
        """Reference and brain of the subject."""
        return load_subject(SubjectKey.of(self.task.subject))

    @property
    def reference(self) -> Mask:
        """The canonical reference: all that the gate needs of the subject, so that the gate alone reads no brain."""
        return load_reference(self.task.subject.reference)

    @cached_property
    def mapped(self) -> tuple[Scores, Transform]:
        """The map on the canonical grid, unscaled."""
        return load_scores(self.task.entry, self.task.inputs, self.volumes)

    @cached_property
    def contrast(self) -> Scores | None:
        """The first declared image, z-scored inside the brain; None where there is none."""
        source = self.task.subject.contrast
        return None if source is None else load_contrast(source, self.volumes.brain)

    @cached_property
    def scores(self) -> MappedScores:
        """The map on the canonical grid, scaled."""
        assert self.task.scale is not None, "a measurement needs its scale"
        mapped, transform = self.mapped
        return scale_scores(mapped, transform, self.task.scale)

    @cached_property
    def own(self) -> tuple[Mask, Transform]:
        """The method's own reference as stored, with its transform."""
        source = self.task.inputs.own_reference
        assert source is not None, "tables that need an own reference are planned only where there is one"
        own = load_own_reference(source, read_header(self.task.inputs.map.url).shape)
        return own, declared_transform(self.task.entry, source, own.shape, self.reference.shape)

    @cached_property
    def transform(self) -> Transform:
        """The declared transform of the map's grid."""
        stored = read_header(self.task.inputs.map.url).shape
        return declared_transform(self.task.entry, self.task.inputs.map, stored, self.reference.shape)

    @cached_property
    def references(self) -> dict[str, Mask]:
        """The references on the canonical grid: a baseline has no grid of its own, so the canonical one alone."""
        canonical = self.reference
        references: dict[str, Mask] = {"canonical": canonical}
        if self.task.entry.kind == "baseline":
            return references
        if self.task.inputs.own_reference is not None:
            references["own_mapped"] = map_nearest(*self.own, canonical.shape)
        return references | {"round_trip": round_trip(canonical, self.transform)}

    @cached_property
    def supports(self) -> tuple[Support, ...]:
        """The brain and the brain in view; one support under both names where the view holds the whole brain.

        The whole map and the whole references are let go: the box of a brain is less than half of its volume.
        """
        brain, unclipped = self._in_box(self.volumes.brain), self._in_box(self.scores.unclipped)
        in_view, view = np.zeros_like(brain), _shifted(self.scores.view, self.box)
        in_view[view] = brain[view]
        references = {name: self._in_box(reference) for name, reference in self.references.items()}
        for name in ("mapped", "scores", "references"):
            self.__dict__.pop(name, None)  # a cached property is computed again if it is asked for
        is_in_range = self.task.scale is not None and self.task.scale.kind == "identity"
        clipped = unclipped if is_in_range else np.clip(unclipped, np.float32(0), np.float32(1))
        if np.array_equal(in_view, brain):
            return (Support(("brain", "brain_in_view"), brain, clipped, unclipped[brain], references),)
        masks: tuple[tuple[SupportId, Mask], ...] = (("brain", brain), ("brain_in_view", in_view))
        return tuple(Support((name,), mask, clipped, unclipped[mask], references) for name, mask in masks)

    def _in_box(self, volume: NDArray[Voxel]) -> NDArray[Voxel]:
        """A copy of a volume's part in the brain's bounding box."""
        return volume[self.box].copy()

    def on_grid(self, labelled: LabelledReference) -> LabelledReference:
        """Lesions of the box by their place on the canonical grid."""
        corner = np.array([side.start for side in self.box], np.int32)
        return replace(labelled, shape=self.volumes.brain.shape, voxels=labelled.voxels + corner)

    @cached_property
    def slices(self) -> list[SliceScores]:
        """Each support, slice by slice."""
        found = [
            slice_scores(s.clipped, s.mask, list(s.references.values()), self.task.voxel_size_mm) for s in self.supports
        ]
        return [replace(one, slice_index=one.slice_index + self.box[2].start) for one in found]

    @cached_property
    def lesions(self) -> list[LesionsOfSupport]:
        """Lesions of every reference in each support, under both connectivities, by their place in the brain's box.

        The mapped own reference and the round trip lie in view already: in both supports they have the same lesions.
        """
        mask, references = self.supports[0].mask, self.supports[0].references
        brain: LesionsOfSupport = {
            c: {name: label_reference(reference, mask, c) for name, reference in references.items()} for c in BOTH
        }
        if len(self.supports) == 1:
            return [brain]
        canonical, view = references["canonical"], self.supports[1].mask
        in_view: LesionsOfSupport = {c: {**brain[c], "canonical": label_reference(canonical, view, c)} for c in BOTH}
        return [brain, in_view]

    @cached_property
    def order(self) -> VisitingOrder:
        """Predicted voxels in visiting order."""
        return order_voxels(self.supports[0].clipped, self.supports[0].mask, WORKSPACE)

    @cached_property
    def box(self) -> Box:
        """Bounding box of the brain; one voxel where there is none."""
        return brain_box(self.volumes.brain)

    @property
    def shells(self) -> list[Shell]:
        """Canonical lesions above the floor in the brain, each with the shell around it."""
        task = self.task
        return subject_shells(SubjectKey.of(task.subject), task.voxel_size_mm, task.parameters.lesion_floor_mm3)

    @property
    def regions(self) -> NDArray[np.int32]:
        """For each voxel of the brain, 1-D, the 6-connected canonical lesion that it is nearest to."""
        return load_regions(SubjectKey.of(self.task.subject), self.task.voxel_size_mm)

    @cached_property
    def sweeps(self) -> list[Mapping[Connectivity, Sweep]]:
        """The one pass under each connectivity, read off for each support.

        Outside the field of view a map scores 0 and nothing is predicted, so both supports have the same predicted
        voxels and components: one pass over the brain carries the lesions of both.
        """
        passes: dict[Connectivity, list[Sweep]] = {c: self.read_off(c) for c in BOTH}
        of_supports = range(len(self.supports))
        return [{c: found[number] for c, found in passes.items()} for number in of_supports]

    def read_off(self, connectivity: Connectivity) -> list[Sweep]:
        """The pass under one connectivity, for each support."""
        lesions = [of_support[connectivity] for of_support in self.lesions]
        in_view = [of_support["canonical"] for of_support in lesions[1:]]
        found = sweep(
            self.order,
            [*lesions[0].values(), *in_view],
            connectivity,
            list(self.voxel_volumes_mm3.values()),
            self.parameters.minimum_component_mm3,
            self.parameters.lesion_floor_mm3,
            lists_components=connectivity == 6,
        )
        count = len(self.supports[0].references)
        return [_of_references(found, [0 if n == 0 else count, *range(1, count)]) for n in range(len(lesions))]


@lru_cache(maxsize=1)
def subject_shells(
    inputs: SubjectKey, voxel_size_mm: tuple[float, float, float], lesion_floor_mm3: float
) -> list[Shell]:
    """6-connected lesions of a subject above the floor, with their shells; those of the last subject are kept.

    No map changes them, and the methods of a subject come one after another.

    Raises:
        BadInput: Reference or brain is refused.
    """
    volumes = load_subject(inputs)
    box = brain_box(volumes.brain)
    reference, brain = volumes.reference[box], volumes.brain[box]
    lesions = label_reference(reference, brain, 6)
    above = lesions.sizes >= smallest_count(lesion_floor_mm3, float(np.prod(voxel_size_mm)))
    return find_shells(lesions, reference, brain, voxel_size_mm, (np.flatnonzero(above) + 1).tolist())


def _shifted(inner: Box, outer: Box) -> Box:
    """A box by its place in another, as far as it lies there."""
    ends = [(max(a.start - b.start, 0), max(a.stop - b.start, 0)) for a, b in zip(inner, outer, strict=True)]
    return slice(*ends[0]), slice(*ends[1]), slice(*ends[2])


def _of_references(found: Sweep, chosen: list[int]) -> Sweep:
    """A pass read off for some of its references."""
    return replace(
        found,
        true_positive=found.true_positive[chosen],
        hits=found.hits[chosen],
        lesion_count=found.lesion_count[chosen],
    )
