"""The lake tables of one (method, subject): each a function from a measurement to a frame.

Definitions: protocol sections 1 to 7; columns: `expectations/tables.toml`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.tables import LakeTable, lake_tables
from ingest.critical import critical_thresholds, exceeding_voxels
from ingest.gate import candidate_overlaps, overlap
from ingest.lesions import Connectivity, LabelledReference, smallest_count
from ingest.measurement import BOTH, Measurement
from ingest.ranking import LEVELS, level_counts, rank_voxels, score_histogram
from ingest.shells import weigh_evidence
from ingest.slices import rank_slices
from ingest.sweep import LESION_FLOORS, POSTPROCESSES, Sweep

THRESHOLDS = np.arange(LEVELS) / (LEVELS - 1)
Values = Mapping[str, NDArray[np.generic]]
Rows = Sequence[tuple[object, ...]]


def frame_of(table: LakeTable, columns: Mapping[str, object]) -> pl.DataFrame:
    """A frame in a table's columns and types; a single value stands for all rows, NaN for null."""
    arrays = {name: cast(NDArray[np.generic], v) for name, v in columns.items() if isinstance(v, np.ndarray)}
    single = {name: pl.lit(value) for name, value in columns.items() if name not in arrays}
    frame = pl.DataFrame(arrays).with_columns(**single)
    floats = [name for name, kind in frame.schema.items() if kind.is_float()]
    return frame.with_columns(pl.col(floats).fill_nan(None)).select(
        pl.col(column.name).cast(column.polars_type) for column in table.columns
    )


def crossed(axes: Mapping[str, Sequence[object]], values: Values) -> dict[str, object]:
    """Columns of a full factorial: every combination of the axes' levels, in order, beside the raveled values.

    Args:
        axes: Levels by key column, the slowest axis first.
        values: Arrays by column, each of (or broadcast to) the shape that the axes span.
    """
    shape = tuple(len(levels) for levels in axes.values())
    columns: dict[str, object] = {}
    for position, (name, levels) in enumerate(axes.items()):
        along = np.asarray(levels).reshape([-1 if k == position else 1 for k in range(len(shape))])
        columns[name] = np.broadcast_to(along, shape).ravel()
    return columns | {name: np.broadcast_to(value, shape).ravel() for name, value in values.items()}


def stacked(table: LakeTable, blocks: Iterator[dict[str, object]]) -> pl.DataFrame:
    """Blocks of columns as one frame of a table; an empty one without blocks."""
    frames = [frame_of(table, block) for block in blocks]
    return pl.concat(frames) if frames else table.frame()


def _named(measurement: Measurement) -> dict[str, object]:
    return {"method_id": measurement.key[0], "subject_id": measurement.key[1]}


def gate_candidate(measurement: Measurement) -> pl.DataFrame:
    """Overlap and centroid distance of every candidate transform."""
    own, transform = measurement.own
    found = candidate_overlaps(own, measurement.reference, transform, measurement.task.voxel_size_mm)
    columns = {name: getattr(found, name) for name in ("transposed", "flip_0", "flip_1", "dz", "is_applied")}
    overlaps = {"dice": found.dice, "centroid_mm": found.centroid_mm}
    return frame_of(lake_tables()["gate_candidate"], _named(measurement) | columns | overlaps)


def gate_overlap(measurement: Measurement) -> pl.DataFrame:
    """The declared transform's overlap in the field of view."""
    own, transform = measurement.own
    known = {"mapped": measurement.references["own_mapped"], "returned": measurement.references["round_trip"]}
    found = overlap(own, measurement.reference, transform, measurement.task.voxel_size_mm, **known)
    columns = {
        "in_view_fraction": np.array([found.in_view_fraction]),
        "own_voxels": found.own_voxels,
        "own_in_view_voxels": found.own_in_view_voxels,
        "in_view_voxels": found.reference_in_view_voxels,
        "round_trip_dice": np.array([found.round_trip_dice]),
    }
    return frame_of(lake_tables()["gate_overlap"], _named(measurement) | columns)


def score_quantile(measurement: Measurement) -> pl.DataFrame:
    """In-brain quantiles of the unscaled scores; linear between order statistics. No row for an empty brain."""
    table, quantiles = lake_tables()["score_quantile"], measurement.task.entry.quantiles
    assert quantiles is not None, "planned for entries scaled by quantiles only"
    scores = measurement.mapped[0][measurement.volumes.brain]
    if scores.size == 0:
        return table.frame()
    low, high = np.quantile(scores.astype(np.float64), quantiles)
    return table.frame([(*measurement.key, float(low), float(high))])


def threshold_curve(measurement: Measurement) -> pl.DataFrame:
    """Predicted and true-positive voxels at all levels, under every post-processing; components are 6-connected."""

    def blocks() -> Iterator[dict[str, object]]:
        for support, sweeps in zip(measurement.supports, measurement.sweeps, strict=True):
            found = sweeps[6]
            totals = np.array([np.count_nonzero(positive) for positive in support.positive.values()])
            axes = {
                "reference_id": list(support.references),
                "voxel_volume_id": list(measurement.voxel_volumes_mm3),
                "postprocess_id": POSTPROCESSES,
                "level": range(LEVELS),
            }
            values = {
                "threshold": THRESHOLDS,
                "predicted_voxels": found.predicted,
                "true_positive_voxels": found.true_positive,
                "reference_voxels": totals[:, None, None, None],
            }
            for support_id in support.support_ids:
                yield _named(measurement) | {"support_id": support_id} | crossed(axes, values)

    return stacked(lake_tables()["threshold_curve"], blocks())


def lesion_curve(measurement: Measurement) -> pl.DataFrame:
    """Lesions hit at all levels, under every post-processing, definition and criterion."""

    def blocks() -> Iterator[dict[str, object]]:
        for support, sweeps in zip(measurement.supports, measurement.sweeps, strict=True):
            for connectivity, found in sweeps.items():
                axes = {
                    "reference_id": list(support.references),
                    "voxel_volume_id": list(measurement.voxel_volumes_mm3),
                    "postprocess_id": POSTPROCESSES,
                    "lesion_definition_id": [f"conn{connectivity}_{floor}" for floor in LESION_FLOORS],
                    "level": range(LEVELS),
                }
                criteria = ("hit_iou_10", "hit_iou_25", "hit_iou_50", "hit_any_overlap")
                hits = {name: found.hits[:, :, :, :, number, :] for number, name in enumerate(criteria)}
                lesions = {"threshold": THRESHOLDS, "lesion_count": found.lesion_count[:, :, None, :, None]}
                for support_id in support.support_ids:
                    yield _named(measurement) | {"support_id": support_id} | crossed(axes, hits | lesions)

    return stacked(lake_tables()["lesion_curve"], blocks())


def lesion_match(measurement: Measurement) -> pl.DataFrame:
    """The match of each canonical lesion above the floor in the brain, at all levels."""
    found: Sweep = measurement.sweeps[0][6]
    axes = {"lesion_id": found.lesion_ids.tolist(), "postprocess_id": POSTPROCESSES, "level": range(LEVELS)}
    values = {
        "matched_iou": found.matched_iou,
        "overlap_voxels": found.overlap_voxels,
        "max_score": found.max_score.astype(np.float64)[:, None, None],
    }
    return frame_of(lake_tables()["lesion_match"], _named(measurement) | crossed(axes, values))


def lesion_evidence(measurement: Measurement) -> pl.DataFrame:
    """Each canonical lesion above the floor in the brain against the shell around it, by the unclipped scores."""
    scores = measurement.supports[0].unclipped
    rows: list[tuple[object, ...]] = []
    for one in measurement.shells:
        found = weigh_evidence(one, scores)
        values = (found.auroc, found.average_precision, one.lesion.size, one.shell.size)
        rows.append((*measurement.key, one.lesion_id, *values))
    return lake_tables()["lesion_evidence"].frame(rows)


def region_curve(measurement: Measurement) -> pl.DataFrame:
    """Predicted voxels of each canonical lesion and its region in the brain, at the levels where there are any."""
    table, lesions = lake_tables()["region_curve"], measurement.lesions[0][6]["canonical"]
    support, count = measurement.supports[0], lesions.sizes.size
    if count == 0:
        return table.frame()
    predicted = level_counts(support.clipped_inside, measurement.regions, count)
    overlap = level_counts(support.clipped[tuple(lesions.voxels.T)], lesions.lesion_ids, count)
    lesion, level = np.nonzero(predicted)
    columns = {"lesion_id": lesion + 1, "level": level, "lesion_voxels": lesions.sizes[lesion]}
    columns |= {"region_predicted_voxels": predicted[lesion, level], "overlap_voxels": overlap[lesion, level]}
    return frame_of(table, _named(measurement) | columns)


def component_overlap(measurement: Measurement) -> pl.DataFrame:
    """Plain components that overlap the canonical reference in the brain; those of the same counts share a row."""
    table, rows = lake_tables()["component_overlap"], measurement.sweeps[0][6].components
    key = ["level", "component_voxels", "component_true_positive_voxels"]
    found = pl.DataFrame(rows, schema=dict.fromkeys(key, pl.Int64), orient="row")
    found = found.group_by(key).len("component_count").sort(key)
    return frame_of(table, _named(measurement) | {column.name: column.to_numpy() for column in found.iter_columns()})


def lesion(measurement: Measurement) -> pl.DataFrame:
    """Lesions of every reference and support; those of the canonical reference in the brain are the subject's own."""

    def blocks() -> Iterator[dict[str, object]]:
        for support, lesions in zip(measurement.supports, measurement.lesions, strict=True):
            for connectivity in BOTH:
                for reference_id, labelled in lesions[connectivity].items():
                    for support_id in support.support_ids:
                        if (reference_id, support_id) != ("canonical", "brain"):
                            place = {"reference_id": reference_id, "support_id": support_id}
                            placed = measurement.on_grid(labelled)
                            yield from lesion_blocks(placed, connectivity, measurement, _named(measurement) | place)

    return stacked(lake_tables()["lesion"], blocks())


def lesion_blocks(
    labelled: LabelledReference, connectivity: Connectivity, measurement: Measurement, named: Mapping[str, object]
) -> Iterator[dict[str, object]]:
    """Lesions of one reference, under both definitions of a connectivity."""
    voxel_mm3 = measurement.voxel_volumes_mm3["true"]
    return lesion_columns(
        labelled, connectivity, voxel_mm3, measurement.parameters.lesion_floor_mm3, measurement.contrast, named
    )


def lesion_columns(
    labelled: LabelledReference,
    connectivity: Connectivity,
    voxel_mm3: float,
    floor_mm3: float,
    contrast: NDArray[np.float32] | None,
    named: Mapping[str, object],
) -> Iterator[dict[str, object]]:
    """Columns of `lesion`: one block for the lesions above the floor, one for all; none where there is no lesion."""
    ids = np.arange(1, labelled.sizes.size + 1)
    columns = {"lesion_id": ids, "volume_mm3": labelled.sizes * voxel_mm3, "mean_contrast": _means(labelled, contrast)}
    columns |= {f"centroid_{axis}": values for axis, values in enumerate(labelled.centroids().T)}
    above = labelled.sizes >= smallest_count(floor_mm3, voxel_mm3)
    for floor, chosen in zip(LESION_FLOORS, (above, np.ones_like(above)), strict=True):
        if chosen.any():
            block = {name: values[chosen] for name, values in columns.items()}
            yield dict(named) | {"lesion_definition_id": f"conn{connectivity}_{floor}"} | block


def _means(labelled: LabelledReference, contrast: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """Mean of an image in each lesion; NaN, for null, where there is no image."""
    if contrast is None:
        return np.full(labelled.sizes.size, np.nan)
    values = contrast[tuple(labelled.voxels.T)].astype(np.float64)
    return np.bincount(labelled.lesion_ids - 1, weights=values, minlength=labelled.sizes.size) / labelled.sizes


def voxel_ranking(measurement: Measurement) -> pl.DataFrame:
    """Exact AUROC and average precision of the unclipped scores."""
    rows: list[tuple[object, ...]] = []
    for support in measurement.supports:
        for reference_id, positive in support.positive.items():
            found = rank_voxels(support.unclipped, positive)
            values = (
                found.auroc,
                found.average_precision,
                found.positive_voxels,
                found.negative_voxels,
                found.tied_fraction,
                found.ordinal_auroc,
                found.ordinal_average_precision,
            )
            rows += [(*measurement.key, reference_id, support_id, *values) for support_id in support.support_ids]
    return lake_tables()["voxel_ranking"].frame(rows)


def score_histogram_frame(measurement: Measurement) -> pl.DataFrame:
    """Occupied bins of the clipped score."""

    def blocks() -> Iterator[dict[str, object]]:
        for support in measurement.supports:
            for reference_id, positive in support.positive.items():
                of_positive, of_negative = score_histogram(support.clipped_inside, positive)
                occupied = np.flatnonzero(of_positive + of_negative)
                counts = {"positive_voxels": of_positive[occupied], "negative_voxels": of_negative[occupied]}
                for support_id in support.support_ids:
                    place = {"reference_id": reference_id, "support_id": support_id}
                    yield _named(measurement) | place | {"bin": occupied} | counts

    return stacked(lake_tables()["score_histogram"], blocks())


def critical_threshold(measurement: Measurement) -> pl.DataFrame:
    """The exact score at which a subject stops exceeding each budget, under both losses.

    Both supports have the same: outside the field of view a map scores 0, which exceeds nothing.
    """
    budgets = measurement.parameters.budgets_cm3
    counts = [exceeding_voxels(b, v) for v in measurement.voxel_volumes_mm3.values() for b in budgets]
    brain = measurement.supports[0]

    def blocks() -> Iterator[dict[str, object]]:
        shape = (len(measurement.voxel_volumes_mm3), len(budgets))
        volumes = list(measurement.voxel_volumes_mm3)
        axes = {"support_id": ("brain", "brain_in_view"), "voxel_volume_id": volumes, "budget_cm3": budgets}
        for reference_id, positive in brain.positive.items():
            found = critical_thresholds(brain.clipped_inside, positive, counts)
            for loss, scores in (("false_positive", found.burden), ("predicted_volume", found.volume)):
                values = {"threshold": scores.astype(np.float64).reshape(shape)}
                yield _named(measurement) | {"reference_id": reference_id, "loss": loss} | crossed(axes, values)

    return stacked(lake_tables()["critical_threshold"], blocks())


def slice_score(measurement: Measurement) -> pl.DataFrame:
    """Scores, reference voxels and area of every slice that holds support voxels."""

    def blocks() -> Iterator[dict[str, object]]:
        for support, found in zip(measurement.supports, measurement.slices, strict=True):
            names = ("slice_index", "score_max", "score_p99", "score_mean", "relative_position")
            columns: dict[str, object] = {name: getattr(found, name) for name in names}
            counts = dict(zip(support.references, found.reference_voxels, strict=True))
            for name in ("canonical", "own_mapped", "round_trip"):
                columns[f"reference_voxels_{name}"] = counts.get(name)
            for support_id in support.support_ids:
                place = {"support_id": support_id, "brain_area_mm2": found.area_mm2}
                yield _named(measurement) | place | columns

    return stacked(lake_tables()["slice_score"], blocks())


def slice_ranking(measurement: Measurement) -> pl.DataFrame:
    """Slices ranked by their highest score, alone and among slices of similar support area."""
    rows: list[tuple[object, ...]] = []
    for support, found in zip(measurement.supports, measurement.slices, strict=True):
        for reference_id, positive in zip(support.references, found.positive, strict=True):
            ranked = rank_slices(found.score_max, positive, found.area_mm2)
            values = (ranked.auroc, ranked.placement_sum, ranked.matched_count)
            counts = (ranked.positive_count, ranked.negative_count)
            rows += [(*measurement.key, reference_id, name, *values, *counts) for name in support.support_ids]
    return lake_tables()["slice_ranking"].frame(rows)


MEASURES: dict[str, Callable[[Measurement], pl.DataFrame]] = {
    "gate_candidate": gate_candidate,
    "gate_overlap": gate_overlap,
    "score_quantile": score_quantile,
    "threshold_curve": threshold_curve,
    "lesion": lesion,
    "lesion_curve": lesion_curve,
    "lesion_match": lesion_match,
    "lesion_evidence": lesion_evidence,
    "region_curve": region_curve,
    "component_overlap": component_overlap,
    "voxel_ranking": voxel_ranking,
    "score_histogram": score_histogram_frame,
    "critical_threshold": critical_threshold,
    "slice_score": slice_score,
    "slice_ranking": slice_ranking,
}
