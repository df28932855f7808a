import csv
import gzip
import hashlib
import itertools
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage, stats

from ingest.phantom import (
    Storage,
    canonical_grid,
    declared_methods,
    grow_anatomy,
    grow_lesions,
    small_lesion_sizes,
    write_phantom,
)

Mask = NDArray[np.bool_]
Volume = NDArray[np.float64]
SHAPE = (56, 68, 48)
STORED_SHAPE = {"diffuse": (68, 56, 48), "sharp": (56, 68, 30), "sharp_twin": (30, 68, 56), "coarse": (37, 45, 48)}
STORED_DTYPE = {"diffuse": "<f4", "sharp": "<u2", "sharp_twin": "<f4", "coarse": "<f8"}
NIFTI_DTYPE = {2: "<u1", 4: "<i2", 16: "<f4", 64: "<f8", 512: "<u2"}
VOXEL_MM3 = 27.0


@dataclass(frozen=True)
class Nifti:
    dtype: str
    values: Volume  # slope and intercept applied
    zooms: tuple[float, float, float]
    header: bytes


@dataclass(frozen=True)
class Transform:
    """The protocol's transform, mapped voxel by voxel index: the slow twin of the storage under test."""

    source_axis: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    reversed: tuple[bool, ...]

    def nearest_index(self, axis: int, x: int, size: int) -> int:
        n = ((2 * (x - self.start[axis]) + 1) * size) // (2 * self.extent[axis])
        n = min(max(n, 0), size - 1)
        return size - 1 - n if self.reversed[axis] else n

    def in_view(self, shape: tuple[int, ...]) -> Mask:
        inside = [
            np.array([self.start[j] <= x < self.start[j] + self.extent[j] for x in range(shape[j])]) for j in range(3)
        ]
        return inside[0][:, None, None] & inside[1][:, None] & inside[2]

    def nearest(self, stored: Volume, shape: tuple[int, ...], dz: int = 0) -> Volume:
        out = stored.transpose(self.source_axis)
        for axis in range(3):
            shift = dz if axis == 2 else 0
            index = [self.nearest_index(axis, x + shift, out.shape[axis]) for x in range(shape[axis])]
            out = out.take(index, axis)
        return np.where(self.in_view(shape), out, 0)

    def linear(self, stored: Volume, shape: tuple[int, ...]) -> Volume:
        out = stored.transpose(self.source_axis)
        for axis in range(3):
            size, mixed = out.shape[axis], list[Volume]()
            for x in range(shape[axis]):
                c = ((2 * (x - self.start[axis]) + 1) * size) / (2 * self.extent[axis]) - 0.5
                c = min(max(c, 0.0), size - 1.0)
                low = int(c)
                high, weight = min(low + 1, size - 1), c - low
                if self.reversed[axis]:
                    low, high = size - 1 - low, size - 1 - high
                mixed.append(out.take(low, axis) * (1 - weight) + out.take(high, axis) * weight)
            out = np.stack(mixed, axis)
        return np.where(self.in_view(shape), out, 0)

    def round_trip(self, mask: Mask, size: tuple[int, ...]) -> Mask:
        """Of canonical labels: to the stored grid by the inverse index map, then back by the nearest one."""
        out = mask
        for axis in range(3):
            inverse = [
                self.start[axis] + ((2 * u + 1) * self.extent[axis]) // (2 * size[axis]) for u in range(size[axis])
            ]
            unreversed = Transform(self.source_axis, self.start, self.extent, (False, False, False))
            back = [unreversed.nearest_index(axis, x, size[axis]) for x in range(mask.shape[axis])]
            out = out.take(inverse, axis).take(back, axis)
        return out & self.in_view(mask.shape)

    def candidates(self) -> "list[tuple[Transform, int]]":
        """The 56 members: in-plane transposes, in-plane flips, through-plane offsets; the declared one is at 3."""
        first, second, third = self.source_axis
        members = list[tuple[Transform, int]]()
        for axes in ((first, second, third), (second, first, third)):
            for flip_0, flip_1 in itertools.product((False, True), repeat=2):
                turned = (self.reversed[0] ^ flip_0, self.reversed[1] ^ flip_1, self.reversed[2])
                members += [(Transform(axes, self.start, self.extent, turned), dz) for dz in range(-3, 4)]
        return members


@dataclass(frozen=True)
class Study:
    folder: Path
    declared: dict[str, Any]
    subjects: list[dict[str, str]]

    @property
    def ids(self) -> list[str]:
        return [row["subject_id"] for row in self.subjects]

    def mask(self, role: str, subject_id: str) -> Mask:
        return read_nifti(self.folder / role / f"{subject_id}.nii.gz").values > 0

    def transforms(self) -> dict[str, Transform]:
        return {
            method["id"]: Transform(
                tuple(method["transform"]["source_axis"]),
                tuple(method["transform"]["start"]),
                tuple(method["transform"]["extent"]),
                tuple(method["transform"]["reversed"]),
            )
            for method in self.declared["method"]
        }

    def map(self, method_id: str, subject_id: str) -> Nifti:
        return read_nifti(self.folder / f"maps/{method_id}/{subject_id}.nii.gz")

    def own_reference(self, method_id: str, subject_id: str) -> Nifti:
        return read_nifti(self.folder / f"maps/{method_id}/{subject_id}_label.nii.gz")


def read_nifti(path: Path) -> Nifti:
    """A NIfTI-1 read from its bytes alone, so that the writer's library is not also the judge."""
    content = gzip.decompress(path.read_bytes())
    shape = struct.unpack("<3h", content[42:48])
    dtype = NIFTI_DTYPE[struct.unpack("<h", content[70:72])[0]]
    first, second, third = struct.unpack("<3f", content[80:92])
    offset, slope, intercept = struct.unpack("<3f", content[108:120])
    raw = np.frombuffer(content, dtype, offset=int(offset)).reshape(shape, order="F")
    return Nifti(dtype, raw.astype(np.float64) * slope + intercept, (first, second, third), content[:352])


def open_study(path: Path) -> Study:
    declared = tomllib.loads(path.read_text(encoding="utf-8"))
    with (path.parent / declared["study"]["subjects"]).open(newline="", encoding="utf-8") as handle:
        return Study(path.parent, declared, list(csv.DictReader(handle)))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def dice(first: Mask, second: Mask) -> float:
    return 2 * int((first & second).sum()) / int(first.sum() + second.sum())


def component_sizes(mask: Mask, connectivity: int) -> list[int]:
    labels, count = ndimage.label(mask, ndimage.generate_binary_structure(3, connectivity))
    return [int((labels == label).sum()) for label in range(1, count + 1)]


def auroc(scores: Volume, positive: Mask) -> float:
    ranks, positives = stats.rankdata(scores), int(positive.sum())
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * (positive.size - positives)))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return open_study(write_phantom(tmp_path_factory.mktemp("phantom")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return open_study(write_phantom(tmp_path_factory.mktemp("small"), validation=1, test=3))


def test_same_arguments_give_same_bytes(small: Study, tmp_path: Path) -> None:
    first = digests(small.folder)
    write_phantom(tmp_path, validation=1, test=3)
    assert digests(tmp_path) == first
    assert len(first) == 4 * (4 + 4 * 2) + 2


def test_another_seed_gives_other_volumes(small: Study, tmp_path: Path) -> None:
    write_phantom(tmp_path, seed=7, validation=1, test=3)
    first, other = digests(small.folder), digests(tmp_path)
    empty = ("reference/phantom04", "_label")
    same = [name for name in first if first[name] == other[name] and name.endswith(".gz")]
    assert same and all("phantom04" in name and any(part in name for part in empty) for name in same)


def test_an_ordinary_subject_does_not_depend_on_the_number_of_subjects(small: Study, study: Study) -> None:
    few, many = digests(small.folder), digests(study.folder)
    ordinary = [name for name in few if "phantom01" in name or "phantom02" in name]
    assert len(ordinary) == 2 * 12
    assert all(few[name] == many[name] for name in ordinary)


def test_subjects_have_splits_and_sites(study: Study) -> None:
    assert study.ids == [f"phantom{number:02d}" for number in range(1, 29)]
    assert [row["split"] for row in study.subjects] == ["validation"] * 12 + ["test"] * 16
    assert all(
        len({row["split"] for row in study.subjects if row["site"] == site}) == 2 for site in ("north", "south", "west")
    )
    assert {row["site"] for row in study.subjects} == {"north", "south", "west"}


def test_study_file_keeps_the_public_contract(study: Study) -> None:
    declared = study.declared
    assert declared["study"] == {"name": "phantom", "voxel_size_mm": [3.0, 3.0, 3.0], "subjects": "subjects.csv"}
    assert set(declared) == {"study", "files", "method", "baseline"}
    assert [method["id"] for method in declared["method"]] == ["diffuse", "sharp", "sharp_twin", "coarse"]
    assert [method["family"] for method in declared["method"]] == ["residual"] * 3 + ["feature"]
    legacy = [method["legacy_voxel_mm3"] for method in declared["method"]]
    assert legacy == pytest.approx([1.166 * 27, 27, 0.604 * 27, 1.3 * 27])
    assert declared["baseline"] == [{"id": "FLAIR", "intensity": "FLAIR"}, {"id": "T2", "intensity": "T2"}]
    patterns = [declared["files"]["reference"], declared["files"]["brain"], *declared["files"]["intensity"].values()]
    patterns += [method[field] for method in declared["method"] for field in ("map", "own_reference")]
    named = {pattern.format(subject_id=subject_id) for pattern in patterns for subject_id in study.ids}
    assert named | {"study.toml", "subjects.csv"} == set(digests(study.folder))


def test_canonical_volumes(study: Study) -> None:
    for subject_id in study.ids:
        brain = read_nifti(study.folder / f"brain/{subject_id}.nii.gz")
        reference = read_nifti(study.folder / f"reference/{subject_id}.nii.gz")
        assert brain.dtype == reference.dtype == "<u1"
        assert brain.values.shape == reference.values.shape == SHAPE
        assert brain.zooms == reference.zooms == (3, 3, 3)
        assert np.isin(reference.values, (0, 1)).all()
        assert not ((reference.values > 0) & (brain.values == 0)).any()
        assert 1150 < brain.values.sum() * VOXEL_MM3 / 1000 < 1550
        assert ndimage.label(brain.values)[1] == 1
        for contrast in ("FLAIR", "T2"):
            image = read_nifti(study.folder / f"intensity/{contrast}/{subject_id}.nii.gz")
            assert image.dtype == "<i2"
            assert ((image.values > 0) == (brain.values > 0)).all()
            assert image.values.min() == 0


def test_maps_and_own_references_as_stored(study: Study) -> None:
    assert {name: STORED_SHAPE[name] for name in study.transforms()} == STORED_SHAPE
    for method_id, subject_id in itertools.product(STORED_SHAPE, study.ids):
        scores, own = study.map(method_id, subject_id), study.own_reference(method_id, subject_id)
        assert scores.values.shape == own.values.shape == STORED_SHAPE[method_id]
        assert (scores.dtype, own.dtype) == (STORED_DTYPE[method_id], "<u1")
        assert np.isfinite(scores.values).all()
        assert scores.values.min() >= 0
        assert scores.values.astype(np.float32).max() <= 1
        assert scores.values.max() > 0.1
        assert np.isin(own.values, (0, 1)).all()


def test_headers_are_plain_and_state_the_stored_voxel_size(study: Study) -> None:
    for method_id in STORED_SHAPE:
        scores = study.map(method_id, "phantom01")
        expected = (3 * 56 / 37, 3 * 68 / 45, 3) if method_id == "coarse" else (3, 3, 3)
        assert scores.zooms == pytest.approx(expected)
        affine = np.array(struct.unpack("<12f", scores.header[280:328])).reshape(3, 4)
        np.testing.assert_allclose(affine, np.diag([*scores.zooms, 1.0])[:3], rtol=1e-6)
        assert scores.header[148:252].strip(b"\0") == b""


def test_reference_sizes(study: Study) -> None:
    ordinary = [study.mask("reference", subject_id) for subject_id in study.ids[:-1]]
    assert not study.mask("reference", study.ids[-1]).any()
    assert study.subjects[-1]["split"] == "test"
    volumes_cm3 = [reference.sum() * VOXEL_MM3 / 1000 for reference in ordinary]
    assert 5 < min(volumes_cm3) < 15
    assert 80 < max(volumes_cm3) < 165
    faces = [component_sizes(reference, 1) for reference in ordinary]
    corners = [component_sizes(reference, 3) for reference in ordinary]
    assert all(1 in sizes for sizes in faces)
    assert sum(2 in sizes for sizes in faces) > 20
    assert all(len(sizes) >= 4 for sizes in corners)
    assert sum(len(face) > len(corner) for face, corner in zip(faces, corners, strict=True)) > 13


def test_one_mass_partly_leaves_the_cropped_view(study: Study) -> None:
    view = study.transforms()["sharp"].in_view(SHAPE)
    shares = [
        (study.mask("reference", subject_id) & view).sum() / study.mask("reference", subject_id).sum()
        for subject_id in study.ids[:-1]
    ]
    assert 0.3 < shares[-1] < 0.95
    assert min(shares[:-1]) > 0.9
    assert study.transforms()["diffuse"].in_view(SHAPE).all()


def test_gate_dice_and_centroid(study: Study) -> None:
    for method_id, transform in study.transforms().items():
        values, distances_mm = list[float](), list[float]()
        for subject_id in study.ids[:-1]:
            mapped = transform.nearest(study.own_reference(method_id, subject_id).values, SHAPE) > 0
            inside = study.mask("reference", subject_id) & transform.in_view(SHAPE)
            values.append(dice(mapped, inside))
            centroids = [np.array(ndimage.center_of_mass(mask)) for mask in (mapped, inside)]
            distances_mm.append(3 * float(np.linalg.norm(centroids[0] - centroids[1])))
        if method_id == "coarse":
            assert np.median(values) > 0.9
            assert min(values) > 0.75
            assert 1 <= sum(value < 0.85 for value in values) <= 4
            assert max(distances_mm) < 6
        else:
            assert min(values) == 1
            assert max(distances_mm) == 0


def test_own_reference_is_the_round_trip_and_empty_where_the_reference_is(study: Study) -> None:
    for method_id, transform in study.transforms().items():
        assert not study.own_reference(method_id, study.ids[-1]).values.any()
        for subject_id in study.ids[::9]:
            own = study.own_reference(method_id, subject_id).values
            expected = transform.round_trip(
                study.mask("reference", subject_id), own.transpose(transform.source_axis).shape
            )
            assert ((transform.nearest(own, SHAPE) > 0) == expected).all()


@pytest.mark.parametrize("subject_id", ["phantom06", "phantom27"])
def test_the_declared_transform_beats_the_other_candidates(study: Study, subject_id: str) -> None:
    for method_id, transform in study.transforms().items():
        own = study.own_reference(method_id, subject_id).values
        inside = study.mask("reference", subject_id) & transform.in_view(SHAPE)
        values = [dice(member.nearest(own, SHAPE, dz) > 0, inside) for member, dz in transform.candidates()]
        assert len(values) == 56
        assert int(np.argmax(values)) == 3
        assert sorted(values)[-2] < values[3] - 0.03


def test_scores_rank_lesions_and_methods_differ(study: Study) -> None:
    mean_auroc = dict[str, float]()
    for method_id, transform in study.transforms().items():
        values = list[float]()
        for subject_id in study.ids[:-1:3]:
            brain = study.mask("brain", subject_id)
            scores = transform.linear(study.map(method_id, subject_id).values, SHAPE)
            values.append(auroc(scores[brain], study.mask("reference", subject_id)[brain]))
        mean_auroc[method_id] = float(np.mean(values))
    assert all(0.8 < value < 0.99 for value in mean_auroc.values())
    assert mean_auroc["diffuse"] == max(mean_auroc.values())
    assert abs(mean_auroc["sharp"] - mean_auroc["sharp_twin"]) < 0.02


def test_lesions_are_brighter_than_white_matter_and_the_rim_is_bright_on_t2(study: Study) -> None:
    for subject_id in study.ids[:-1:3]:
        brain, reference = study.mask("brain", subject_id), study.mask("reference", subject_id)
        deep = ndimage.binary_erosion(brain, iterations=5) & ~reference
        rim = brain & ~ndimage.binary_erosion(brain) & ~reference
        flair = read_nifti(study.folder / f"intensity/FLAIR/{subject_id}.nii.gz").values
        t2 = read_nifti(study.folder / f"intensity/T2/{subject_id}.nii.gz").values
        assert flair[reference].mean() > 1.02 * np.median(flair[deep])
        assert t2[reference].mean() > 1.02 * np.median(t2[deep])
        assert t2[rim].mean() > 1.3 * np.median(t2[deep])


def test_other_spacings(tmp_path: Path) -> None:
    coarse = open_study(write_phantom(tmp_path, validation=0, test=3, spacing_mm=6))
    assert coarse.declared["study"]["voxel_size_mm"] == [6.0, 6.0, 6.0]
    assert coarse.mask("reference", "phantom01").shape == (28, 34, 24)
    assert {row["split"] for row in coarse.subjects} == {"test"}
    view = coarse.transforms()["sharp"].in_view((28, 34, 24))
    leaving = coarse.mask("reference", "phantom02")
    assert 0.2 < (leaving & view).sum() / leaving.sum() < 1
    assert not coarse.mask("reference", "phantom03").any()


@pytest.mark.parametrize("wrong", [{"validation": -1}, {"test": 2}, {"spacing_mm": 0.5}, {"spacing_mm": 7.0}])
def test_refuses_what_it_cannot_simulate(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"found.*{next(iter(wrong.values()))}"):
        write_phantom(tmp_path / "never", **wrong)
    assert not (tmp_path / "never").exists()


@settings(max_examples=60, deadline=None)
@given(
    st.permutations((0, 1, 2)),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.tuples(*[st.integers(4, 9)] * 3),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.tuples(*[st.booleans()] * 3),
    st.integers(0, 2),
)
def test_storage_aligns_voxel_centres(
    axes: list[int],
    start: tuple[int, ...],
    extent: tuple[int, ...],
    lost: tuple[int, ...],
    reversed_: tuple[bool, ...],
    ramp_axis: int,
) -> None:
    """A ramp survives storing and mapping back, up to the clipped border of a lower resolution: no half-voxel shift."""
    shape = tuple(a + length for a, length in zip(start, extent, strict=True))
    size = tuple(max(2, length - less) for length, less in zip(extent, lost, strict=True))
    storage = Storage(
        (axes[0], axes[1], axes[2]),
        (start[0], start[1], start[2]),
        (extent[0], extent[1], extent[2]),
        (size[0], size[1], size[2]),
        (reversed_[0], reversed_[1], reversed_[2]),
        "float64",
    )
    transform = Transform(storage.source_axis, start, extent, reversed_)
    ramp = np.indices(shape)[ramp_axis] / 16
    back = transform.linear(storage.store_map(ramp.astype(np.float32)).astype(np.float64), shape)
    position = np.indices(shape)[ramp_axis] - start[ramp_axis]
    border = extent[ramp_axis] / size[ramp_axis] / 2 - 0.5
    inner = transform.in_view(shape) & (position >= border) & (position <= extent[ramp_axis] - 1 - border)
    assert inner.any()
    np.testing.assert_allclose(back[inner], ramp[inner], atol=1e-6)
    assert not back[~transform.in_view(shape)].any()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.permutations((0, 1, 2)), st.tuples(*[st.booleans()] * 3))
def test_labels_at_full_size_come_back_exactly(data: st.DataObject, axes: list[int], turned: tuple[bool, ...]) -> None:
    shape = (4, 5, 3)
    flat = data.draw(st.lists(st.booleans(), min_size=60, max_size=60))
    labels = np.array(flat).reshape(shape)
    storage = Storage(
        (axes[0], axes[1], axes[2]), (0, 0, 1), (4, 5, 2), (4, 5, 2), (turned[0], turned[1], turned[2]), "float32"
    )
    transform = Transform(storage.source_axis, storage.start, storage.extent, storage.reversed)
    back = transform.nearest(storage.store_labels(labels).astype(np.float64), shape) > 0
    assert (back == (labels & transform.in_view(shape))).all()


def test_small_lesions_come_on_both_sides_of_the_floor() -> None:
    for seed, (spacing_mm, under, over) in itertools.product(range(20), ((3.0, 1, 2), (2.0, 6, 7), (6.0, 1, 1))):
        sizes = small_lesion_sizes(np.random.default_rng(seed), canonical_grid(spacing_mm))
        assert min(sizes) == sizes[-1] == under
        assert over in sizes
        assert 4 <= len(sizes) <= 12


def test_lesions_lie_in_the_brain_and_carry_conspicuity() -> None:
    grid = canonical_grid(4.0)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        anatomy = grow_anatomy(rng, grid)
        lesions = grow_lesions(rng, grid, anatomy, leaves_view=False)
        assert not (lesions.mask & ~anatomy.brain).any()
        assert not (lesions.core & ~lesions.mask).any()
        assert ((lesions.conspicuity > 0) == lesions.mask).all()
        assert lesions.conspicuity.max() == 1


def test_declared_storage_fits_the_grid() -> None:
    for spacing_mm in (1.0, 2.5, 3.0, 6.0):
        grid = canonical_grid(spacing_mm)
        for method in declared_methods(grid).values():
            storage = method.storage
            assert sorted(storage.source_axis) == [0, 1, 2]
            for axis in range(3):
                assert 0 <= storage.start[axis] <= storage.start[axis] + storage.extent[axis] <= grid.shape[axis]
                assert 1 < storage.size[axis] <= storage.extent[axis]
