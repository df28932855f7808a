"""Regions of lesions against the distances of every voxel to every lesion, and counts by region against comparisons."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingest.lesions import LabelledReference, label_reference
from ingest.ranking import LEVELS, level_counts, thresholds
from ingest.regions import nearest_lesion

Mask = NDArray[np.bool_]
Size = tuple[float, float, float]


def distances(labelled: LabelledReference, support: Mask, voxel_size_mm: Size) -> NDArray[np.float64]:
    """Distance from each voxel of the support to each lesion, in mm, shape (voxels, lesions)."""
    places = np.argwhere(support) * np.array(voxel_size_mm)
    found = np.empty((len(places), labelled.sizes.size))
    for lesion in range(labelled.sizes.size):
        own = labelled.voxels[labelled.lesion_ids == lesion + 1] * np.array(voxel_size_mm)
        found[:, lesion] = np.sqrt(((places[:, None] - own[None]) ** 2).sum(axis=-1)).min(axis=1)
    return found


@st.composite
def labelled_supports(draw: st.DrawFn) -> tuple[LabelledReference, Mask, Size]:
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    support = random.random(shape) < draw(st.sampled_from([0, 0.5, 1]))
    reference = random.random(shape) < draw(st.sampled_from([0, 0.02, 0.1, 0.5]))
    sizes = st.sampled_from([0.4, 1.0, 1.1, 3.0])
    return label_reference(reference, support, 6), support, draw(st.tuples(sizes, sizes, sizes))


@settings(max_examples=150, deadline=None)
@given(labelled_supports())
def test_every_voxel_belongs_to_a_nearest_lesion(case: tuple[LabelledReference, Mask, Size]) -> None:
    labelled, support, voxel_size_mm = case
    regions = nearest_lesion(labelled, support, voxel_size_mm)
    assert regions.shape == (np.count_nonzero(support),)
    if labelled.sizes.size == 0:
        assert not regions.any()
        return
    away = distances(labelled, support, voxel_size_mm)
    chosen = away[np.arange(len(away)), regions - 1]
    np.testing.assert_allclose(chosen, away.min(axis=1), rtol=1e-6, atol=1e-12)
    inside = labelled.volume()[support]
    np.testing.assert_array_equal(regions[inside > 0], inside[inside > 0])


def test_distances_are_in_millimetres() -> None:
    reference = np.zeros((7, 7, 1), np.bool_)
    reference[0, 3], reference[3, 6] = True, True
    support = np.ones_like(reference)
    labelled = label_reference(reference, support, 6)
    here = np.flatnonzero((np.argwhere(support) == [2, 3, 0]).all(axis=1))
    assert nearest_lesion(labelled, support, (1.0, 1.0, 1.0))[here] == [1]
    assert nearest_lesion(labelled, support, (3.0, 1.0, 1.0))[here] == [2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 40))
def test_counts_of_groups_equal_comparisons(seed: int, count: int, voxels: int) -> None:
    random = np.random.default_rng(seed)
    points = random.choice(thresholds(), voxels)
    steps = random.choice([-1, 0, 1], voxels)
    scores = np.where(steps == 0, points, np.nextafter(points, steps.astype(np.float32)))
    groups = random.integers(1, count + 1, voxels).astype(np.int32)
    above = scores[None] > thresholds()[:, None]
    expected = np.array([np.count_nonzero(above[:, groups == one], axis=1) for one in range(1, count + 1)])
    np.testing.assert_array_equal(level_counts(scores, groups, count), expected)


@pytest.mark.parametrize("count", [0, 3])
def test_no_voxel_is_predicted_nowhere(count: int) -> None:
    found = level_counts(np.zeros(0, np.float32), np.zeros(0, np.int32), count)
    assert found.shape == (count, LEVELS) and not found.any()
