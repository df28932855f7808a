"""Ceilings that use the reference on a measured lake, worked out anew from the lake's own tables."""

from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from ingest.manifest import read_manifest
from marts.release import build_tables, open_for_building

Key = tuple[Any, ...]
SETTING = (
    "reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true' and postprocess_id = 'plain'"
)
POINTS = """
    select method_id, subject_id, budget_cm3, level, reference_voxels
    from operating_subject
    where threshold_rule_id = 'validation' and postprocess_id = 'plain' and reference_voxels > 0
"""
FEW = 12  # components that cost false positives: so many choices can all be tried


@pytest.fixture(scope="module")
def points(phantom_marts: duckdb.DuckDBPyConnection) -> list[Key]:
    """Method, subject, budget, validation level and reference voxels, test subjects with a reference."""
    return phantom_marts.sql(POINTS).fetchall()


def stored(marts: duckdb.DuckDBPyConnection, ceiling_id: str, columns: str) -> dict[Key, Key]:
    rows = marts.sql(
        f"select method_id, subject_id, budget_cm3, {columns} from ceiling_subject where ceiling_id = '{ceiling_id}'"
    ).fetchall()
    return {row[:3]: row[3:] for row in rows}


def voxel_mm3(marts: duckdb.DuckDBPyConnection) -> float:
    return float(marts.sql("select any_value(voxel_mm3) from subject").fetchall()[0][0])


def test_every_subject_with_a_reference_has_every_ceiling(
    phantom_marts: duckdb.DuckDBPyConnection, points: list[Key]
) -> None:
    rows = phantom_marts.sql("select method_id, subject_id, budget_cm3, ceiling_id from ceiling_subject").fetchall()
    assert len(points) > 0 and len(rows) == 5 * len(points)
    assert phantom_marts.sql("from ceiling_subject where dice is null").fetchall() == []
    states = phantom_marts.sql("select distinct status, n_subjects from label_ceiling").fetchall()
    assert states == [("ok", len({subject for _, subject, *_ in points}))]


def test_the_best_threshold_of_a_subject_within_the_budget(
    phantom_marts: duckdb.DuckDBPyConnection, points: list[Key]
) -> None:
    curve: dict[Key, list[Key]] = {}
    names = "method_id, subject_id, predicted_voxels, true_positive_voxels, reference_voxels"
    for row in phantom_marts.sql(f"select {names} from threshold_curve where {SETTING}").fetchall():
        curve.setdefault(row[:2], []).append(row[2:])
    found, size = stored(phantom_marts, "subject_threshold", "dice"), voxel_mm3(phantom_marts)
    for method, subject, budget, *_ in points:
        kept = [(p, t, g) for p, t, g in curve[method, subject] if (p - t) * size / 1000 <= budget]
        assert found[method, subject, budget] == (max(2 * t / (p + g) for p, t, g in kept),)


def test_the_best_choice_of_components_by_trying_all(
    phantom_marts: duckdb.DuckDBPyConnection, points: list[Key]
) -> None:
    found, tried = stored(phantom_marts, "component_selection", "attained_dice, dice"), 0
    size = voxel_mm3(phantom_marts)
    for method, subject, budget, level, reference in points:
        components = [
            (voxels - hits, hits)
            for voxels, hits, count in phantom_marts.execute(
                "select component_voxels, component_true_positive_voxels, component_count from component_overlap"
                " where method_id = ? and subject_id = ? and level = ?",
                [method, subject, level],
            ).fetchall()
            for _ in range(count)
        ]
        pure, mixed = (sum(t for f, t in components if f == 0), [one for one in components if one[0] > 0])
        if len(mixed) <= FEW:
            best = 0.0
            for taken in product((0, 1), repeat=len(mixed)):
                false, true = np.array(taken) @ np.array(mixed, np.int64).reshape(-1, 2)
                if false * size / 1000 <= budget:
                    best = max(best, 2 * (true + pure) / (false + true + pure + reference))
            attained, bound = found[method, subject, budget]
            assert attained - 1e-12 <= best <= bound + 1e-12
            tried += 1
    assert tried >= len(points) / 2


def test_touched_lesions_replaced_by_the_reference(phantom_marts: duckdb.DuckDBPyConnection, points: list[Key]) -> None:
    volumes = {
        (subject, lesion): volume
        for subject, lesion, volume in phantom_marts.sql(
            "select subject_id, lesion_id, volume_mm3 from lesion"
            " where method_id is null and lesion_definition_id = 'conn6_all'"
        ).fetchall()
    }
    overlaps = phantom_marts.sql("select method_id, subject_id, level, lesion_id, overlap_voxels from region_curve")
    touched: dict[Key, dict[int, int]] = {}
    for *where, lesion, voxels in overlaps.fetchall():
        if voxels > 0:
            touched.setdefault(tuple(where), {})[lesion] = voxels
    found, size = (
        stored(phantom_marts, "boundary_replacement", "dice, within_lesion_coverage"),
        voxel_mm3(phantom_marts),
    )
    for method, subject, budget, level, reference in points:
        hit = touched.get((method, subject, level), {})
        replaced = sum(volumes[subject, lesion] for lesion in hit) / size
        dice, coverage = found[method, subject, budget]
        assert dice == pytest.approx(2 * replaced / (replaced + reference), abs=1e-12)
        assert coverage == (pytest.approx(sum(hit.values()) / replaced, abs=1e-12) if hit else None)


def test_gains_are_paired_means_over_the_shared_draws(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    subjects = [
        subject
        for (subject,) in phantom_marts.sql(
            "select subject_id from cohort_subject where is_included and split = 'test' order by subject_id"
        ).fetchall()
    ]
    seed, replicates = phantom_marts.sql("select seed, contrast_replicates from protocol").fetchall()[0]
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(0, len(subjects), (replicates, len(subjects)))
    gains: dict[Key, dict[str, float]] = {}
    names = "method_id, budget_cm3, ceiling_id, subject_id, dice - validation_dice"
    for *key, subject, gain in phantom_marts.sql(f"select {names} from ceiling_subject").fetchall():
        gains.setdefault(tuple(key), {})[subject] = gain
    rows = phantom_marts.sql("select method_id, budget_cm3, ceiling_id, gain, gain_low, gain_high from label_ceiling")
    for *key, gain, low, high in rows.fetchall():
        values = np.array([gains[tuple(key)].get(subject, np.nan) for subject in subjects])
        sampled = values[drawn]
        means = np.nanmean(sampled[~np.isnan(sampled).all(axis=1)], axis=1)
        assert gain == pytest.approx(np.nanmean(values), abs=1e-12)
        assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1e-9)


def test_a_lake_without_regions_and_components_has_the_other_ceilings(phantom_lake: Path) -> None:
    manifest = read_manifest(phantom_lake)
    parts = {name: paths for name, paths in manifest.parts.items() if name not in ("region_curve", "component_overlap")}
    with open_for_building(None, phantom_lake) as connection:
        build_tables(connection, manifest.model_copy(update={"parts": parts}), ["label_ceiling"])
        states = connection.sql("select ceiling_id, status, n_subjects > 0 from label_ceiling group by all").fetchall()
        (reason,) = connection.sql(
            "select distinct reason from label_ceiling where ceiling_id = 'lesion_threshold' and status = 'unavailable'"
        ).fetchall()
    assert {("subject_threshold", "ok", True), ("subject_optimum", "ok", True)} <= set(states)
    assert ("lesion_threshold", "unavailable", False) in states and "not measured" in reason[0]
