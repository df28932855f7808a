"""Slow, obviously right ways to the same numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import cc3d
import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from ingest.gate import CandidateOverlaps
from ingest.grid import Transform, candidates, field_of_view, nearest_table
from ingest.sweep import LEVELS
from tests.benchmarks.workload import Mask, Scores

Counts = NDArray[np.int64]
FLOOR_VOXELS = 50  # 50 mm3, of lesions and of pruned components, at voxels of 1 mm3


def bounding_box(mask: Mask) -> tuple[slice, ...]:
    """The smallest box that holds a mask; empty for an empty one."""
    box: list[slice] = []
    for axis in range(3):
        occupied = np.flatnonzero(mask.any(axis=tuple(other for other in range(3) if other != axis)))
        box.append(slice(int(occupied[0]), int(occupied[-1]) + 1) if occupied.size else slice(0, 0))
    return tuple(box)


def label_every_level(scores: Scores, levels: Sequence[int]) -> int:
    """Label what is predicted at each level, cut to its bounding box: the peer that labels level by level."""
    total = 0
    for level in levels:
        mask = scores > np.float32(level / 200)
        box = bounding_box(mask)
        total += int(cc3d.connected_components(np.ascontiguousarray(mask[box]), connectivity=6).max())
    return total


@dataclass(frozen=True)
class TwinSweep:
    """Counts at some levels: predicted and true-positive voxels [P, level], hits [P, F, criterion, level]."""

    predicted: Counts
    true_positive: Counts
    hits: Counts


def sweep_by_levels(scores: Scores, support: Mask, reference: Mask, levels: Sequence[int]) -> TwinSweep:
    """What one sweep of one reference under 6-connectivity reads off, each level labelled and matched on its own."""
    box = bounding_box(support & (scores > 0) | reference)
    scores, lesions = np.where(support, scores, np.float32(0))[box], _label((reference & support)[box])
    sizes = np.bincount(lesions.ravel())
    found = TwinSweep(*(np.zeros((*shape, len(levels)), np.int64) for shape in ((3,), (3,), (3, 2, 4))))
    for place, level in enumerate(levels):
        components = _label(scores > np.float32(level / 200))
        counts = np.bincount(components.ravel())
        strong = np.zeros(counts.size, np.bool_)
        strong[components[scores > np.float32((level + 200) / 400)]] = True
        kept = [np.ones_like(strong), strong, strong & (counts >= FLOOR_VOXELS)]
        overlaps = _overlaps(lesions, components, sizes.size, counts.size)
        for process, keep in enumerate(kept):
            keep[0] = False
            found.predicted[process, place] = counts[keep].sum()
            found.true_positive[process, place] = overlaps[1:, keep].sum()
            for floor, smallest in enumerate((FLOOR_VOXELS, 0)):
                above = np.flatnonzero(sizes >= smallest)[1:]
                found.hits[process, floor, :, place] = _hits(overlaps[above][:, keep], sizes[above], counts[keep])
    return found


def _label(mask: Mask) -> Counts:
    return np.asarray(cc3d.connected_components(np.ascontiguousarray(mask), connectivity=6), np.int64)


def _overlaps(lesions: Counts, components: Counts, lesion_count: int, component_count: int) -> Counts:
    """Voxels that each lesion shares with each component."""
    shared = np.flatnonzero(lesions)
    pairs = lesions.ravel()[shared] * component_count + components.ravel()[shared]
    return np.bincount(pairs, minlength=lesion_count * component_count).reshape(lesion_count, component_count)


def _hits(overlaps: Counts, sizes: Counts, counts: Counts) -> list[int]:
    """Lesions whose matched component reaches an IoU of 0.1, 0.25, 0.5; lesions touched by any component."""
    unions = sizes[:, None] + counts - overlaps
    touched = overlaps.any(axis=0)
    iou = overlaps[:, touched] / unions[:, touched]
    matched = iou[optimize.linear_sum_assignment(iou, maximize=True)]
    return [*(int(np.count_nonzero(matched >= least)) for least in (0.1, 0.25, 0.5)), int(overlaps.any(axis=1).sum())]


def map_every_candidate(own: Mask, reference: Mask, transform: Transform) -> tuple[NDArray[np.float64], ...]:
    """Dice and centroid distance (1 mm voxels) of every candidate, each mapped on its own."""
    dice: list[float] = []
    distance: list[float] = []
    for member in candidates(reference.shape[2]):
        changed = transform.candidate(member.transposed, member.flip_0, member.flip_1)
        box = field_of_view(changed, (reference.shape[0], reference.shape[1], reference.shape[2]))
        tables = [nearest_table(changed, axis, box[axis], member.dz if axis == 2 else 0) for axis in range(3)]
        mapped, target = np.transpose(own, changed.source_axis)[np.ix_(*tables)], reference[box]
        dice.append(2 * np.count_nonzero(mapped & target) / (np.count_nonzero(mapped) + np.count_nonzero(target)))
        offset = np.argwhere(mapped).mean(axis=0) - np.argwhere(target).mean(axis=0)
        distance.append(float(np.sqrt(np.sum(np.square(offset)))))
    return np.array(dice), np.array(distance)


def same_overlaps(found: CandidateOverlaps, expected: tuple[NDArray[np.float64], ...]) -> bool:
    """Whether every Dice is the same, and every distance but for the last bits of a mean."""
    return np.array_equal(found.dice, expected[0]) and bool(np.allclose(found.centroid_mm, expected[1], 0, 1e-9))


def curve_by_levels(scores: Scores, support: Mask, reference: Mask) -> tuple[Counts, Counts]:
    """Predicted and true-positive voxels at every level, counted level by level."""
    inside, positive = scores[support], reference[support]
    predicted = [np.count_nonzero(inside > np.float32(level / 200)) for level in range(LEVELS)]
    true_positive = [np.count_nonzero(inside[positive] > np.float32(level / 200)) for level in range(LEVELS)]
    return np.array(predicted), np.array(true_positive)
