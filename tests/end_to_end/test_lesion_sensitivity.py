"""Sensitivity by size and error modes on a measured lake, counted lesion by lesion from the lake's own tables."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from ingest.manifest import read_manifest
from marts.release import build_tables, open_for_building

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


@pytest.fixture(scope="module")
def evidence(phantom_marts: duckdb.DuckDBPyConnection) -> dict[Key, tuple[float, float]]:
    """Local AUROC and average precision of every method's view of a lesion."""
    rows = phantom_marts.sql(
        "select method_id, subject_id, lesion_id, local_auroc, local_average_precision from lesion_evidence"
    ).fetchall()
    return {tuple(row[:3]): (row[3], row[4]) for row in rows}


def test_error_modes_count_every_test_lesion_once(
    phantom_marts: duckdb.DuckDBPyConnection,
    matches: dict[Key, tuple[float, int]],
    evidence: dict[Key, tuple[float, float]],
) -> None:
    (reference_budget,) = phantom_marts.sql("select reference_budget_cm3 from protocol").fetchall()[0]
    points = [row for row in phantom_marts.sql(LEVELS).fetchall() if row[1:3] == ("validation", reference_budget)]
    expected: dict[Key, int] = {}
    for method, subject, level in ((row[0], row[3], row[4]) for row in points):
        for key in numbers_of(matches, method, subject, level):
            iou, overlap = matches[key]
            missed = "evidence_not_selected" if evidence[key[:3]][0] > 0.5 else "no_evidence"
            mode = "detected" if iou >= 0.10 else "poorly_delineated" if overlap else missed
            expected[method, key[3], mode] = expected.get((method, key[3], mode), 0) + 1
    rows = phantom_marts.sql("select method_id, postprocess_id, error_mode, mode_count from error_mode").fetchall()
    found = {tuple(row[:3]): row[3] for row in rows}
    assert {key: count for key, count in found.items() if count} == expected
    assert len(found) == 5 * len({key[:2] for key in found})
    modes = {"detected", "poorly_delineated", "evidence_not_selected", "no_evidence"}
    assert {mode for _, _, mode in expected} == modes


def numbers_of(matches: Iterable[Key], method: str, subject: str, level: int) -> list[Key]:
    return [key for key in matches if (key[0], key[1], key[4]) == (method, subject, level)]


def test_local_contrast_is_a_mean_over_lesions(
    phantom_marts: duckdb.DuckDBPyConnection,
    evidence: dict[Key, tuple[float, float]],
    volumes: dict[str, dict[tuple[str, int], float]],
) -> None:
    """Point estimates, and intervals over cohorts in which subjects are repeated with all their lesions, one by one."""
    limit = float(np.quantile(list(volumes["validation"].values()), 1 / 3))
    ((seed, count, level),) = phantom_marts.sql(
        "select seed, contrast_replicates, interval_level from protocol"
    ).fetchall()
    cohort = "select subject_id from cohort_subject where is_included and split = 'test' order by subject_id"
    subjects = [str(row[0]) for row in phantom_marts.sql(cohort).fetchall()]
    draws = np.random.Generator(np.random.PCG64(seed)).integers(0, len(subjects), (count, len(subjects)))
    rows = phantom_marts.sql("""
        select
            method_id, size_class, n_lesions, n_subjects, n_short_shells, n_without_shell, n_replicates,
            local_average_precision_chance,
            local_auroc_mean, local_auroc_mean_low, local_auroc_mean_high, local_average_precision_mean,
            local_average_precision_mean_low, local_average_precision_mean_high
        from local_contrast
    """).fetchall()
    methods = {key[0] for key in evidence}
    assert {tuple(row[:2]) for row in rows} == {(m, size) for m in methods for size in ("all", "small", "not_small")}
    for method, size, *found in rows:
        lesions = {
            subject: [
                evidence[method, subject, number]
                for (owner, number), volume in volumes["test"].items()
                if owner == subject and size in ("all", "small" if volume < limit else "not_small")
            ]
            for subject in subjects
        }
        cohorts = [[pair for k in taken for pair in lesions[subjects[k]]] for taken in draws.tolist()]
        means = np.array([np.mean(pairs, axis=0) for pairs in cohorts if pairs])
        every = [pair for subject in subjects for pair in lesions[subject]]
        ends = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
        expected = np.concatenate([np.mean(every, axis=0)[None], ends]).T.ravel()
        with_lesions = sum(bool(pairs) for pairs in lesions.values())
        assert found[:6] == [len(every), with_lesions, 0, 0, len(means), 0.5]
        np.testing.assert_allclose(np.array(found[6:]), expected, rtol=0, atol=1e-12)


def test_a_lake_without_evidence_has_no_local_contrast_and_no_mode_for_a_missed_lesion(phantom_lake: Path) -> None:
    manifest = read_manifest(phantom_lake)
    kept = {name: parts for name, parts in manifest.parts.items() if name != "lesion_evidence"}
    wanted = ["error_mode", "local_contrast"]
    with open_for_building(None, phantom_lake) as connection:
        build_tables(connection, manifest.model_copy(update={"parts": kept}), wanted)
        assert connection.sql("from local_contrast").fetchall() == []
        modes = connection.sql("select distinct error_mode from error_mode where mode_count > 0").fetchall()
    assert {mode for (mode,) in modes} == {"detected", "poorly_delineated", "not_assessable"}
