"""Hand-written cases of the one-pass sweep."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingest.lesions import Connectivity, label_reference
from ingest.sweep import GRID, HIT_CRITERIA, LEVELS, Sweep, Workspace, order_voxels, sweep

Mask = NDArray[np.bool_]
PLAIN, HYSTERESIS, PRUNED = 0, 1, 2
FLOOR, ALL = 0, 1


def blank(*shape: int) -> Mask:
    return np.zeros(shape, np.bool_)


def line(*voxels: int, length: int = 20) -> Mask:
    """A volume one voxel wide, with these voxels set."""
    mask = blank(1, 1, length)
    mask[0, 0, list(voxels)] = True
    return mask


def run(
    scores: NDArray[np.generic],
    *references: Mask,
    support: Mask | None = None,
    connectivity: Connectivity = 6,
    volumes: tuple[float, ...] = (1.0,),
    minimum_mm3: float = 0,
    floor_mm3: float = 0,
) -> Sweep:
    support = np.ones(scores.shape, np.bool_) if support is None else support
    labelled = [label_reference(reference, support, connectivity) for reference in references]
    order = order_voxels(scores.astype(np.float32), support)
    return sweep(order, labelled, connectivity, volumes, minimum_mm3, floor_mm3)


def hits(found: Sweep, level: int, process: int = PLAIN, floor: int = FLOOR) -> list[int]:
    return found.hits[0, 0, process, floor, :, level].tolist()


def test_even_points_of_the_half_level_grid_are_the_thresholds() -> None:
    levels = np.arange(LEVELS)
    np.testing.assert_array_equal(GRID[::2], (levels / 200).astype(np.float32))
    np.testing.assert_array_equal(GRID[200:], ((levels + 200) / 400).astype(np.float32))
    assert (np.diff(GRID) > 0).all()


def test_every_grid_point_and_its_neighbours_fall_on_the_right_side() -> None:
    scores = np.concatenate([GRID, np.nextafter(GRID, np.float32(0)), np.nextafter(GRID, np.float32(2))])
    scores = np.clip(scores, 0, 1)[None, None]
    expected = [np.count_nonzero(scores > np.float32(level / 200)) for level in range(LEVELS)]
    assert run(scores).predicted[0, PLAIN].tolist() == expected


def test_a_tenth_is_not_above_a_tenth_in_either_precision() -> None:
    for scores in (np.full((1, 1, 3), 0.1), np.full((1, 1, 3), 0.1, np.float32)):
        predicted = run(scores).predicted[0, PLAIN]
        assert (predicted[19], predicted[20]) == (3, 0)


def test_a_constant_map_is_predicted_below_its_score_only() -> None:
    reference = line(3, 4, 5)
    found = run(np.full(reference.shape, 0.5), reference)
    assert found.predicted[0, PLAIN].tolist() == [20] * 100 + [0] * 101
    assert found.true_positive[0, 0, PLAIN].tolist() == [3] * 100 + [0] * 101
    assert not found.predicted[0, HYSTERESIS].any()
    assert found.max_score.tolist() == [0.5]
    # One component of 20 voxels around a lesion of 3: IoU 3 / 20.
    assert hits(found, 99) == [1, 0, 0, 1]
    assert found.matched_iou[0, PLAIN, 99] == 3 / 20


def test_a_map_of_ones_is_kept_by_hysteresis_at_every_level_but_the_last() -> None:
    found = run(np.ones((2, 3, 4)))
    assert (found.predicted[0, :, :200] == 24).all()
    assert not found.predicted[..., 200].any()


def test_zeros_never_fire() -> None:
    found = run(np.zeros((2, 3, 4)), np.ones((2, 3, 4), np.bool_))
    assert not found.predicted.any()
    assert not found.hits.any()
    assert found.lesion_count.tolist() == [[[1, 1]]]


def test_one_component_that_bridges_two_lesions_is_matched_with_one_of_them() -> None:
    reference = line(1, 2, 3, 6, 7)
    found = run(line(*range(1, 8)) * 0.6, reference)
    # Seven voxels: IoU 3 / 7 with the first lesion, 2 / 7 with the second.
    assert hits(found, 100) == [1, 1, 0, 2]
    assert found.matched_iou[:, PLAIN, 100].tolist() == [3 / 7, 0]
    assert found.overlap_voxels[:, PLAIN, 100].tolist() == [3, 2]


def test_a_bridge_between_equal_lesions_goes_to_the_lower_one() -> None:
    found = run(line(*range(1, 8)) * 0.6, line(1, 2, 6, 7))
    assert found.matched_iou[:, PLAIN, 100].tolist() == [2 / 7, 0]


def test_a_bridge_goes_where_it_adds_most() -> None:
    # Lesion 1 (voxels 0 to 4) has a component of its own, 0 to 1: IoU 2 / 5. The bridge 3 to 8 has IoU 2 / 9 with it,
    # and 2 / 6 with lesion 2 (voxels 7 to 8): both are matched.
    found = run(line(0, 1, 3, 4, 5, 6, 7, 8) * 0.6, line(0, 1, 2, 3, 4, 7, 8))
    assert found.matched_iou[:, PLAIN, 100].tolist() == [2 / 5, 2 / 6]
    assert found.overlap_voxels[:, PLAIN, 100].tolist() == [4, 2]


def test_bridges_that_share_a_lesion_are_assigned_together() -> None:
    # Components 2 to 6 and 8 to 12 both touch lesion 2 (voxels 5 to 9); lesions 1 (0 to 2) and 3 (12 to 14) touch one
    # each. With lesion 2 each has IoU 2 / 8, with its other lesion 1 / 7: one takes lesion 2, and one the other.
    reference = line(0, 1, 2, 5, 6, 7, 8, 9, 12, 13, 14)
    found = run(line(2, 3, 4, 5, 6, 8, 9, 10, 11, 12) * 0.6, reference)
    assert found.matched_iou[:, PLAIN, 100].tolist() == [1 / 7, 2 / 8, 0]


def test_two_candidates_of_equal_iou_give_one_match() -> None:
    found = run(line(2, 3, 6, 7) * 0.6, line(*range(2, 8)))
    assert hits(found, 100) == [1, 1, 0, 1]
    assert found.matched_iou[:, PLAIN, 100].tolist() == [2 / 6]
    assert found.overlap_voxels[:, PLAIN, 100].tolist() == [4]


@pytest.mark.parametrize(("voxels", "size", "expected"), [(1, 10, [1, 0, 0, 1]), (1, 11, [0, 0, 0, 1])])
def test_an_iou_equal_to_the_lowest_criterion_is_a_hit(voxels: int, size: int, expected: list[int]) -> None:
    assert hits(run(line(*range(voxels)) * 0.6, line(*range(size))), 100) == expected


@pytest.mark.parametrize(("size", "expected"), [(4, [1, 1, 0, 1]), (2, [1, 1, 1, 1])])
def test_an_iou_equal_to_the_higher_criteria_is_a_hit(size: int, expected: list[int]) -> None:
    assert hits(run(line(0) * 0.6, line(*range(size))), 100) == expected


def test_lesions_and_components_that_meet_in_a_corner_are_one_for_26_neighbours_only() -> None:
    corner = blank(2, 2, 2)
    corner[0, 0, 0] = corner[1, 1, 1] = True
    apart, joined = run(corner * 0.6, corner), run(corner * 0.6, corner, connectivity=26)
    assert apart.lesion_count.tolist() == [[[2, 2]]]
    assert joined.lesion_count.tolist() == [[[1, 1]]]
    assert hits(apart, 100) == [2, 2, 2, 2]
    assert hits(joined, 100) == [1, 1, 1, 1]


def test_edges_of_the_volume_do_not_touch() -> None:
    ends = blank(3, 3, 3)
    ends[0, 0, 2] = ends[0, 1, 0] = ends[1, 2, 2] = ends[2, 0, 2] = True
    found = run(ends * 0.6, ends, connectivity=26)
    assert found.lesion_count[0, 0, ALL] == 4
    assert hits(found, 100) == [4, 4, 4, 4]


def test_hundreds_of_specks_inside_and_around_a_lesion() -> None:
    specks = np.indices((17, 17, 17)).sum(axis=0) % 2 == 0
    reference = blank(17, 17, 17)
    reference[4:13, 4:13, 4:13] = True
    found = run(specks * 0.6, reference)
    inside = np.count_nonzero(specks & reference)
    assert found.predicted[0, PLAIN, 100] == np.count_nonzero(specks) > 2400
    assert hits(found, 100) == [0, 0, 0, 1]
    assert found.matched_iou[0, PLAIN, 100] == 1 / 729
    assert found.overlap_voxels[0, PLAIN, 100] == inside > 300
    # Specks that meet at their edges are one component for 26 neighbours.
    assert hits(run(specks * 0.6, reference, connectivity=26), 100) == [1, 0, 0, 1]


def test_a_component_enters_hysteresis_with_its_peak_and_grows_from_there() -> None:
    # Peak 0.7 is above h(k / 200) = (k + 200) / 400 for k < 80; the shoulders of 0.3 join it below level 60.
    scores = line(3, 4, 6, 7) * 0.3 + line(5) * 0.7 + line(10, 11) * 0.45
    found = run(scores, minimum_mm3=4)
    assert found.predicted[0, PLAIN, [59, 60, 79, 80, 100, 139, 140]].tolist() == [7, 3, 3, 3, 1, 1, 0]
    assert found.predicted[0, HYSTERESIS, [59, 60, 79, 80]].tolist() == [5, 1, 1, 0]
    assert found.predicted[0, PRUNED, [59, 60, 79, 80]].tolist() == [5, 0, 0, 0]


def test_pruning_and_floors_follow_each_voxel_volume() -> None:
    lesions = line(0, 1, 4, 5, 6)
    found = run(lesions * 1.0, lesions, volumes=(1.0, 1.5), minimum_mm3=3, floor_mm3=3)
    assert found.predicted[:, PRUNED, 100].tolist() == [3, 5]
    assert found.lesion_count.tolist() == [[[1, 2], [2, 2]]]
    assert found.hits[0, :, PRUNED, :, 2, 100].tolist() == [[1, 1], [2, 2]]
    assert found.lesion_ids.tolist() == [2]


def test_the_floor_of_lesions_frees_a_bridge_for_those_above_it() -> None:
    # The bridge is better with the small lesion 1 (3 / 12 against 2 / 16): under the floor it has only lesion 2.
    scores, reference = line(*range(12)) * 0.6, line(0, 1, 2, *range(10, 16))
    found = run(scores, reference, floor_mm3=4)
    assert hits(found, 100, floor=ALL) == [1, 1, 0, 2]
    assert hits(found, 100, floor=FLOOR) == [1, 0, 0, 1]
    assert found.lesion_ids.tolist() == [2]
    assert found.matched_iou[0, PLAIN, 100] == 2 / 16


def test_lesions_are_numbered_by_first_voxel_in_c_order_in_any_memory_order() -> None:
    reference, scores = blank(2, 3, 3), np.zeros((2, 3, 3), np.float32)
    reference[1, 0, 0] = reference[0, 2, 2] = reference[0, 0, 1] = True
    scores[1, 0, 0], scores[0, 2, 2], scores[0, 0, 1] = 0.3, 0.2, 0.1
    for order in ("C", "F"):
        found = run(np.asarray(scores, order=order), np.asarray(reference, order=order))
        assert found.max_score.tolist() == [np.float32(score) for score in (0.1, 0.2, 0.3)]


def test_everything_is_cut_to_the_support() -> None:
    support = line(*range(6))
    found = run(line(*range(4, 10)) * 0.6, line(*range(3, 10)), support=support)
    assert found.predicted[0, PLAIN, 100] == 2
    assert found.matched_iou[0, PLAIN, 100] == 2 / 3


def test_empty_references_and_supports_give_zeros() -> None:
    shape = (3, 4, 5)
    nothing, everything = blank(*shape), np.ones(shape, np.bool_)
    found = run(np.full(shape, 0.9), nothing, everything)
    assert not found.hits[0].any()
    assert found.lesion_count.tolist() == [[[0, 0]], [[1, 1]]]
    assert found.matched_iou.shape == (0, 3, LEVELS)
    assert hits(run(np.full(shape, 0.9), everything, nothing), 100) == [1, 1, 1, 1]
    outside = run(np.full(shape, 0.9), everything, support=nothing)
    assert not outside.predicted.any()
    assert outside.lesion_count.tolist() == [[[0, 0]]]


def test_no_reference_at_all_still_counts_predictions() -> None:
    found = run(np.full((2, 2, 2), 0.9))
    assert found.predicted[0, HYSTERESIS, 100] == 8
    assert found.hits.shape == (0, 1, 3, 2, len(HIT_CRITERIA), LEVELS)
    assert found.max_score.size == 0


def test_scores_outside_the_unit_interval_are_refused_inside_the_support_only() -> None:
    for wrong in (-0.1, 1.1, np.nan):
        scores = np.array([[[0.5, wrong]]], np.float32)
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            run(scores)
        assert run(scores, support=np.array([[[True, False]]])).predicted[0, PLAIN, 0] == 1


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    scores, support = np.zeros((2, 2, 2), np.float32), np.ones((2, 2, 2), np.bool_)
    wide: Any = scores.astype(np.float64)
    with pytest.raises(ValueError, match="of one shape"):
        order_voxels(scores, support[:1])
    with pytest.raises(ValueError, match="float32"):
        order_voxels(wide, support)
    order = order_voxels(scores, support)
    for other in (label_reference(support, support, 26), label_reference(support[:1], support[:1], 6)):
        with pytest.raises(ValueError, match="does not fit"):
            sweep(order, [other], 6, [1.0], 0, 0)
    with pytest.raises(ValueError, match="voxel volume"):
        sweep(order, [], 6, [], 0, 0)


def test_a_reference_of_a_wider_support_is_refused() -> None:
    support = line(0, 1)
    order = order_voxels(np.ones(support.shape, np.float32), support)
    with pytest.raises(ValueError, match="outside the support"):
        sweep(order, [label_reference(line(1, 2), line(0, 1, 2), 6)], 6, [1.0], 0, 0)


def test_an_order_whose_buffers_are_in_use_again_is_refused() -> None:
    support, workspace = line(0, 1), Workspace()
    scores = np.ones(support.shape, np.float32)
    stale = order_voxels(scores, support, workspace)
    order_voxels(scores, support, workspace)
    with pytest.raises(ValueError, match="stale"):
        sweep(stale, [], 6, [1.0], 0, 0)


def test_one_order_serves_both_connectivities() -> None:
    diagonal = np.eye(4, dtype=np.bool_)[None]
    order = order_voxels(diagonal.astype(np.float32), np.ones_like(diagonal))
    pruned = [sweep(order, [], connectivity, [1.0], 2, 0).predicted[0, PRUNED, 0] for connectivity in (6, 26, 6)]
    assert pruned == [0, 4, 0]
