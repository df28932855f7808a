"""Executing one job in a worker: read its files, measure what it lacks, and store it.

Each function raises `BadInput` where a file of its job is refused.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from expectations.store import PartStore
from expectations.tables import lake_tables
from ingest.critical import critical_thresholds
from ingest.gate import candidate_overlaps, overlap
from ingest.grid import Transform, map_linear
from ingest.lesions import label_reference
from ingest.measurement import BOTH, Measurement
from ingest.measures import MEASURES, lesion_columns, stacked
from ingest.nifti import read_header, read_labels, read_scores
from ingest.plan import CheckTask, FileTask, Source, SubjectTask, Task
from ingest.ranking import level_counts, rank_voxels, score_histogram
from ingest.regions import nearest_lesion
from ingest.shells import find_shells
from ingest.slices import slice_scores
from ingest.sweep import order_voxels, sweep
from ingest.volumes import (
    Mask,
    SubjectKey,
    SubjectVolumes,
    check_own_shape,
    check_shape,
    declared_transform,
    load_contrast,
    load_scores,
    load_subject,
)

HEADER_TOLERANCE = 0.01  # a header's voxel volume agrees within 1 percent: headers round their spacing


def measure_task(task: Task, store: PartStore) -> None:
    """Measure and store every table that a task lacks.

    Raises:
        BadInput: A file of the task is refused.
    """
    measurement = Measurement(task)
    wanted = {part.table for part in task.parts}
    if "lesion_evidence" in wanted:
        _ = measurement.shells  # the subject's alone, like its regions: found before a map is held beside them
    if "region_curve" in wanted:
        _ = measurement.regions
    for part in task.parts:
        table = lake_tables()[part.table]
        store.write(part, table, MEASURES[part.table](measurement))


def measure_subject(task: SubjectTask, store: PartStore) -> None:
    """Measure and store what belongs to the subject alone: its row, and its canonical lesions in the brain.

    Raises:
        BadInput: Reference, brain or image is refused.
    """
    volumes = load_subject(SubjectKey.of(task.subject))
    for part in task.parts:
        table = lake_tables()[part.table]
        if part.table == "subject":
            store.write(part, table, table.frame([_subject_row(task, volumes)]))
        else:
            store.write(part, table, stacked(table, _canonical_lesions(task, volumes)))


def _subject_row(task: SubjectTask, volumes: SubjectVolumes) -> tuple[object, ...]:
    reference, brain = volumes.reference, volumes.brain
    inside = int(np.count_nonzero(reference & brain))
    voxel_mm3 = float(np.prod(task.voxel_size_mm))
    return (
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


def _canonical_lesions(task: SubjectTask, volumes: SubjectVolumes) -> Iterator[dict[str, object]]:
    voxel_mm3, floor_mm3 = float(np.prod(task.voxel_size_mm)), task.parameters.lesion_floor_mm3
    source = task.subject.contrast
    contrast = None if source is None else load_contrast(source, volumes.brain)
    named = {"method_id": None, "subject_id": task.subject.subject_id}
    named |= {"reference_id": "canonical", "support_id": "brain"}
    for connectivity in BOTH:
        labelled = label_reference(volumes.reference, volumes.brain, connectivity)
        yield from lesion_columns(labelled, connectivity, voxel_mm3, floor_mm3, contrast, named)


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
    shape = (4, 4, 3)
    scores = np.linspace(0, 1, 48, dtype=np.float32).reshape(shape)
    mask, brain, millimetre = scores > 0.5, np.ones(shape, np.bool_), (1.0, 1.0, 1.0)
    transform = Transform((0, 1, 2), (0, 0, 0), shape, shape, (False, False, False))
    for stored, own in ((scores, mask), (np.asfortranarray(scores), np.asfortranarray(mask))):
        map_linear(stored, transform, shape)
        candidate_overlaps(own, mask, transform, millimetre)
        overlap(own, mask, transform, millimetre)
    for connectivity in BOTH:
        lesions = [label_reference(mask, brain, connectivity)]
        sweep(order_voxels(scores, brain), lesions, connectivity, [1.0], 1.0, 1.0)
    apart = np.zeros(shape, np.bool_)
    apart[0], apart[-1] = True, True
    level_counts(scores.ravel(), nearest_lesion(label_reference(apart, brain, 6), brain, millimetre), 2)
    rank_voxels(scores.ravel(), mask.ravel())
    score_histogram(scores.ravel(), mask.ravel())
    critical_thresholds(scores.ravel(), mask.ravel(), [1])
    slice_scores(scores, brain, [mask], millimetre)
    find_shells(label_reference(scores > 0.9, brain, 6), scores > 0.9, brain, millimetre, [1])
