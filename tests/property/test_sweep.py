"""The one-pass sweep against a twin that labels, filters and assigns at every level on its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from importlib import import_module
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage, optimize

from ingest.lesions import Connectivity, label_reference, match_exactly, match_lesions
from ingest.sweep import GRID, LEVELS, Sweep, Workspace, order_voxels, sweep

Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]
Volume = NDArray[np.float32]

CRITERIA = (Fraction(1, 10), Fraction(1, 4), Fraction(1, 2))
WORKSPACE = Workspace()
filters = import_module("skimage.filters")


@dataclass(frozen=True)
class Case:
    """What one sweep is given."""

    scores: Volume
    support: Mask
    references: tuple[Mask, ...]
    connectivity: Connectivity
    volumes: tuple[float, ...] = (1.0,)
    minimum_mm3: float = 2
    floor_mm3: float = 2


def run(case: Case, workspace: Workspace = WORKSPACE) -> Sweep:
    references = [label_reference(mask, case.support, case.connectivity) for mask in case.references]
    order = order_voxels(case.scores, case.support, workspace)
    volumes, minimum, floor = case.volumes, case.minimum_mm3, case.floor_mm3
    return sweep(order, references, case.connectivity, volumes, minimum, floor, lists_components=True)


def label(mask: Mask, connectivity: int) -> Counts:
    structure = ndimage.generate_binary_structure(3, 1 if connectivity == 6 else 3)
    return np.asarray(ndimage.label(mask, structure)[0], np.int64)


def sizes_of(labels: Counts) -> Counts:
    return np.bincount(labels.ravel(), minlength=1)


def voxels_needed(volume_mm3: float, voxel_mm3: float) -> int:
    return next(n for n in range(10**6) if n * voxel_mm3 >= volume_mm3)


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

    return best(0, frozenset[int]())[1]


def assigned_total(choices: Sequence[Mapping[int, Fraction]]) -> float:
    columns = sorted({component for choice in choices for component in choice})
    matrix = np.zeros((len(choices), len(columns)))
    for row, choice in enumerate(choices):
        for component, iou in choice.items():
            matrix[row, columns.index(component)] = iou
    rows, taken = optimize.linear_sum_assignment(matrix, maximize=True)
    return float(matrix[rows, taken].sum())


def match(predicted: Counts, lesions: Counts, floor: int) -> dict[int, Fraction]:
    """IoU of the component matched with each lesion above the floor."""
    sizes, component_sizes = sizes_of(lesions), sizes_of(predicted)
    above = [lesion for lesion in range(1, sizes.size) if sizes[lesion] >= floor]
    choices: list[dict[int, Fraction]] = []
    for lesion in above:
        overlaps = np.bincount(predicted[lesions == lesion])
        choices.append(
            {
                component: Fraction(
                    int(overlaps[component]), int(component_sizes[component] + sizes[lesion] - overlaps[component])
                )
                for component in np.flatnonzero(overlaps).tolist()
                if component > 0
            }
        )
    ious = best_ious(choices)
    assert float(sum(ious)) == pytest.approx(assigned_total(choices), abs=1e-9)
    return dict(zip(above, ious, strict=True))


@dataclass(frozen=True)
class Level:
    """The fields of a `Sweep` at one level."""

    predicted: Counts
    true_positive: Counts
    hits: Counts
    matched_iou: NDArray[np.float64]
    overlap_voxels: Counts


def postprocessed(labels: Counts, strong: Mask, minimum: int) -> list[Counts]:
    """Components of the three post-processings."""
    hysteresis = np.where(np.isin(labels, labels[strong]), labels, 0)
    large = np.flatnonzero(sizes_of(labels) >= minimum)
    return [labels, hysteresis, np.where(np.isin(hysteresis, large), hysteresis, 0)]


def read_level(case: Case, lesions: Sequence[Counts], above: Mask, strong: Mask) -> Level:
    floors = [voxels_needed(case.floor_mm3, volume) for volume in case.volumes]
    shape = (len(lesions), len(case.volumes), 3)
    result = Level(
        predicted=np.zeros(shape[1:], np.int64),
        true_positive=np.zeros(shape, np.int64),
        hits=np.zeros((*shape, 2, 4), np.int64),
        matched_iou=np.zeros((np.count_nonzero(sizes_of(lesions[0])[1:] >= floors[0]), 3)),
        overlap_voxels=np.zeros((np.count_nonzero(sizes_of(lesions[0])[1:] >= floors[0]), 3), np.int64),
    )
    labels = label(above, case.connectivity)
    for volume, voxel_mm3 in enumerate(case.volumes):
        minimum = voxels_needed(case.minimum_mm3, voxel_mm3)
        for process, components in enumerate(postprocessed(labels, strong, minimum)):
            result.predicted[volume, process] = np.count_nonzero(components)
            for reference, ids in enumerate(lesions):
                overlaps = np.bincount(ids[components > 0], minlength=ids.max() + 1)
                result.true_positive[reference, volume, process] = overlaps[1:].sum()
                for place, floor in enumerate((floors[volume], 0)):
                    ious = match(components, ids, floor)
                    hits = [sum(iou >= least for iou in ious.values()) for least in CRITERIA]
                    hits.append(sum(overlaps[lesion] > 0 for lesion in ious))
                    result.hits[reference, volume, process, place] = hits
                    if reference == volume == place == 0:
                        result.matched_iou[:, process] = [float(iou) for iou in ious.values()]
                        result.overlap_voxels[:, process] = [overlaps[lesion] for lesion in ious]
    return result


def overlapping(case: Case, above: Mask) -> list[tuple[int, int]]:
    """Voxels, and voxels of the first reference, of each component that holds one."""
    labels = label(above, case.connectivity)
    hits = np.bincount(labels[case.references[0] & above], minlength=1)
    return sorted((int(np.count_nonzero(labels == one)), int(hits[one])) for one in np.flatnonzero(hits))


def twin(case: Case) -> dict[str, NDArray[np.generic]]:
    """The fields of a `Sweep`, every level on its own (levels with the same masks are read once)."""
    lesions = [label(mask & case.support, case.connectivity) for mask in case.references]
    floors = [voxels_needed(case.floor_mm3, volume) for volume in case.volumes]
    known: dict[bytes, Level] = {}
    levels: list[Level] = []
    listed: dict[bytes, list[tuple[int, int]]] = {}
    components: list[tuple[int, int, int]] = []
    for level in range(LEVELS):
        above = (case.scores > np.float32(level / 200)) & case.support
        strong = (case.scores > np.float32((level + 200) / 400)) & case.support
        key = above.tobytes() + strong.tobytes()
        if key not in known:
            known[key] = read_level(case, lesions, above, strong)
        levels.append(known[key])
        if above.tobytes() not in listed:
            listed[above.tobytes()] = overlapping(case, above)
        components += [(level, *row) for row in listed[above.tobytes()]]
    followed = [i for i, size in enumerate(sizes_of(lesions[0])) if i > 0 and size >= floors[0]]
    counts = [[[np.count_nonzero(sizes_of(ids)[1:] >= f), ids.max()] for f in floors] for ids in lesions]
    return {
        **{name.name: np.stack([getattr(level, name.name) for level in levels], axis=-1) for name in fields(Level)},
        "lesion_count": np.array(counts, np.int64),
        "lesion_ids": np.array(followed, np.int64),
        "max_score": np.array([case.scores[lesions[0] == lesion].max() for lesion in followed], np.float32),
        "components": np.array(components, np.int64).reshape(-1, 3),
    }


def assert_equals_twin(case: Case) -> None:
    found, expected = run(case), twin(case)
    assert (np.diff(found.components[:, 0]) <= 0).all()
    found = replace(found, components=found.components[np.lexsort(found.components.T[::-1])])
    for field in fields(found):
        np.testing.assert_array_equal(getattr(found, field.name), expected[field.name], err_msg=field.name, strict=True)


def arrange(array: NDArray[np.generic], order: str) -> NDArray[np.generic]:
    return np.asfortranarray(array) if order == "F" else np.ascontiguousarray(array)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small volumes with few distinct scores, on the grid of thresholds and one step to either side of it."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    points = GRID[draw(st.lists(st.integers(0, 400), min_size=1, max_size=8))]
    palette = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1))])
    scores = random.choice(palette, shape) * (random.random(shape) >= draw(st.sampled_from([0, 0.3, 0.7])))
    shares = draw(st.lists(st.sampled_from([0, 0.1, 0.3, 0.5, 0.8, 1]), min_size=1, max_size=3))
    order = draw(st.sampled_from("CF"))
    return Case(
        scores=np.asarray(arrange(scores, order), np.float32),
        support=np.asarray(arrange(random.random(shape) < draw(st.sampled_from([0, 0.5, 0.9, 1])), order), np.bool_),
        references=tuple(random.random(shape) < share for share in shares),
        connectivity=draw(st.sampled_from([6, 26])),
        volumes=tuple(draw(st.lists(st.sampled_from([0.5, 0.7, 1.0, 3.3]), min_size=1, max_size=2))),
        minimum_mm3=draw(st.sampled_from([0, 1, 2.1, 5, 50])),
        floor_mm3=draw(st.sampled_from([0, 1, 2.1, 3.3, 50])),
    )


@st.composite
def woven_cases(draw: st.DrawFn) -> Case:
    """Lesions as parallel bars, and components as bars across that dip into some of them: matchings often tie."""
    lesions, bars = draw(st.tuples(st.integers(2, 5), st.integers(2, 5)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (3, 2 * bars + 3, 2 * lesions + 3)
    points = GRID[sorted(draw(st.lists(st.integers(1, 400), min_size=1, max_size=3)))]
    scores, reference = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    for lesion in range(lesions):
        reference[1, : 2 * bars - 1 + random.integers(4), 2 * lesion] = True
    share = draw(st.sampled_from([0.3, 0.6, 1]))
    for bar in range(bars):
        height = random.choice(points)
        scores[0, 2 * bar, : 2 * lesions - 1 + random.integers(4)] = height
        for lesion in range(lesions):
            depth = random.integers(1, 3) * (random.random() < share)
            scores[1 : 1 + depth, 2 * bar, 2 * lesion] = height
            reference[2 : 1 + depth, 2 * bar, 2 * lesion] = True
    axes = draw(st.permutations(range(3)))
    return Case(
        scores=scores.transpose(axes),
        support=np.ones(shape, np.bool_).transpose(axes),
        references=(reference.transpose(axes),),
        connectivity=6,
        minimum_mm3=draw(st.sampled_from([0, 8])),
        floor_mm3=0,
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_level_equals_the_twin(case: Case) -> None:
    assert_equals_twin(case)


@settings(max_examples=120, deadline=None)
@given(woven_cases())
def test_lesions_and_components_that_touch_many_of_each_other_equal_the_twin(case: Case) -> None:
    assert_equals_twin(case)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_counts_are_nested(case: Case) -> None:
    found = run(case)
    assert (np.diff(found.predicted, axis=-1) <= 0).all()
    assert (np.diff(found.predicted, axis=1) <= 0).all()
    assert (np.diff(found.true_positive, axis=2) <= 0).all()
    assert (np.diff(found.hits[..., 3, :], axis=-1) <= 0).all()
    assert (np.diff(found.hits, axis=4) >= 0)[..., 2, :].all()
    assert (np.diff(found.hits[..., :3, :], axis=4) <= 0).all()
    assert (found.predicted - found.true_positive >= 0).all()
    assert (found.hits <= found.lesion_count[:, :, None, :, None, None]).all()
    assert not found.predicted[..., -1].any()


@settings(max_examples=40, deadline=None)
@given(cases(), st.permutations(range(3)), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_flips_and_permutations_of_the_axes_change_no_count(
    case: Case, axes: list[int], flips: tuple[bool, bool, bool]
) -> None:
    steps = tuple(slice(None, None, -1 if flip else 1) for flip in flips)
    moved = replace(
        case,
        scores=case.scores.transpose(axes)[steps],
        support=case.support.transpose(axes)[steps],
        references=tuple(mask.transpose(axes)[steps] for mask in case.references),
    )
    here, there = run(case), run(moved)
    np.testing.assert_array_equal(here.predicted, there.predicted)
    np.testing.assert_array_equal(here.true_positive, there.true_positive)
    np.testing.assert_array_equal(here.hits[..., 3, :], there.hits[..., 3, :])
    # Lesions are renumbered, so ties can go to another lesion: the total is what stays.
    np.testing.assert_allclose(here.matched_iou.sum(axis=0), there.matched_iou.sum(axis=0), atol=1e-12)
    np.testing.assert_array_equal(np.sort(here.max_score), np.sort(there.max_score))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_a_workspace_leaves_no_trace(case: Case) -> None:
    fresh, used = run(case, Workspace()), run(case)
    for field in fields(fresh):
        np.testing.assert_array_equal(getattr(fresh, field.name), getattr(used, field.name))


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, LEVELS - 1))
def test_hysteresis_is_that_of_scikit_image(case: Case, level: int) -> None:
    case = replace(case, connectivity=6)
    inside = np.where(case.support, case.scores, -1)
    mask: Mask = filters.apply_hysteresis_threshold(inside, np.float32(level / 200), np.float32((level + 200) / 400))
    assert run(case).predicted[0, 1, level] == np.count_nonzero(mask)


@st.composite
def pair_lists(draw: st.DrawFn) -> Counts:
    """Lesions and components that overlap, with few distinct fractions; nothing says they fit into a volume."""
    lesions, components = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [(i, j) for i in range(lesions) for j in range(components) if random.random() < 0.6]
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    union = random.integers(2, draw(st.sampled_from([4, 12, 10**6])), len(rows))
    return np.column_stack([pairs, random.integers(1, union), union])


@settings(max_examples=150, deadline=None)
@given(pair_lists())
def test_matching_equals_trying_everything(pairs: Counts) -> None:
    choices: dict[int, dict[int, Fraction]] = {}
    for lesion, component, overlap, union in pairs.tolist():
        choices.setdefault(lesion, {})[component] = Fraction(overlap, union)
    expected = {
        k: iou for k, iou in zip(sorted(choices), best_ious([choices[i] for i in sorted(choices)]), strict=True) if iou
    }
    for found in (match_lesions(pairs), match_exactly(pairs)):
        assert {lesion: Fraction(overlap, union) for lesion, overlap, union in found.tolist()} == expected
        assert (np.diff(found[:, 0]) > 0).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3))
def test_trying_everything_equals_all_permutations(table: list[list[int]]) -> None:
    choices = [{j: Fraction(value, 4) for j, value in enumerate(row) if value} for row in table]
    values = [tuple(Fraction(table[i][j], 4) for i, j in enumerate(order)) for order in permutations(range(3))]
    assert best_ious(choices) == max(values, key=lambda ious: (sum(ious), ious))
