"""The built-in phantom study: simulated brains, lesions and anomaly maps, seeded, small, stored as real methods store.

Nothing here is a patient. Each subject is an egg-shaped brain with a folded cortex, ventricles, a FLAIR-like and a
T2-like image and lesions. The maps come from those images alone: every method compares them with a blurred copy of the
same brain without lesions, a stand-in for what a trained model would reconstruct or remember, and none of them reads
the reference. What they find and what they get wrong (rim, bias field, periventricular caps, faint lesions) comes from
the image, not from a dial set per method.

Known simplifications: a mass displaces nothing; the stand-in knows the subject's own anatomy, so maps are cleaner than
real ones; noise is Gaussian. The last two test subjects are placed by hand (no lesion; a mass that leaves a view), so
validation and test are exchangeable only but for those two.
"""

import csv
import gzip
import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Float32 = NDArray[np.float32]
Mask = NDArray[np.bool_]
Triple = tuple[int, int, int]

FIELD_MM = (168.0, 204.0, 144.0)
VIEW_MM = 90.0  # through-plane coverage of the two cropped methods, centred
SEMI_AXES_MM = (65.0, 83.0, 56.0)
MINIMUM_COMPONENT_MM3 = 50.0  # the protocol's lesion floor: specks are made on both sides of it
FLAIR_TISSUE = (0.18, 0.64, 0.49)  # CSF, grey matter, white matter
T2_TISSUE = (1.00, 0.60, 0.41)
SITES = ("north", "south", "west")
SITE_NOISE = (0.030, 0.045, 0.035)
SITE_CONTRAST = (1.0, 0.8, 1.1)


@dataclass(frozen=True)
class Storage:
    """How a method stores its maps, in the terms of a study's `[method.transform]`.

    Attributes:
        source_axis: The stored axis that canonical axis j reads.
        start: First canonical voxel of the field of view, per canonical axis.
        extent: Canonical voxels in the field of view, per canonical axis.
        size: Stored voxels along each canonical axis; below `extent` the map is stored at lower resolution.
        reversed: Whether the stored axis runs against the canonical one, per canonical axis.
        dtype: `float32`, `float64`, or `uint16` (scaled by 1/65535 in the header).
    """

    source_axis: Triple
    start: Triple
    extent: Triple
    size: Triple
    reversed: tuple[bool, bool, bool]
    dtype: str

    def lay_out(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Reverse and permute `size`-shaped values, still along canonical axes, into stored order."""
        for axis in range(3):
            if self.reversed[axis]:
                values = np.flip(values, axis)
        return np.ascontiguousarray(values.transpose([self.source_axis.index(stored) for stored in range(3)]))

    def store_labels(self, labels: Mask) -> NDArray[np.generic]:
        """Take the canonical voxel that holds each stored voxel's centre (nearest; an exact copy at full size)."""
        for axis in range(3):
            stored = np.arange(self.size[axis])
            source = self.start[axis] + (2 * stored + 1) * self.extent[axis] // (2 * self.size[axis])
            labels = labels.take(source, axis)
        return self.lay_out(labels.astype(np.uint8))

    def store_map(self, scores: Float32) -> NDArray[np.generic]:
        """Interpolate scores in [0, 1] linearly at the stored voxels' centres, in the stored dtype (raw, if scaled)."""
        for axis in range(3):
            length, size = self.extent[axis], self.size[axis]
            offset = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
            low = np.floor(offset).astype(np.intp)
            high = np.minimum(low + 1, length - 1)
            weight = along(axis, (offset - low).astype(np.float32))
            below, above = (scores.take(self.start[axis] + index, axis) for index in (low, high))
            scores = np.asarray(below + weight * (above - below), np.float32)
        scores = np.clip(scores, 0, 1)
        stored = np.rint(scores * np.float32(65535)) if self.dtype == "uint16" else scores
        return self.lay_out(stored.astype(self.dtype))

    def voxel_mm(self, spacing_mm: float) -> tuple[float, float, float]:
        """The stored voxel's size in mm along the stored axes, as an honest header states it."""
        canonical = [spacing_mm * self.extent[axis] / self.size[axis] for axis in range(3)]
        first, second, third = (canonical[self.source_axis.index(stored)] for stored in range(3))
        return first, second, third


@dataclass(frozen=True)
class Method:
    """What the study file declares for one method.

    Attributes:
        family: The kind of method, as in the study file.
        legacy_ratio: Voxel volume used in the method's earlier reports, as a multiple of the true one.
        storage: How its maps are stored.
    """

    family: str
    legacy_ratio: float
    storage: Storage


@dataclass(frozen=True)
class Grid:
    """The canonical grid: shape, isotropic spacing in mm, and mm coordinates from the centre, one array per axis."""

    shape: Triple
    spacing_mm: float
    x: Float32
    y: Float32
    z: Float32


@dataclass(frozen=True)
class Anatomy:
    """A brain without lesions: mask, its two images, white matter share, and mm outside the ventricles."""

    brain: Mask
    flair: Float32
    t2: Float32
    white: Float32
    ventricle_mm: Float32


@dataclass(frozen=True)
class Lesions:
    """A reference mask with the conspicuity (0 to 1) of each lesion voxel and the necrotic core of the mass."""

    mask: Mask
    conspicuity: Float32
    core: Mask


@dataclass(frozen=True)
class Images:
    """The two acquired images, median-normalised, and what each would show without lesions, noise or bias."""

    flair: Float32
    t2: Float32
    healthy_flair: Float32
    healthy_t2: Float32


class NiftiImage(Protocol):
    """The part of a nibabel image that writing needs."""

    header: MutableMapping[str, float]

    def to_bytes(self) -> bytes:
        """The file's bytes, uncompressed."""
        ...


def along(axis: int, values: Float32) -> Float32:
    """Shape a 1-D array so that it broadcasts along one axis of a volume."""
    shape = [1, 1, 1]
    shape[axis] = -1
    return values.reshape(shape)


def canonical_grid(spacing_mm: float) -> Grid:
    """The grid that covers `FIELD_MM` at an isotropic spacing in mm: 56 x 68 x 48 voxels at 3 mm."""
    first, second, third = (round(field / spacing_mm) for field in FIELD_MM)
    x, y, z = (
        along(axis, ((np.arange(size) - (size - 1) / 2) * spacing_mm).astype(np.float32))
        for axis, size in enumerate((first, second, third))
    )
    return Grid((first, second, third), spacing_mm, x, y, z)


def declared_methods(grid: Grid) -> dict[str, Method]:
    """The four methods and their storage: permuted, cropped, cropped and permuted, and at two-thirds resolution."""
    rows, columns, slices = grid.shape
    view = round(VIEW_MM / grid.spacing_mm)
    whole, start = (0, 0, 0), (0, 0, (slices - view) // 2)
    cropped = (rows, columns, view)
    reduced = (2 * rows // 3, 2 * columns // 3, slices)
    straight = (0, 1, 2)
    return {
        "diffuse": Method(
            "residual", 1.166, Storage((1, 0, 2), whole, grid.shape, grid.shape, (False, True, False), "float32")
        ),
        "sharp": Method("residual", 1.0, Storage(straight, start, cropped, cropped, (False, False, False), "uint16")),
        "sharp_twin": Method(
            "residual", 0.604, Storage((2, 1, 0), start, cropped, cropped, (True, False, False), "float32")
        ),
        "coarse": Method(
            "feature", 1.3, Storage(straight, whole, grid.shape, reduced, (False, False, True), "float64")
        ),
    }


def blur(volume: Float32, scale_mm: float, grid: Grid) -> Float32:
    """Gaussian filter with a standard deviation in mm; beyond the grid everything is 0."""
    return np.asarray(
        ndimage.gaussian_filter(volume, scale_mm / grid.spacing_mm, mode="constant", truncate=3.0), np.float32
    )


def smooth_noise(rng: np.random.Generator, scale_mm: float, grid: Grid) -> Float32:
    """Gaussian noise of a correlation length in mm, scaled to mean 0 and variance 1 over the grid."""
    noise = rng.standard_normal(grid.shape, np.float32)
    sigma = scale_mm / grid.spacing_mm
    noise = np.asarray(ndimage.gaussian_filter(noise, sigma, mode="wrap", truncate=3.0), np.float32)
    return (noise - noise.mean()) / noise.std()


def soft_step(signed_mm: Float32, width_mm: float) -> Float32:
    """Share of a tissue at a signed distance (mm) inside its border: 0.5 on it, partial volume around it."""
    return np.float32(0.5) * (1 + np.tanh(signed_mm / np.float32(2 * width_mm)))


def ellipsoid_mm(grid: Grid, centre_mm: tuple[float, float, float], semi_mm: tuple[float, float, float]) -> Float32:
    """Approximate signed distance in mm from an ellipsoid's surface, positive inside; axis 0 is mirrored."""
    radius = np.sqrt(
        ((np.abs(grid.x) - centre_mm[0]) / semi_mm[0]) ** 2
        + ((grid.y - centre_mm[1]) / semi_mm[1]) ** 2
        + ((grid.z - centre_mm[2]) / semi_mm[2]) ** 2
    )
    return (1 - radius) * np.float32(min(semi_mm))


def grow_brain(rng: np.random.Generator, grid: Grid) -> tuple[Float32, Float32]:
    """A subject's outline: relative radius (1 on the surface, below it inside) and radial depth in mm below it."""
    growth = rng.uniform(0.98, 1.03)
    a, b, c = (semi_mm * growth * rng.uniform(0.98, 1.02) for semi_mm in SEMI_AXES_MM)
    narrowing = 1 - np.float32(0.10) * grid.y / b  # frontal lobes are narrower than parietal ones
    height = np.where(grid.z < 0, np.float32(0.88 * c), np.float32(1.06 * c))  # a flat base, a high vertex
    powers = (np.abs(grid.x) / (a * narrowing)) ** 2.2 + (np.abs(grid.y) / b) ** 2.2 + (np.abs(grid.z) / height) ** 2.2
    radius = powers ** (1 / 2.2) + np.float32(0.018) * smooth_noise(rng, 18.0, grid)
    radius = np.maximum(radius, 0.02).astype(np.float32)
    from_centre_mm = np.sqrt(grid.x**2 + grid.y**2 + grid.z**2)
    return radius, np.asarray((1 / radius - 1) * from_centre_mm, np.float32)


def grow_ventricles(rng: np.random.Generator, grid: Grid) -> Float32:
    """Signed mm inside the ventricles: two lateral ones and the third; their size varies as it does with age."""
    width = rng.uniform(0.85, 1.6)
    front = ellipsoid_mm(grid, (8.0, 14.0, 8.0), (5.5 * width, 20.0, 7.5 * width))
    back = ellipsoid_mm(grid, (14.0, -20.0, 6.0), (5.5 * width, 24.0, 8.0 * width))
    third = ellipsoid_mm(grid, (0.0, 2.0, -8.0), (2.5 * width, 12.0, 9.0))
    return np.maximum(np.maximum(front, back), third)


def grow_anatomy(rng: np.random.Generator, grid: Grid) -> Anatomy:
    """A brain of about 1,200 to 1,500 cm3 without lesions: CSF rim, folded cortex, fissure, deep nuclei, ventricles."""
    radius, depth_mm = grow_brain(rng, grid)
    brain: Mask = radius < 1
    sulcus_mm = 13 * np.exp(-((smooth_noise(rng, 5.0, grid) / np.float32(0.45)) ** 2))
    fissure_mm = np.abs(grid.x) + 60 * np.maximum(np.float32(0.58) - radius, 0)
    sheet_mm = np.minimum(depth_mm - sulcus_mm + 1, fissure_mm).astype(np.float32)
    inside_mm = grow_ventricles(rng, grid)
    nuclei = soft_step(ellipsoid_mm(grid, (22.0, 4.0, -1.0), (8.0, 17.0, 11.0)), 1.0)
    csf = np.maximum(soft_step(2 - sheet_mm, 1.0), soft_step(inside_mm, 0.8))
    white = (1 - csf) * soft_step(sheet_mm - 6.5, 1.2) * (1 - nuclei)
    grey = 1 - csf - white

    def image(tissue: tuple[float, float, float]) -> Float32:
        return np.where(brain, tissue[0] * csf + tissue[1] * grey + tissue[2] * white, 0).astype(np.float32)

    return Anatomy(brain, image(FLAIR_TISSUE), image(T2_TISSUE), np.where(brain, white, 0), -inside_mm)


def nearest_voxels(field: Float32, allowed: Mask, count: int) -> NDArray[np.intp]:
    """Flat indices of the `count` allowed voxels of lowest field, lowest first (fewer, if fewer are allowed)."""
    candidates = np.flatnonzero(allowed)
    return candidates[np.argsort(field.ravel()[candidates], kind="stable")[:count]]


def distance_mm(grid: Grid, centre: Triple) -> Float32:
    """Distance of every voxel from one voxel, in mm."""
    x, y, z = (
        along(axis, (np.arange(size, dtype=np.float32) - centre[axis]) * np.float32(grid.spacing_mm))
        for axis, size in enumerate(grid.shape)
    )
    return np.sqrt(x**2 + y**2 + z**2)


def draw_voxel(rng: np.random.Generator, weight: Float32) -> Triple:
    """Draw one voxel with a probability proportional to its weight."""
    cumulative = weight.cumsum(dtype=np.float64)
    flat = cumulative.searchsorted(rng.random() * float(cumulative[-1]), side="right")
    first, second, third = np.unravel_index(flat, weight.shape)
    return int(first), int(second), int(third)


def grow_mass(rng: np.random.Generator, grid: Grid, anatomy: Anatomy, leaves_view: bool) -> tuple[Mask, Mask]:
    """The large lesion (5 to 150 cm3, log-normal) and its necrotic core, as thresholded distance plus smooth noise.

    With `leaves_view` it is 25 to 60 cm3 and lies at the vertex, across the upper border of the cropped view.
    """
    volume_cm3 = 0.0
    while not 5 <= volume_cm3 <= 150:
        volume_cm3 = rng.lognormal(math.log(32.0), 0.85)
    allowed = anatomy.brain & (anatomy.ventricle_mm > 0)
    centred = anatomy.white * ((np.abs(grid.z) < 20) & (np.abs(grid.x) > 15))
    if leaves_view:
        volume_cm3 = min(max(volume_cm3, 25.0), 60.0)
        centred = (anatomy.brain & (np.abs(grid.z - VIEW_MM / 2 + 4) < 3.5) & (np.abs(grid.x) < 25)).astype(np.float32)
    radius_mm = (3000 * volume_cm3 / (4 * math.pi)) ** (1 / 3)
    ragged = distance_mm(grid, draw_voxel(rng, centred)) / np.float32(radius_mm)
    ragged = ragged + np.float32(0.16) * smooth_noise(rng, 9.0, grid) + np.float32(0.04) * smooth_noise(rng, 4.0, grid)
    voxels = nearest_voxels(ragged.astype(np.float32), allowed, round(1000 * volume_cm3 / grid.spacing_mm**3))
    core_share = rng.uniform(0.05, 0.3) if volume_cm3 > 20 else 0.0
    mass, core = np.zeros(grid.shape, np.bool_), np.zeros(grid.shape, np.bool_)
    mass.ravel()[voxels] = True
    core.ravel()[voxels[: int(core_share * voxels.size)]] = True
    return mass, core


def small_lesion_sizes(rng: np.random.Generator, grid: Grid) -> list[int]:
    """Voxel counts of a subject's small lesions: log-normal ones, then specks just under and just over the floor."""
    voxel_mm3 = grid.spacing_mm**3
    volumes_mm3 = np.clip(rng.lognormal(math.log(350.0), 1.0, int(rng.integers(2, 8))), 0, 4000)
    over = math.ceil(MINIMUM_COMPONENT_MM3 / voxel_mm3)
    under = max(1, over - 1)
    ordinary = [max(over, round(volume / voxel_mm3)) for volume in volumes_mm3]
    return [*ordinary, *[over] * int(rng.integers(1, 3)), *[under] * int(rng.integers(1, 4))]


def corner_pair(rng: np.random.Generator, centre: Triple) -> tuple[Triple, Triple]:
    """Two voxels that share an edge or a corner but no face: one 26-connected lesion, two 6-connected ones."""
    first, second, third = centre
    return centre, (first + 1, second + 1, third + int(rng.integers(0, 2)))


def grow_lesions(rng: np.random.Generator, grid: Grid, anatomy: Anatomy, leaves_view: bool) -> Lesions:
    """One mass, two to seven small lesions of mainly periventricular white matter, specks, and often a corner pair.

    Small lesions keep two voxels away from all others, so that the specks stay on their side of the floor.
    """
    mask, core = grow_mass(rng, grid, anatomy, leaves_view)
    conspicuity = mask.astype(np.float32)
    likely = np.where(anatomy.white > 0.5, np.exp(-np.maximum(anatomy.ventricle_mm, 0) / 15) + 0.05, 0)
    ragged = smooth_noise(rng, 3.5, grid)

    def free_white_matter() -> Mask:
        return (anatomy.white > 0.5) & (ndimage.maximum_filter(mask.astype(np.uint8), 5) == 0)

    def add(voxels: NDArray[np.intp]) -> None:
        mask.ravel()[voxels] = True
        conspicuity.ravel()[voxels] = rng.uniform(0.45, 1.0)

    for size in small_lesion_sizes(rng, grid):
        free = free_white_matter()
        centre = draw_voxel(rng, np.where(free, likely, 0).astype(np.float32))
        spread_mm = (3 * size * grid.spacing_mm**3 / (4 * math.pi)) ** (1 / 3)
        away_mm = distance_mm(grid, centre)
        noisy = away_mm / np.float32(spread_mm) + np.float32(0.25) * ragged
        add(nearest_voxels(np.where(away_mm < grid.spacing_mm / 2, -10, noisy), free, size))
    if rng.random() < 0.7:
        free = free_white_matter()
        pair = corner_pair(rng, draw_voxel(rng, np.where(free, likely, 0).astype(np.float32)))
        add(np.asarray([np.ravel_multi_index(voxel, grid.shape) for voxel in pair], np.intp))
    return Lesions(mask, conspicuity, core)


def no_lesions(grid: Grid) -> Lesions:
    """The lesions of a healthy subject: an empty reference."""
    return Lesions(np.zeros(grid.shape, np.bool_), np.zeros(grid.shape, np.float32), np.zeros(grid.shape, np.bool_))


def acquire(rng: np.random.Generator, grid: Grid, anatomy: Anatomy, lesions: Lesions, site: int) -> Images:
    """The FLAIR and T2 of one subject: lesions of its own contrast, bright tissue that is none, bias field, noise."""
    contrast = SITE_CONTRAST[site] * rng.uniform(0.12, 0.36)
    t2_contrast = contrast * rng.uniform(0.7, 1.3)
    caps = rng.uniform(0.0, 0.16) * np.exp(-np.maximum(anatomy.ventricle_mm, 0) / 4) * anatomy.white
    glow = 0.05 * np.maximum(smooth_noise(rng, 7.0, grid) - 1, 0)  # flow and shading, bright but no lesion
    share = blur(lesions.mask.astype(np.float32), 1.6, grid)
    strength = blur(lesions.conspicuity, 1.6, grid) * (1 + np.float32(0.12) * smooth_noise(rng, 7.0, grid))
    necrosis = blur(lesions.core.astype(np.float32), 2.0, grid)
    flair = (1 - share) * (anatomy.flair + caps + glow) + share * FLAIR_TISSUE[2]
    t2 = (1 - share) * anatomy.t2 + share * T2_TISSUE[2]

    def scan(tissue: NDArray[np.floating], lesion: NDArray[np.floating]) -> Float32:
        tilt = sum(rng.normal(0, 0.06) * axis / 70 for axis in (grid.x, grid.y, grid.z))
        dome = rng.normal(0, 0.06) * (grid.x**2 + grid.y**2 + grid.z**2) / 70**2
        noise = SITE_NOISE[site] * rng.standard_normal(grid.shape, np.float32)
        return normalised((tissue + lesion) * np.exp(tilt + dome) + noise, anatomy.brain)

    return Images(
        scan(flair, contrast * strength * (1 - 1.3 * necrosis)),  # a necrotic core is dark on FLAIR, bright on T2
        scan(t2, t2_contrast * strength * (1 + 0.8 * necrosis)),
        normalised(anatomy.flair, anatomy.brain),
        normalised(anatomy.t2, anatomy.brain),
    )


def normalised(image: NDArray[np.floating], brain: Mask) -> Float32:
    """Divide by the median inside the brain, keep values there at 0.001 or more, and set 0 outside."""
    return np.where(brain, np.maximum(image / np.median(image[brain]), 0.001), 0).astype(np.float32)


def residual(image: Float32, healthy: Float32, detail_mm: float, copied: float, grid: Grid) -> Float32:
    """Image minus its pseudo-healthy reconstruction, which copies a share of the anomaly and loses detail (mm)."""
    shown = np.asarray(healthy + copied * (image - healthy), np.float32)
    return image - blur(shown, detail_mm, grid)


def stretched(scores: Float32, brain: Mask) -> Float32:
    """Scale by this map's own 99.8th percentile, the habit by which a threshold means another thing per subject."""
    return scores / float(np.quantile(scores[brain], 0.998))


def patch_distances(images: Images, grid: Grid, patch_mm: float, stride_mm: float) -> Float32:
    """Distance of patches from healthy ones (mean FLAIR, mean T2, FLAIR texture), repeated over each stride.

    The healthy images are blurred first: a bank of patches does not know where this subject's folds lie.
    """
    patch, stride = max(1, round(patch_mm / grid.spacing_mm)), max(1, round(stride_mm / grid.spacing_mm))

    def mean(volume: Float32) -> Float32:
        return np.asarray(ndimage.uniform_filter(volume, patch, mode="constant"), np.float32)

    def texture(volume: Float32) -> Float32:
        return np.sqrt(np.maximum(mean(volume**2) - mean(volume) ** 2, 0))

    flair, t2 = (blur(healthy, 5.0, grid) for healthy in (images.healthy_flair, images.healthy_t2))
    distance = np.sqrt(
        mean(images.flair - flair) ** 2
        + 0.3 * mean(images.t2 - t2) ** 2
        + 0.5 * (texture(images.flair) - texture(flair)) ** 2
    )
    for axis, size in enumerate(grid.shape):
        distance = distance.take(np.minimum(np.arange(size) // stride * stride + stride // 2, size - 1), axis)
    return distance


def score_maps(images: Images, brain: Mask, grid: Grid) -> dict[str, Float32]:
    """The four methods' scores in [0, 1] on the canonical grid, 0 outside the brain.

    `diffuse` keeps detail, copies half of what it sees and is blurred: faint, well ranked, on one scale for all
    subjects. `sharp` blurs its reconstruction and so fires at the rim; it stretches every map by itself.
    `sharp_twin` is the same model with another blur and a gamma. `coarse` compares patches of both images.
    """
    flair = residual(images.flair, images.healthy_flair, 1.8, 0.5, grid)
    t2 = residual(images.t2, images.healthy_t2, 1.8, 0.5, grid)
    crisp = np.abs(residual(images.flair, images.healthy_flair, 2.4, 0.1, grid))
    maps = {
        "diffuse": blur(np.maximum(flair, 0) + np.float32(0.4) * np.maximum(t2, 0), 3.2, grid),
        "sharp": stretched(blur(crisp, 1.8, grid), brain),
        "sharp_twin": np.minimum(stretched(blur(crisp, 2.1, grid), brain), 1) ** 0.8,
        "coarse": 0.9 * patch_distances(images, grid, 9.0, 9.0),
    }
    return {
        method_id: np.where(brain, np.clip(values, 0, 1), 0).astype(np.float32) for method_id, values in maps.items()
    }


def write_volume(path: Path, values: NDArray[np.generic], voxel_mm: tuple[float, float, float]) -> None:
    """Write a gzipped NIfTI with a plain diagonal affine (mm); the same values give the same bytes.

    Values stored as `uint16` get the slope 1/65535 that brings them into [0, 1].
    """
    image = cast(NiftiImage, nib.Nifti1Image(values, np.diag([*voxel_mm, 1.0])))
    image.header["xyzt_units"] = 2  # mm
    if values.dtype == np.uint16:
        image.header["scl_slope"], image.header["scl_inter"] = 1 / 65535, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(image.to_bytes(), compresslevel=2, mtime=0))


def write_subject(folder: Path, subject_id: str, rng: np.random.Generator, grid: Grid, site: int, role: str) -> None:
    """Simulate one subject and write its reference, brain, two images, four maps and four own references.

    Args:
        folder: The study's folder.
        subject_id: Names the files.
        rng: The subject's own generator.
        grid: The canonical grid.
        site: Index into `SITES`; sites differ in noise and lesion contrast.
        role: `ordinary`, `healthy` (no lesion, an empty reference), or `leaves_view` (the mass crosses the cropped
            view's border).
    """
    anatomy = grow_anatomy(rng, grid)
    lesions = grow_lesions(rng, grid, anatomy, role == "leaves_view")
    if role == "healthy":
        lesions = no_lesions(grid)
    images = acquire(rng, grid, anatomy, lesions, site)
    gain = 400 * rng.uniform(0.7, 1.4)
    canonical_mm = (grid.spacing_mm, grid.spacing_mm, grid.spacing_mm)
    name = f"{subject_id}.nii.gz"
    write_volume(folder / "reference" / name, lesions.mask.astype(np.uint8), canonical_mm)
    write_volume(folder / "brain" / name, anatomy.brain.astype(np.uint8), canonical_mm)
    for contrast, image in (("FLAIR", images.flair), ("T2", images.t2)):
        write_volume(folder / "intensity" / contrast / name, np.ceil(image * gain).astype(np.int16), canonical_mm)
    scores = score_maps(images, anatomy.brain, grid)
    for method_id, method in declared_methods(grid).items():
        storage, place = method.storage, folder / "maps" / method_id
        voxel_mm = storage.voxel_mm(grid.spacing_mm)
        write_volume(place / name, storage.store_map(scores[method_id]), voxel_mm)
        write_volume(place / f"{subject_id}_label.nii.gz", storage.store_labels(lesions.mask), voxel_mm)


def study_toml(grid: Grid) -> str:
    """The study file's text; the protocol's own defaults are left out."""
    spacing = float(grid.spacing_mm)

    def method_toml(method_id: str, method: Method) -> str:
        storage = method.storage
        return (
            f'\n[[method]]\nid = "{method_id}"\nfamily = "{method.family}"\n'
            f'map = "maps/{method_id}/{{subject_id}}.nii.gz"\n'
            f'own_reference = "maps/{method_id}/{{subject_id}}_label.nii.gz"\n'
            f"legacy_voxel_mm3 = {round(method.legacy_ratio * spacing**3, 6)}\n"
            f"[method.transform]\nsource_axis = {list(storage.source_axis)}\nstart = {list(storage.start)}\n"
            f"extent = {list(storage.extent)}\nreversed = {str(list(storage.reversed)).lower()}\n"
        )

    return (
        "# Simulated brains, lesions and maps, written by `mirto demo`. No patient is in here.\n"
        f'[study]\nname = "phantom"\nvoxel_size_mm = [{spacing}, {spacing}, {spacing}]\nsubjects = "subjects.csv"\n'
        '\n[files]\nreference = "reference/{subject_id}.nii.gz"\nbrain = "brain/{subject_id}.nii.gz"\n'
        '\n[files.intensity]\nFLAIR = "intensity/FLAIR/{subject_id}.nii.gz"\nT2 = "intensity/T2/{subject_id}.nii.gz"\n'
        + "".join(method_toml(method_id, method) for method_id, method in declared_methods(grid).items())
        + "".join(f'\n[[baseline]]\nid = "{contrast}"\nintensity = "{contrast}"\n' for contrast in ("FLAIR", "T2"))
    )


def write_phantom(
    folder: Path, *, seed: int = 2026, validation: int = 12, test: int = 16, spacing_mm: float = 3.0
) -> Path:
    """Write the phantom study: the same arguments give the same bytes.

    Every subject has a mass of 5 to 150 cm3, several small lesions, and specks just under and just over the lesion
    floor. The last test subject is healthy (an empty reference); in the one before it, the mass partly leaves the
    field of view of `sharp` and `sharp_twin`. Subjects are drawn from their own seed, so phantom03 is the same
    ordinary subject in studies of any size. Files of an earlier study in the folder are overwritten; the study file is
    written last.

    Args:
        folder: Where the study goes; made if missing.
        seed: Of all randomness.
        validation: Validation subjects, numbered first.
        test: Test subjects, at least 3.
        spacing_mm: Isotropic voxel size, 1 to 6 mm; 3 mm gives 56 x 68 x 48 voxels.

    Returns:
        The path of `study.toml`.

    Raises:
        ValueError: A number of subjects or the spacing is out of range.
    """
    if validation < 0 or test < 3:
        raise ValueError(f"a phantom study needs validation >= 0 and test >= 3; found {validation} and {test}")
    if not 1 <= spacing_mm <= 6:
        raise ValueError(f"spacing_mm must lie between 1 and 6 mm; found {spacing_mm}")
    grid = canonical_grid(spacing_mm)
    total = validation + test
    roles = {total - 1: "healthy", total - 2: "leaves_view"}
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str]] = []
    for index in range(total):
        subject_id = f"phantom{index + 1:02d}"
        rows.append((subject_id, "validation" if index < validation else "test", SITES[index % len(SITES)]))
        rng = np.random.default_rng([seed, index])
        write_subject(folder, subject_id, rng, grid, index % len(SITES), roles.get(index, "ordinary"))
    with (folder / "subjects.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(("subject_id", "split", "site"))
        writer.writerows(rows)
    study = folder / "study.toml"
    study.write_text(study_toml(grid), encoding="utf-8")
    return study
