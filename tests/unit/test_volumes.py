"""Volumes against their declarations: what is mapped, what is refused and in which words, and the states of support."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from expectations.protocol import protocol
from expectations.store import Part
from expectations.study import TransformTable
from ingest.jobs import execute
from ingest.measure import check_file
from ingest.measurement import Measurement
from ingest.measures import MEASURES
from ingest.phantom import write_volume
from ingest.plan import CheckTask, Entry, MapInputs, Scale, Source, SubjectInputs, Task
from ingest.problems import BadInput
from ingest.volumes import SubjectKey, load_contrast, load_subject, resolve_transform

SHAPE = (6, 5, 4)
Write = Callable[[str, NDArray[np.generic]], Source]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an array as NIfTI and name it as a source."""

    def write_source(name: str, array: NDArray[np.generic]) -> Source:
        path = tmp_path / f"{name}.nii.gz"
        write_volume(path, array, (1.0, 1.0, 1.0))
        return Source(str(path), path.name, "map", "p1")

    return write_source


@pytest.fixture
def reference() -> NDArray[np.uint8]:
    mask = np.zeros(SHAPE, np.uint8)
    mask[2:4, 1:4, 1:3] = 1
    return mask


def entry(**changes: object) -> Entry:
    declared = Entry(
        method_id="m",
        model_id="m",
        kind="method",
        position=0,
        map="m",
        own_reference=None,
        own_reference_labels=None,
        family=None,
        training_set=None,
        legacy_voxel_mm3=None,
        transform=TransformTable(),
        alternative_transform=None,
        fixed_scale=Scale("identity", 0.0, 1.0),
        quantiles=None,
        nan_outside_brain="refuse",
    )
    return replace(declared, **changes)


def measurement(
    map_source: Source, subject: SubjectInputs, own: Source | None = None, **changes: object
) -> Measurement:
    method = entry(**changes)
    scale = method.fixed_scale or Scale("quantiles", 0.0, 1.0)
    inputs = MapInputs(map_source, own)
    return Measurement(Task(method, subject, inputs, scale, (1.0, 1.0, 1.0), protocol().parameters, ()))


def subject_of(reference: Source, brain: Source | None = None, image: Source | None = None) -> SubjectInputs:
    return SubjectInputs("p1", "test", reference, brain, {"FLAIR": image} if image else {})


def random_map(seed: int, shape: tuple[int, ...] = SHAPE) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random(shape, np.float32)


def test_support_is_the_mask_else_the_first_image_else_everything(write: Write, reference: NDArray[np.uint8]) -> None:
    brain, image = np.zeros(SHAPE, np.uint8), np.zeros(SHAPE, np.float32)
    brain[1:] = 1
    image[2:] = -3.5  # negative intensities are brain too
    files = write("reference", reference), write("brain", brain), write("image", image)
    cases = [
        (subject_of(*files), "brain_mask", brain > 0),
        (subject_of(files[0], None, files[2]), "image_nonzero", image != 0),
        (subject_of(files[0]), "whole_array", np.ones(SHAPE, bool)),
    ]
    for inputs, status, expected in cases:
        volumes = load_subject(SubjectKey.of(inputs))
        assert volumes.support_status == status
        assert np.array_equal(volumes.brain, expected)


def test_a_brain_on_another_grid_is_refused(write: Write, reference: NDArray[np.uint8]) -> None:
    inputs = subject_of(write("reference", reference), write("brain", np.ones((6, 5, 3), np.uint8)))
    with pytest.raises(BadInput, match=r"has shape \(6, 5, 3\), the subject's reference has \(6, 5, 4\)"):
        load_subject(SubjectKey.of(inputs))


@pytest.mark.parametrize(("low", "high"), [(-0.25, 1.0), (0.0, 1.5)])
def test_scores_outside_the_unit_range_are_refused_under_identity(
    write: Write, reference: NDArray[np.uint8], low: float, high: float
) -> None:
    scores = random_map(1)
    scores.flat[:2] = low, high
    with pytest.raises(BadInput, match=f"scores from {low:g} to {high:g} where score_scale is identity"):
        _ = measurement(write("map", scores), subject_of(write("reference", reference))).mapped


def test_a_declared_range_scales_and_clips(write: Write, reference: NDArray[np.uint8]) -> None:
    scores = random_map(2) * 8 - 2
    found = measurement(
        write("map", scores), subject_of(write("reference", reference)), fixed_scale=Scale("range", 0.0, 4.0)
    )
    assert np.allclose(found.scores.unclipped, scores / 4, atol=1e-7)
    assert found.supports[0].clipped.min() == 0 and found.supports[0].clipped.max() == 1


def test_nan_is_refused_with_its_count(write: Write, reference: NDArray[np.uint8]) -> None:
    scores = random_map(3)
    scores.flat[[0, 7, 9]] = np.nan, np.inf, -np.inf
    with pytest.raises(BadInput, match="holds 3 NaN or infinite values"):
        _ = measurement(write("map", scores), subject_of(write("reference", reference))).mapped


def test_nan_outside_the_brain_may_be_declared_zero(write: Write, reference: NDArray[np.uint8]) -> None:
    brain = np.zeros(SHAPE, np.uint8)
    brain[1:5, 1:4, 1:3] = 1
    scores = random_map(4)
    scores[0, 0, 0] = np.nan
    subject = subject_of(write("reference", reference), write("brain", brain))
    found = measurement(write("map", scores), subject, nan_outside_brain="zero").mapped[0]
    assert np.array_equal(found, np.where(np.isnan(scores), np.float32(0), scores))
    scores[2, 2, 2] = np.inf
    with pytest.raises(BadInput, match="at 1 voxels inside the brain"):
        _ = measurement(write("map2", scores), subject, nan_outside_brain="zero").mapped


def test_a_source_size_that_does_not_fit_is_refused(write: Write, reference: NDArray[np.uint8]) -> None:
    table = TransformTable(source_size=(6, 5, 9))
    with pytest.raises(BadInput, match=r"source_size is declared as \(6, 5, 9\), the stored array gives \(6, 5, 4\)"):
        _ = measurement(write("map", random_map(5)), subject_of(write("reference", reference)), transform=table).mapped


def test_an_own_reference_of_another_shape_than_its_map_is_refused(write: Write, reference: NDArray[np.uint8]) -> None:
    own = write("own", np.zeros((6, 5, 3), np.uint8))
    found = measurement(write("map", random_map(6)), subject_of(write("reference", reference)), own)
    with pytest.raises(BadInput, match=r"has shape \(6, 5, 3\), its map has \(6, 5, 4\)"):
        _ = found.own


def test_the_check_finds_the_same_as_measuring(write: Write, reference: NDArray[np.uint8]) -> None:
    subject = subject_of(write("reference", reference))
    inputs = MapInputs(write("map", random_map(7) * 2), write("own", np.zeros((6, 5, 3), np.uint8)))
    own = replace(inputs.own_reference, role="own_reference") if inputs.own_reference else None
    assert own is not None
    with pytest.raises(BadInput, match="its map has"):
        check_file(CheckTask(entry(), subject, own, inputs, True))
    check_file(CheckTask(entry(), subject, inputs.map, inputs, True))  # a header cannot tell the range
    with pytest.raises(BadInput, match="where score_scale is identity"):
        check_file(CheckTask(entry(), subject, inputs.map, inputs, False))


def test_full_and_centre_are_filled_per_subject() -> None:
    table = TransformTable(source_axis=(1, 0, 2), start=(0, "centre", "centre"), extent=("full", "full", 3))
    found = resolve_transform(table, (5, 6, 2), (6, 5, 8))
    assert found.start == (0, 0, 2) and found.extent == (6, 5, 3) and found.size == (6, 5, 2)


def test_contrast_is_z_scored_inside_the_brain(write: Write) -> None:
    brain = np.zeros(SHAPE, bool)
    brain[1:4] = True
    image = random_map(8) * 900
    found = load_contrast(write("image", image), brain)
    inside = image[brain].astype(np.float64)
    assert np.allclose(found[brain], (inside - inside.mean()) / inside.std(), atol=1e-6)
    assert not found[~brain].any()
    assert not load_contrast(write("flat", np.full(SHAPE, 7, np.float32)), brain).any()
    image[2, 2, 2] = np.nan
    with pytest.raises(BadInput, match="1 NaN or infinite values inside the brain"):
        load_contrast(write("broken", image), brain)


def test_a_flat_image_is_a_volume_of_one_slice(write: Write) -> None:
    truth = np.zeros((6, 5), np.uint8)
    truth[2:4, 2] = 1
    found = measurement(write("map", random_map(9, (6, 5))), subject_of(write("reference", truth)))
    assert found.volumes.reference.shape == (6, 5, 1)
    assert found.mapped[0].shape == (6, 5, 1)


def test_views_that_hold_the_brain_give_one_support_under_both_names(
    write: Write, reference: NDArray[np.uint8]
) -> None:
    brain = np.zeros(SHAPE, np.uint8)
    brain[1:5, 1:4, 1:3] = 1
    subject = subject_of(write("reference", reference), write("brain", brain))
    whole = measurement(write("map", random_map(10)), subject)
    assert [support.support_ids for support in whole.supports] == [("brain", "brain_in_view")]
    cropped = TransformTable(start=(0, 0, 2), extent=("full", "full", 2))
    part = measurement(write("crop", random_map(11, (6, 5, 2))), subject, transform=cropped)
    assert [support.support_ids for support in part.supports] == [("brain",), ("brain_in_view",)]
    inside = np.zeros(SHAPE, np.bool_)
    inside[part.box] = part.supports[1].mask  # supports are cut to the brain's bounding box
    assert not inside[:, :, :2].any() and np.array_equal(inside[:, :, 2:], (brain > 0)[:, :, 2:])
    assert not part.supports[0].unclipped[(~inside)[brain > 0]].any()  # outside the view a map scores 0


def test_a_baseline_has_the_canonical_reference_alone(write: Write, reference: NDArray[np.uint8]) -> None:
    image = write("image", random_map(12))
    subject = subject_of(write("reference", reference), None, image)
    found = measurement(image, subject, kind="baseline", fixed_scale=None, quantiles=(0.0, 1.0))
    assert list(found.references) == ["canonical"]
    method = measurement(write("map", random_map(13)), subject)
    assert list(method.references) == ["canonical", "round_trip"]


def test_nothing_is_stored_for_a_refused_map(write: Write, reference: NDArray[np.uint8], tmp_path: Path) -> None:
    part = Part("threshold_curve", "m@p1", "0")
    task = measurement(write("map", random_map(14) * 3), subject_of(write("reference", reference))).task
    failure = execute(replace(task, parts=(part,)), str(tmp_path / "lake"))
    assert failure is not None and failure.path == "map.nii.gz" and "identity" in failure.reason
    assert not list((tmp_path / "lake").glob("parts/*/*"))


def test_an_empty_brain_measures_to_nothing(write: Write, reference: NDArray[np.uint8]) -> None:
    subject = subject_of(write("reference", reference), write("brain", np.zeros(SHAPE, np.uint8)))
    found = measurement(write("map", random_map(15)), subject)
    assert not any(sweep.predicted.any() or sweep.lesion_count.any() for sweep in found.sweeps[0].values())
    assert MEASURES["voxel_ranking"](found).get_column("auroc").null_count() == 4
    nothing = ("slice_score", "lesion_match", "region_curve", "component_overlap")
    assert all(MEASURES[name](found).is_empty() for name in nothing)
