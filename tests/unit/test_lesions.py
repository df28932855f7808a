"""Reference lesions and their matching."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage

from ingest.lesions import (
    Connectivity,
    label_reference,
    match_exactly,
    match_lesions,
    neighbour_offsets,
    smallest_count,
)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 0.2, 0.4, 0.7, 1]),
    st.sampled_from(["C", "F"]),
    st.sampled_from([6, 26]),
)
def test_lesions_are_those_of_scipy(
    shape: tuple[int, int, int], seed: int, share: float, order: str, connectivity: Connectivity
) -> None:
    random = np.random.default_rng(seed)
    masks = [np.asarray(random.random(shape) < part, order="F" if order == "F" else "C") for part in (share, 0.8)]
    found = label_reference(masks[0], masks[1], connectivity)
    structure = ndimage.generate_binary_structure(3, 1 if connectivity == 6 else 3)
    labels = np.asarray(ndimage.label(masks[0] & masks[1], structure)[0])
    np.testing.assert_array_equal(found.volume(), labels)
    np.testing.assert_array_equal(found.sizes, np.bincount(labels.ravel())[1:])
    centres = [np.argwhere(labels == lesion).mean(axis=0) for lesion in range(1, found.sizes.size + 1)]
    np.testing.assert_allclose(found.centroids(), np.array(centres).reshape(-1, 3), atol=1e-12)
    boxes = [[[s.start for s in box], [s.stop for s in box]] for box in ndimage.find_objects(labels) if box]
    np.testing.assert_array_equal(found.bounding_boxes(), np.array(boxes, np.int64).reshape(-1, 2, 3))


def test_lesion_ids_follow_the_first_voxel_in_c_order() -> None:
    mask = np.zeros((2, 2, 5), np.bool_)
    mask[0, 1, 0] = mask[1, 0, 0] = mask[0, 0, 3:] = mask[0, 1, 4] = True
    labels = label_reference(mask, np.ones_like(mask), 6).volume()
    assert (labels[0, 0, 3], labels[0, 1, 4], labels[0, 1, 0], labels[1, 0, 0]) == (1, 1, 2, 3)


def test_no_lesions_where_reference_and_support_do_not_meet() -> None:
    mask = np.zeros((2, 3, 4), np.bool_)
    mask[0] = True
    found = label_reference(mask, ~mask, 26)
    assert found.voxels.shape == (0, 3)
    assert found.centroids().shape == (0, 3)
    assert found.bounding_boxes().shape == (0, 2, 3)
    assert not found.volume().any()


def test_what_does_not_fit_is_refused() -> None:
    mask = np.zeros((2, 3, 4), np.bool_)
    with pytest.raises(ValueError, match="of one shape"):
        label_reference(mask, mask[:1], 6)
    with pytest.raises(ValueError, match="of one shape"):
        label_reference(mask[0], mask[0], 6)


def test_neighbours() -> None:
    six, twenty_six = neighbour_offsets(6), neighbour_offsets(26)
    assert (len(six), len(twenty_six)) == (6, 26)
    assert (np.abs(six).sum(axis=1) == 1).all()
    assert len(np.unique(twenty_six, axis=0)) == 26
    assert (np.abs(twenty_six).max(axis=1) == 1).all()


@pytest.mark.parametrize(
    ("volume_mm3", "voxel_mm3", "voxels"),
    [
        (50, 1, 50),
        (50, 8, 7),
        (50, 1.3, 39),
        (0, 1, 0),
        (-3, 2, 0),
        (0.3, 0.1, 3),
        (0.7, 0.1, 7),
        (1e-9, 1, 1),
        (1, 3, 1),
    ],
)
def test_smallest_count(volume_mm3: float, voxel_mm3: float, voxels: int) -> None:
    assert smallest_count(volume_mm3, voxel_mm3) == voxels


@given(st.floats(0, 1e5), st.floats(1e-3, 1e3))
def test_smallest_count_is_the_smallest(volume_mm3: float, voxel_mm3: float) -> None:
    voxels = smallest_count(volume_mm3, voxel_mm3)
    assert voxels * voxel_mm3 >= volume_mm3
    assert voxels == 0 or (voxels - 1) * voxel_mm3 < volume_mm3


@pytest.mark.parametrize(("volume_mm3", "voxel_mm3"), [(50, 0), (50, -1), (float("nan"), 1), (50, float("inf"))])
def test_smallest_count_refuses_what_is_no_volume(volume_mm3: float, voxel_mm3: float) -> None:
    with pytest.raises(ValueError, match="positive voxel volume"):
        smallest_count(volume_mm3, voxel_mm3)


def pairs(*rows: tuple[int, int, int, int]) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(-1, 4)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((), []),
        # One component, two lesions of equal IoU: the lower lesion.
        (((7, 0, 1, 4), (3, 0, 1, 4)), [[3, 1, 4]]),
        # Equal totals: 1/2 alone, or 1/4 and 1/4. The lower lesion takes what is best for it.
        (((1, 0, 1, 2), (1, 1, 1, 4), (2, 0, 1, 4)), [[1, 1, 2]]),
        (((2, 0, 1, 2), (2, 1, 1, 4), (1, 0, 1, 4)), [[1, 1, 4], [2, 1, 4]]),
        # The greatest total needs a detour: each lesion takes its second best.
        (((1, 0, 9, 10), (1, 1, 8, 10), (2, 0, 8, 10), (2, 2, 1, 10)), [[1, 8, 10], [2, 8, 10]]),
        # Totals that differ by less than floating point can tell, 1/n(n+1) for large n.
        (
            ((1, 0, 10**8, 2 * 10**8 + 1), (1, 1, 1, 3), (2, 0, 10**8 + 1, 2 * 10**8 + 3), (2, 2, 1, 3)),
            [[1, 1, 3], [2, 10**8 + 1, 2 * 10**8 + 3]],
        ),
    ],
)
def test_matching(rows: tuple[tuple[int, int, int, int], ...], expected: list[list[int]]) -> None:
    assert match_lesions(pairs(*rows)).tolist() == expected
    assert match_exactly(pairs(*rows)).tolist() == expected


def test_a_long_chain_of_ties_is_matched_in_parts() -> None:
    rows = [
        row for i in range(300) for row in ((2 * i, 2 * i, 1, 3), (2 * i + 1, 2 * i, 1, 3), (2 * i, 2 * i + 1, 1, 9))
    ]
    found = match_lesions(pairs(*rows))
    # Lesion 2 i has a way out, so both are matched.
    assert found.tolist() == [[i, 1, 9 if i % 2 == 0 else 3] for i in range(600)]
    tied = [row for i in range(300) for row in ((2 * i, i, 1, 3), (2 * i + 1, i, 1, 3))]
    assert match_lesions(pairs(*tied)).tolist() == [[2 * i, 1, 3] for i in range(300)]
