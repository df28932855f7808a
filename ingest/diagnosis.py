"""Diagnostics of geometry for one method and test subject: its map under known corruptions, and under every candidate.

A corruption is done by the transform, in the terms of the candidate set: a flip toggles the reversal of a canonical
axis, a transpose swaps the stored axes that axes 0 and 1 read, a shift reads at `x_2 + dz`; the field of view stays as
declared. A flip of the mapped volume is the same only up to the last bit of the interpolation, and not at all where the
field of view reaches beyond the grid, so no map is flipped after mapping. A shift is exact: the map is brought to the
grid once with further slices at either end, and every offset is a window of it.

In-plane axes are canonical 0 and 1. By convention of the study's grid axis 0 runs from left to right and axis 1 from
back to front, as in BraTS and every RAS or LPS array; on another grid the two flips trade names and nothing else.

All with the canonical reference in the brain, plain thresholding and the lesion definition conn6_floor. Definitions:
protocol section 2; columns: `expectations/tables.toml`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.ndimage import convolve1d, distance_transform_edt

from expectations.store import PartStore
from expectations.tables import lake_tables
from ingest.grid import (
    THROUGH_PLANE_OFFSETS,
    Candidate,
    Transform,
    candidates,
    field_of_view,
    map_linear,
    map_linear_beyond,
    map_nearest_scores,
    scaled,
)
from ingest.lesions import label_reference
from ingest.measurement import WORKSPACE, Measurement
from ingest.measures import THRESHOLDS, frame_of, stacked
from ingest.nifti import read_header
from ingest.plan import DiagnosticTask
from ingest.ranking import Ranking, rank_voxels, ranking_scratch
from ingest.slices import SliceRanking, rank_slices, slice_scores
from ingest.sweep import Sweep, order_voxels, sweep
from ingest.volumes import Box, Mask, Scores, SubjectKey, declared_transform, load_stored, load_subject, scale_scores

SHIFTS = {
    "shift_minus_2": -2,
    "shift_plus_2": 2,
    "shift_minus_5": -5,
    "shift_plus_5": 5,
    "shift_minus_10": -10,
    "shift_plus_10": 10,
}
ORIENTATIONS = {
    "flip_left_right": Candidate(False, True, False, 0),
    "flip_anterior_posterior": Candidate(False, False, True, 0),
    "transpose": Candidate(True, False, False, 0),
}
MARGIN = max(map(abs, SHIFTS.values()))
EXCHANGED = "exchanged"
THERE_AND_BACK = (0.25, 0.5, 0.25)  # half a voxel along one axis and back, linear
DISTANCE_DECIMALS = 6  # of a distance in mm: symmetric voxels are equally far whatever the order of a sum of squares


@dataclass(frozen=True)
class Diagnosed:
    """A map against a reference in the brain: its rankings of voxels and slices, and its counts at all levels."""

    voxels: Ranking
    slices: SliceRanking
    counts: Sweep


def diagnose(task: DiagnosticTask, store: PartStore) -> None:
    """Measure and store every diagnostic table that a task lacks.

    Raises:
        BadInput: A file of the task is refused.
    """
    diagnosis = Diagnosis(task)
    for part in task.parts:
        store.write(part, lake_tables()[part.table], DIAGNOSES[part.table](diagnosis))


class Diagnosis:
    """What one diagnostic task reads and measures, each at most once and only when a table needs it."""

    def __init__(self, task: DiagnosticTask) -> None:
        self.task = task
        self.measurement = Measurement(task)

    @property
    def named(self) -> dict[str, object]:
        """The key columns of every row."""
        return {"method_id": self.task.entry.method_id, "subject_id": self.task.subject.subject_id}

    @property
    def reference(self) -> Mask:
        """The canonical reference."""
        return self.measurement.volumes.reference

    @property
    def brain(self) -> Mask:
        """The brain support."""
        return self.measurement.volumes.brain

    @property
    def shape(self) -> tuple[int, int, int]:
        """Canonical shape."""
        first, second, third = self.brain.shape
        return first, second, third

    @cached_property
    def stored(self) -> tuple[Scores, Transform]:
        """The map as stored, with its declared transform."""
        return load_stored(self.task.entry, self.task.inputs.map, self.brain)

    def scaled(self, mapped: Scores, transform: Transform) -> Scores:
        """The unclipped score of a map on the canonical grid; 0 outside the field of view."""
        assert self.task.scale is not None, "a diagnosis needs its scale"
        return scale_scores(mapped, transform, self.task.scale).unclipped

    def in_view(self, orientation: Candidate, margin: int) -> Scores:
        """The unclipped score inside the field of view, read by an in-plane candidate, with further slices."""
        assert self.task.scale is not None, "a diagnosis needs its scale"
        stored, transform = self.stored
        member = transform.candidate(orientation.transposed, orientation.flip_0, orientation.flip_1)
        mapped = map_linear_beyond(stored, member, self.shape, margin)
        if self.task.scale.kind == "identity":
            return mapped
        whole = (slice(0, mapped.shape[0]), slice(0, mapped.shape[1]), slice(0, mapped.shape[2]))
        return scaled(mapped, self.task.scale.low, self.task.scale.high, whole, mapped)

    @cached_property
    def variants(self) -> dict[str, Diagnosed]:
        """Every variant that the subject's own files give."""
        return {name: self.against(scores, reference) for name, scores, reference in self.variant_maps()}

    def variant_maps(self) -> Iterator[tuple[str, Scores, Mask]]:
        """Map and reference of every variant; on a grid of one slice nothing moves through the planes."""
        reference, share = self.reference, self.task.parameters.reference_dilation_share
        stored, transform = self.stored
        box = field_of_view(transform, self.shape)
        margin = MARGIN if self.shape[2] > 1 else 0
        in_view = self.in_view(Candidate(False, False, False, 0), margin)
        declared = self._windowed(in_view, box, margin)
        yield "declared", declared, reference
        yield "reference_dilated", declared, dilated(reference, self.brain, share, self.task.voxel_size_mm)
        if margin:
            yield "slices_permuted", self._permuted(declared, box), reference
            for name, dz in SHIFTS.items():
                yield name, self._windowed(in_view, box, margin + dz), reference
        yield "half_voxel", self._half_voxel(declared, box), reference
        yield "nearest", self.scaled(map_nearest_scores(stored, transform, self.shape), transform), reference
        for name, orientation in ORIENTATIONS.items():
            yield name, self._windowed(self.in_view(orientation, 0), box, 0), reference
        if (table := self.task.entry.alternative_transform) is not None:
            entry = replace(self.task.entry, transform=table)
            alternative = declared_transform(entry, self.task.inputs.map, stored.shape, self.shape)
            yield "alternative", self.scaled(map_linear(stored, alternative, self.shape), alternative), reference

    def _windowed(self, in_view: Scores, box: Box, first: int) -> Scores:
        """The canonical map whose field of view is a window of slices, from the first on; 0 outside it."""
        canonical = np.zeros(self.shape, np.float32)
        canonical[box] = in_view[:, :, first : first + box[2].stop - box[2].start]
        return canonical

    def _permuted(self, declared: Scores, box: Box) -> Scores:
        """The map with its slices in another order: those in view that hold brain, by the seed and the subject's id."""
        held = np.flatnonzero(self.brain.any(axis=(0, 1)))
        held = held[(held >= box[2].start) & (held < box[2].stop)]
        digest = hashlib.sha256(self.task.subject.subject_id.encode()).digest()
        words = [self.task.parameters.seed, int.from_bytes(digest[:8])]
        order = np.random.Generator(np.random.PCG64(words)).permutation(held)
        permuted = declared.copy()
        permuted[:, :, held] = declared[:, :, order]
        return permuted

    def _half_voxel(self, declared: Scores, box: Box) -> Scores:
        """The map re-exported on a grid half a voxel away along every axis and read back, linear and clipped to view.

        There and back along one axis weighs a voxel and its two neighbours 1 : 2 : 1.
        """
        exported = declared.copy()
        if min(side.stop - side.start for side in box) == 0:
            return exported
        in_view = declared[box]
        for axis in range(3):
            in_view = np.asarray(convolve1d(in_view, THERE_AND_BACK, axis, mode="nearest"), np.float32)
        exported[box] = in_view
        return exported

    @cached_property
    def exchanged(self) -> dict[str, Diagnosed]:
        """The next subject's map in the place of this one's; nothing where there is none on a grid of this shape."""
        other, entry = self.task.exchanged, self.task.entry
        if other is None or read_header(other.subject.reference.url).shape != self.shape:
            return {}
        brain = self.brain if entry.nan_outside_brain == "refuse" else load_subject(SubjectKey.of(other.subject)).brain
        stored, transform = load_stored(entry, other.map, brain)
        scores = self.scaled(map_linear(stored, transform, self.shape), transform)
        return {EXCHANGED: self.against(scores, self.reference)}

    def against(self, unclipped: Scores, reference: Mask) -> Diagnosed:
        """Measure a canonical map against a reference in the brain."""
        task, box, brain = self.task, self.measurement.box, self.brain
        clipped = np.clip(unclipped, np.float32(0), np.float32(1))
        slices = slice_scores(clipped, brain, [reference], task.voxel_size_mm)
        lesions = label_reference(reference[box], brain[box], 6)
        parameters, volume = task.parameters, self.measurement.voxel_volumes_mm3["true"]
        order = order_voxels(clipped[box], brain[box], WORKSPACE)
        return Diagnosed(
            voxels=rank_voxels(unclipped[brain], reference[brain]),
            slices=rank_slices(slices.score_max, slices.positive[0], slices.area_mm2),
            counts=sweep(order, [lesions], 6, [volume], parameters.minimum_component_mm3, parameters.lesion_floor_mm3),
        )

    def candidate_aurocs(self) -> Iterator[tuple[Candidate, float | None]]:
        """Voxel AUROC in the brain of the map read by every candidate transform.

        The brain in view is a list of places in the mapped field of view, and an offset moves each by as many slices.
        """
        box, margin = field_of_view(self.stored[1], self.shape), max(THROUGH_PLANE_OFFSETS) if self.shape[2] > 1 else 0
        members = candidates(self.shape[2])
        offsets = 2 * margin + 1
        within = [side.stop - side.start for side in box]
        along = np.flatnonzero(self.brain[box].ravel())
        places = along // within[2] * (within[2] + 2 * margin) + along % within[2] if along.size else along
        scores = np.zeros(int(np.count_nonzero(self.brain)), np.float32)  # outside the field of view a map scores 0
        positive = np.zeros(scores.size, np.bool_)
        inside = self.brain & self.reference
        positive[: along.size] = inside[box].ravel()[along]
        outside = int(np.count_nonzero(inside)) - int(np.count_nonzero(positive))
        positive[along.size : along.size + outside] = True
        scratch = ranking_scratch(scores.size)
        for orientation in members[::offsets]:
            in_view = self.in_view(orientation, margin).ravel()
            for dz in range(-margin, margin + 1):
                in_view.take(places + (margin + dz), out=scores[: along.size], mode="clip")
                yield orientation._replace(dz=dz), rank_voxels(scores, positive, scratch).auroc


def dilated(reference: Mask, within: Mask, share: float, voxel_mm: tuple[float, float, float]) -> Mask:
    """A reference that has grown by a share of its volume: the nearest voxels around it are added.

    Args:
        reference: Reference mask, 3-D.
        within: Where it may grow, of the same shape; its volume is counted there.
        share: Share of its voxels to add, rounded to whole voxels.
        voxel_mm: Size of a voxel along each axis, in mm; distances are between voxel centres.

    Returns:
        The larger mask; of voxels equally far those first in C order are added. An empty reference stays empty, and one
        that fills `within` stays as it is.
    """
    wanted = round(share * int(np.count_nonzero(reference & within)))
    if wanted == 0:
        return reference
    margin, grown = 4, reference.copy()
    while True:
        box = _around(reference, margin)
        distance = np.asarray(distance_transform_edt(~reference[box], sampling=voxel_mm), np.float64)
        near = np.flatnonzero((within[box] & ~reference[box]).ravel())
        far_mm = np.round(distance.ravel()[near], DISTANCE_DECIMALS)
        is_whole = all(side == slice(0, size) for side, size in zip(box, reference.shape, strict=True))
        # a voxel outside the box is further than the margin, so those within the margin are all known
        if is_whole or np.count_nonzero(far_mm <= margin * min(voxel_mm)) >= wanted:
            break
        margin *= 2
    added = near[np.argsort(far_mm, kind="stable")[:wanted]]
    inside = grown[box]
    inside[np.unravel_index(added, inside.shape)] = True
    return grown


def _around(mask: Mask, margin: int) -> Box:
    """Bounding box of a mask that is not empty, wider by a margin, cut to the array."""
    sides: list[slice] = []
    for axis, size in enumerate(mask.shape):
        held = np.flatnonzero(mask.any(axis=tuple(other for other in range(3) if other != axis)))
        sides.append(slice(max(int(held[0]) - margin, 0), min(int(held[-1]) + margin + 1, size)))
    return sides[0], sides[1], sides[2]


def _ranking(name: str, diagnosis: Diagnosis, variants: Mapping[str, Diagnosed]) -> pl.DataFrame:
    """AUROC, average precision and slice AUROC of some variants."""
    rows = [
        (
            *diagnosis.named.values(),
            variant_id,
            found.voxels.auroc,
            found.voxels.average_precision,
            found.voxels.positive_voxels,
            found.voxels.negative_voxels,
            found.slices.auroc,
            found.slices.positive_count,
            found.slices.negative_count,
        )
        for variant_id, found in variants.items()
    ]
    return lake_tables()[name].frame(rows)


def _curve(name: str, diagnosis: Diagnosis, variants: Mapping[str, Diagnosed]) -> pl.DataFrame:
    """Voxels and lesions at all levels of some variants."""

    def blocks() -> Iterator[dict[str, object]]:
        for variant_id, found in variants.items():
            counts: dict[str, NDArray[np.generic]] = {
                "level": np.arange(THRESHOLDS.size),
                "threshold": THRESHOLDS,
                "predicted_voxels": found.counts.predicted[0, 0],
                "true_positive_voxels": found.counts.true_positive[0, 0, 0],
                "hit_iou_10": found.counts.hits[0, 0, 0, 0, 0],
            }
            single = {
                "variant_id": variant_id,
                "reference_voxels": found.voxels.positive_voxels,
                "lesion_count": int(found.counts.lesion_count[0, 0, 0]),
            }
            yield diagnosis.named | single | counts

    return stacked(lake_tables()[name], blocks())


def _candidates(diagnosis: Diagnosis) -> pl.DataFrame:
    """AUROC of the map read by every candidate transform."""
    found = list(diagnosis.candidate_aurocs())
    columns: dict[str, object] = {
        name: np.array([getattr(member, name) for member, _ in found]) for name in Candidate._fields
    }
    columns["is_applied"] = np.array([not any(member) for member, _ in found])
    columns["auroc"] = np.array([np.nan if auroc is None else auroc for _, auroc in found])
    return frame_of(lake_tables()["candidate_ranking"], diagnosis.named | columns)


DIAGNOSES: dict[str, Callable[[Diagnosis], pl.DataFrame]] = {
    "variant_ranking": lambda d: _ranking("variant_ranking", d, d.variants),
    "variant_curve": lambda d: _curve("variant_curve", d, d.variants),
    "exchange_ranking": lambda d: _ranking("exchange_ranking", d, d.exchanged),
    "exchange_curve": lambda d: _curve("exchange_curve", d, d.exchanged),
    "candidate_ranking": _candidates,
}
