"""The audit marts on the phantom, against sums over its files and lake tables."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from scipy.ndimage import generate_binary_structure, label

from expectations.study import Study, load_study
from ingest.nifti import read_header, read_labels
from ingest.plan import Plan, plan_study
from ingest.volumes import resolve_transform

Row = dict[str, Any]


@pytest.fixture(scope="module")
def study(phantom_study: Path) -> Study:
    return load_study(phantom_study)


@pytest.fixture(scope="module")
def plan(study: Study) -> Plan:
    return plan_study(study)


def rows(marts: duckdb.DuckDBPyConnection, sql: str) -> list[Row]:
    return marts.sql(sql).pl().to_dicts()


def middle(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def test_the_cohort_is_that_of_the_files(phantom_marts: duckdb.DuckDBPyConnection, plan: Plan) -> None:
    found = {row["split"]: row for row in rows(phantom_marts, "from cohort")}
    for split in ("validation", "test"):
        subjects = [subject for subject in plan.subjects if subject.split == split]
        masks = [read_labels(subject.reference.url, None).mask for subject in subjects]
        brains = [read_labels(subject.brain.url, None).mask for subject in subjects if subject.brain]
        volumes = [int((m & b).sum()) * 216.0 for m, b in zip(masks, brains, strict=True) if (m & b).any()]
        row = found[split]
        assert (row["n_subjects"], row["empty_reference_count"]) == (len(masks), sum(not m.any() for m in masks))
        assert row["distinct_reference_count"] == len({m.tobytes() for m in masks if m.any()})
        assert row["repeated_reference_count"] == 0
        assert [row[f"shape_{axis}_median"] for axis in range(3)] == list(masks[0].shape)
        expected = np.quantile(volumes, [0, 0.25, 0.5, 0.75, 1])
        names = ("minimum", "q1", "median", "q3", "maximum")
        assert [row[f"reference_mm3_{name}"] for name in names] == pytest.approx(expected, rel=1e-12)
    assert found["test"]["empty_reference_count"] == 1


def test_a_copied_reference_is_counted(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    """The mart's own SQL over a subject table in which two subjects of different splits share a reference."""
    from marts.catalog import read_mart, sql_folder

    subject, cohort = (phantom_marts.sql(f"from {name}").pl() for name in ("subject", "cohort_subject"))
    first, last = subject["reference_sha256"][0], subject["subject_id"][11]
    copied = subject.with_columns(
        reference_sha256=pl.when(pl.col("subject_id") == last).then(pl.lit(first)).otherwise(pl.col("reference_sha256"))
    )
    with duckdb.connect() as connection:
        connection.register("subject", copied)
        connection.register("cohort_subject", cohort)
        found = connection.sql(read_mart(sql_folder() / "cohort.sql").sql).pl()
    assert dict(found.select("split", "repeated_reference_count").iter_rows()) == {"validation": 1, "test": 1}


def test_voxel_volumes_are_those_of_headers_and_counts(phantom_marts: duckdb.DuckDBPyConnection, plan: Plan) -> None:
    found = {row["method_id"]: row for row in rows(phantom_marts, "from voxel_volume_audit")}
    methods = [entry for entry in plan.entries if entry.kind == "method"]
    assert set(found) == {entry.method_id for entry in methods}
    for entry in methods:
        headers: list[float | None] = []
        counted: list[float] = []
        ratios: list[float] = []
        agreeing = 0
        for subject in plan.subjects:
            inputs = plan.maps[entry.method_id, subject.subject_id]
            header = read_header(inputs.map.url)
            reference = read_labels(subject.reference.url, None).mask
            transform = resolve_transform(entry.transform, header.shape, reference.shape)
            declared = 216.0 * float(np.prod(transform.extent)) / float(np.prod(transform.size))
            headers.append(header.header_voxel_mm3)
            agreeing += header.header_voxel_mm3 is not None and abs(header.header_voxel_mm3 / declared - 1) <= 0.01
            if inputs.own_reference is None:
                continue
            view = tuple(slice(max(a, 0), a + n) for a, n in zip(transform.start, transform.extent, strict=True))
            own = int(read_labels(inputs.own_reference.url, None).mask.sum())
            canonical = int(reference[view].sum())
            if own and canonical:
                counted.append(canonical * 216.0 / own)
                ratios.append(own * declared / float(entry.legacy_voxel_mm3 or np.nan) / canonical)
        row = found[entry.method_id]
        assert (row["n_subjects"], row["header_agrees_count"]) == (len(plan.subjects), agreeing)
        assert row["n_counted"] == len(counted)
        assert row["header_voxel_mm3_median"] == pytest.approx(middle(headers), rel=1e-9)
        expected = [middle(counted), min(counted), max(counted)]
        names = ("median", "minimum", "maximum")
        assert [row[f"counted_voxel_mm3_{name}"] for name in names] == pytest.approx(expected, rel=1e-9)
        expected = [middle(ratios), min(ratios), max(ratios)]
        assert [row[f"legacy_count_ratio_{name}"] for name in names] == pytest.approx(expected, rel=1e-9)


def test_round_trips_are_counted_from_the_files(phantom_marts: duckdb.DuckDBPyConnection, plan: Plan) -> None:
    """6-connected components before and after, by scipy; the trip is what the phantom stores as own references."""
    from ingest.grid import map_nearest

    found = {
        row["method_id"]: row
        for row in rows(phantom_marts, "from round_trip_audit where lesion_definition_id = 'conn6_all'")
    }
    included = {row["subject_id"] for row in rows(phantom_marts, "from cohort_subject where is_included")}
    subjects = [s for s in plan.subjects if s.split == "test" and s.subject_id in included]
    faces = generate_binary_structure(3, 1)
    for entry in (entry for entry in plan.entries if entry.kind == "method"):
        counts, volumes = np.zeros(3, int), np.zeros(3)
        for subject in subjects:
            inputs = plan.maps[entry.method_id, subject.subject_id]
            assert inputs.own_reference is not None and subject.brain is not None
            reference = read_labels(subject.reference.url, None).mask
            brain = read_labels(subject.brain.url, None).mask
            own = read_labels(inputs.own_reference.url, None).mask
            transform = resolve_transform(entry.transform, own.shape, reference.shape)
            shape = (reference.shape[0], reference.shape[1], reference.shape[2])
            view = map_nearest(np.ones(own.shape, np.bool_), transform, shape)
            stages = (reference & brain, reference & brain & view, map_nearest(own, transform, shape) & brain)
            for number, mask in enumerate(stages):
                counts[number] += label(mask, faces)[1]
                volumes[number] += 216.0 * int(mask.sum())
        row = found[entry.method_id]
        names = ("canonical", "in_view", "round_trip")
        assert [row[f"{name}_lesion_count"] for name in names] == counts.tolist()
        assert [row[f"{name}_mm3"] for name in names] == pytest.approx(volumes)
        assert row["round_trip_volume_ratio"] == pytest.approx(volumes[2] / volumes[0])
        assert row["n_subjects"] == row["n_own"] == row["own_equal_count"] == len(subjects)
    assert found["coarse"]["round_trip_volume_ratio"] != 1


def test_ties_are_audited_over_the_test_cohort(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    ranking = phantom_marts.sql(
        "select v.* from voxel_ranking as v join cohort_subject as c using (subject_id)"
        " where c.is_included and c.split = 'test'"
    ).pl()
    found = rows(phantom_marts, "from tie_audit")
    assert len(found) == ranking.select("method_id", "reference_id", "support_id").n_unique()
    for row in found:
        mine = ranking.filter(
            (pl.col("method_id") == row["method_id"]) & (pl.col("reference_id") == row["reference_id"])
        )
        here = mine.filter(pl.col("support_id") == row["support_id"])
        assert row["n_subjects"] == len(here)
        for name, ordinal in (("auroc", "ordinal_auroc"), ("average_precision", "ordinal_average_precision")):
            excess: list[float] = [o - v for o, v in here.select(ordinal, name).iter_rows() if v is not None]
            assert row[f"{name}_excess_mean"] == pytest.approx(statistics.fmean(excess), abs=1e-12)
            assert row[f"{name}_excess_largest"] == max(map(abs, excess))
        assert row["tied_fraction_median"] == middle(here["tied_fraction"])
        sizes = {
            support: dict(part.select("subject_id", pl.col("positive_voxels") + pl.col("negative_voxels")).iter_rows())
            for (support,), part in mine.group_by("support_id")
        }
        outside = [1 - sizes["brain_in_view"][s] / n for s, n in sizes[row["support_id"]].items()]
        assert row["outside_view_fraction_median"] == pytest.approx(middle(outside), abs=1e-12)
    cropped = [row["outside_view_fraction_median"] for row in found if row["method_id"] == "sharp"]
    assert max(cropped) > 0.05
