"""Measuring one task: from the files of one (method, subject) to the rows of its lake tables.

Everything here runs inside a worker process and returns plain frames; nothing is cached between tasks but the last
subject's reference and brain. Definitions: protocol sections 1 to 3.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from expectations.store import PartStore
from expectations.tables import lake_tables
from ingest.gate import candidate_overlaps, overlap
from ingest.grid import Transform, map_linear
from ingest.nifti import read_header, read_labels, read_scores
from ingest.plan import CheckTask, FileTask, Source, SubjectTask, Task
from ingest.ranking import LEVELS, curve_counts, rank_voxels, score_histogram
from ingest.volumes import (
    Mask,
    Scores,
    SubjectKey,
    SubjectVolumes,
    check_own_shape,
    check_shape,
    declared_transform,
    load_own_reference,
    load_scores,
    load_subject,
    scale_scores,
)

Rows = list[tuple[object, ...]]
HEADER_TOLERANCE = 0.01  # a header's voxel volume agrees within 1 percent: headers round their spacing


@dataclass(frozen=True)
class Support:
    """The voxels of one support as flat arrays: unclipped and clipped scores, and whether each is in the reference."""

    support_id: str
    unclipped: Scores
    positive: NDArray[np.bool_]

    @cached_property
    def clipped(self) -> Scores:
        """Scores clipped to [0, 1]."""
        return np.clip(self.unclipped, np.float32(0), np.float32(1))


class Measurement:
    """What one task reads, each file at most once and only when a table needs it."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @cached_property
    def volumes(self) -> SubjectVolumes:
        """Reference and brain of the subject."""
        return load_subject(SubjectKey.of(self.task.subject))

    @cached_property
    def mapped(self) -> tuple[Scores, Transform]:
        """The map on the canonical grid, unscaled."""
        return load_scores(self.task.entry, self.task.inputs, self.volumes)

    @cached_property
    def supports(self) -> list[Support]:
        """The map inside the brain and inside the brain in view; the same arrays where the view holds the brain."""
        assert self.task.scale is not None, "a measurement needs its scale"
        mapped, transform = self.mapped
        scores = scale_scores(mapped, transform, self.task.scale)
        volumes = self.volumes
        brain = Support("brain", scores.unclipped[volumes.brain], volumes.reference[volumes.brain])
        in_view = np.zeros_like(volumes.brain)
        in_view[scores.view] = volumes.brain[scores.view]
        if np.count_nonzero(in_view) == brain.unclipped.size:
            return [brain, Support("brain_in_view", brain.unclipped, brain.positive)]
        return [brain, Support("brain_in_view", scores.unclipped[in_view], volumes.reference[in_view])]

    @cached_property
    def own(self) -> tuple[Mask, Transform]:
        """The method's own reference as stored, with its transform."""
        source, shape = self.task.inputs.own_reference, self.volumes.reference.shape
        assert source is not None, "tables that need an own reference are planned only where there is one"
        stored = read_header(self.task.inputs.map.url).shape
        own = load_own_reference(source, stored)
        return own, declared_transform(self.task.entry, source, own.shape, shape)

    @property
    def key(self) -> tuple[str, str]:
        """Method and subject."""
        return self.task.entry.method_id, self.task.subject.subject_id


def gate_candidate(measurement: Measurement) -> Rows:
    """Overlap and centroid distance of every candidate transform."""
    own, transform = measurement.own
    found = candidate_overlaps(own, measurement.volumes.reference, transform, measurement.task.voxel_size_mm)
    columns = (found.transposed, found.flip_0, found.flip_1, found.dz, found.is_applied, found.dice, found.centroid_mm)
    return [(*measurement.key, *map(_plain, row)) for row in zip(*columns, strict=True)]


def gate_overlap(measurement: Measurement) -> Rows:
    """The declared transform's overlap in the field of view."""
    own, transform = measurement.own
    found = overlap(own, measurement.volumes.reference, transform, measurement.task.voxel_size_mm)
    return [
        (
            *measurement.key,
            _plain(found.in_view_fraction),
            found.own_voxels,
            found.own_in_view_voxels,
            found.reference_in_view_voxels,
            _plain(found.round_trip_dice),
        )
    ]


def score_quantile(measurement: Measurement) -> Rows:
    """In-brain quantiles of the unscaled scores; linear between order statistics."""
    assert measurement.task.entry.quantiles is not None, "planned for entries scaled by quantiles only"
    scores = measurement.mapped[0][measurement.volumes.brain]
    if scores.size == 0:
        return []
    low, high = np.quantile(scores.astype(np.float64), measurement.task.entry.quantiles)
    return [(*measurement.key, float(low), float(high))]


def threshold_curve(measurement: Measurement) -> Rows:
    """Predicted and true-positive voxels at all levels; plain counts are the same under both voxel volumes."""
    volumes = ["true"] if measurement.task.entry.legacy_voxel_mm3 is None else ["true", "legacy"]
    rows: Rows = []
    for support in measurement.supports:
        predicted, true_positive = curve_counts(support.clipped, support.positive)
        reference = int(np.count_nonzero(support.positive))
        counts = list(zip(range(LEVELS), predicted.tolist(), true_positive.tolist(), strict=True))
        for volume in volumes:
            key = (*measurement.key, "canonical", support.support_id, volume, "plain")
            rows += [(*key, level, level / (LEVELS - 1), p, tp, reference) for level, p, tp in counts]
    return rows


def voxel_ranking(measurement: Measurement) -> Rows:
    """Exact AUROC and average precision of the unclipped scores."""
    rows: Rows = []
    for support in measurement.supports:
        found = rank_voxels(support.unclipped, support.positive)
        rows.append(
            (
                *measurement.key,
                "canonical",
                support.support_id,
                found.auroc,
                found.average_precision,
                found.positive_voxels,
                found.negative_voxels,
                found.tied_fraction,
                found.ordinal_auroc,
                found.ordinal_average_precision,
            )
        )
    return rows


def score_histogram_rows(measurement: Measurement) -> Rows:
    """Occupied bins of the clipped score."""
    rows: Rows = []
    for support in measurement.supports:
        positive, negative = score_histogram(support.clipped, support.positive)
        key = (*measurement.key, "canonical", support.support_id)
        occupied = np.flatnonzero(positive + negative)
        rows += [(*key, int(b), int(positive[b]), int(negative[b])) for b in occupied]
    return rows


MEASURES: dict[str, Callable[[Measurement], Rows]] = {
    "gate_candidate": gate_candidate,
    "gate_overlap": gate_overlap,
    "score_quantile": score_quantile,
    "threshold_curve": threshold_curve,
    "voxel_ranking": voxel_ranking,
    "score_histogram": score_histogram_rows,
}


def _plain(value: object) -> object:
    """A numpy scalar as a Python value; NaN, which stands for undefined, as null."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return None if np.isnan(value) else float(value)
    return value


def measure_task(task: Task, store: PartStore) -> None:
    """Measure and store every table that a task lacks.

    Raises:
        BadInput: A file of the task is refused.
    """
    measurement = Measurement(task)
    for part in task.parts:
        table = lake_tables()[part.table]
        store.write(part, table, table.frame(MEASURES[part.table](measurement)))


def measure_subject(task: SubjectTask, store: PartStore) -> None:
    """Measure and store the `subject` row.

    Raises:
        BadInput: Reference or brain is refused.
    """
    volumes = load_subject(SubjectKey.of(task.subject))
    reference, brain = volumes.reference, volumes.brain
    inside = int(np.count_nonzero(reference & brain))
    voxel_mm3 = float(np.prod(task.voxel_size_mm))
    row = (
        task.subject.subject_id,
        task.subject.split,
        *reference.shape,
        voxel_mm3,
        int(np.count_nonzero(brain)),
        inside,
        int(np.count_nonzero(reference)) - inside,
        inside * voxel_mm3,
        _voxel_hash(reference),
        volumes.support_status,
    )
    table = lake_tables()["subject"]
    for part in task.parts:
        store.write(part, table, table.frame([row]))


def _voxel_hash(mask: Mask) -> str:
    packed = np.packbits(np.ascontiguousarray(mask))
    return hashlib.sha256(repr(mask.shape).encode() + packed.tobytes()).hexdigest()


def describe_files(task: FileTask, store: PartStore) -> None:
    """Store the `source_file` rows of a task.

    Raises:
        BadInput: A header is refused, or the declared transform does not fit an array.
    """
    table = lake_tables()["source_file"]
    frame = table.frame([_file_row(task, source) for source in task.sources])
    for part in task.parts:
        store.write(part, table, frame)


def _file_row(task: FileTask, source: Source) -> tuple[object, ...]:
    header = read_header(source.url)
    stated, declared = header.header_voxel_mm3, _declared_voxel_mm3(task, source, header.shape)
    agrees = stated is not None and abs(stated / declared - 1) <= HEADER_TOLERANCE
    return (
        source.path,
        source.role,
        source.method_id,
        source.subject_id,
        source.contrast,
        *task.digests[source.url],
        "x".join(map(str, header.shape)),
        header.dtype,
        declared,
        stated,
        header.orientation,
        agrees,
    )


def _declared_voxel_mm3(task: FileTask, source: Source, stored: tuple[int, int, int]) -> float:
    """Volume of a stored voxel as the study declares it: the extent read, divided by the stored voxels along it."""
    volume = float(np.prod(task.voxel_size_mm))
    if task.entry is None:
        return volume
    transform = declared_transform(task.entry, source, stored, read_header(task.reference.url).shape)
    return volume * float(np.prod(transform.extent)) / float(np.prod(transform.size))


def check_file(task: CheckTask) -> None:
    """Check one file against the declarations; a quick check reads headers only.

    Raises:
        BadInput: The file is refused.
    """
    source, entry = task.source, task.entry
    shape = read_header(task.subject.reference.url).shape
    stored = read_header(source.url).shape
    if entry is None or task.inputs is None:
        check_shape(source, stored, shape)
        if not task.quick:
            _read_canonical(source)
        return
    declared_transform(entry, source, stored, shape)
    if source.role == "own_reference":
        check_own_shape(source, stored, read_header(task.inputs.map.url).shape)
    if task.quick:
        return
    if source.role == "own_reference":
        read_labels(source.url, source.labels)
    else:
        load_scores(entry, task.inputs, load_subject(SubjectKey.of(task.subject)))


def _read_canonical(source: Source) -> None:
    if source.role == "intensity":
        read_scores(source.url)
    else:
        read_labels(source.url, source.labels)


def warm_up() -> None:
    """Compile every kernel that measuring uses, or load it from numba's cache."""
    shape = (3, 3, 2)
    scores = np.linspace(0, 1, 18, dtype=np.float32).reshape(shape)
    mask = scores > 0.5
    transform = Transform((0, 1, 2), (0, 0, 0), shape, shape, (False, False, False))
    for stored, own in ((scores, mask), (np.asfortranarray(scores), np.asfortranarray(mask))):
        map_linear(stored, transform, shape)
        candidate_overlaps(own, mask, transform, (1.0, 1.0, 1.0))
        overlap(own, mask, transform, (1.0, 1.0, 1.0))
    rank_voxels(scores.ravel(), mask.ravel())
    curve_counts(scores.ravel(), mask.ravel())
    score_histogram(scores.ravel(), mask.ravel())
