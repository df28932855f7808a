"""The whole path against a slow twin: from the phantom's files to every mart, written from the definitions alone.

The twin reads NIfTI with nibabel, maps with index formulas, counts by comparing arrays level by level, labels with
scipy, ranks with scikit-learn, chooses thresholds with loops over exact fractions, and spells the multiverse out as one
dense array over universes and methods. Component passes are slow, so they are checked at levels that rotate over the
pairs of method and subject; lesion hits at all levels are then taken from `lesion_curve`.
"""

import csv
import itertools
import math
import shutil
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import duckdb
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage, optimize, stats

from expectations.study import load_study
from expectations.tables import lake_tables
from ingest.jobs import InProcess
from ingest.run import Ingest
from marts.release import build_tables, open_for_building

nib: Any = import_module("nibabel")
sklearn_metrics: Any = import_module("sklearn.metrics")

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Row = Mapping[str, Any]
Rows = dict[tuple[Any, ...], Row]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner")

LEVELS = range(201)
CUTS = [np.float32(level / 200) for level in LEVELS]
RULES = {
    "validation": None,
    "crc_05": Fraction(1, 20),
    "crc_10": Fraction(1, 10),
    "crc_20": Fraction(1, 5),
    "rcps_05": Fraction(1, 20),
    "rcps_10": Fraction(1, 10),
    "rcps_20": Fraction(1, 5),
    "crc_label_free_05": Fraction(1, 20),
    "crc_label_free_10": Fraction(1, 10),
    "crc_label_free_20": Fraction(1, 5),
    "test_matched": None,
    "fixed_50": None,
    "subject_optimum": None,
}
FEWEST_SUBJECTS = {"crc": {"05": 19, "10": 9, "20": 4}, "rcps": {"05": 45, "10": 22, "20": 11}}
BUDGET_RULES = ("validation", "crc_10", "test_matched")
AXES: dict[str, tuple[Any, ...]] = {
    "reference_id": ("canonical", "own_mapped", "round_trip"),
    "support_id": ("brain", "brain_in_view"),
    "voxel_volume_id": ("true", "legacy"),
    "threshold_rule_id": ("validation", "crc_10", "test_matched", "fixed_50", "subject_optimum"),
    "budget_cm3": (5.0, 10.0, 20.0, 40.0),
    "postprocess_id": ("plain", "hysteresis", "hysteresis_pruned"),
    "lesion_definition_id": ("conn6_floor", "conn6_all", "conn26_floor"),
    "hit_criterion_id": ("iou_10", "iou_25", "iou_50", "any_overlap"),
    "aggregation_id": ("mean", "median", "pooled"),
    "metric_id": ("dice", "lesion_sensitivity", "voxel_auroc", "voxel_ap", "slice_auroc", "slice_aroc"),
}
INDEFENSIBLE = {"own_mapped", "round_trip", "legacy", "fixed_50", "subject_optimum"}
REFERENCE_UNIVERSE = (
    *("canonical", "brain", "true", "validation", 20.0, "plain", "conn6_floor", "iou_10", "mean"),
    "dice",
)
TIE = 1e-9
CRITERIA = {"iou_10": 0.10, "iou_25": 0.25, "iou_50": 0.50}
DEFINITIONS = ("conn6_floor", "conn6_all", "conn26_floor", "conn26_all")
NEIGHBOURS = {"conn6": ndimage.generate_binary_structure(3, 1), "conn26": ndimage.generate_binary_structure(3, 3)}
STRIDE = 67  # of the levels at which components are checked


def remembered(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Keep what a method returned on its object, by its arguments."""

    @wraps(method)
    def recall(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        memory: dict[object, Result] = vars(self).setdefault("remembered", {})
        key = (method.__name__, args)
        if key not in memory:
            memory[key] = method(self, *args, **kwargs)
        return memory[key]

    return recall


# Sections 1 and 2: from stored arrays to scores, references and supports on the canonical grid


@dataclass(frozen=True)
class Transform:
    """T_m: for each canonical axis a source axis, start, extent and reversal."""

    source_axis: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    reversed: tuple[bool, ...]

    def candidate(self, transposed: bool, flip_0: bool, flip_1: bool) -> "Transform":
        first, second, third = self.source_axis
        flips = (flip_0, flip_1, False)
        return replace(
            self,
            source_axis=(second, first, third) if transposed else self.source_axis,
            reversed=tuple(r != flip for r, flip in zip(self.reversed, flips, strict=True)),
        )

    def in_view(self, shape: tuple[int, ...]) -> Mask:
        x = np.indices(shape)
        inside = [
            (x[j] >= a) & (x[j] < a + length) for j, (a, length) in enumerate(zip(self.start, self.extent, strict=True))
        ]
        return inside[0] & inside[1] & inside[2]

    def nearest(self, stored: Array, shape: tuple[int, ...], dz: int = 0) -> Array:
        turned = stored.transpose(self.source_axis)
        read: list[Array] = []
        for j, (a, length, size) in enumerate(zip(self.start, self.extent, turned.shape, strict=True)):
            x = np.arange(shape[j]) + (dz if j == 2 else 0)
            n = np.clip(((2 * (x - a) + 1) * size) // (2 * length), 0, size - 1)
            read.append(size - 1 - n if self.reversed[j] else n)
        return turned[np.ix_(*read)]

    def linear(self, stored: Array, shape: tuple[int, ...]) -> Array:
        value: Array = stored.transpose(self.source_axis).astype(np.float64)
        for j, (a, length) in enumerate(zip(self.start, self.extent, strict=True)):
            size = int(value.shape[j])
            c: Array = np.clip(((2 * (np.arange(shape[j]) - a) + 1) * size) / (2 * length) - 0.5, 0, size - 1)
            low = np.floor(c).astype(np.int64)
            high = np.minimum(low + 1, size - 1)
            weight = (c - low).reshape([-1 if k == j else 1 for k in range(3)])
            if self.reversed[j]:
                low, high = size - 1 - low, size - 1 - high
            value = value.take(low, j) + weight * (value.take(high, j) - value.take(low, j))
        return value.astype(np.float32)

    def round_trip(self, reference: Mask, stored_shape: tuple[int, ...]) -> Mask:
        shape: tuple[int, ...] = reference.shape
        sizes = [stored_shape[axis] for axis in self.source_axis]
        taken = [
            a + ((2 * np.arange(size) + 1) * length) // (2 * size)
            for a, length, size in zip(self.start, self.extent, sizes, strict=True)
        ]
        back: list[Array] = [
            np.clip(((2 * (np.arange(width) - a) + 1) * size) // (2 * length), 0, size - 1)
            for width, a, length, size in zip(shape, self.start, self.extent, sizes, strict=True)
        ]
        return reference[np.ix_(*taken)][np.ix_(*back)] & self.in_view(shape)


def read_nifti(path: Path) -> Array:
    """Stored values times slope plus intercept in float64, rounded once to float32."""
    proxy = nib.load(path).dataobj
    stored = np.asarray(proxy.get_unscaled(), np.float64)
    return (stored * float(proxy.slope) + float(proxy.inter)).astype(np.float32)


def read_labels(path: Path) -> Mask:
    return np.rint(read_nifti(path)) != 0


@dataclass(frozen=True)
class Subject:
    subject_id: str
    split: str
    reference: Mask
    brain: Mask
    spacing_mm: tuple[float, ...]


@dataclass(frozen=True)
class Entry:
    """A method or a baseline."""

    method_id: str
    kind: str
    position: int
    transform: Transform | None
    legacy_mm3: Fraction | None


Candidate = tuple[bool, bool, bool, int]  # transposed, flip 0, flip 1, dz
CANDIDATES: list[Candidate] = list(itertools.product((False, True), (False, True), (False, True), range(-3, 4)))
DECLARED: Candidate = (False, False, False, 0)


def components_of(mask: Mask, neighbours: str) -> Array:
    """Connected components, numbered from 1 by their first voxel in C order."""
    labels = np.asarray(ndimage.label(mask, NEIGHBOURS[neighbours])[0])
    found, first = np.unique(labels.ravel(), return_index=True)
    ordered = [label for _, label in sorted(zip(first.tolist(), found.tolist(), strict=True)) if label > 0]
    number = np.zeros(len(found), np.int16)
    number[ordered] = np.arange(1, len(ordered) + 1)
    return number[labels]


def dice_of(first: Mask, second: Mask) -> float | None:
    total = int(first.sum()) + int(second.sum())
    return 2 * int((first & second).sum()) / total if total else None


def centroid_distance_mm(first: Mask, second: Mask, spacing_mm: Sequence[float]) -> float | None:
    if not first.any() or not second.any():
        return None
    apart = (np.argwhere(first).mean(axis=0) - np.argwhere(second).mean(axis=0)) * np.asarray(spacing_mm)
    return math.sqrt(float((apart**2).sum()))


def linear_quantile(values: Sequence[int], share: Fraction) -> Fraction:
    """Linear quantile in exact arithmetic."""
    ordered, position = sorted(values), share * (len(values) - 1)
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def candidate_name(candidate: Candidate) -> str:
    transposed, flip_0, flip_1, dz = candidate
    parts = ["transpose"] * transposed + ["flip 0"] * flip_0 + ["flip 1"] * flip_1
    return " + ".join([*parts, *([f"offset {dz:+d}"] if dz else [])]) or "as declared"


class Pair:
    """One entry and subject: what is measured on the canonical grid, once it is asked for."""

    def __init__(self, entry: Entry, subject: Subject, stored: Array, own: Mask | None, scale: tuple[float, float]):
        self.entry, self.subject, self.stored, self.own, self.scale = entry, subject, stored, own, scale
        self.shape = subject.reference.shape

    def equals(self, other: "Pair") -> bool:
        """Whether entry, scale and all files are the same."""
        same = (self.entry, self.scale, self.own is None) == (other.entry, other.scale, other.own is None)
        arrays = [(self.stored, other.stored), (self.own, other.own)]
        arrays += [(self.subject.reference, other.subject.reference), (self.subject.brain, other.subject.brain)]
        return same and all(a is None or b is None or np.array_equal(a, b) for a, b in arrays)

    @cached_property
    def view(self) -> Mask:
        return self.entry.transform.in_view(self.shape) if self.entry.transform else np.ones(self.shape, np.bool_)

    @cached_property
    def supports(self) -> dict[str, Mask]:
        return {"brain": self.subject.brain, "brain_in_view": self.subject.brain & self.view}

    @cached_property
    def references(self) -> dict[str, Mask]:
        found = {"canonical": self.subject.reference}
        if self.entry.transform is not None and self.own is not None:
            found["own_mapped"] = self.entry.transform.nearest(self.own, self.shape) & self.view
            found["round_trip"] = self.entry.transform.round_trip(self.subject.reference, self.own.shape)
        return found

    @cached_property
    def unclipped(self) -> Array:
        """Mapped, scaled, and 0 outside the field of view."""
        low, high = self.scale
        mapped = self.entry.transform.linear(self.stored, self.shape) if self.entry.transform else self.stored
        if (low, high) != (0.0, 1.0):
            mapped = ((mapped.astype(np.float64) - low) / (high - low)).astype(np.float32)
        return np.where(self.view, mapped, np.float32(0))

    @cached_property
    def score(self) -> Array:
        return np.clip(self.unclipped, np.float32(0), np.float32(1))

    @remembered
    def components(self, support: str, level: int, neighbours: str) -> tuple[Array, list[int]]:
        """Components of the thresholded map inside the support, and those with a voxel above t + 0.5 (1 - t)."""
        fired = (self.score > CUTS[level]) & self.supports[support]
        labels = components_of(fired, neighbours)
        seeds = np.unique(labels[fired & (self.score > np.float32((level + 200) / 400))])
        return labels, [int(label) for label in seeds]

    def predicted(self, support: str, level: int, postprocess: str, least_voxels: int, neighbours: str) -> Array:
        """Section 5. Labels of the predicted components; pruning keeps those of at least so many voxels."""
        labels, seeded = self.components(support, level, neighbours)
        if postprocess == "plain":
            return labels
        sizes = np.bincount(labels.ravel())
        least = least_voxels if postprocess == "hysteresis_pruned" else 1
        is_kept = np.zeros(len(sizes), np.bool_)
        is_kept[[label for label in seeded if sizes[label] >= least]] = True
        return np.where(is_kept[labels], labels, 0)

    @remembered
    def component_counts(
        self, reference: str, support: str, level: int, postprocess: str, least_voxels: int
    ) -> tuple[int, int, int]:
        """Predicted voxels, true positives and reference voxels after 6-connected post-processing."""
        mask = self.predicted(support, level, postprocess, least_voxels, "conn6") > 0
        inside = self.references[reference] & self.supports[support]
        return int(mask.sum()), int((mask & inside).sum()), int(inside.sum())

    @remembered
    def lesions(self, reference: str, support: str, neighbours: str) -> Array:
        """Section 4. Labels of the reference lesions, numbered by first voxel in C order."""
        return components_of(self.references[reference] & self.supports[support], neighbours)

    @remembered
    def lesion_voxels(self, reference: str, support: str, neighbours: str) -> dict[int, Array]:
        """Voxels of every lesion, in C order."""
        lesions = self.lesions(reference, support, neighbours).ravel()
        return {lesion: np.flatnonzero(lesions == lesion) for lesion in range(1, int(lesions.max()) + 1)}

    def support_of(self, support: str) -> str:
        """One name for the two supports where the field of view holds the brain: they are measured once."""
        return "brain" if self.view[self.subject.brain].all() else support

    @remembered
    def matches(
        self, reference: str, support: str, neighbours: str, floor: int, level: int, postprocess: str, least: int
    ) -> dict[int, tuple[float, int]]:
        """Matched IoU and overlapping voxels of every lesion of at least `floor` voxels."""
        predicted = self.predicted(support, level, postprocess, least, neighbours)
        voxels_of = self.lesion_voxels(reference, support, neighbours)
        names = [lesion for lesion, voxels in voxels_of.items() if len(voxels) >= floor]
        volumes = np.bincount(predicted.ravel())
        iou = np.zeros((len(names), len(volumes)))
        overlap = np.zeros(len(names), np.int64)
        for row, lesion in enumerate(names):
            touched = Counter[int](predicted.ravel()[voxels_of[lesion]].tolist())
            for component, voxels in touched.items():
                if component > 0:
                    overlap[row] += voxels
                    iou[row, component] = voxels / (len(voxels_of[lesion]) + int(volumes[component]) - voxels)
        # equal totals go to the lower lesion: a nudge far below any difference of two totals
        nudged = iou + (iou > 0) * (1e-10 * np.arange(len(names), 0, -1))[:, None]
        rows, columns = optimize.linear_sum_assignment(nudged, maximize=True)
        best = dict(zip(rows.tolist(), iou[rows, columns].tolist(), strict=True))
        return {lesion: (best.get(row, 0.0), int(overlap[row])) for row, lesion in enumerate(names)}

    @cached_property
    def plain_counts(self) -> dict[tuple[str, str], tuple[list[int], list[int], int]]:
        """By reference and support: predicted voxels and true positives at every level, and reference voxels."""
        counts: dict[tuple[str, str], tuple[list[int], list[int], int]] = {}
        for (name, reference), (support, inside) in itertools.product(self.references.items(), self.supports.items()):
            scores, positive = self.score[inside], reference[inside]
            fired = [scores > cut for cut in CUTS]
            predicted = [int(mask.sum()) for mask in fired]
            counts[name, support] = predicted, [int((mask & positive).sum()) for mask in fired], int(positive.sum())
        return counts

    @remembered
    def ranking(self, reference: str, support: str) -> Row:
        """Section 3. AUROC with mid-ranks and average precision with ties collapsed, by scikit-learn."""
        scores = self.unclipped[self.supports[support]]
        positive = self.references[reference][self.supports[support]]
        n_positive, n_negative = int(positive.sum()), int((~positive).sum())
        _, inverse, repeats = np.unique(scores, return_inverse=True, return_counts=True)
        row = {
            "positive_voxels": n_positive,
            "negative_voxels": n_negative,
            "tied_fraction": float((repeats[inverse] > 1).mean()),
        }
        if n_positive == 0 or n_negative == 0:
            return row | {"auroc": None, "average_precision": None}
        return row | {
            "auroc": float(sklearn_metrics.roc_auc_score(positive, scores)),
            "average_precision": float(sklearn_metrics.average_precision_score(positive, scores)),
        }

    def evidence(self, lesion: Array) -> Row:
        """Section 4. A lesion against the voxels of the brain outside the reference that are nearest of all."""
        free = np.flatnonzero(self.subject.brain & ~self.subject.reference)
        sides = np.rint(np.square(self.subject.spacing_mm) * 1e6).astype(np.int64)
        places = [np.stack(np.unravel_index(voxels, self.shape), axis=1) for voxels in (free, lesion)]
        squared = sum((np.subtract.outer(*(p[:, j] for p in places)) ** 2 * sides[j] for j in range(3)), start=0)
        shell = free[np.argsort(np.min(squared, axis=1), kind="stable")[: len(lesion)]]
        positive = np.arange(len(lesion) + len(shell)) < len(lesion)
        scores = self.unclipped.ravel()[np.concatenate([lesion, shell])]
        return {
            "local_auroc": float(sklearn_metrics.roc_auc_score(positive, scores)),
            "local_average_precision": float(sklearn_metrics.average_precision_score(positive, scores)),
            "lesion_voxels": len(lesion),
            "shell_voxels": len(shell),
        }

    @remembered
    def slices(self, support: str) -> list[dict[str, Any]]:
        """Section 7. Every slice along axis 2 that holds support voxels."""
        inside = self.supports[support]
        held = [k for k in range(self.shape[2]) if inside[:, :, k].any()]
        rows: list[dict[str, Any]] = []
        for k in held:
            scores = self.score[:, :, k][inside[:, :, k]].astype(np.float64)
            positive = {name: int((mask & inside)[:, :, k].sum()) for name, mask in self.references.items()}
            rows.append(
                {f"reference_voxels_{name}": positive.get(name) for name in AXES["reference_id"]}
                | {
                    "slice_index": k,
                    "score_max": float(scores.max()),
                    "score_p99": float(np.quantile(scores, 0.99)),
                    "score_mean": float(scores.mean()),
                    "voxels": len(scores),
                    "brain_area_mm2": len(scores) * self.subject.spacing_mm[0] * self.subject.spacing_mm[1],
                    "relative_position": (k - held[0]) / (held[-1] - held[0]) if len(held) > 1 else 0.0,
                }
            )
        return rows

    @remembered
    def slice_ranking(self, reference: str, support: str) -> Row:
        """AUROC of the slices' maxima, and placement values among negative slices of the same brain-area quintile."""
        rows = self.slices(support)
        is_positive = [row[f"reference_voxels_{reference}"] > 0 for row in rows]
        scores = [row["score_max"] for row in rows]
        areas = [row["voxels"] for row in rows]
        edges = [linear_quantile(areas, Fraction(k, 5)) for k in (1, 2, 3, 4)]
        strata = [sum(edge < area for edge in edges) for area in areas]
        placements: list[Fraction] = []
        for here in (k for k in range(len(rows)) if is_positive[k]):
            rivals = [scores[k] for k in range(len(rows)) if not is_positive[k] and strata[k] == strata[here]]
            if rivals:
                won = sum(2 * (rival > scores[here]) + (rival == scores[here]) for rival in rivals)
                placements.append(Fraction(won, 2 * len(rivals)))
        both = 0 < sum(is_positive) < len(rows)
        return {
            "auroc": float(sklearn_metrics.roc_auc_score(is_positive, scores)) if both else None,
            "placement_sum": float(sum(placements)),
            "matched_count": len(placements),
            "positive_count": sum(is_positive),
            "negative_count": len(rows) - sum(is_positive),
        }

    def critical_threshold(self, reference: str, support: str, loss: str, most_voxels: int) -> float:
        """Section 6. The first score that does not count against the budget, 0 where there are fewer voxels."""
        inside = self.supports[support]
        counted = inside & ~self.references[reference] if loss == "false_positive" else inside
        scores = np.sort(self.score[counted])[::-1]
        return float(scores[most_voxels]) if len(scores) > most_voxels else 0.0

    @cached_property
    def candidates(self) -> dict[Candidate, tuple[float | None, float | None]]:
        """Section 2. Dice and centroid distance (mm) in view of the 56 members on top of the declared transform."""
        assert self.entry.transform is not None
        assert self.own is not None
        canonical = self.subject.reference & self.view
        found: dict[Candidate, tuple[float | None, float | None]] = {}
        for transposed, flip_0, flip_1, dz in CANDIDATES:
            member = self.entry.transform.candidate(transposed, flip_0, flip_1)
            mapped = member.nearest(self.own, self.shape, dz) & self.view
            distance = centroid_distance_mm(mapped, canonical, self.subject.spacing_mm)
            found[transposed, flip_0, flip_1, dz] = dice_of(mapped, canonical), distance
        return found

    def bins(self, support: str) -> Array:
        """Histogram bins of the clipped score: 0 for zeros only, else ceil(s * 4095) in float32."""
        return np.ceil(self.score[self.supports[support]] * np.float32(4095)).astype(np.int64)


class Study:
    """The declared study, read with the standard library, and one pair per entry and subject."""

    def __init__(self, file: Path, like: "Study | None" = None) -> None:
        self.folder, self.like = file.parent, like
        declared = tomllib.loads(file.read_text())
        self.options: dict[str, Any] = declared.get("protocol", {})
        self.spacing_mm = tuple(float(size) for size in declared["study"]["voxel_size_mm"])
        self.voxel_mm3 = math.prod((Fraction(str(size)) for size in self.spacing_mm), start=Fraction(1))
        with (self.folder / declared["study"]["subjects"]).open() as handle:
            listed = list(csv.DictReader(handle))
        self.subjects = {row["subject_id"]: self._subject(declared["files"], row) for row in listed}
        self.entries: dict[str, Entry] = {}
        self.pairs: dict[tuple[str, str], Pair] = {}
        self.scales: dict[str, tuple[float, float]] = {}
        for method in declared["method"]:
            self._add_method(method)
        self.contrast = next(iter(declared["files"]["intensity"].values()))
        for baseline in declared["baseline"]:
            self._add_baseline(baseline["id"], declared["files"]["intensity"][baseline["intensity"]])

    def path(self, pattern: str, subject_id: str) -> Path:
        return self.folder / pattern.format(subject_id=subject_id)

    def _subject(self, files: Row, row: Row) -> Subject:
        name = row["subject_id"]
        reference = read_labels(self.path(files["reference"], name))
        brain = read_nifti(self.path(files["brain"], name)) != 0
        return Subject(name, row["split"], reference, brain, self.spacing_mm)

    def _add_method(self, declared: Row) -> None:
        t = declared["transform"]
        transform = Transform(*(tuple(t[field]) for field in ("source_axis", "start", "extent", "reversed")))
        legacy_mm3 = Fraction(str(declared["legacy_voxel_mm3"]))
        entry = Entry(declared["id"], "method", len(self.entries), transform, legacy_mm3)
        self.entries[entry.method_id], self.scales[entry.method_id] = entry, (0.0, 1.0)
        for name, subject in self.subjects.items():
            stored = read_nifti(self.path(declared["map"], name))
            own = read_labels(self.path(declared["own_reference"], name))
            self.add(Pair(entry, subject, stored, own, (0.0, 1.0)))

    def _add_baseline(self, method_id: str, pattern: str) -> None:
        """Section 9. Intensity z-scored in the brain (population SD), scaled by validation quantiles.

        A z-score is rounded once to float32, as any map is.
        """
        entry = Entry(method_id, "baseline", len(self.entries), None, None)
        standard = {name: self.standard_image(pattern, name) for name in self.subjects}
        quantiles = [
            np.quantile(standard[name][subject.brain].astype(np.float64), [0.001, 0.999])
            for name, subject in self.subjects.items()
            if subject.split == "validation"
        ]
        low, high = np.median(quantiles, axis=0).tolist()
        self.entries[method_id], self.scales[method_id] = entry, (low, high)
        for name, subject in self.subjects.items():
            self.add(Pair(entry, subject, standard[name], None, (low, high)))

    def standard_image(self, pattern: str, subject_id: str) -> Array:
        image = read_nifti(self.path(pattern, subject_id)).astype(np.float64)
        inside = image[self.subjects[subject_id].brain]
        return ((image - inside.mean()) / inside.std()).astype(np.float32)

    def add(self, pair: Pair) -> None:
        """Keep a pair, or its equal from another study, which remembers what was measured."""
        key = pair.entry.method_id, pair.subject.subject_id
        known = self.like.pairs.get(key) if self.like else None
        self.pairs[key] = known if known is not None and known.equals(pair) else pair


# Section 2: the gate


class Gate:
    """The 56 candidates of every method and subject, and the verdicts."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.methods = [entry.method_id for entry in study.entries.values() if entry.kind == "method"]
        self.candidates = {(m, s): study.pairs[m, s].candidates for m in self.methods for s in study.subjects}
        self.subject_rows: Rows = {pair: self._verdict(*pair) for pair in self.candidates}

    def _verdict(self, method_id: str, subject_id: str) -> Row:
        pair, scanned = self.study.pairs[method_id, subject_id], self.candidates[method_id, subject_id]
        canonical = pair.subject.reference & pair.view
        dice, distance = scanned[DECLARED]
        n_reference = int(pair.subject.reference.sum())
        row = {
            "centroid_mm": distance,
            "dice_in_view": dice,
            "in_view_fraction": int(canonical.sum()) / n_reference if n_reference else None,
        }
        if dice is None:
            return row | {"verdict": "not_assessable", "best_candidate_dice": None}
        best = max(value for value, _ in scanned.values() if value is not None)
        round_trip_dice = dice_of(pair.references["own_mapped"], pair.references["round_trip"])
        assert round_trip_dice is not None
        passes_i = distance is not None and distance <= 3
        passes_ii_b, passes_iii = dice >= best - 0.01, dice >= 0.85
        if not passes_ii_b or (not passes_i and round_trip_dice < 0.85):
            verdict = "misregistered"
        else:
            verdict = "passed" if passes_i and passes_iii else "label_fidelity"
        passes = {"passes_i": passes_i, "passes_ii_b": passes_ii_b, "passes_iii": passes_iii}
        return row | passes | {"verdict": verdict, "best_candidate_dice": best, "round_trip_dice": round_trip_dice}

    def mean_dice(self, method_id: str) -> dict[Candidate, float]:
        """Cohort mean Dice of every candidate, over the subjects with a reference in view."""
        scanned = [
            self.candidates[method_id, s]
            for s in self.study.subjects
            if (self.study.pairs[method_id, s].subject.reference & self.study.pairs[method_id, s].view).any()
        ]
        return {c: statistics.fmean(one[c][0] or 0.0 for one in scanned) for c in CANDIDATES} if scanned else {}

    def method_row(self, method_id: str) -> Row:
        rows = [row for (m, _), row in self.subject_rows.items() if m == method_id]
        counts = Counter(row["verdict"] for row in rows)
        names = ("passed", "label_fidelity", "misregistered", "not_assessable")
        summary: dict[str, Any] = {f"{name}_count": counts[name] for name in names} | {"n_subjects": len(rows)}
        for column in ("centroid_mm", "dice_in_view", "in_view_fraction"):
            values = [row[column] for row in rows if row[column] is not None]
            summary[f"{column}_median"] = float(np.median(values)) if values else None
        means = self.mean_dice(method_id)
        applied, best = means[DECLARED], max(means.values())
        summary["dice_in_view_minimum"] = min(row["dice_in_view"] for row in rows if row["dice_in_view"] is not None)
        summary["applied_mean_dice"], summary["best_mean_dice"] = applied, best
        summary["margin"] = applied - max(mean for candidate, mean in means.items() if candidate != DECLARED)
        summary["verdict"] = "passed" if applied >= best - 1e-9 else "failed"
        return summary


# Section 6: thresholds, and what they give on the test cohort


@dataclass(frozen=True)
class Choice:
    level: int | None
    status: str
    reason: str | None


@dataclass(frozen=True)
class Series:
    """A method's maps under one reference, support and voxel volume."""

    method_id: str
    reference_id: str
    support_id: str
    voxel_volume_id: str


def within_lesion_guard(feasible: list[int], hits: Sequence[int], lesion_count: int) -> list[int]:
    """THE LESION GUARD of the validation rule: of the feasible levels, those that lose no more than 3 % of the lesions.

    Hits of 6-connected lesions above the floor, IoU >= 0.10, summed over validation subjects.
    """
    most = max(hits[level] for level in feasible)
    return [level for level in feasible if hits[level] >= most - max(1, math.floor(Fraction(3, 100) * lesion_count))]


@cache
def is_bounded_by_clopper_pearson(exceedances: int, count: int, alpha: Fraction) -> bool:
    """Whether the one-sided 90 % upper bound keeps alpha: P(at most as many exceedances | alpha) <= 0.10, exactly."""
    tail = sum(math.comb(count, i) * alpha**i * (1 - alpha) ** (count - i) for i in range(exceedances + 1))
    return exceedances < count and tail <= Fraction(1, 10)


def mean_of(values: Iterable[Fraction | None]) -> float | None:
    """Mean of what is defined, exact before the one rounding."""
    defined = [value for value in values if value is not None]
    return float(sum(defined) / len(defined)) if defined else None


def median_of(values: Iterable[Fraction | None]) -> float | None:
    defined = [float(value) for value in values if value is not None]
    return float(np.median(defined)) if defined else None


CRITERION_COLUMNS = ("iou_10", "iou_25", "iou_50", "any_overlap", "lesion_count")


class LesionHits:
    """Hits at every level as the lake holds them: the twin counts components at some levels only."""

    def __init__(self, marts: duckdb.DuckDBPyConnection, condition: str = "true") -> None:
        key = "method_id, subject_id, reference_id, support_id, voxel_volume_id, postprocess_id, lesion_definition_id"
        frame = marts.sql(
            f"select {key}, hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap, lesion_count from lesion_curve"
            f" where {condition} order by {key}, level"
        ).pl()
        names, hits = frame.select(key.split(", ")), frame.select(frame.columns[7:]).to_numpy()
        self.tables = dict(zip(names[:: len(LEVELS)].iter_rows(), hits.reshape(-1, len(LEVELS), 5), strict=True))

    def of(self, series: Series, subject_id: str, postprocess: str, definition: str) -> Array:
        """Levels by criteria, the number of lesions last."""
        where = (series.reference_id, series.support_id, series.voxel_volume_id, postprocess, definition)
        return self.tables[series.method_id, subject_id, *where]


class Twin:
    """Thresholds, operating points and cell scores of one study under one protocol."""

    def __init__(self, study: Study, hits: "LesionHits") -> None:
        self.study, self.gate, self.hits = study, Gate(study), hits
        self.budgets: list[float] = study.options.get("budgets_cm3", [5.0, 10.0, 20.0, 40.0])
        self.one_if_both_empty = study.options.get("empty_dice") == "one_if_both_empty"
        self.minimum_mm3 = Fraction(str(study.options.get("minimum_component_mm3", 50)))
        self.floor_mm3 = Fraction(str(study.options.get("lesion_floor_mm3", 50)))
        self.held_out = [
            m
            for m in self.gate.methods
            if study.options.get("gate_failure") == "hold_out" and self.gate.method_row(m)["verdict"] == "failed"
        ]
        self.entries = [entry for entry in study.entries.values() if entry.method_id not in self.held_out]
        self.methods = [entry.method_id for entry in self.entries if entry.kind == "method"]
        self.ranked = [entry.method_id for entry in self.entries]
        self.excluded = {
            s
            for (m, s), row in self.gate.subject_rows.items()
            if row["verdict"] == "misregistered"
            and m not in self.held_out
            and study.options.get("misregistered") != "keep"
        }
        self.cohort = {
            split: [
                s.subject_id for s in study.subjects.values() if s.split == split and s.subject_id not in self.excluded
            ]
            for split in ("validation", "test")
        }
        self.chosen: dict[tuple[Series, str, float], Choice] = {}

    def voxel_mm3(self, method_id: str, voxel_volume_id: str) -> Fraction:
        legacy_mm3 = self.study.entries[method_id].legacy_mm3
        if voxel_volume_id == "true":
            return self.study.voxel_mm3
        assert legacy_mm3 is not None
        return legacy_mm3

    def series(self) -> list[Series]:
        """Every series of every ranked entry; a baseline has the canonical reference and the true volume only."""
        return [
            Series(entry.method_id, reference, support, volume)
            for entry in self.entries
            for reference in (AXES["reference_id"] if entry.kind == "method" else ("canonical",))
            for support in AXES["support_id"]
            for volume in (AXES["voxel_volume_id"] if entry.kind == "method" else ("true",))
        ]

    def counts(self, series: Series, subject_id: str, postprocess: str, level: int) -> tuple[int, int, int]:
        """Predicted voxels, true positives and reference voxels of one subject."""
        pair = self.study.pairs[series.method_id, subject_id]
        if postprocess == "plain":
            predicted, true_positive, total = pair.plain_counts[series.reference_id, series.support_id]
            return predicted[level], true_positive[level], total
        least = self.least_voxels(series, postprocess)
        support = pair.support_of(series.support_id)
        return pair.component_counts(series.reference_id, support, level, postprocess, least)

    def least_voxels(self, series: Series, postprocess: str) -> int:
        """Voxels from which `voxels * volume >= minimum` holds; without a role but for pruning."""
        voxel_mm3 = self.voxel_mm3(series.method_id, series.voxel_volume_id)
        return math.ceil(self.minimum_mm3 / voxel_mm3) if postprocess == "hysteresis_pruned" else 0

    def floor_voxels(self, series: Series, definition: str) -> int:
        """Voxels from which a reference component is a lesion."""
        voxel_mm3 = self.voxel_mm3(series.method_id, series.voxel_volume_id)
        return math.ceil(self.floor_mm3 / voxel_mm3) if definition.endswith("floor") else 1

    def dice(self, counts: tuple[int, int, int]) -> Fraction | None:
        predicted, true_positive, total = counts
        if total == 0:
            return Fraction(int(predicted == 0)) if self.one_if_both_empty else None
        return Fraction(2 * true_positive, predicted + total)

    def burden(self, series: Series, counts: tuple[int, int, int]) -> Fraction:
        predicted, true_positive, _ = counts
        return (predicted - true_positive) * self.voxel_mm3(series.method_id, series.voxel_volume_id) / 1000

    @remembered
    def plain_curves(self, series: Series, split: str) -> tuple[Array, Array]:
        """Predicted and false-positive voxels of the cohort's plain maps, subjects by levels."""
        curves = [
            self.study.pairs[series.method_id, s].plain_counts[series.reference_id, series.support_id]
            for s in self.cohort[split]
        ]
        predicted = np.array([p for p, _, _ in curves])
        return predicted, predicted - np.array([tp for _, tp, _ in curves])

    def mean_burden(self, series: Series, split: str, level: int) -> Fraction:
        _, false_positive = self.plain_curves(series, split)
        total = int(false_positive[:, level].sum())
        return total * self.voxel_mm3(series.method_id, series.voxel_volume_id) / 1000 / len(false_positive)

    @remembered
    def mean_dice(self, series: Series, split: str, level: int) -> Fraction | None:
        values = [self.dice(self.counts(series, s, "plain", level)) for s in self.cohort[split]]
        defined = [value for value in values if value is not None]
        return sum(defined, start=Fraction(0)) / len(defined) if defined else None

    def choose(self, series: Series, rule: str, budget: float) -> Choice:
        key = (series, rule, budget)
        if key not in self.chosen:
            self.chosen[key] = self._choose(series, rule, Fraction(str(budget)))
        return self.chosen[key]

    def _choose(self, series: Series, rule: str, budget: Fraction) -> Choice:
        if rule == "fixed_50":
            return Choice(100, "ok", None)
        if rule == "subject_optimum":
            return Choice(None, "ok", None)
        if rule == "validation":
            return self._by_validation(series, budget)
        if rule == "test_matched":
            return self._by_test(series, budget)
        return self._by_calibration(series, rule, budget)

    def _by_validation(self, series: Series, budget: Fraction) -> Choice:
        feasible = [level for level in LEVELS if self.mean_burden(series, "validation", level) <= budget]
        best: tuple[Fraction, int] | None = None
        hits, lesion_count = self.validation_hits(series)
        for level in within_lesion_guard(feasible, hits, lesion_count):
            dice = self.mean_dice(series, "validation", level)
            if dice is not None and (best is None or dice >= best[0]):
                best = dice, level
        assert best is not None
        return Choice(best[1], "ok", None)

    @remembered
    def validation_hits(self, series: Series) -> tuple[list[int], int]:
        """Lesions hit at every level, and lesions, of the reference definition and criterion."""
        tables = [self.hits.of(series, s, "plain", "conn6_floor") for s in self.cohort["validation"]]
        total = np.array(tables, np.int64).sum(axis=0)
        return total[:, CRITERION_COLUMNS.index("iou_10")].tolist(), int(total[0, -1])

    def _by_test(self, series: Series, budget: Fraction) -> Choice:
        if budget >= self.mean_burden(series, "test", 0):
            return Choice(None, "infeasible", "burden never reached")
        return Choice(min(k for k in LEVELS if self.mean_burden(series, "test", k) <= budget), "ok", None)

    def _by_calibration(self, series: Series, rule: str, budget: Fraction) -> Choice:
        family, alpha, n = rule.split("_")[0], RULES[rule], len(self.cohort["validation"])
        assert alpha is not None
        for level, exceedances in enumerate(self.exceedances(series, budget, "label_free" in rule)):
            if family == "rcps":
                keeps = is_bounded_by_clopper_pearson(exceedances, n, alpha)
            else:
                keeps = Fraction(exceedances + 1, n + 1) <= alpha
            if keeps:
                return Choice(level, "ok", None)
        return Choice(None, "infeasible", f"needs {FEWEST_SUBJECTS[family][rule[-2:]]} validation subjects")

    def most_voxels(self, series: Series, budget: float | Fraction) -> int:
        """The most voxels whose volume is not above the budget."""
        return math.floor(1000 * Fraction(str(budget)) / self.voxel_mm3(series.method_id, series.voxel_volume_id))

    @remembered
    def exceedances(self, series: Series, budget: Fraction, label_free: bool) -> list[int]:
        """At every level, validation subjects whose predicted (label-free) or false-positive volume is too large."""
        predicted, false_positive = self.plain_curves(series, "validation")
        voxels = predicted if label_free else false_positive
        return (voxels > self.most_voxels(series, budget)).sum(axis=0).tolist()

    @remembered
    def optimum(self, series: Series, subject_id: str) -> int:
        """The level of a subject's best Dice, ties to the larger; 200 without a reference."""
        best, best_level = Fraction(-1), 200
        for level in LEVELS:
            counts = self.counts(series, subject_id, "plain", level)
            if counts[2] > 0 and (dice := Fraction(2 * counts[1], counts[0] + counts[2])) >= best:
                best, best_level = dice, level
        return best_level

    def counts_on_test(self, series: Series, rule: str, budget: float, postprocess: str) -> list[tuple[int, int, int]]:
        """One triple per test subject; none at all where the rule is infeasible."""
        choice = self.choose(series, rule, budget)
        if choice.status != "ok":
            return []
        return [
            self.counts(series, s, postprocess, self.optimum(series, s) if choice.level is None else choice.level)
            for s in self.cohort["test"]
        ]

    def pooled_dice(self, counts: Sequence[tuple[int, int, int]]) -> float | None:
        total = sum(p + g for p, _, g in counts)
        return 2 * sum(tp for _, tp, _ in counts) / total if total else None

    def aggregate_dice(self, counts: Sequence[tuple[int, int, int]], aggregation: str) -> float | None:
        if aggregation == "pooled":
            return self.pooled_dice(counts)
        values = [self.dice(triple) for triple in counts]
        return mean_of(values) if aggregation == "mean" else median_of(values)

    @remembered
    def pooled_voxels(self, method_id: str, reference: str, support: str) -> tuple[Array, Array, Array]:
        """Bins, clipped scores and labels of all test voxels together."""
        pairs = [self.study.pairs[method_id, s] for s in self.cohort["test"]]
        return (
            np.concatenate([pair.bins(support) for pair in pairs]),
            np.concatenate([pair.score[pair.supports[support]] for pair in pairs]),
            np.concatenate([pair.references[reference][pair.supports[support]] for pair in pairs]),
        )

    @remembered
    def voxel_metric(self, method_id: str, metric: str, reference: str, support: str, aggregation: str) -> float | None:
        if aggregation == "pooled":
            bins, _, labels = self.pooled_voxels(method_id, reference, support)
            function = "roc_auc_score" if metric == "voxel_auroc" else "average_precision_score"
            return float(getattr(sklearn_metrics, function)(labels, bins))
        column = "auroc" if metric == "voxel_auroc" else "average_precision"
        values = [self.study.pairs[method_id, s].ranking(reference, support)[column] for s in self.cohort["test"]]
        defined = [value for value in values if value is not None]
        return float(np.mean(defined) if aggregation == "mean" else np.median(defined))

    @remembered
    def slice_metric(self, method_id: str, metric: str, reference: str, support: str, aggregation: str) -> float | None:
        pairs = [self.study.pairs[method_id, s] for s in self.cohort["test"]]
        ranked = [pair.slice_ranking(reference, support) for pair in pairs]
        if metric == "slice_aroc":
            placed = [(Fraction(row["placement_sum"]), row["matched_count"]) for row in ranked if row["matched_count"]]
            if aggregation == "pooled":
                return float(1 - sum(u for u, _ in placed) / sum(n for _, n in placed)) if placed else None
            values = [float(1 - u / n) for u, n in placed]
        elif aggregation == "pooled":
            rows = [row for pair in pairs for row in pair.slices(support)]
            labels = [row[f"reference_voxels_{reference}"] > 0 for row in rows]
            return float(sklearn_metrics.roc_auc_score(labels, [row["score_max"] for row in rows]))
        else:
            values = [row["auroc"] for row in ranked if row["auroc"] is not None]
        return float(np.mean(values) if aggregation == "mean" else np.median(values)) if values else None

    @remembered
    def sensitivity(
        self, series: Series, rule: str, budget: float, postprocess: str, definition: str
    ) -> dict[tuple[str, str], float | None]:
        """Lesion sensitivity by criterion and aggregation; empty where the rule is infeasible."""
        choice = self.choose(series, rule, budget)
        if choice.status != "ok":
            return {}
        tables = {s: self.hits.of(series, s, postprocess, definition) for s in self.cohort["test"]}
        levels = {s: self.optimum(series, s) if choice.level is None else choice.level for s in tables}
        rows = [tables[s][levels[s]].tolist() for s in tables]
        found: dict[tuple[str, str], float | None] = {}
        for column, criterion in enumerate(CRITERION_COLUMNS[:-1]):
            shares = [Fraction(row[column], row[-1]) for row in rows if row[-1] > 0]
            found[criterion, "mean"], found[criterion, "median"] = mean_of(shares), median_of(shares)
            total = sum(row[-1] for row in rows)
            found[criterion, "pooled"] = sum(row[column] for row in rows) / total if total else None
        return found

    def cell_score(self, cell: Row, entry: Entry) -> float | None:
        """The score of an entry in a cell."""
        is_baseline = entry.kind == "baseline"
        reference = "canonical" if is_baseline else cell["reference_id"]
        volume = "true" if is_baseline else cell["voxel_volume_id"]
        support, aggregation = cell["support_id"], cell["aggregation_id"]
        metric, rule, budget, postprocess = (
            cell[column] for column in ("metric_id", "threshold_rule_id", "budget_cm3", "postprocess_id")
        )
        if metric.startswith("voxel"):
            return self.voxel_metric(entry.method_id, metric, reference, support, aggregation)
        if metric.startswith("slice"):
            return self.slice_metric(entry.method_id, metric, reference, support, aggregation)
        series = Series(entry.method_id, reference, support, volume)
        if metric == "lesion_sensitivity":
            found = self.sensitivity(series, rule, budget, postprocess, cell["lesion_definition_id"])
            return found.get((cell["hit_criterion_id"], aggregation))
        return self.dice_score(series, rule, budget, postprocess, aggregation)

    @remembered
    def dice_score(self, series: Series, rule: str, budget: float, postprocess: str, aggregation: str) -> float | None:
        counts = self.counts_on_test(series, rule, budget, postprocess)
        return self.aggregate_dice(counts, aggregation) if counts else None


# Section 8: the multiverse


def acting_levels(universe: Row) -> tuple[Any, ...]:
    """What a universe's score depends on: universes that agree here share one distinct cell."""
    u = universe
    common = (u["metric_id"], u["reference_id"], u["support_id"], u["aggregation_id"])
    if u["metric_id"] not in ("dice", "lesion_sensitivity"):
        return common
    uses_budget = u["threshold_rule_id"] in BUDGET_RULES
    is_sensitivity = u["metric_id"] == "lesion_sensitivity"
    # the legacy volume changes burdens (so thresholds), floors and pruning, never plain or hysteresis counts
    has_floor = is_sensitivity and u["lesion_definition_id"].endswith("floor")
    uses_volume = uses_budget or has_floor or u["postprocess_id"] == "hysteresis_pruned"
    lesions = (u["lesion_definition_id"], u["hit_criterion_id"]) if is_sensitivity else ()
    volume = u["voxel_volume_id"] if uses_volume else None
    budget = u["budget_cm3"] if uses_budget else None
    return (*common, u["threshold_rule_id"], u["postprocess_id"], volume, budget, *lesions)


def every_universe(budgets: Sequence[float]) -> list[dict[str, Any]]:
    levels = AXES | {"budget_cm3": tuple(budgets)}
    return [dict(zip(levels, combination, strict=True)) for combination in itertools.product(*levels.values())]


def is_defensible(universe: Row) -> bool:
    return not INDEFENSIBLE & set(universe.values())


def acts(metric: str, axis: str) -> bool:
    if metric in ("dice", "lesion_sensitivity"):
        return metric == "lesion_sensitivity" or axis not in ("lesion_definition_id", "hit_criterion_id", "metric_id")
    return axis in ("reference_id", "support_id", "aggregation_id")


def scored_nowhere(is_scored: Mask, levels: Mapping[str, Sequence[Any]]) -> Iterable[tuple[str, int]]:
    """Metrics without any score, then the levels without one in all the other metrics on which their axis acts."""
    empty = [m for m in range(len(levels["metric_id"])) if not is_scored[..., m].any()]
    yield from (("metric_id", m) for m in empty)
    for k, axis in enumerate(list(levels)[:-1]):
        metrics = [m for m, name in enumerate(levels["metric_id"]) if acts(name, axis) and m not in empty]
        if metrics:
            yield from ((axis, n) for n in range(len(levels[axis])) if not is_scored[..., metrics].take(n, k).any())


def next_to_leave(is_scored: Mask, kept: Mapping[str, list[int]]) -> tuple[str, int]:
    """A metric that has no score left; else the level with a hole after which the largest share is scored.

    Of equal shares the one with the most scores, of these the first.
    """
    left: dict[tuple[str, int], tuple[Fraction, int]] = {}
    for axis, level in [(name, level) for name, levels in kept.items() for level in levels]:
        alone = is_scored[np.ix_(*{**kept, axis: [level]}.values())]
        rest = is_scored[np.ix_(*{**kept, axis: [other for other in kept[axis] if other != level]}.values())]
        if axis == "metric_id" and not alone.any():
            return axis, level
        if axis != "metric_id" and not alone.all():
            left[axis, level] = Fraction(int(rest.sum()), max(rest.size, 1)), int(rest.sum())
    return max(left, key=lambda drop: left[drop])


def dropped_levels(is_scored: Mask, levels: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    """The levels that leave, in order (docs/decisions/0002-dropping-levels.md).

    First what is scored nowhere, then one level at a time, until no universe without a score is left.
    """
    kept = {axis: list(range(len(names))) for axis, names in levels.items()}
    drops = list(scored_nowhere(is_scored, levels))
    for axis, level in drops:
        kept[axis].remove(level)
    while not is_scored[np.ix_(*kept.values())].all():
        axis, level = next_to_leave(is_scored, kept)
        kept[axis].remove(level)
        drops.append((axis, level))
    return [(axis, level_name(levels[axis][level])) for axis, level in drops]


def level_name(level: object) -> str:
    return f"{level:g}" if isinstance(level, float) else str(level)


class Multiverse:
    """One dense array of scores over the ten axes and the entries, and everything that is read off it."""

    def __init__(self, twin: Twin, marts: duckdb.DuckDBPyConnection) -> None:
        self.twin = twin
        self.levels: dict[str, tuple[Any, ...]] = AXES | {"budget_cm3": tuple(twin.budgets)}
        self.universes = every_universe(twin.budgets)
        self.signatures = [acting_levels(universe) for universe in self.universes]
        grid = marts.sql("select universe_id, cell_id from universe_grid order by universe_id").pl()
        cells: list[int] = grid.get_column("cell_id").to_list()
        self.cell_of: dict[tuple[Any, ...], int] = dict(zip(self.signatures, cells, strict=True))
        self.scores: dict[tuple[Any, ...], list[float | None]] = {}
        for universe, signature in zip(self.universes, self.signatures, strict=True):
            if signature not in self.scores:
                self.scores[signature] = [twin.cell_score(universe, entry) for entry in twin.entries]
        table = np.array([self.scores[s] for s in self.signatures], np.float64)  # None becomes NaN
        self.array = table.reshape(*map(len, self.levels.values()), len(twin.entries))
        is_scored = ~np.isnan(self.array[..., : len(twin.methods)]).any(axis=-1)
        self.drops = dropped_levels(np.asarray(is_scored), self.levels)
        self.kept = {
            axis: [k for k, level in enumerate(levels) if (axis, level_name(level)) not in self.drops]
            for axis, levels in self.levels.items()
        }

    def is_kept(self, universe: Row) -> bool:
        return not self.drops or not any((axis, level_name(level)) in self.drops for axis, level in universe.items())

    def chosen(self, universe_set: str, metric: str) -> dict[str, list[int]]:
        """Positions of the kept levels of each axis, for one universe set and metric (or all)."""
        defended = {
            axis: [k for k in kept if universe_set == "all" or self.levels[axis][k] not in INDEFENSIBLE]
            for axis, kept in self.kept.items()
        }
        if metric == "all":
            return defended
        return defended | {"metric_id": [self.levels["metric_id"].index(metric)]}

    def groups(self) -> Iterable[tuple[str, str, Array]]:
        """Universe set, metric (each and all), and the scores: one axis per axis, the entries last."""
        metrics = [self.levels["metric_id"][k] for k in self.kept["metric_id"]]
        for universe_set, metric in itertools.product(("defensible", "all"), ("all", *metrics)):
            chosen = self.chosen(universe_set, metric)
            yield universe_set, metric, self.array[np.ix_(*chosen.values())]

    def places(self, scores: Sequence[float]) -> list[int]:
        """Rank of every method (0 is best), the same for scores that tie."""
        order = sorted(range(len(scores)), key=lambda m: (-scores[m], m))
        places, place = [0] * len(scores), 0
        for above, below in itertools.pairwise(order):
            place += scores[above] - scores[below] >= TIE
            places[below] = place
        return places

    def spelled(self, places: Sequence[int], is_weak: bool) -> str:
        """Methods by place, then by declared order, with = between ties where the order is weak."""
        order = sorted(range(len(places)), key=lambda m: (places[m], m))
        text = self.twin.methods[order[0]]
        for above, below in itertools.pairwise(order):
            text += ("=" if is_weak and places[above] == places[below] else ">") + self.twin.methods[below]
        return text

    def flip_share(self) -> Rows:
        rows: Rows = {}
        entries = self.twin.entries
        for universe_set, metric, scores in self.groups():
            flat = scores.reshape(-1, len(entries))
            for a, b in itertools.combinations(range(len(entries)), 2):
                difference = flat[:, a] - flat[:, b]
                ahead, behind = difference[difference >= TIE], -difference[difference <= -TIE]
                ties = len(difference) - len(ahead) - len(behind)
                rows[universe_set, metric, entries[a].method_id, entries[b].method_id] = {
                    "greater_count": len(ahead),
                    "less_count": len(behind),
                    "tie_count": ties,
                    "flip_share": (min(len(ahead), len(behind)) + 0.5 * ties) / len(difference),
                    "median_abs_difference": float(np.median(np.abs(difference))),
                    "median_lead_a": float(np.median(ahead)) if len(ahead) else None,
                    "median_lead_b": float(np.median(behind)) if len(behind) else None,
                    "is_baseline_pair": "baseline" in (entries[a].kind, entries[b].kind),
                }
        return rows

    def variance_share(self) -> Rows:
        rows: Rows = {}
        for universe_set, metric, everyone in self.groups():
            y = everyone[..., : len(self.twin.methods)].astype(np.longdouble)  # remainders are small differences
            n, m, grand = y.size, y.shape[-1], y.mean()
            method_mean = y.mean(axis=tuple(range(10)))
            total = float(((y - grand) ** 2).sum())
            terms: dict[str, tuple[float, int | None]] = {
                "total": (total, None),
                "method": (n / m * float(((method_mean - grand) ** 2).sum()), None),
            }
            for k, axis in enumerate(self.levels):
                others = tuple(j for j in range(10) if j != k)
                level_mean, both_mean, size = y.mean(axis=(*others, 10)), y.mean(axis=others), y.shape[k]
                interaction = both_mean - level_mean[:, None] - method_mean[None, :] + grand
                terms[axis] = n / size * float(((level_mean - grand) ** 2).sum()), size
                terms[f"method:{axis}"] = n / (size * m) * float((interaction**2).sum()), size
            axes = sum(value for term, (value, _) in terms.items() if term not in ("total", "method"))
            terms |= {"axes": (axes, None), "remainder": (total - terms["method"][0] - axes, None)}
            for term, (value, size) in terms.items():
                rows[universe_set, metric, term] = {
                    "sum_of_squares": value,
                    "share": value / total if total else None,
                    "level_count": size,
                }
        return rows

    def order_share(self) -> Rows:
        rows: Rows = {}
        for universe_set, metric, everyone in self.groups():
            flat = everyone[..., : len(self.twin.methods)].reshape(-1, len(self.twin.methods))
            orders: Counter[tuple[str, str]] = Counter()
            for scores, count in Counter(map(tuple, flat.tolist())).items():
                places = self.places(scores)
                orders["weak", self.spelled(places, True)] += count
                orders["resolved", self.spelled(places, False)] += count
            for (kind, order), count in orders.items():
                rows[universe_set, metric, kind, order] = {"universe_count": count, "share": count / len(flat)}
        return rows

    def universe_spread(self) -> Rows:
        rows: Rows = {}
        for universe_set, metric, everyone in self.groups():
            if metric == "all":
                continue
            flat = everyone[..., : len(self.twin.methods)].reshape(-1, len(self.twin.methods))
            first = flat.max(axis=1, keepdims=True) - flat < TIE
            shared = first / first.sum(axis=1, keepdims=True)
            for k, method_id in enumerate(self.twin.methods):
                quartiles = np.quantile(flat[:, k], [0.25, 0.5, 0.75]).tolist()
                rows[universe_set, metric, method_id] = {
                    **dict(zip(("score_q1", "score_median", "score_q3"), quartiles, strict=True)),
                    "first_share": float(shared[:, k].mean()),
                    "universe_count": len(flat),
                }
        return rows

    def agreement(self) -> Rows:
        """Kendall's tau-b of every scored universe's order with the reference universe's, on tied values."""
        names = list(self.levels.values())
        reference = self.array[tuple(levels.index(v) for levels, v in zip(names, REFERENCE_UNIVERSE, strict=True))]
        reference_places = self.places(reference[: len(self.twin.methods)].tolist())
        found: dict[tuple[Any, ...], float | None] = {}
        taus: dict[tuple[int, ...], float | None] = {}
        for signature, scores in self.scores.items():
            defined = [score for score in scores[: len(self.twin.methods)] if score is not None]
            places = tuple(self.places(defined))
            if len(defined) == len(self.twin.methods) and places not in taus:
                is_tied = len(set(places)) == 1 or len(set(reference_places)) == 1
                taus[places] = None if is_tied else float(stats.kendalltau(places, reference_places).statistic)
            found[signature] = taus.get(places)
        rows: Rows = {}
        for number, (universe, signature) in enumerate(zip(self.universes, self.signatures, strict=True), start=1):
            if self.is_kept(universe):
                tau = found[signature]
                rows[(number,)] = {
                    "metric_id": universe["metric_id"],
                    "is_defensible": is_defensible(universe),
                    "kendall_tau_b": tau,
                    **({} if tau is None else {"reproduces_reference": tau > 1 - 1e-12}),
                }
        return rows


# Comparing


def differs(found: Any, expected: Any, tolerance: float) -> bool:
    """Floats within the tolerance (relative above 1), all else equal."""
    if not isinstance(expected, float) or found is None:
        return bool(found != expected)
    return not abs(found - expected) <= tolerance * max(1.0, abs(expected))


def assert_same_rows(
    marts: duckdb.DuckDBPyConnection, table: str, key: str, expected: Rows, tolerance: float = 1e-12
) -> None:
    """Every key of both sides, and every column that the twin gives."""
    frame = marts.sql(f'select * from "{table}"').pl() if " " not in table else marts.sql(table).pl()
    names = [name.strip() for name in key.split(",")]
    found = {tuple(row[name] for name in names): row for row in frame.iter_rows(named=True)}
    assert len(found) == frame.height, f"{table}: its key is not unique"
    assert expected, f"{table}: nothing to compare"
    assert not (missing := sorted(map(str, set(expected) - set(found)))), f"{table} lacks {missing[:5]}"
    assert not (extra := sorted(map(str, set(found) - set(expected)))), f"{table} has {extra[:5]} beyond the twin"
    wrong = [
        (where, column, found[where][column], value)
        for where, row in expected.items()
        for column, value in row.items()
        if differs(found[where][column], value, tolerance)
    ]
    assert not wrong, f"{table}: {len(wrong)} values differ; where, column, found, expected: {wrong[:5]}"


@dataclass(frozen=True)
class Side:
    """A study twice: the marts of its lake, and the twin."""

    marts: duckdb.DuckDBPyConnection
    twin: Twin

    def checked_levels(self, method_id: str, subject_id: str) -> Sequence[int]:
        """Three levels, other ones for every pair of method and subject; together they are nearly all levels."""
        number = 1 + list(self.twin.study.subjects).index(subject_id)
        return LEVELS[(10 * self.twin.study.entries[method_id].position + number) % STRIDE :: STRIDE]


CHECKED = f"""(
    select c.* from {{}} as c
    join method using (method_id)
    join (select subject_id, row_number() over (order by subject_id) as number from subject) using (subject_id)
    where c.postprocess_id = '{{}}' or c.level % {STRIDE} = (10 * position + number) % {STRIDE}
)"""


GUARD_ONLY = "postprocess_id = 'plain' and lesion_definition_id = 'conn6_floor'"


@pytest.fixture(scope="module")
def phantom(phantom_study: Path, phantom_marts: duckdb.DuckDBPyConnection) -> Side:
    return Side(phantom_marts, Twin(Study(phantom_study), LesionHits(phantom_marts)))


@pytest.fixture(scope="module")
def multiverse(phantom: Side) -> Multiverse:
    return Multiverse(phantom.twin, phantom.marts)


Variant = Callable[[Path, Sequence[str]], duckdb.DuckDBPyConnection]


@pytest.fixture
def built(phantom_lake: Path, tmp_path: Path) -> Variant:
    """Ingest a changed study into a copy of the phantom's lake and build the named marts."""

    def build(study: Path, wanted: Sequence[str]) -> duckdb.DuckDBPyConnection:
        lake = tmp_path / "lake"
        if not lake.exists():
            shutil.copytree(phantom_lake, lake)
        report = Ingest(load_study(study), lake, InProcess()).run()
        assert not report.manifest.failures
        connection = open_for_building(None, lake)
        build_tables(connection, report.manifest, wanted)
        return connection

    return build


@pytest.fixture
def copied_study(phantom_study: Path, tmp_path: Path) -> Path:
    return shutil.copytree(phantom_study.parent, tmp_path / "study") / phantom_study.name


def declare(study: Path, protocol: str) -> None:
    """Add to the protocol, the last table of the phantom's study file."""
    study.write_text(f"{study.read_text()}{protocol}\n")


# The expected rows of each table


def curve_rows(at: Side) -> Rows:
    rows: Rows = {}
    for subject_id in at.twin.study.subjects:
        for series in at.twin.series():
            for postprocess in AXES["postprocess_id"]:
                for level in LEVELS if postprocess == "plain" else at.checked_levels(series.method_id, subject_id):
                    predicted, true_positive, total = at.twin.counts(series, subject_id, postprocess, level)
                    where = (series.method_id, subject_id, *vars_of(series), postprocess, level)
                    rows[where] = {
                        "threshold": level / 200,
                        "predicted_voxels": predicted,
                        "true_positive_voxels": true_positive,
                        "reference_voxels": total,
                    }
    return rows


def vars_of(series: Series) -> tuple[str, str, str]:
    return series.reference_id, series.support_id, series.voxel_volume_id


def ranked_pairs(at: Side) -> Iterable[tuple[Pair, str, str]]:
    for pair in at.twin.study.pairs.values():
        for reference in AXES["reference_id"] if pair.entry.kind == "method" else ("canonical",):
            for support in AXES["support_id"]:
                yield pair, reference, support


def choice_rows(at: Side) -> Rows:
    rows: Rows = {}
    for series, rule, budget in itertools.product(at.twin.series(), RULES, at.twin.budgets):
        choice = at.twin.choose(series, rule, budget)
        rows[series.method_id, *vars_of(series), rule, budget] = {
            "level": choice.level,
            "threshold": None if choice.level is None else choice.level / 200,
            "status": choice.status,
        }
    return rows


def operating_rows(at: Side) -> Rows:
    rows: Rows = {}
    for method_id, rule, budget in itertools.product(at.twin.ranked, RULES, at.twin.budgets):
        series = Series(method_id, "canonical", "brain", "true")
        choice = at.twin.choose(series, rule, budget)
        for postprocess in AXES["postprocess_id"]:
            counts = at.twin.counts_on_test(series, rule, budget, postprocess)
            if not counts:
                continue
            burdens = [float(at.twin.burden(series, triple)) for triple in counts]
            limit = Fraction(str(budget))
            rows[method_id, rule, budget, postprocess] = {
                "threshold": None if choice.level is None else choice.level / 200,
                "n_subjects": len(counts),
                "n_dice": sum(at.twin.dice(triple) is not None for triple in counts),
                "dice_mean": at.twin.aggregate_dice(counts, "mean"),
                "dice_median": at.twin.aggregate_dice(counts, "median"),
                "dice_pooled": at.twin.aggregate_dice(counts, "pooled"),
                "burden_cm3_mean": float(np.mean(burdens)),
                "burden_cm3_median": float(np.median(burdens)),
                "burden_cm3_p95": float(np.quantile(burdens, 0.95)),
                "burden_cm3_max": max(burdens),
                "exceedance": sum(at.twin.burden(series, t) > limit for t in counts) / len(counts),
            }
    return rows


def gap_rows(at: Side) -> Rows:
    rows: Rows = {}
    twin = at.twin
    for method_id, budget in itertools.product(twin.ranked, twin.budgets):
        series = Series(method_id, "canonical", "brain", "true")
        chosen, matched = (twin.choose(series, rule, budget).level for rule in ("validation", "test_matched"))
        if chosen is None or matched is None:
            continue
        gaps = [
            after - before
            for before, after in (
                tuple(twin.dice(twin.counts(series, s, "plain", level)) for level in (chosen, matched))
                for s in twin.cohort["test"]
            )
            if before is not None and after is not None
        ]
        above, below = (twin.mean_burden(series, "test", level) for level in (matched, matched - 1))
        weight = (Fraction(str(budget)) - above) / (below - above)
        dice_above, dice_below, dice_chosen = (
            twin.mean_dice(series, "test", level) for level in (matched, matched - 1, chosen)
        )
        assert dice_above is not None
        assert dice_below is not None
        assert dice_chosen is not None
        equal = (1 - weight) * dice_above + weight * dice_below
        rows[method_id, budget] = {
            "n_dice": len(gaps),
            "validation_threshold": chosen / 200,
            "validation_burden_cm3": float(twin.mean_burden(series, "test", chosen)),
            "test_matched_threshold": matched / 200,
            "test_matched_burden_cm3": float(above),
            "interpolation_weight": float(weight),
            "gap_mean": mean_of(gaps),
            "gap_median": median_of(gaps),
            "equal_burden_dice_mean": float(equal),
            "gap_interpolated": float(equal - dice_chosen),
        }
    return rows


def voxel_rows(at: Side) -> Rows:
    rows: Rows = {}
    twin = at.twin
    for method_id, metric, support in itertools.product(twin.ranked, ("voxel_auroc", "voxel_ap"), AXES["support_id"]):
        for reference in AXES["reference_id"] if method_id in twin.methods else ("canonical",):
            pairs = [twin.study.pairs[method_id, s] for s in twin.cohort["test"]]
            defined = sum(pair.ranking(reference, support)["auroc"] is not None for pair in pairs)
            for aggregation in AXES["aggregation_id"]:
                rows[method_id, metric, support, reference, aggregation] = {
                    "value": twin.voxel_metric(method_id, metric, reference, support, aggregation),
                    "n_subjects": len(pairs) if aggregation == "pooled" else defined,
                }
    return rows


def assert_same_choices(at: Side) -> None:
    assert_same_rows(at.marts, "threshold_choice", CHOICE_KEY, choice_rows(at))
    for *where, rule, budget, reason in at.marts.sql(f"select {CHOICE_KEY}, reason from threshold_choice").fetchall():
        expected = at.twin.choose(Series(*where), rule, budget).reason
        assert reason is None if expected is None else expected in reason
    assert_same_rows(at.marts, "operating_point", OPERATING_KEY, operating_rows(at))
    assert_same_rows(at.marts, "transfer_gap", "method_id, budget_cm3", gap_rows(at))
    assert_same_rows(
        at.marts, "voxel_metric", "method_id, metric_id, support_id, reference_id, aggregation_id", voxel_rows(at)
    )


def assert_identities(marts: duckdb.DuckDBPyConnection) -> None:
    checks = marts.sql("select identity, item, holds from identity_check").fetchall()
    assert "identity_1" in {identity for identity, _, _ in checks}
    assert [(identity, item) for identity, item, holds in checks if not holds] == []


CHOICE_KEY = "method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3"
OPERATING_KEY = "method_id, threshold_rule_id, budget_cm3, postprocess_id"
CURVE_KEY = "method_id, subject_id, reference_id, support_id, voxel_volume_id, postprocess_id, level"
GATE_COLUMNS = ("centroid_mm", "dice_in_view", "in_view_fraction", "best_candidate_dice", "verdict")


# Lake tables


def test_score_scale_is_the_median_of_validation_quantiles(phantom: Side) -> None:
    expected: Rows = {(m,): {"low": low, "high": high} for m, (low, high) in phantom.twin.study.scales.items()}
    assert_same_rows(phantom.marts, "score_scale", "method_id", expected)


def test_threshold_curve_counts_the_same_voxels(phantom: Side) -> None:
    assert_same_rows(
        phantom.marts, f"from {CHECKED.format('threshold_curve', 'plain')}", CURVE_KEY, curve_rows(phantom)
    )


def test_voxel_ranking_equals_scikit_learn(phantom: Side) -> None:
    expected: Rows = {
        (pair.entry.method_id, pair.subject.subject_id, reference, support): pair.ranking(reference, support)
        for pair, reference, support in ranked_pairs(phantom)
    }
    assert_same_rows(phantom.marts, "voxel_ranking", "method_id, subject_id, reference_id, support_id", expected)


def test_score_histogram_counts_the_same_voxels(phantom: Side) -> None:
    expected: Rows = {}
    subjects = sorted(phantom.twin.study.subjects)[::3]
    for pair, reference, support in ranked_pairs(phantom):
        if pair.subject.subject_id not in subjects:
            continue
        bins, positive = pair.bins(support), pair.references[reference][pair.supports[support]]
        positives, negatives = (Counter[int](bins[side].tolist()) for side in (positive, ~positive))
        for number in positives | negatives:
            expected[pair.entry.method_id, pair.subject.subject_id, reference, support, number] = {
                "positive_voxels": positives[number],
                "negative_voxels": negatives[number],
            }
    query = f"select * from score_histogram where subject_id in {tuple(subjects)}"
    assert_same_rows(phantom.marts, query, "method_id, subject_id, reference_id, support_id, bin", expected)


def test_pooled_auroc_lies_within_its_bound_of_the_exact_one(phantom: Side) -> None:
    pooled = phantom.marts.sql(
        "select method_id, reference_id, support_id, value, error_bound from voxel_metric"
        " where metric_id = 'voxel_auroc' and aggregation_id = 'pooled'"
    ).fetchall()
    assert len(pooled) == 2 * (3 * 4 + 2)
    for method_id, reference, support, value, bound in pooled:
        bins, scores, labels = phantom.twin.pooled_voxels(method_id, reference, support)
        positives, negatives = (np.bincount(bins[labels == side], minlength=4096) for side in (True, False))
        expected = 0.5 * int((positives * negatives).sum()) / (int(positives.sum()) * int(negatives.sum()))
        assert bound == pytest.approx(expected, abs=1e-15)
        assert abs(value - float(sklearn_metrics.roc_auc_score(labels, scores))) <= bound + 1e-12


def test_every_gate_candidate_is_mapped_the_same(phantom: Side) -> None:
    expected: Rows = {
        (*pair, *candidate): {"is_applied": candidate == DECLARED, "dice": dice, "centroid_mm": distance}
        for pair, scanned in phantom.twin.gate.candidates.items()
        for candidate, (dice, distance) in scanned.items()
    }
    assert len(expected) == 56 * len(phantom.twin.gate.candidates)
    assert_same_rows(phantom.marts, "gate_candidate", "method_id, subject_id, transposed, flip_0, flip_1, dz", expected)


def test_critical_thresholds_are_order_statistics(phantom: Side) -> None:
    expected: Rows = {}
    losses, twin = ("false_positive", "predicted_volume"), phantom.twin
    for series, s, loss, budget in itertools.product(twin.series(), twin.study.subjects, losses, twin.budgets):
        pair, most = twin.study.pairs[series.method_id, s], twin.most_voxels(series, budget)
        threshold = pair.critical_threshold(series.reference_id, series.support_id, loss, most)
        expected[series.method_id, s, *vars_of(series), loss, budget] = {"threshold": threshold}
    key = "method_id, subject_id, reference_id, support_id, voxel_volume_id, loss, budget_cm3"
    assert_same_rows(phantom.marts, "critical_threshold", key, expected)


def test_lesions_and_their_volumes(phantom: Side) -> None:
    twin = phantom.twin
    contrast = {s: twin.study.standard_image(twin.study.contrast, s) for s in twin.study.subjects}
    expected: Rows = {}
    for pair, reference, support in ranked_pairs(phantom):
        method_id, s = pair.entry.method_id, pair.subject.subject_id
        owner = None if (reference, support) == ("canonical", "brain") else method_id
        for definition in DEFINITIONS:
            floor = twin.floor_voxels(Series(method_id, reference, support, "true"), definition)
            for lesion, voxels in pair.lesion_voxels(reference, support, definition.split("_")[0]).items():
                if len(voxels) >= floor:
                    centre = [float(index.mean()) for index in np.unravel_index(voxels, pair.shape)]
                    expected[owner, s, reference, support, definition, lesion] = {
                        "volume_mm3": float(len(voxels) * twin.study.voxel_mm3),
                        **{f"centroid_{j}": centre[j] for j in range(3)},
                        "mean_contrast": float(contrast[s].ravel()[voxels].mean(dtype=np.float64)),
                    }
    key = "method_id, subject_id, reference_id, support_id, lesion_definition_id, lesion_id"
    assert_same_rows(phantom.marts, "lesion", key, expected)


def lesion_keys(at: Side) -> Iterable[tuple[Pair, Series, str, int]]:
    """Every series, subject and post-processing, at the levels that are checked."""
    for series, s in itertools.product(at.twin.series(), at.twin.study.subjects):
        levels = at.checked_levels(series.method_id, s)
        for postprocess, level in itertools.product(AXES["postprocess_id"], levels):
            yield at.twin.study.pairs[series.method_id, s], series, postprocess, level


def test_lesion_hits_equal_an_optimal_assignment(phantom: Side) -> None:
    twin, expected = phantom.twin, dict[tuple[Any, ...], Row]()
    for pair, series, postprocess, level in lesion_keys(phantom):
        least = twin.least_voxels(series, postprocess)
        for definition in DEFINITIONS:
            floor = twin.floor_voxels(series, definition)
            neighbours = definition.split("_")[0]
            support = pair.support_of(series.support_id)
            matched = pair.matches(series.reference_id, support, neighbours, floor, level, postprocess, least).values()
            where = (pair.entry.method_id, pair.subject.subject_id, *vars_of(series), postprocess, definition, level)
            expected[where] = {
                **{f"hit_{name}": sum(iou >= cut for iou, _ in matched) for name, cut in CRITERIA.items()},
                "hit_any_overlap": sum(overlap > 0 for _, overlap in matched),
                "lesion_count": len(matched),
                "threshold": level / 200,
            }
    key = CURVE_KEY.replace("level", "lesion_definition_id, level")
    assert_same_rows(phantom.marts, f"from {CHECKED.format('lesion_curve', '')}", key, expected)


def test_lesion_matches(phantom: Side) -> None:
    twin, expected = phantom.twin, dict[tuple[Any, ...], Row]()
    for pair, series, postprocess, level in lesion_keys(phantom):
        if vars_of(series) == ("canonical", "brain", "true"):
            voxels_of = pair.lesion_voxels("canonical", "brain", "conn6")
            floor, least = twin.floor_voxels(series, "conn6_floor"), twin.least_voxels(series, postprocess)
            matched = pair.matches("canonical", "brain", "conn6", floor, level, postprocess, least)
            for lesion, (iou, overlap) in matched.items():
                where = (pair.entry.method_id, pair.subject.subject_id, lesion, postprocess, level)
                expected[where] = {
                    "matched_iou": iou,
                    "overlap_voxels": overlap,
                    "max_score": float(pair.score.ravel()[voxels_of[lesion]].max()),
                }
    key = "method_id, subject_id, lesion_id, postprocess_id, level"
    assert_same_rows(phantom.marts, f"from {CHECKED.format('lesion_match', '')}", key, expected)


def test_lesion_evidence(phantom: Side) -> None:
    expected: Rows = {
        (pair.entry.method_id, pair.subject.subject_id, lesion): pair.evidence(voxels)
        for pair in phantom.twin.study.pairs.values()
        for lesion, voxels in pair.lesion_voxels("canonical", "brain", "conn6").items()
        if len(voxels) * phantom.twin.study.voxel_mm3 >= phantom.twin.floor_mm3
    }
    assert_same_rows(phantom.marts, "lesion_evidence", "method_id, subject_id, lesion_id", expected)


def test_components_that_hold_reference_voxels(phantom: Side) -> None:
    expected: Rows = {}
    for (method, subject), pair in phantom.twin.study.pairs.items():
        for level in phantom.checked_levels(method, subject):
            labels = pair.predicted("brain", level, "plain", 1, "conn6")
            inside = labels[pair.references["canonical"] & pair.supports["brain"]]
            hits, sizes = np.bincount(inside), np.bincount(labels.ravel())
            counts = Counter((int(sizes[one]), int(hits[one])) for one in np.flatnonzero(hits) if one > 0)
            for (size, hit), number in counts.items():
                expected[method, subject, level, size, hit] = {"component_count": number}
    key = "method_id, subject_id, level, component_voxels, component_true_positive_voxels"
    checked = CHECKED.replace("c.postprocess_id = '{}' or ", "").format("component_overlap")
    assert_same_rows(phantom.marts, f"from {checked}", key, expected)


def test_what_is_predicted_of_each_lesions_region(phantom: Side) -> None:
    """A voxel as near to two lesions may belong to either: counts lie between those without and with such voxels."""
    spacing = np.array(phantom.twin.study.spacing_mm)
    names = "method_id, subject_id, lesion_id, level, region_predicted_voxels, overlap_voxels, lesion_voxels"
    found = {tuple(row[:4]): row[4:] for row in phantom.marts.sql(f"select {names} from region_curve").fetchall()}
    for (method, subject), pair in phantom.twin.study.pairs.items():
        voxels_of = pair.lesion_voxels("canonical", "brain", "conn6")
        places = np.argwhere(pair.supports["brain"]) * spacing
        sites = [np.argwhere(pair.lesions("canonical", "brain", "conn6") == one) * spacing for one in voxels_of]
        away = np.array([((places[:, None] - site) ** 2).sum(axis=-1).min(axis=1) for site in sites])
        for level in phantom.checked_levels(method, subject):
            predicted = pair.score[pair.supports["brain"]] > CUTS[level]
            for row, (lesion, voxels) in enumerate(voxels_of.items()):
                others = np.delete(away, row, axis=0).min(axis=0, initial=np.inf)
                least, most = (int((predicted & near).sum()) for near in (away[row] < others, away[row] <= others))
                in_region, overlap, size = found.get((method, subject, lesion, level), (0, 0, len(voxels)))
                assert least <= in_region <= most and size == len(voxels)
                assert overlap == int((pair.score.ravel()[voxels] > CUTS[level]).sum())


def test_slice_scores(phantom: Side) -> None:
    expected: Rows = {
        (pair.entry.method_id, pair.subject.subject_id, support, row["slice_index"]): {
            column: value for column, value in row.items() if column != "voxels"
        }
        for pair in phantom.twin.study.pairs.values()
        for support in AXES["support_id"]
        for row in pair.slices(support)
    }
    assert_same_rows(phantom.marts, "slice_score", "method_id, subject_id, support_id, slice_index", expected)


def test_slice_rankings(phantom: Side) -> None:
    expected: Rows = {
        (pair.entry.method_id, pair.subject.subject_id, reference, support): pair.slice_ranking(reference, support)
        for pair, reference, support in ranked_pairs(phantom)
    }
    assert_same_rows(phantom.marts, "slice_ranking", "method_id, subject_id, reference_id, support_id", expected)


# Marts


def assert_same_gate(at: Side) -> None:
    assert_same_rows(at.marts, "gate_subject", "method_id, subject_id", at.twin.gate.subject_rows)
    summaries: Rows = {(m,): at.twin.gate.method_row(m) for m in at.twin.gate.methods}
    assert_same_rows(at.marts, "gate_summary", "method_id", summaries)
    named = at.marts.sql(
        "select method_id, subject_id, best_candidate, best_candidate_dice from gate_subject"
        " where best_candidate is not null"
    ).fetchall()
    for method_id, subject_id, name, dice in named:
        scanned = at.twin.gate.candidates[method_id, subject_id]
        assert {candidate_name(c): value for c, (value, _) in scanned.items()}[name] == pytest.approx(dice, abs=1e-12)


def test_gate_verdicts(phantom: Side) -> None:
    assert_same_gate(phantom)
    verdicts = {row["verdict"] for row in phantom.twin.gate.subject_rows.values()}
    assert {"passed", "label_fidelity", "not_assessable"} <= verdicts


def test_thresholds_operating_points_and_gaps(phantom: Side) -> None:
    assert_same_choices(phantom)
    statuses = {(row["status"], where[4]) for where, row in choice_rows(phantom).items()}
    assert {("ok", "rcps_20"), ("infeasible", "rcps_10"), ("ok", "crc_10"), ("infeasible", "crc_05")} <= statuses


def test_every_identity_is_checked_and_holds(phantom: Side) -> None:
    assert_identities(phantom.marts)
    # identity 2 is over the subjects with a reference, so an empty one is no reason to leave it out
    assert phantom.marts.sql("from identity_check where identity = 'identity_2'").fetchall()


def test_subject_thresholds(phantom: Side) -> None:
    twin = phantom.twin
    expected: Rows = {}
    for series, rule, budget in itertools.product(twin.series(), RULES, twin.budgets):
        choice = twin.choose(series, rule, budget)
        for s in twin.cohort["test"] if choice.status == "ok" else ():
            level = twin.optimum(series, s) if choice.level is None else choice.level
            expected[series.method_id, s, *vars_of(series), rule, budget] = {"level": level}
    assert_same_rows(phantom.marts, "subject_threshold", CHOICE_KEY.replace(",", ", subject_id,", 1), expected)


def test_an_empty_reference_has_no_dice_and_keeps_its_burden(phantom: Side) -> None:
    twin = phantom.twin
    empty = [s for s in twin.cohort["test"] if not twin.study.subjects[s].reference.any()]
    assert len(empty) == 1
    rows = phantom.marts.sql(
        "select dice, predicted_voxels * 0.216 = burden_cm3 and burden_cm3 > 0 from operating_subject"
        f" where subject_id = '{empty[0]}' and threshold_rule_id = 'fixed_50' and postprocess_id = 'plain'"
        " and predicted_voxels > 0"
    ).fetchall()
    assert rows
    assert set(rows) == {(None, True)}
    assert {
        row["auroc"] for row in (twin.study.pairs[m, empty[0]].ranking("canonical", "brain") for m in twin.ranked)
    } == {None}


def test_lesion_sensitivity(phantom: Side) -> None:
    twin, expected = phantom.twin, dict[tuple[Any, ...], Row]()
    options = (AXES["threshold_rule_id"], twin.budgets, AXES["postprocess_id"], AXES["lesion_definition_id"])
    for series, rule, budget, postprocess, definition in itertools.product(twin.series(), *options):
        found = twin.sensitivity(series, rule, budget, postprocess, definition)
        for criterion in CRITERION_COLUMNS[:-1] if found else ():
            expected[series.method_id, *vars_of(series), rule, budget, postprocess, definition, criterion] = {
                f"sensitivity_{aggregation}": found[criterion, aggregation] for aggregation in AXES["aggregation_id"]
            }
    key = f"{CHOICE_KEY}, postprocess_id, lesion_definition_id, hit_criterion_id"
    assert_same_rows(phantom.marts, "lesion_score", key, expected)


def test_slice_metrics(phantom: Side) -> None:
    expected: Rows = {
        (m, metric, support, reference, aggregation): {
            "value": phantom.twin.slice_metric(m, metric, reference, support, aggregation)
        }
        for m in phantom.twin.ranked
        for metric in ("slice_auroc", "slice_aroc")
        for support in AXES["support_id"]
        for reference in (AXES["reference_id"] if m in phantom.twin.methods else ("canonical",))
        for aggregation in AXES["aggregation_id"]
    }
    key = "method_id, metric_id, support_id, reference_id, aggregation_id"
    assert_same_rows(phantom.marts, "slice_metric", key, expected)


# The multiverse


def test_universes_and_their_distinct_cells(phantom: Side, multiverse: Multiverse) -> None:
    universes, signatures = multiverse.universes, multiverse.signatures
    defended = [signature for u, signature in zip(universes, signatures, strict=True) if is_defensible(u)]
    by_metric = Counter(signature[0] for signature in set(defended))
    assert (len(universes), len(defended)) == (155_520, 15_552)
    assert (len(set(signatures)), len(set(defended))) == (19_368, 2_832)
    assert by_metric["dice"] == 216
    assert by_metric["lesion_sensitivity"] == 2592
    assert {by_metric[m] for m in AXES["metric_id"][2:]} == {6}
    # two universes share a stored cell exactly when they share what acts on their metric
    assert len(set(multiverse.cell_of.values())) == len(multiverse.cell_of)
    expected: Rows = {}
    for number, (universe, signature) in enumerate(zip(universes, signatures, strict=True), start=1):
        expected[(number,)] = universe | {
            "cell_id": multiverse.cell_of[signature],
            "is_defensible": is_defensible(universe),
            "is_reference": tuple(universe.values()) == REFERENCE_UNIVERSE,
            "status": "ok" if multiverse.is_kept(universe) else "unavailable",
        }
    assert_same_rows(phantom.marts, "universe", "universe_id", expected)


def test_cells_carry_their_multiplicity(phantom: Side, multiverse: Multiverse) -> None:
    sizes = Counter(multiverse.signatures)
    expected: Rows = {(multiverse.cell_of[s],): {"metric_id": s[0], "multiplicity": n} for s, n in sizes.items()}
    assert_same_rows(phantom.marts, "cell", "cell_id", expected)


def test_levels_without_a_score_are_dropped_for_all(phantom: Side, multiverse: Multiverse) -> None:
    expected: Rows = {
        (axis, level): {"position": position, "dropped_universes": 155_520 // len(multiverse.levels[axis])}
        for position, (axis, level) in enumerate(multiverse.drops)
    }
    if expected:
        assert_same_rows(phantom.marts, "dropped_level", "axis_column, level_id", expected)
    assert phantom.marts.sql("from dropped_level").pl().height == len(expected)


def compare_cell_scores(at: Side, multiverse: Multiverse) -> None:
    expected: Rows = {}
    for signature, scores in multiverse.scores.items():
        for entry, score in zip(at.twin.entries, scores, strict=True):
            expected[multiverse.cell_of[signature], entry.method_id] = {"metric_id": signature[0], "score": score}
    assert_same_rows(at.marts, "cell_score", "cell_id, method_id", expected)


def test_cell_scores(phantom: Side, multiverse: Multiverse) -> None:
    compare_cell_scores(phantom, multiverse)
    assert not any(score is None for scores in multiverse.scores.values() for score in scores)


def assert_same_multiverse(at: Side, multiverse: Multiverse) -> None:
    flips = multiverse.flip_share()
    assert_same_rows(at.marts, "flip_share", "universe_set, metric_id, method_a, method_b", flips)
    assert_same_rows(at.marts, "variance_share", "universe_set, metric_id, term", multiverse.variance_share(), 1e-9)
    assert_same_rows(
        at.marts, "order_share", "universe_set, metric_id, order_kind, method_order", multiverse.order_share()
    )
    assert_same_rows(at.marts, "universe_spread", "universe_set, metric_id, method_id", multiverse.universe_spread())
    assert_same_rows(at.marts, "rank_agreement", "universe_id", multiverse.agreement())
    largest: dict[tuple[str, str], float] = {}
    for (universe_set, metric, _, _), row in flips.items():
        if not row["is_baseline_pair"]:
            largest[universe_set, metric] = max(largest.get((universe_set, metric), 0.0), row["flip_share"])
    assert_same_rows(
        at.marts, "phi_max", "universe_set, metric_id", {where: {"value": phi} for where, phi in largest.items()}
    )
    for universe_set, metric, value, a, b in at.marts.sql(
        "select universe_set, metric_id, value, method_a, method_b from phi_max"
    ).fetchall():
        assert flips[universe_set, metric, a, b]["flip_share"] == pytest.approx(value, abs=1e-12)


def test_flips_sums_of_squares_orders_and_spread(phantom: Side, multiverse: Multiverse) -> None:
    assert_same_multiverse(phantom, multiverse)


# Variants of the study


def transpose_in_plane(study: Path, method_id: str, subject_id: str) -> None:
    """Swap the stored array's axes that canonical axes 0 and 1 read, in a map and in its own reference."""
    (declared,) = [m for m in tomllib.loads(study.read_text())["method"] if m["id"] == method_id]
    first, second, _ = declared["transform"]["source_axis"]
    for pattern in (declared["map"], declared["own_reference"]):
        path = study.parent / pattern.format(subject_id=subject_id)
        values = read_nifti(path).swapaxes(first, second)
        nib.save(nib.Nifti1Image(np.ascontiguousarray(values), np.eye(4)), path)


WITHOUT_UNIVERSES = (
    *("gate_summary", "cohort_subject", "threshold_choice", "operating_point"),
    *("transfer_gap", "voxel_metric", "identity_check"),
)


def test_a_misregistered_subject_leaves_the_cohort_for_all_methods(
    phantom: Side, copied_study: Path, built: Variant
) -> None:
    transpose_in_plane(copied_study, "diffuse", "phantom04")
    transpose_in_plane(copied_study, "sharp", "phantom12")
    marts = built(copied_study, WITHOUT_UNIVERSES)
    study = Study(copied_study, like=phantom.twin.study)
    at = Side(marts, Twin(study, LesionHits(marts, GUARD_ONLY)))
    assert at.twin.excluded == {"phantom04", "phantom12"}
    assert_same_gate(at)
    cohort: Rows = {(s,): {"is_included": s not in at.twin.excluded} for s in study.subjects}
    assert_same_rows(marts, "cohort_subject", "subject_id", cohort)
    reasons = dict(marts.sql("select subject_id, reason from cohort_subject where not is_included").fetchall())
    assert "diffuse" in reasons["phantom04"]
    assert "sharp" in reasons["phantom12"]
    # ten validation subjects are left, one too few for RCPS at 0.20
    assert at.twin.choose(Series("coarse", "canonical", "brain", "true"), "rcps_20", 20.0).status == "infeasible"
    assert_same_choices(at)
    assert_identities(marts)
    marts.close()

    declare(copied_study, 'misregistered = "keep"')
    marts = built(copied_study, ("cohort_subject", "operating_point"))
    at = Side(marts, Twin(Study(copied_study, like=phantom.twin.study), LesionHits(marts, GUARD_ONLY)))
    assert at.twin.gate.subject_rows["sharp", "phantom12"]["verdict"] == "misregistered"
    assert at.twin.excluded == set()
    assert_same_rows(marts, "cohort_subject", "subject_id", {(s,): {"is_included": True} for s in study.subjects})
    assert_same_rows(marts, "operating_point", OPERATING_KEY, operating_rows(at))
    marts.close()


def reverse_nothing(study: Path, method_id: str) -> None:
    before, block = study.read_text().split(f'id = "{method_id}"\n', 1)
    assert "reversed = [false, true, false]" in block.split("[[method]]")[0]
    block = block.replace("reversed = [false, true, false]", "reversed = [false, false, false]", 1)
    study.write_text(f'{before}id = "{method_id}"\n{block}')


def test_a_wrong_reversal_fails_the_gate_and_is_held_out_of_every_mart(
    phantom: Side, copied_study: Path, built: Variant
) -> None:
    reverse_nothing(copied_study, "diffuse")
    marts = built(copied_study, ("gate_summary",))
    at = Side(marts, Twin(Study(copied_study, like=phantom.twin.study), LesionHits(marts, GUARD_ONLY)))
    assert_same_gate(at)
    (verdict, candidate, suggestion), *others = marts.sql(
        "select verdict, best_candidate, suggestion from gate_summary where method_id = 'diffuse'"
    ).fetchall()
    means = at.twin.gate.mean_dice("diffuse")
    assert others == []
    assert (verdict, candidate) == ("failed", "flip 1")
    assert "flip 1" in suggestion
    assert f"{max(means.values()):.2f}" in suggestion
    assert f"{means[DECLARED]:.2f}" in suggestion
    marts.close()

    declare(copied_study, 'gate_failure = "hold_out"')
    marts = built(copied_study, ())
    at = Side(marts, Twin(Study(copied_study, like=phantom.twin.study), LesionHits(marts, GUARD_ONLY)))
    assert at.twin.ranked == ["sharp", "sharp_twin", "coarse", "FLAIR", "T2"]
    # its misregistered subjects stay, since it is held out
    assert at.twin.excluded == set()
    assert_same_rows(
        marts, "cohort_subject", "subject_id", {(s,): {"is_included": True} for s in at.twin.study.subjects}
    )
    assert_same_choices(at)
    assert_identities(marts)
    columns = marts.sql(
        "select c.table_name, c.column_name from information_schema.columns as c"
        " where c.column_name in ('method_id', 'method_a', 'method_b')"
    ).fetchall()
    gate = {"gate_change", "gate_subject", "gate_summary", "ranked_method"}
    lake_and_gate = {*lake_tables(), *gate, "lesion_hit", "failure"}
    names = {table for table, _ in columns} - lake_and_gate
    assert {"flip_share", "universe_spread", "cell_score", "operating_point", "lesion_score"} <= names
    for table, column in columns:
        if table in names:
            assert marts.sql(f"select count(*) from \"{table}\" where {column} = 'diffuse'").fetchall() == [(0,)], table
    orders = marts.sql("select distinct method_order from order_share").fetchall()
    assert orders
    assert not any("diffuse" in order for (order,) in orders)
    marts.close()


def test_budgets_out_of_reach_at_equality_and_dice_of_empty_references(
    phantom: Side, copied_study: Path, built: Variant
) -> None:
    declare(
        copied_study,
        'budgets_cm3 = [10.8, 21.6, 1150.0]\nreference_budget_cm3 = 21.6\nempty_dice = "one_if_both_empty"',
    )
    marts = built(copied_study, (*WITHOUT_UNIVERSES, "cell_score", "dropped_level"))
    at = Side(marts, Twin(Study(copied_study, like=phantom.twin.study), LesionHits(marts)))
    assert_same_choices(at)
    reasons = marts.sql(
        "select distinct status, reason from threshold_choice "
        "where threshold_rule_id = 'test_matched' and level is null"
    ).fetchall()
    assert len(reasons) == 1
    assert reasons[0][0] == "infeasible"
    assert "burden never reached" in reasons[0][1]
    multiverse = Multiverse(at.twin, marts)
    compare_cell_scores(at, multiverse)
    assert ("threshold_rule_id", "test_matched") in multiverse.drops
    found = marts.sql("select axis_column, level_id from dropped_level order by position").fetchall()
    assert found == multiverse.drops
    assert_identities(marts)
    marts.close()
