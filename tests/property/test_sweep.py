"""The one-pass sweep against a twin that labels, filters and assigns at every level on its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage, optimize

from ingest.lesions import Connectivity, label_reference
from ingest.sweep import LEVELS, Sweep, Workspace, order_voxels, sweep

Mask = NDArray[np.bool_]
Labels = NDArray[np.int64]
Volume = NDArray[np.float32]

GRID = (np.arange(401) / 400).astype(np.float32)
CRITERIA = (Fraction(1, 10), Fraction(1, 4), Fraction(1, 2))
WORKSPACE = Workspace()


@dataclass(frozen=True)
class Case:
    """What one sweep is given."""

    scores: Volume
    support: Mask
    references: tuple[Mask, ...]
    connectivity: Connectivity
    volumes: tuple[float, ...]
    minimum_mm3: float
    floor_mm3: float


def run(case: Case) -> Sweep:
    references = [label_reference(mask, case.support, case.connectivity) for mask in case.references]
    order = order_voxels(case.scores, case.support, WORKSPACE)
    return sweep(order, references, case.connectivity, case.volumes, case.minimum_mm3, case.floor_mm3)


def label(mask: Mask, connectivity: int) -> Labels:
    structure = ndimage.generate_binary_structure(3, 1 if connectivity == 6 else 3)
    return np.asarray(ndimage.label(mask, structure)[0], np.int64)


def sizes_of(labels: Labels) -> Labels:
    return np.bincount(labels.ravel(), minlength=labels.max() + 1 if labels.size else 1)


def best_ious(choices: Sequence[Mapping[int, Fraction]]) -> tuple[Fraction, ...]:
    """IoU of each lesion in the best matching, by trying everything: greatest total, then the lower lesion first."""
    later = [frozenset(c for choice in choices[i + 1 :] for c in choice) for i in range(len(choices))]

    @cache
    def best(lesion: int, used: frozenset[int]) -> tuple[Fraction, tuple[Fraction, ...]]:
        if lesion == len(choices):
            return Fraction(0), ()
        options: list[tuple[Fraction, tuple[Fraction, ...]]] = []
        for component, iou in [(-1, Fraction(0)), *choices[lesion].items()]:
            if component not in used:
                total, rest = best(lesion + 1, (used | {component}) & later[lesion])
                options.append((iou + total, (iou, *rest)))
        return max(options)

    return best(0, frozenset())[1]


def assignment_total(choices: Sequence[Mapping[int, Fraction]]) -> float:
    columns = sorted({component for choice in choices for component in choice})
    matrix = np.array([[float(choice.get(column, 0)) for column in columns] for choice in choices])
    if matrix.size == 0:
        return 0.0
    rows, taken = optimize.linear_sum_assignment(matrix, maximize=True)
    return float(matrix[rows, taken].sum())


def match(predicted: Labels, lesions: Labels, floor: int) -> dict[int, Fraction]:
    """IoU of the component matched with each lesion above the floor."""
    sizes, component_sizes = sizes_of(lesions), sizes_of(predicted)
    above = [lesion for lesion in range(1, sizes.size) if sizes[lesion] >= floor]
    choices: list[dict[int, Fraction]] = []
    for lesion in above:
        overlaps = np.bincount(predicted[lesions == lesion])
        choices.append(
            {
                component: Fraction(int(n), int(component_sizes[component] + sizes[lesion] - n))
                for component, n in enumerate(overlaps)
                if component > 0 and n > 0
            }
        )
    ious = best_ious(choices)
    assert float(sum(ious)) == pytest.approx(assignment_total(choices), abs=1e-9)
    return dict(zip(above, ious, strict=True))


def voxels_needed(volume_mm3: float, voxel_mm3: float) -> int:
    return next(n for n in range(10**6) if n * voxel_mm3 >= volume_mm3)


def twin(case: Case) -> dict[str, NDArray[np.generic]]:
    """The fields of a `Sweep`, each level labelled, filtered and matched on its own."""
    lesions = [label(mask & case.support, case.connectivity) for mask in case.references]
    minimums = [voxels_needed(case.minimum_mm3, volume) for volume in case.volumes]
    floors = [voxels_needed(case.floor_mm3, volume) for volume in case.volumes]
    shape = (len(lesions), len(case.volumes))
    predicted = np.zeros((len(case.volumes), 3, LEVELS), np.int64)
    true_positive = np.zeros((*shape, 3, LEVELS), np.int64)
    hits = np.zeros((*shape, 3, 2, 4, LEVELS), np.int64)
    followed = (
        [i for i in range(1, sizes_of(lesions[0]).size) if sizes_of(lesions[0])[i] >= floors[0]] if lesions else []
    )
    matched = np.zeros((len(followed), 3, LEVELS))
    overlap = np.zeros((len(followed), 3, LEVELS), np.int64)
    find = cache(lambda key, reference, floor: match(kept_labels[key], lesions[reference], floor))
    kept_labels: dict[bytes, Labels] = {}
    for level in range(LEVELS):
        above = (case.scores > np.float32(level / 200)) & case.support
        labels = label(above, case.connectivity)
        strong = np.unique(labels[(case.scores > np.float32((level + 200) / 400)) & case.support])
        for volume, minimum in enumerate(minimums):
            large = np.flatnonzero(sizes_of(labels) >= minimum)
            kept = [labels, np.where(np.isin(labels, strong), labels, 0)]
            kept.append(np.where(np.isin(labels, large), kept[1], 0))
            for process, components in enumerate(kept):
                key = components.tobytes()
                kept_labels[key] = components
                predicted[volume, process, level] = np.count_nonzero(components)
                for reference, ids in enumerate(lesions):
                    true_positive[reference, volume, process, level] = np.count_nonzero((components > 0) & (ids > 0))
                    touched = np.unique(ids[components > 0])
                    for place, floor in enumerate((floors[volume], 0)):
                        ious = find(key, reference, floor)
                        for criterion, least in enumerate(CRITERIA):
                            count = sum(iou >= least for iou in ious.values())
                            hits[reference, volume, process, place, criterion, level] = count
                        count = sum(lesion in touched for lesion in ious)
                        hits[reference, volume, process, place, 3, level] = count
                        if reference == volume == place == 0:
                            matched[:, process, level] = [float(ious[lesion]) for lesion in followed]
                            overlap[:, process, level] = [
                                np.count_nonzero(components[ids == lesion]) for lesion in followed
                            ]
    return {
        "predicted": predicted,
        "true_positive": true_positive,
        "hits": hits,
        "lesion_count": np.array(
            [
                [[np.count_nonzero(sizes_of(ids)[1:] >= floor), ids.max(initial=0)] for floor in floors]
                for ids in lesions
            ],
            np.int64,
        ).reshape(*shape, 2),
        "lesion_ids": np.array(followed, np.int64),
        "matched_iou": matched,
        "overlap_voxels": overlap,
        "max_score": np.array([case.scores[lesions[0] == lesion].max() for lesion in followed], np.float32),
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small volumes with few distinct scores, on the grid of thresholds and one step beside it."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    points = GRID[draw(st.lists(st.integers(0, 400), min_size=1, max_size=8))]
    palette = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, 1), np.zeros(1)]).astype(np.float32)
    scores = random.choice(palette, shape)
    scores[random.random(shape) < draw(st.sampled_from([0, 0.3, 0.7]))] = 0
    support = random.random(shape) < draw(st.sampled_from([0, 0.5, 0.9, 1]))
    shares = draw(st.lists(st.sampled_from([0, 0.1, 0.3, 0.5, 0.8, 1]), max_size=3))
    references = tuple(random.random(shape) < share for share in shares)
    arrange: Callable[[NDArray[np.generic]], NDArray[np.generic]] = draw(
        st.sampled_from([np.ascontiguousarray, np.asfortranarray])
    )
    return Case(
        scores=np.asarray(arrange(scores), np.float32),
        support=np.asarray(arrange(support), np.bool_),
        references=references,
        connectivity=draw(st.sampled_from([6, 26])),
        volumes=tuple(draw(st.lists(st.sampled_from([0.5, 0.7, 1.0, 3.3]), min_size=1, max_size=2))),
        minimum_mm3=draw(st.sampled_from([0, 1, 2.1, 5, 50])),
        floor_mm3=draw(st.sampled_from([0, 1, 2.1, 3.3, 50])),
    )


def assert_equal(found: Sweep, expected: dict[str, NDArray[np.generic]]) -> None:
    for field in fields(found):
        np.testing.assert_array_equal(getattr(found, field.name), expected[field.name], err_msg=field.name, strict=True)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_level_equals_the_twin(case: Case) -> None:
    assert_equal(run(case), twin(case))
