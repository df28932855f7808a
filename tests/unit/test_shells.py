"""Shells around lesions, against distances between all voxels; evidence against scikit-learn."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.metrics import average_precision_score, roc_auc_score

from ingest.lesions import LabelledReference, label_reference
from ingest.shells import Evidence, Shell, find_shells, squared_sides, weigh_evidence

Mask = NDArray[np.bool_]
Size = tuple[float, float, float]


def shells_of(reference: Mask, support: Mask, voxel_size_mm: Size) -> tuple[LabelledReference, list[Shell]]:
    lesions = label_reference(reference, support, 6)
    return lesions, find_shells(lesions, reference, support, voxel_size_mm, range(1, lesions.sizes.size + 1))


def shell_by_all_distances(lesion: Mask, free: Mask, sides: tuple[Fraction, ...]) -> list[list[int]]:
    """Every free voxel of the volume by its exact distance to the lesion, then by its place; the nearest of them."""
    voxels = [tuple(map(int, voxel)) for voxel in np.argwhere(lesion)]
    ranked = sorted(
        (min(sum(((a - b) * s) ** 2 for a, b, s in zip(voxel, other, sides, strict=True)) for other in voxels), voxel)
        for voxel in product(*map(range, free.shape))
        if free[voxel]
    )
    return sorted(list(voxel) for _, voxel in ranked[: len(voxels)])


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.05, 0.2, 0.5, 0.8]),
    st.sampled_from([0.5, 0.9, 1]),
    st.sampled_from(["1 1 1", "0.9 0.9 3", "2 1 1.5", "0.3 0.4 0.5", "1 1 12", "0.488 0.488 6.5"]),
)
@example((5, 6, 7), 1, 0.05, 1, "1 1 12")
def test_a_shell_holds_the_nearest_voxels_of_the_whole_volume(
    shape: tuple[int, int, int], seed: int, reference_share: float, support_share: float, size: str
) -> None:
    random = np.random.default_rng(seed)
    reference, support = random.random(shape) < reference_share, random.random(shape) < support_share
    first, second, third = map(float, size.split())
    lesions, shells = shells_of(reference, support, (first, second, third))
    labels, inside = lesions.volume(), np.argwhere(support)
    assert [shell.lesion_id for shell in shells] == list(range(1, labels.max() + 1))
    for shell in shells:
        lesion = labels == shell.lesion_id
        assert inside[shell.lesion].tolist() == np.argwhere(lesion).tolist()
        expected = shell_by_all_distances(lesion, support & ~reference, tuple(map(Fraction, size.split())))
        assert inside[shell.shell].tolist() == expected
        assert len(expected) == min(int(lesion.sum()), int((support & ~reference).sum()))


@pytest.mark.parametrize("size", [(1.0, 1.0, 1.0), (0.9375, 0.9375, 3.0), (2.0, 0.5, 1.0)])
def test_shells_in_a_grown_box_are_as_near_as_those_of_the_full_volume(size: Size) -> None:
    """Ragged lesions beside each other and at the edge of the brain, by scipy's distances over the whole volume."""
    random = np.random.default_rng(7)
    centred = [(axis - n / 2) / (0.45 * n) for axis, n in zip(np.ogrid[:44, :52, :36], (44, 52, 36), strict=True)]
    support = centred[0] ** 2 + centred[1] ** 2 + centred[2] ** 2 < 1
    noise = np.asarray(ndimage.gaussian_filter(random.standard_normal(support.shape), 2.5))
    reference = noise > np.quantile(noise, 0.85)
    lesions, shells = shells_of(reference, support, size)
    labels, free = lesions.volume(), support & ~reference
    assert lesions.sizes.max() > 500 and len(shells) > 10
    for shell in shells:
        distances = np.asarray(ndimage.distance_transform_edt(labels != shell.lesion_id, sampling=size))
        nearest = np.sort(distances[free])[: shell.lesion.size]
        assert not reference[support][shell.shell].any()
        assert (np.diff(shell.shell) > 0).all()
        np.testing.assert_allclose(np.sort(distances[support][shell.shell]), nearest, rtol=1e-6)


def test_of_equally_distant_voxels_the_first_are_taken() -> None:
    """Voxels at (3, 4), (5, 0) and (0, 5) sides of 1.1 mm; in floating point the first lies farthest."""
    assert (3 * 1.1) ** 2 + (4 * 1.1) ** 2 > (5 * 1.1) ** 2
    reference = np.zeros((11, 11, 1), np.bool_)
    reference[5, 5, 0] = True
    support = reference.copy()
    for voxel in ((10, 5), (8, 9), (2, 1), (5, 0), (4, 0)):
        support[(*voxel, 0)] = True
    _, (shell,) = shells_of(reference, support, (1.1, 1.1, 1.0))
    assert np.argwhere(support)[shell.shell].tolist() == [[2, 1, 0]]


def test_a_shell_is_short_where_the_support_ends_and_empty_where_it_is_all_reference() -> None:
    reference = np.zeros((4, 3, 2), np.bool_)
    reference[:3] = True
    lesions, (short,) = shells_of(reference, np.ones_like(reference), (1.0, 1.0, 1.0))
    assert (short.lesion.size, short.shell.size) == (18, 6)
    (empty,) = find_shells(lesions, reference, reference, (1.0, 1.0, 1.0), [1])
    assert empty.shell.size == 0
    assert weigh_evidence(empty, np.ones(18, np.float32)) == Evidence(None, None)


def test_no_lesion_has_no_shell() -> None:
    nothing = np.zeros((3, 3, 3), np.bool_)
    assert shells_of(nothing, ~nothing, (1.0, 1.0, 1.0))[1] == []


def test_squared_sides_are_whole_square_micrometres() -> None:
    assert squared_sides((0.9, 1.0, 3.0)) == (810_000, 1_000_000, 9_000_000)
    assert squared_sides((1e-5, 0.001, 0.0012)) == (1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from([2, 5, 1000]))
def test_evidence_is_that_of_scikit_learn(lesion: int, shell: int, seed: int, values: int) -> None:
    """Scores with many ties, some below zero, over a support that holds more than lesion and shell."""
    random = np.random.default_rng(seed)
    scores = (random.integers(-1, values, 100) / 7).astype(np.float32)
    places = random.permutation(100)[: lesion + shell]
    one = Shell(1, places[:lesion], places[lesion:])
    positive = np.arange(lesion + shell) < lesion
    found = weigh_evidence(one, scores)
    assert found.auroc == pytest.approx(roc_auc_score(positive, scores[places]), abs=1e-12)
    assert found.average_precision == pytest.approx(average_precision_score(positive, scores[places]), abs=1e-12)
