"""Maps under known corruptions against a voxel-by-voxel reading of the stored file, and scikit-learn."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import ndimage

from expectations.study import load_study
from ingest.diagnosis import DIAGNOSES, ORIENTATIONS, SHIFTS, Diagnosis, dilated
from ingest.grid import Transform, candidates, field_of_view, map_linear, map_linear_beyond, map_nearest_scores
from ingest.phantom import write_volume
from ingest.plan import DiagnosticTask, Exchanged, Plan, Scale, plan_study

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]
Triple = tuple[int, int, int]

metrics = import_module("sklearn.metrics")
roc_auc_score = cast(Callable[[Mask, NDArray[np.generic]], float], metrics.roc_auc_score)
average_precision_score = cast(Callable[[Mask, NDArray[np.generic]], float], metrics.average_precision_score)

SHAPE = (8, 6, 9)
STUDY = """
[study]
name = "diagnosis"
voxel_size_mm = [2.0, 2.0, 3.0]
subjects = "subjects.csv"

[files]
reference = "reference/{subject_id}.nii.gz"
brain = "brain/{subject_id}.nii.gz"

[protocol]
lesion_floor_mm3 = 24.0

[[method]]
id = "whole"
map = "whole/{subject_id}.nii.gz"

[[method]]
id = "coarse"
map = "coarse/{subject_id}.nii.gz"
score_scale = [-0.5, 1.5]
[method.transform]
source_axis = [1, 0, 2]
start = [0, 1, 1]
extent = [8, 5, 6]
reversed = [false, true, false]
[method.alternative_transform]
source_axis = [0, 1, 2]
"""
SIZES: dict[str, Triple] = {"whole": SHAPE, "coarse": (4, 6, 5)}  # stored arrays; coarse along stored axes 1, 0, 2
SCALES = {"whole": Scale("identity", 0.0, 1.0), "coarse": Scale("range", -0.5, 1.5)}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two methods and three test subjects of random voxels: one map stored as it is, one cropped, turned and coarse."""
    folder, rng = tmp_path_factory.mktemp("diagnosis"), np.random.default_rng(7)
    for subject_id in ("a", "b", "c"):
        write_volume(folder / f"reference/{subject_id}.nii.gz", (rng.random(SHAPE) < 0.2).astype(np.uint8), (2, 2, 3))
        write_volume(folder / f"brain/{subject_id}.nii.gz", (rng.random(SHAPE) < 0.9).astype(np.uint8), (2, 2, 3))
        for method_id, size in SIZES.items():
            scores = np.round(rng.random(size), 2).astype(np.float32)
            write_volume(folder / f"{method_id}/{subject_id}.nii.gz", scores, (2, 2, 3))
    (folder / "study.toml").write_text(STUDY)
    (folder / "subjects.csv").write_text("subject_id,split\na,test\nb,test\nc,test\n")
    return plan_study(load_study(folder / "study.toml"))


def diagnosis_of(plan: Plan, method_id: str, number: int = 0, exchanged: int | None = 1) -> Diagnosis:
    entry = next(entry for entry in plan.entries if entry.method_id == method_id)
    subject = plan.subjects[number]
    other = None
    if exchanged is not None:
        following = plan.subjects[exchanged]
        other = Exchanged(following, plan.maps[method_id, following.subject_id].map)
    task = DiagnosticTask(
        entry=entry,
        subject=subject,
        inputs=plan.maps[method_id, subject.subject_id],
        scale=SCALES[method_id],
        voxel_size_mm=plan.voxel_size_mm,
        parameters=plan.parameters,
        parts=(),
        exchanged=other,
    )
    return Diagnosis(task)


def read_voxel(stored: Scores, transform: Transform, voxel: Triple) -> float:
    """A stored map at one canonical voxel, by the protocol's formula; the field of view is not looked at."""
    lower: list[int] = []
    upper: list[int] = []
    weights: list[float] = []
    for axis, x in enumerate(voxel):
        a, extent, size = transform.start[axis], transform.extent[axis], transform.size[axis]
        c = min(max((2 * (x - a) + 1) * size / (2 * extent) - 0.5, 0.0), size - 1.0)
        low = int(np.floor(c))
        high = min(low + 1, size - 1)
        weights.append(c - low)
        lower.append(size - 1 - low if transform.reversed[axis] else low)
        upper.append(size - 1 - high if transform.reversed[axis] else high)

    def at(corner: Triple) -> float:
        index = [0, 0, 0]
        for axis in range(3):
            index[transform.source_axis[axis]] = (upper if corner[axis] else lower)[axis]
        return float(stored[index[0], index[1], index[2]])

    values = {corner: at(corner) for corner in product((0, 1), (0, 1), (0, 1))}
    faces = product((0, 1), (0, 1))
    planes = {(j, k): values[0, j, k] + weights[0] * (values[1, j, k] - values[0, j, k]) for j, k in faces}
    rows = [planes[0, k] + weights[1] * (planes[1, k] - planes[0, k]) for k in (0, 1)]
    return rows[0] + weights[2] * (rows[1] - rows[0])


def read_map(stored: Scores, transform: Transform, scale: Scale, dz: int = 0) -> Scores:
    """A map on the canonical grid, voxel by voxel: 0 outside the declared field of view."""
    canonical = np.zeros(SHAPE, np.float32)
    view = [range(*side.indices(SHAPE[axis])) for axis, side in enumerate(field_of_view(transform, SHAPE))]
    for x in product(*view):
        mapped = np.float64(np.float32(read_voxel(stored, transform, (x[0], x[1], x[2] + dz))))
        canonical[x] = np.float32((mapped - scale.low) / (scale.high - scale.low))
    return canonical


def check(found: object, expected: float) -> None:
    assert found == pytest.approx(expected, abs=1e-12)


def check_variant(diagnosis: Diagnosis, name: str, canonical: Scores, reference: Mask) -> None:
    """Compare one variant with scikit-learn and with counting, on its canonical map."""
    measured, brain = diagnosis.variants[name], diagnosis.brain
    check(measured.voxels.auroc, roc_auc_score(reference[brain], canonical[brain]))
    check(measured.voxels.average_precision, average_precision_score(reference[brain], canonical[brain]))
    clipped = np.clip(canonical, 0, 1)
    held = [k for k in range(SHAPE[2]) if brain[:, :, k].any()]
    highest = np.array([clipped[:, :, k][brain[:, :, k]].max() for k in held])
    positive = np.array([(reference & brain)[:, :, k].any() for k in held])
    assert (measured.slices.positive_count, measured.slices.negative_count) == (positive.sum(), (~positive).sum())
    if measured.slices.auroc is not None:
        check(measured.slices.auroc, roc_auc_score(positive, highest))
    for level in (0, 40, 100, 133, 200):
        predicted = (clipped > np.float32(level / 200)) & brain
        assert measured.counts.predicted[0, 0, level] == predicted.sum()
        assert measured.counts.true_positive[0, 0, 0, level] == (predicted & reference).sum()
    labels = cast(tuple[NDArray[np.int32], int], ndimage.label(reference & brain))[0]
    sizes = np.bincount(labels.ravel())[1:]
    assert measured.counts.lesion_count[0, 0, 0] == np.count_nonzero(sizes * 12.0 >= 24.0)


@pytest.mark.parametrize("method_id", SIZES)
def test_variants_equal_a_voxel_by_voxel_reading(plan: Plan, method_id: str) -> None:
    diagnosis = diagnosis_of(plan, method_id)
    stored, transform = diagnosis.stored
    scale = SCALES[method_id]
    maps = {"declared": read_map(stored, transform, scale)}
    maps |= {name: read_map(stored, transform, scale, dz) for name, dz in SHIFTS.items()}
    for name, member in ORIENTATIONS.items():
        turned = transform.candidate(member.transposed, member.flip_0, member.flip_1)
        maps[name] = read_map(stored, turned, scale)
    if method_id == "coarse":
        size = (stored.shape[0], stored.shape[1], stored.shape[2])
        whole = Transform((0, 1, 2), (0, 0, 0), SHAPE, size, (False, False, False))
        maps["alternative"] = read_map(stored, whole, scale)
    for name, canonical in maps.items():
        check_variant(diagnosis, name, canonical, diagnosis.reference)
    assert set(diagnosis.variants) == {*maps, "nearest", "half_voxel", "slices_permuted", "reference_dilated"}


def test_flips_of_a_map_stored_as_it_is_are_those_of_the_array(plan: Plan) -> None:
    diagnosis = diagnosis_of(plan, "whole")
    stored, _ = diagnosis.stored
    check_variant(diagnosis, "declared", stored, diagnosis.reference)
    check_variant(diagnosis, "flip_left_right", np.flip(stored, 0), diagnosis.reference)
    check_variant(diagnosis, "flip_anterior_posterior", np.flip(stored, 1), diagnosis.reference)
    moved = np.concatenate([stored[:, :, 2:], stored[:, :, -1:], stored[:, :, -1:]], axis=2)
    check_variant(diagnosis, "shift_plus_2", moved, diagnosis.reference)
    check_variant(diagnosis, "nearest", stored, diagnosis.reference)


def test_a_dilated_reference_is_measured_with_the_declared_map(plan: Plan) -> None:
    diagnosis = diagnosis_of(plan, "coarse")
    stored, transform = diagnosis.stored
    larger = dilated(diagnosis.reference, diagnosis.brain, 0.2, (2.0, 2.0, 3.0))
    inside = np.count_nonzero(diagnosis.reference & diagnosis.brain)
    assert np.count_nonzero(larger & diagnosis.brain) == inside + round(0.2 * inside)
    check_variant(diagnosis, "reference_dilated", read_map(stored, transform, SCALES["coarse"]), larger)


def canonical_map(diagnosis: Diagnosis, name: str) -> Scores:
    return next(scores for variant_id, scores, _ in diagnosis.variant_maps() if variant_id == name)


def test_slices_are_permuted_in_view_where_there_is_brain(plan: Plan) -> None:
    diagnosis = diagnosis_of(plan, "coarse")
    declared, permuted = (canonical_map(diagnosis, name) for name in ("declared", "slices_permuted"))
    assert not np.array_equal(permuted, declared)
    slices = [sorted(scores[:, :, k].tobytes() for k in range(SHAPE[2])) for scores in (declared, permuted)]
    assert slices[0] == slices[1]
    assert not permuted[:, :, 0].any() and not permuted[:, :, 7:].any()  # outside the field of view
    check_variant(diagnosis, "slices_permuted", permuted, diagnosis.reference)
    assert np.array_equal(canonical_map(diagnosis_of(plan, "coarse"), "slices_permuted"), permuted)
    other = diagnosis_of(plan, "coarse")
    other.task = replace(other.task, parameters=other.task.parameters.model_copy(update={"seed": 1}))
    assert not np.array_equal(canonical_map(other, "slices_permuted"), permuted)


def test_half_a_voxel_away_and_back_weighs_neighbours_1_2_1_inside_the_view(plan: Plan) -> None:
    diagnosis = diagnosis_of(plan, "coarse")
    declared, exported = (canonical_map(diagnosis, name) for name in ("declared", "half_voxel"))
    box = field_of_view(diagnosis.stored[1], SHAPE)
    expected = declared[box].astype(np.float64)
    for axis in range(3):
        size = expected.shape[axis]
        padded = np.pad(expected, [(int(axis == other),) * 2 for other in range(3)], mode="edge")
        there = (padded.take(range(size + 1), axis) + padded.take(range(1, size + 2), axis)) / 2
        expected = (there.take(range(size), axis) + there.take(range(1, size + 1), axis)) / 2
    assert exported[box] == pytest.approx(expected, abs=1e-6)
    outside = np.ones(SHAPE, np.bool_)
    outside[box] = False
    assert outside.any() and not exported[outside].any()
    check_variant(diagnosis, "half_voxel", exported, diagnosis.reference)


def test_the_nearest_re_export_reads_one_stored_voxel_each(plan: Plan) -> None:
    diagnosis = diagnosis_of(plan, "coarse")
    stored, transform = diagnosis.stored
    exported = map_nearest_scores(stored, transform, SHAPE)
    for x in product(*(range(*side.indices(99)) for side in field_of_view(transform, SHAPE))):
        index = [0, 0, 0]
        for axis in range(3):
            size = transform.size[axis]
            near = ((2 * (x[axis] - transform.start[axis]) + 1) * size) // (2 * transform.extent[axis])
            index[transform.source_axis[axis]] = size - 1 - near if transform.reversed[axis] else near
        assert exported[x] == stored[index[0], index[1], index[2]]
    low, high = SCALES["coarse"].low, SCALES["coarse"].high
    scaled = ((exported.astype(np.float64) - low) / (high - low)).astype(np.float32)
    scaled[:, :1], scaled[:, :, :1], scaled[:, :, 7:] = 0, 0, 0
    check_variant(diagnosis, "nearest", scaled, diagnosis.reference)


@pytest.mark.parametrize("method_id", SIZES)
def test_every_candidate_reads_the_map_as_its_transform_says(plan: Plan, method_id: str) -> None:
    diagnosis = diagnosis_of(plan, method_id)
    stored, transform = diagnosis.stored
    found = list(diagnosis.candidate_aurocs())
    assert [member for member, _ in found] == list(candidates(SHAPE[2]))
    brain, reference = diagnosis.brain, diagnosis.reference
    for member, auroc in found:
        turned = transform.candidate(member.transposed, member.flip_0, member.flip_1)
        mapped = map_linear(stored, turned, SHAPE, member.dz)
        check(auroc, roc_auc_score(reference[brain], diagnosis.scaled(mapped, turned)[brain]))


def test_an_exchanged_map_is_the_next_subject_s(plan: Plan) -> None:
    for method_id in SIZES:
        first, second = diagnosis_of(plan, method_id, 0, exchanged=1), diagnosis_of(plan, method_id, 1)
        stored, transform = second.stored
        mapped = first.scaled(map_linear(stored, transform, SHAPE), transform)
        [(name, found)] = first.exchanged.items()
        assert name == "exchanged"
        check(found.voxels.auroc, roc_auc_score(first.reference[first.brain], mapped[first.brain]))


def test_nothing_is_exchanged_without_another_subject_or_on_another_grid(plan: Plan, tmp_path: Path) -> None:
    assert diagnosis_of(plan, "whole", exchanged=None).exchanged == {}
    write_volume(tmp_path / "reference.nii.gz", np.zeros((3, 3, 3), np.uint8), (2, 2, 3))
    diagnosis = diagnosis_of(plan, "whole")
    other = diagnosis.task.exchanged
    assert other is not None
    moved = replace(other.subject.reference, url=str(tmp_path / "reference.nii.gz"))
    small = replace(other, subject=replace(other.subject, reference=moved))
    diagnosis.task = replace(diagnosis.task, exchanged=small)
    assert diagnosis.exchanged == {}
    assert DIAGNOSES["exchange_ranking"](diagnosis).is_empty()
    assert DIAGNOSES["exchange_curve"](diagnosis).is_empty()


def test_the_next_subject_is_of_the_same_split_and_the_last_is_followed_by_the_first(plan: Plan) -> None:
    first, second, third = plan.subjects
    assert [plan.next_in_split(subject) for subject in plan.subjects] == [second, third, first]
    moved = replace(second, split="validation")
    split = replace(plan, subjects=(first, moved, third))
    assert [split.next_in_split(subject) for subject in split.subjects] == [third, None, first]


def test_a_grid_of_one_slice_has_no_shift(plan: Plan, tmp_path: Path) -> None:
    diagnosis = diagnosis_of(plan, "whole", exchanged=None)
    rng = np.random.default_rng(3)
    for role in ("reference", "brain", "map"):
        values = rng.random((5, 4, 1)).astype(np.float32) if role == "map" else np.ones((5, 4, 1), np.uint8)
        if role == "reference":
            values[:2] = 0
        write_volume(tmp_path / f"{role}.nii.gz", values, (2, 2, 3))
    subject, task = diagnosis.task.subject, diagnosis.task
    assert subject.brain is not None
    flat = replace(
        subject,
        reference=replace(subject.reference, url=str(tmp_path / "reference.nii.gz")),
        brain=replace(subject.brain, url=str(tmp_path / "brain.nii.gz")),
    )
    inputs = replace(task.inputs, map=replace(task.inputs.map, url=str(tmp_path / "map.nii.gz")))
    flat_diagnosis = Diagnosis(replace(task, subject=flat, inputs=inputs))
    assert len(list(flat_diagnosis.candidate_aurocs())) == 8
    assert not {*SHIFTS, "slices_permuted"} & set(flat_diagnosis.variants)
    assert set(ORIENTATIONS) <= set(flat_diagnosis.variants)


def test_tables_hold_a_row_per_variant_level_and_candidate(plan: Plan) -> None:
    diagnosis = diagnosis_of(plan, "coarse")
    frames = {name: measure(diagnosis) for name, measure in DIAGNOSES.items()}
    assert frames["variant_ranking"].height == len(diagnosis.variants) == 15
    assert frames["variant_curve"].height == 15 * 201
    assert frames["exchange_ranking"].height == 1 and frames["exchange_curve"].height == 201
    assert frames["candidate_ranking"].height == 56
    assert frames["candidate_ranking"].filter("is_applied").height == 1


TRANSFORMS = st.builds(
    Transform,
    source_axis=st.sampled_from([(0, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 1)]),
    start=st.tuples(*(st.integers(-3, 4) for _ in range(3))),
    extent=st.tuples(*(st.integers(1, 9) for _ in range(3))),
    size=st.tuples(*(st.integers(1, 7) for _ in range(3))),
    reversed=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    align=st.sampled_from(["centre", "corner"]),
)


@settings(deadline=None, max_examples=60)
@given(TRANSFORMS, st.integers(0, 3), st.booleans(), st.integers(0, 1000))
def test_one_mapping_gives_every_offset(transform: Transform, margin: int, is_fortran: bool, seed: int) -> None:
    stored = np.random.default_rng(seed).random(transform.stored_shape).astype(np.float32)
    stored = np.asfortranarray(stored) if is_fortran else stored
    shape = (5, 4, 6)
    beyond, box = map_linear_beyond(stored, transform, shape, margin), field_of_view(transform, shape)
    slices = box[2].stop - box[2].start
    for dz in range(-margin, margin + 1):
        window = beyond[:, :, margin + dz : margin + dz + slices]
        assert np.array_equal(window, map_linear(stored, transform, shape, dz)[box])


MASKS = hnp.arrays(np.bool_, st.tuples(*(st.integers(1, 6) for _ in range(3))), elements=st.sampled_from([False, True]))


@settings(deadline=None, max_examples=60)
@given(MASKS, st.integers(0, 1000), st.sampled_from([0.0, 0.2, 1.0, 5.0]))
def test_a_dilation_adds_the_nearest_voxels(reference: Mask, seed: int, share: float) -> None:
    within = np.random.default_rng(seed).random(reference.shape) < 0.8
    voxel_mm = (1.0, 2.5, 0.8)
    grown = dilated(reference, within, share, voxel_mm)
    added = grown & ~reference
    free = within & ~reference
    wanted = round(share * np.count_nonzero(reference & within))
    assert (grown & reference).sum() == reference.sum() and not (added & ~within).any()
    assert added.sum() == min(wanted, free.sum())
    if not added.any() or not (free & ~added).any():
        return
    held = np.argwhere(reference) * voxel_mm
    distance = {tuple(x): np.linalg.norm(held - x * np.array(voxel_mm), axis=1).min() for x in np.argwhere(free)}
    places = [(round(float(distance[tuple(x)]), 6), tuple(x)) for x in np.argwhere(free)]
    assert sorted(places)[: int(added.sum())] == sorted(p for p in places if added[p[1]])


def test_a_dilation_looks_beyond_its_first_margin() -> None:
    reference, within = np.zeros((40, 3, 3), np.bool_), np.zeros((40, 3, 3), np.bool_)
    reference[:5], within[:5], within[20:22] = True, True, True
    assert np.flatnonzero(dilated(reference, within, 0.2, (1.0, 1.0, 1.0)).any(axis=(1, 2))).tolist() == [*range(5), 20]


def test_an_empty_reference_stays_empty() -> None:
    empty = np.zeros((4, 4, 4), np.bool_)
    assert not dilated(empty, ~empty, 0.2, (1.0, 1.0, 1.0)).any()
