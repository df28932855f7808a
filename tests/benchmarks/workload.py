"""What is benchmarked: a generated brain with about thirty lesions, a sparse and a dense map of it, and their files."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ingest.grid import Transform, map_linear
from ingest.phantom import write_volume

Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]
MapName = Literal["sparse", "dense"]

SHAPE = (240, 240, 139)
SEMI_AXES = (72.0, 90.0, 62.0)  # 1.7 million brain voxels, as at 1 mm
LESIONS = 30
FIRST_SLICE = 24
"""Where the maps' field of view begins: brain and lesions reach below it, so that the two supports differ."""

TRANSFORM = Transform((1, 0, 2), (0, 0, FIRST_SLICE), SHAPE, SHAPE, (False, True, False))
SUBJECTS = ("one", "two", "three", "four")
LEVEL = 100
"""The level, of threshold 0.5, at which peers that take a mask are asked."""


@dataclass(frozen=True)
class Volumes:
    """One subject on its canonical grid.

    Attributes:
        brain: Brain mask.
        reference: Lesions, all inside the brain.
        stored: The maps as their method stores them: in another axis order, reversed, shifted along axis 2.
        maps: The same on the canonical grid: 0 outside the field of view.
    """

    brain: Mask
    reference: Mask
    stored: dict[MapName, Scores]
    maps: dict[MapName, Scores]


def make_volumes(seed: int = 2026) -> Volumes:
    """Generate the subject; the same seed gives the same voxels."""
    rng = np.random.default_rng(seed)
    brain = _ellipsoid((119.5, 119.5, 69.0), SEMI_AXES) < 1
    texture = smooth_noise(rng, 1.0)
    radii = np.geomspace(1.2, 17.0, LESIONS)
    centres = _centres(rng, brain, LESIONS)
    reference, bumps = np.zeros(SHAPE, np.bool_), np.zeros(SHAPE, np.float32)
    ragged = smooth_noise(rng, 3.0) * np.float32(0.12)
    for number, (centre, radius) in enumerate(zip(centres, radii, strict=True)):
        box, distance = _around(centre, radius)
        reference[box] |= distance + ragged[box] < 1
        if number % 5:  # every fifth lesion stays unseen
            _add_bump(bumps, centre + rng.normal(0, 0.15 * radius, 3), 1.2 * radius, rng.uniform(0.4, 1.0))
    reference &= brain
    false_bumps = np.zeros(SHAPE, np.float32)
    for centre in _centres(rng, brain, 60):
        _add_bump(false_bumps, centre, rng.uniform(2, 8), rng.uniform(0.1, 0.8))
    sparse = _sparse(rng, np.maximum(bumps, false_bumps), texture, brain)
    dense = np.clip(np.float32(0.35) + np.float32(0.16) * texture + np.float32(0.4) * bumps, 0.004, 1)
    stored: dict[MapName, Scores] = {"sparse": _store(sparse), "dense": _store(np.where(brain, dense, np.float32(0)))}
    maps: dict[MapName, Scores] = {name: map_linear(stored[name], TRANSFORM, SHAPE) for name in ("sparse", "dense")}
    return Volumes(brain, reference, stored, maps)


def smooth_noise(rng: np.random.Generator, sigma: float) -> Scores:
    """Gaussian noise of mean 0 and variance 1, smooth over `sigma` voxels."""
    noise = np.asarray(ndimage.gaussian_filter(rng.standard_normal(SHAPE, np.float32), sigma), np.float32)
    return (noise - noise.mean()) / noise.std()


def _sparse(rng: np.random.Generator, bumps: Scores, texture: Scores, brain: Mask) -> Scores:
    """Blobs with texture, and specks of a voxel; everything faint is zero."""
    scores = bumps * (1 + np.float32(0.25) * texture)
    scores[scores < 0.08] = 0
    specks = brain & (rng.random(SHAPE, np.float32) < 0.003)
    scores[specks] = rng.random(int(np.count_nonzero(specks)), np.float32)
    return np.where(brain, np.clip(scores, 0, 1), np.float32(0))


def _ellipsoid(centre: tuple[float, float, float], semi_axes: tuple[float, float, float]) -> Scores:
    """Squared relative radius of every voxel."""
    axes = [
        np.square((np.arange(size, dtype=np.float32) - np.float32(middle)) / np.float32(semi))
        for size, middle, semi in zip(SHAPE, centre, semi_axes, strict=True)
    ]
    return axes[0][:, None, None] + axes[1][:, None] + axes[2]


def _centres(rng: np.random.Generator, brain: Mask, count: int) -> NDArray[np.int64]:
    """Brain voxels to put something at, away from the border of the grid; shape (count, 3)."""
    inside = np.argwhere(brain)
    return inside[rng.choice(inside.shape[0], count, replace=False)]


def _around(centre: NDArray[np.generic], radius: float) -> tuple[tuple[slice, slice, slice], Scores]:
    """A box of the grid around a centre, and the distance of its voxels from the centre in radii."""
    windows: list[slice] = []
    squares: list[Scores] = []
    for middle, size in zip(np.asarray(centre, np.float64), SHAPE, strict=True):
        window = slice(max(0, int(middle - 2 * radius) - 1), min(size, int(middle + 2 * radius) + 2))
        windows.append(window)
        squares.append((((np.arange(window.start, window.stop) - middle) / radius) ** 2).astype(np.float32))
    distance = np.sqrt(squares[0][:, None, None] + squares[1][:, None] + squares[2])
    return (windows[0], windows[1], windows[2]), distance


def _add_bump(scores: Scores, centre: NDArray[np.generic], radius: float, peak: float) -> None:
    """Raise scores to a bump that falls off over its radius."""
    box, distance = _around(centre, radius)
    np.maximum(scores[box], np.float32(peak) * np.exp(-(distance**2)), out=scores[box])


def _store(canonical: Scores) -> Scores:
    """The map as stored: planes from `FIRST_SLICE` on, reversed along axis 1, axes 0 and 1 exchanged."""
    shifted = np.zeros_like(canonical)
    shifted[:, :, : SHAPE[2] - FIRST_SLICE] = canonical[:, ::-1, FIRST_SLICE:]
    return np.asfortranarray(shifted.transpose(1, 0, 2))


def write_study(folder: Path, volumes: Volumes) -> Path:
    """Write the study that holds the subject four times over, with both maps as methods.

    Beside it lie the peers' inputs: both maps on the canonical grid, cut at threshold 0.5, as masks and as NIfTI.

    Returns:
        The path of `study.toml`.
    """
    spacing = (1.0, 1.0, 1.0)
    first = SUBJECTS[0]
    files: dict[str, NDArray[np.generic]] = {
        f"reference/{first}.nii.gz": volumes.reference.astype(np.uint8),
        f"brain/{first}.nii.gz": volumes.brain.astype(np.uint8),
        f"maps/label/{first}.nii.gz": _store(volumes.reference.astype(np.float32)).astype(np.uint8),
    }
    for name, stored in volumes.stored.items():
        files[f"maps/{name}/{first}.nii.gz"] = stored
        mask = (volumes.maps[name] > np.float32(LEVEL / 200)).astype(np.uint8)
        files[f"peers/{name}.nii.gz"] = mask
        np.save(folder / f"{name}.npy", mask)
    np.save(folder / "reference.npy", volumes.reference.astype(np.uint8))
    for path, values in files.items():
        write_volume(folder / path, values, spacing)
    for path in files:
        if first in path:
            for other in SUBJECTS[1:]:
                shutil.copyfile(folder / path, folder / path.replace(first, other))
    rows = "".join(f"{subject},{'validation' if subject == first else 'test'}\n" for subject in SUBJECTS)
    (folder / "subjects.csv").write_text(f"subject_id,split\n{rows}", encoding="utf-8")
    methods = "".join(
        f'\n[[method]]\nid = "{name}"\nmap = "maps/{name}/{{subject_id}}.nii.gz"\n'
        'own_reference = "maps/label/{subject_id}.nii.gz"\n[method.transform]\n'
        f"source_axis = [1, 0, 2]\nstart = [0, 0, {FIRST_SLICE}]\nreversed = [false, true, false]\n"
        for name in volumes.stored
    )
    study = folder / "study.toml"
    study.write_text(
        '[study]\nname = "benchmark"\nvoxel_size_mm = [1.0, 1.0, 1.0]\nsubjects = "subjects.csv"\n'
        '\n[files]\nreference = "reference/{subject_id}.nii.gz"\nbrain = "brain/{subject_id}.nii.gz"\n' + methods,
        encoding="utf-8",
    )
    return study
