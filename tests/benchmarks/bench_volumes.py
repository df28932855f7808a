"""Bars 4 to 6: loading, resampling and the 56 candidates of the gate."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from ingest.gate import candidate_overlaps
from ingest.grid import Transform, map_linear
from ingest.nifti import read_scores
from ingest.phantom import write_volume
from tests.benchmarks.bars import Bars, Benchmark, race, row_of_race
from tests.benchmarks.twins import map_every_candidate, same_overlaps
from tests.benchmarks.workload import SHAPE, TRANSFORM, MapName, Volumes

nib: Any = import_module("nibabel")

COARSE = (160, 160, 93)
RESAMPLINGS = {
    "straight": Transform((0, 1, 2), (0, 0, 0), SHAPE, COARSE, (False, False, False)),
    "permuted and reversed": Transform((2, 0, 1), (0, 0, 12), SHAPE, COARSE, (False, True, True)),
}


@pytest.mark.parametrize("name", ["sparse", "dense"])
def bench_loading(benchmark: Benchmark, bars: Bars, study: Path, name: MapName) -> None:
    path = str(study.parent / "maps" / name / "one.nii.gz")
    compare_loading(benchmark, bars, path, f"{name} map, float32")


def bench_loading_scaled_integers(benchmark: Benchmark, bars: Bars, volumes: Volumes, tmp_path: Path) -> None:
    values = np.rint(volumes.stored["dense"] * np.float32(65535)).astype(np.uint16)
    write_volume(tmp_path / "scaled.nii.gz", values, (1.0, 1.0, 1.0))
    compare_loading(benchmark, bars, str(tmp_path / "scaled.nii.gz"), "dense map, scaled uint16")


def compare_loading(benchmark: Benchmark, bars: Bars, path: str, what: str) -> None:
    ours, rival = race(
        benchmark, lambda: read_scores(path).values, lambda: np.asanyarray(nib.load(path).dataobj), rival_rounds=7
    )
    same = np.array_equal(ours.result, rival.result.astype(np.float32))
    row = row_of_race(4, f"load and hash a .nii.gz, {what}", ours.best, ("nibabel", rival.best), 0.7, same=same)
    bars.add(row)


def coordinates(transform: Transform) -> NDArray[np.float64]:
    """Where every canonical voxel reads the stored array, along stored axes; shape (3, *SHAPE)."""
    along: list[NDArray[np.float64]] = []
    for axis in range(3):
        size, offset = transform.size[axis], np.arange(SHAPE[axis]) - transform.start[axis]
        position = np.clip((2 * offset + 1) * size / (2 * transform.extent[axis]) - 0.5, 0, size - 1)
        along.append(size - 1 - position if transform.reversed[axis] else position)
    grid = np.meshgrid(*along, indexing="ij")
    return np.stack([grid[transform.source_axis.index(stored)] for stored in range(3)])


@pytest.mark.parametrize("name", list(RESAMPLINGS))
def bench_resampling(benchmark: Benchmark, bars: Bars, name: str) -> None:
    transform = RESAMPLINGS[name]
    noise = np.random.default_rng(5).random(transform.stored_shape, np.float32)
    stored, places = np.asfortranarray(noise), coordinates(transform)
    ours, rival = race(
        benchmark,
        lambda: map_linear(stored, transform, SHAPE),
        lambda: ndimage.map_coordinates(stored, places, order=1, mode="nearest"),
    )
    inside = tuple(slice(start, None) for start in transform.start)
    same = float(np.abs(ours.result[inside] - rival.result[inside]).max()) <= 1e-6
    what = f"map 160x160x93 to 240x240x139, {name}"
    bars.add(row_of_race(5, what, ours.best, ("map_coordinates", rival.best), 0.08, same=same))


@pytest.mark.parametrize("name", ["full size", "two thirds"])
def bench_candidates(benchmark: Benchmark, bars: Bars, volumes: Volumes, name: str) -> None:
    transform = TRANSFORM if name == "full size" else RESAMPLINGS["straight"]
    own = stored_label(volumes, transform)
    ours, rival = race(
        benchmark,
        lambda: candidate_overlaps(own, volumes.reference, transform, (1.0, 1.0, 1.0)),
        lambda: map_every_candidate(own, volumes.reference, transform),
        rival_rounds=2,
    )
    same = same_overlaps(ours.result, rival.result)
    what = f"56 candidates, own reference at {name}"
    bars.add(row_of_race(6, what, ours.best, ("each mapped by numpy", rival.best), 0.08, same=same))


def stored_label(volumes: Volumes, transform: Transform) -> NDArray[np.bool_]:
    """An own reference on the stored grid: the nearest canonical voxels, in Fortran order, as NIfTI is read."""
    tables = [
        np.clip(
            transform.start[axis] + (2 * np.arange(size) + 1) * transform.extent[axis] // (2 * size), 0, SHAPE[axis] - 1
        )[:: -1 if transform.reversed[axis] else 1]
        for axis, size in enumerate(transform.size)
    ]
    canonical = volumes.reference[np.ix_(*tables)]
    return np.asfortranarray(canonical.transpose([transform.source_axis.index(stored) for stored in range(3)]))
