"""Sensitivity by size and error modes on a measured lake, counted lesion by lesion from the lake's own tables."""

from collections.abc import Iterable
from typing import Any

import duckdb
import numpy as np
import pytest

LESIONS = """
    select s.split, l.subject_id, l.lesion_id, l.volume_mm3
    from lesion as l
    join cohort_subject as s on s.subject_id = l.subject_id and s.is_included
    where l.method_id is null and l.lesion_definition_id = 'conn6_floor'
    order by l.subject_id, l.lesion_id
"""
LEVELS = """
    select method_id, threshold_rule_id, budget_cm3, subject_id, level
    from subject_threshold
    where reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
"""
CUTS = {"iou_10": 0.10, "iou_25": 0.25, "iou_50": 0.50}
POSTPROCESSES = ("plain", "hysteresis", "hysteresis_pruned")

Key = tuple[Any, ...]


def is_hit(criterion: str, matched_iou: float, overlap_voxels: int) -> bool:
    return overlap_voxels > 0 if criterion == "any_overlap" else matched_iou >= CUTS[criterion]


@pytest.fixture(scope="module")
def matches(phantom_marts: duckdb.DuckDBPyConnection) -> dict[Key, tuple[float, int]]:
    rows = phantom_marts.sql(
        "select method_id, subject_id, lesion_id, postprocess_id, level, matched_iou, overlap_voxels from lesion_match"
    ).fetchall()
    return {tuple(row[:5]): (row[5], row[6]) for row in rows}


@pytest.fixture(scope="module")
def volumes(phantom_marts: duckdb.DuckDBPyConnection) -> dict[str, dict[tuple[str, int], float]]:
    """Volumes of lesions above the floor, by split, subject and number."""
    found: dict[str, dict[tuple[str, int], float]] = {"validation": {}, "test": {}}
    for split, subject, number, volume in phantom_marts.sql(LESIONS).fetchall():
        found[split][subject, number] = volume
    return found


def test_sensitivity_by_size_is_a_count_of_lesions(
    phantom_marts: duckdb.DuckDBPyConnection,
    matches: dict[Key, tuple[float, int]],
    volumes: dict[str, dict[tuple[str, int], float]],
) -> None:
    limit = float(np.quantile(list(volumes["validation"].values()), 1 / 3))
    lesions = [(*key, "small" if volume < limit else "not_small") for key, volume in volumes["test"].items()]
    expected: dict[Key, list[tuple[str, bool]]] = {}
    for method, rule, budget, subject, level in phantom_marts.sql(LEVELS).fetchall():
        for _, number, size in (lesion for lesion in lesions if lesion[0] == subject):
            for postprocess in POSTPROCESSES:
                match = matches[method, subject, number, postprocess, level]
                for criterion in (*CUTS, "any_overlap"):
                    for size_class in (size, "all"):
                        key = (method, rule, budget, postprocess, "conn6_floor", criterion, size_class)
                        expected.setdefault(key, []).append((subject, is_hit(criterion, *match)))
    rows = phantom_marts.sql("from lesion_sensitivity where lesion_definition_id = 'conn6_floor'").fetchall()
    found = {tuple(row[:7]): tuple(row[7:]) for row in rows}
    assert {key[-1] for key in found} == {"all", "small", "not_small"}
    assert found == {
        key: (
            sum(hit for _, hit in hits) / len(hits),
            sum(hit for _, hit in hits),
            len(hits),
            len({subject for subject, _ in hits}),
            None if key[-1] == "all" else limit,
        )
        for key, hits in expected.items()
    }


def test_all_lesions_agree_with_the_multiverse(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    """Every definition and criterion, at thresholds of the multiverse: the same number from the other mart."""
    rows = phantom_marts.sql("""
        select l.value, s.sensitivity_pooled, l.n_lesions, s.lesion_total, l.n_subjects, s.n_with_lesions
        from lesion_sensitivity as l
        full join (
            from lesion_score where reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
        ) as s using (
            method_id, threshold_rule_id, budget_cm3, postprocess_id, lesion_definition_id, hit_criterion_id
        )
        where s.method_id is not null and coalesce(l.size_class, 'all') = 'all'
    """).fetchall()
    assert rows
    assert [row for row in rows if (row[0], row[2], row[4]) != (row[1], row[3], row[5])] == []
    assert phantom_marts.sql("from identity_check where identity = 'lesion_size_classes'").fetchall()


def test_error_modes_count_every_test_lesion_once(
    phantom_marts: duckdb.DuckDBPyConnection, matches: dict[Key, tuple[float, int]]
) -> None:
    (reference_budget,) = phantom_marts.sql("select reference_budget_cm3 from protocol").fetchall()[0]
    points = [row for row in phantom_marts.sql(LEVELS).fetchall() if row[1:3] == ("validation", reference_budget)]
    expected: dict[Key, int] = {}
    for method, subject, level in ((row[0], row[3], row[4]) for row in points):
        for key in numbers_of(matches, method, subject, level):
            iou, overlap = matches[key]
            mode = "detected" if iou >= 0.10 else "poorly_delineated" if overlap else "not_selected"
            expected[method, key[3], mode] = expected.get((method, key[3], mode), 0) + 1
    rows = phantom_marts.sql("select method_id, postprocess_id, error_mode, mode_count from error_mode").fetchall()
    found = {tuple(row[:3]): row[3] for row in rows}
    assert {key: count for key, count in found.items() if count} == expected
    assert len(found) == 3 * len({key[:2] for key in found})
    assert {mode for _, _, mode in expected} == {"detected", "poorly_delineated", "not_selected"}


def numbers_of(matches: Iterable[Key], method: str, subject: str, level: int) -> list[Key]:
    return [key for key in matches if (key[0], key[1], key[4]) == (method, subject, level)]
