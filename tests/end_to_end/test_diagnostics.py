"""Diagnostics of geometry end to end: measured when asked for, kept while current, and marts that equal scipy."""

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import nibabel as nib
import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

import mirto
from expectations.store import PartStore
from expectations.study import load_study
from expectations.tables import lake_tables
from ingest.jobs import InProcess
from ingest.manifest import read_manifest
from ingest.phantom import write_phantom, write_volume
from ingest.run import Ingest, Report
from marts.catalog import Check, marts
from marts.quality import check_findings, declared_findings
from marts.release import build_tables, open_for_building
from transforms import TRANSFORMS

spearmanr: Any = import_module("scipy.stats").spearmanr

DIAGNOSTIC_TABLES = {name for name, table in lake_tables().items() if "diagnosis" in table.parts}
WANTED = (
    *("diagnostic", "diagnostic_power", "corruption_effect", "spatial_control", "mapping_delta", "offset_scan"),
    *("sensitivity_subset", "identity_check", "candidate_scan", "operating_subject"),
    "jaccard_excess",
)
TEST_SUBJECTS, METHODS = 5, 4
ALTERNATIVE = """
[method.alternative_transform]
source_axis = [0, 1, 2]
start = [0, 0, 4]
extent = ["full", "full", 15]
reversed = [true, false, false]
"""


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom of five test subjects, the last without a reference; `sharp` has an alternative transform."""
    study = write_phantom(tmp_path_factory.mktemp("diagnostics") / "study", validation=2, test=5, spacing_mm=6.0)
    few = "multiverse_replicates = 50\ncontrast_replicates = 50\nconformal_split_count = 10\nlesion_floor_mm3 = 450.0\n"
    head, sharp, rest = study.read_text().partition('id = "sharp"\n')
    block, following, rest = rest.partition("[[method]]")
    study.write_text(f"{head}{sharp}{block}{ALTERNATIVE}\n{following}{rest}\n[protocol]\n{few}")
    return study


def ingest(study_file: Path, lake: Path, diagnostics: bool) -> Report:
    report = Ingest(load_study(study_file), lake, InProcess(), diagnostics=diagnostics).run()
    assert not report.manifest.failures
    return report


def counts(report: Report) -> dict[str, int]:
    """Current diagnostic parts by table."""
    return {name: len(report.manifest.parts[name]) for name in DIAGNOSTIC_TABLES}


@pytest.fixture(scope="module")
def lake(study_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lake with diagnostics; read only. None without the option; with it a part per table, method and subject."""
    folder = tmp_path_factory.mktemp("diagnostics") / "lake"
    assert set(counts(ingest(study_file, folder, diagnostics=False)).values()) == {0}
    report = ingest(study_file, folder, diagnostics=True)
    assert set(counts(report).values()) == {METHODS * TEST_SUBJECTS}
    assert report.measured_parts == len(DIAGNOSTIC_TABLES) * METHODS * TEST_SUBJECTS
    return folder


@pytest.fixture(scope="module")
def connection(lake: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    connection = open_for_building(None, lake)
    build_tables(connection, read_manifest(lake), WANTED)
    yield connection
    connection.close()


@pytest.fixture
def query(connection: duckdb.DuckDBPyConnection) -> Callable[[str], pl.DataFrame]:
    return lambda sql: connection.sql(sql).pl()


def test_a_plain_run_keeps_what_is_current_and_drops_what_is_stale(
    study_file: Path, lake: Path, tmp_path: Path
) -> None:
    shutil.copytree(lake, tmp_path / "lake")
    shutil.copytree(study_file.parent, tmp_path / "study")
    study, everything = tmp_path / "study" / "study.toml", METHODS * TEST_SUBJECTS
    kept = ingest(study, tmp_path / "lake", diagnostics=False)
    assert kept.measured_parts == 0 and set(counts(kept).values()) == {everything}

    study.write_text(f"{study.read_text()}reference_dilation_share = 0.5\n")
    stale = ingest(study, tmp_path / "lake", diagnostics=False)
    variants = {"variant_ranking", "variant_curve"}
    assert counts(stale) == {name: 0 if name in variants else everything for name in DIAGNOSTIC_TABLES}

    again = ingest(study, tmp_path / "lake", diagnostics=True)
    assert again.measured_parts == 2 * everything and set(counts(again).values()) == {everything}


def test_a_run_that_was_killed_resumes(study_file: Path, lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake, tmp_path / "lake")
    store = PartStore(tmp_path / "lake")
    lost = sorted((store.lake / "parts" / "candidate_ranking").glob("*.parquet"))[::3]
    for part in lost:
        part.unlink()
    partial = ingest(study_file, tmp_path / "lake", diagnostics=False)
    assert counts(partial)["candidate_ranking"] == METHODS * TEST_SUBJECTS - len(lost)
    assert ingest(study_file, tmp_path / "lake", diagnostics=True).measured_parts == len(lost)


def test_another_subject_s_bad_map_spares_the_tables_of_the_own_map(
    study_file: Path, lake: Path, tmp_path: Path
) -> None:
    shutil.copytree(lake, tmp_path / "lake")
    shutil.copytree(study_file.parent, tmp_path / "study")
    for name in DIAGNOSTIC_TABLES:
        shutil.rmtree(tmp_path / "lake" / "parts" / name)
    study = load_study(tmp_path / "study" / "study.toml")
    tested = sorted(subject.subject_id for subject in study.subjects if subject.split == "test")
    before, bad = tested[1:3]
    map_file = tmp_path / "study" / f"maps/diffuse/{bad}.nii.gz"
    shape = nib.Nifti1Image.from_filename(map_file).shape
    write_volume(map_file, np.full(shape, np.nan, np.float32), (6, 6, 6))
    report = Ingest(study, tmp_path / "lake", InProcess(), diagnostics=True).run()
    failed = {(failure.subject_id, failure.method_id, failure.path) for failure in report.manifest.failures}
    assert failed == {(bad, "diffuse", f"maps/diffuse/{bad}.nii.gz")}
    measured = {
        name: {
            subject for subject in tested if any(f"diffuse@{subject}." in part for part in report.manifest.parts[name])
        }
        for name in DIAGNOSTIC_TABLES
    }
    own = set(tested) - {bad}
    assert measured == {name: own - {before} if name.startswith("exchange") else own for name in DIAGNOSTIC_TABLES}


def test_every_rule_of_the_new_tables_holds(connection: duckdb.DuckDBPyConnection) -> None:
    found = marts()
    for name in DIAGNOSTIC_TABLES:
        table = lake_tables()[name]
        assert declared_findings(connection, table) == []
        rules = [Check("stop", *rule.split(" | ")) for rule in table.rules]
        assert list(check_findings(connection, table, rules)) == []
    for name in WANTED:
        table = found[name].table if name in found else TRANSFORMS[name].table
        assert declared_findings(connection, table) == []
        if name in found:
            stops = [check for check in found[name].checks if check.severity == "stop"]
            assert list(check_findings(connection, table, stops)) == []


def test_identities_tie_the_diagnostics_to_the_other_tables(query: Callable[[str], pl.DataFrame]) -> None:
    rows = query("select identity, count(*) as items, bool_and(holds) as holds from identity_check group by identity")
    found = {identity: (items, holds) for identity, items, holds in rows.iter_rows()}
    assert found["declared_variant"] == (METHODS, True)
    assert found["declared_variant_count"] == found["declared_variant_hit"] == (METHODS, True)
    assert found["candidate_variant"] == (METHODS * 6, True)


def test_diagnostics_equal_scipy_and_counting(query: Callable[[str], pl.DataFrame]) -> None:
    rows = query("select * from diagnostic")
    assert rows.filter(pl.col("status") != "ok").is_empty()
    values = {
        (d, m, o): v for d, m, o, v in rows.select("diagnostic_id", "method_id", "other_method_id", "value").iter_rows()
    }
    auroc = query(
        "select method_id, subject_id, auroc from voxel_ranking join subject using (subject_id)"
        " where split = 'test' and reference_id = 'canonical' and support_id = 'brain' and auroc is not null"
    ).pivot("method_id", index="subject_id", values="auroc")
    assert auroc.height == TEST_SUBJECTS - 1
    reexport = dict(query("select method_id, variant_id from benign_reexport").iter_rows())
    assert set(reexport.values()) == {"nearest", "half_voxel"} and reexport["coarse"] == "nearest"
    variants = query("select * from variant_ranking where auroc is not null").sort("subject_id")
    for method_id, variant_id in reexport.items():
        is_one = (pl.col("method_id") == method_id) & (pl.col("variant_id") == variant_id)
        other = variants.filter(is_one).get_column("auroc")
        mine = auroc.sort("subject_id").get_column(method_id)
        assert values["rank_stability", method_id, None] == pytest.approx(spearmanr(mine, other).statistic)
        assert values["anti_location", method_id, None] == pytest.approx((mine < 0.5).mean())
        means = query(
            "select transposed, flip_0, flip_1, dz, avg(auroc) as mean from candidate_ranking"
            f" where method_id = '{method_id}' group by all"
        )
        declared = means.row(
            by_predicate=~pl.col("transposed") & ~pl.col("flip_0") & ~pl.col("flip_1") & (pl.col("dz") == 0)
        )
        best = float(np.max(means.get_column("mean").to_numpy()))
        assert values["transform_scan", method_id, None] == pytest.approx(best - declared[-1], abs=1e-12)
    expected = spearmanr(auroc.get_column("diffuse"), auroc.get_column("sharp")).statistic
    assert values["shared_conspicuity", "diffuse", "sharp"] == pytest.approx(expected)
    assert rows.filter(pl.col("diagnostic_id") == "shared_conspicuity").height == 6


def test_an_effect_is_the_mean_of_paired_differences(query: Callable[[str], pl.DataFrame]) -> None:
    long = query("select * from variant_metric").drop_nulls("value")
    declared = long.filter(pl.col("variant_id") == "declared").drop("variant_id").rename({"value": "declared"})
    pairs = long.join(declared, on=["method_id", "subject_id", "metric_id"])
    expected = pairs.group_by("method_id", "variant_id", "metric_id").agg(
        (pl.col("value") - pl.col("declared")).mean().alias("expected"), pl.len().alias("n")
    )
    found = query("select * from corruption_effect union all select * from spatial_control").filter(
        pl.col("variant_id") != "ids_permuted"
    )
    joined = found.join(expected, on=["method_id", "variant_id", "metric_id"])
    assert joined.height == found.height == METHODS * 5 * 14
    assert joined.get_column("mean_difference").to_numpy() == pytest.approx(
        joined.get_column("expected").to_numpy(), abs=1e-12
    )
    assert joined.get_column("n_subjects").to_list() == joined.get_column("n").to_list()
    permuted = query("select * from corruption_effect where variant_id = 'ids_permuted' and metric_id = 'voxel_auroc'")
    exchanged = query("select * from spatial_control where variant_id = 'exchanged' and metric_id = 'voxel_auroc'")
    two_of_four = exchanged.get_column("mean_difference").to_numpy() * 2 / 4
    assert permuted.get_column("mean_difference").to_numpy() == pytest.approx(two_of_four)


def test_dice_under_a_variant_is_read_at_the_threshold_of_the_declared_maps(
    query: Callable[[str], pl.DataFrame],
) -> None:
    points = query(
        "select method_id, avg(dice) as dice from operating_subject cross join protocol"
        " where threshold_rule_id = 'validation' and budget_cm3 = reference_budget_cm3 and postprocess_id = 'plain'"
        " group by method_id"
    )
    found = query("select distinct method_id, declared_mean from corruption_effect where metric_id = 'dice'")
    joined = found.join(points, on="method_id")
    assert joined.height == METHODS
    assert joined.get_column("declared_mean").to_numpy() == pytest.approx(joined.get_column("dice").to_numpy())


def test_the_alternative_transform_is_compared_with_the_declared_one(query: Callable[[str], pl.DataFrame]) -> None:
    rows = query("select * from mapping_delta")
    assert set(rows.get_column("method_id")) == {"sharp"} and rows.height == 5
    flip = query(
        "select mean_difference from corruption_effect"
        " where method_id = 'sharp' and variant_id = 'flip_left_right' and metric_id = 'voxel_auroc'"
    ).item()
    delta = rows.filter(pl.col("metric_id") == "voxel_auroc").get_column("mean_difference").item()
    assert delta == pytest.approx(flip, abs=1e-9)  # the alternative declared here is the flip along axis 0


def test_power_is_told_for_every_method_and_the_small_cohort_is_said(query: Callable[[str], pl.DataFrame]) -> None:
    rows = query("select * from diagnostic_power")
    assert rows.height == METHODS * 2 * 7 * 3
    assert set(rows.filter(pl.col("sample_id") != "all").get_column("status")) == {"degraded"}
    assert rows.get_column("n_subjects").unique().to_list() == [TEST_SUBJECTS - 1]
    assert rows.get_column("power").null_count() == 0


def test_offsets_are_chosen_on_half_and_again_on_the_other(query: Callable[[str], pl.DataFrame]) -> None:
    rows = query("select * from offset_scan")
    assert rows.select("n_selection", "n_replication", "n_remaining").unique().rows() == [(2, 2, 0)]
    scanned = query(
        "select method_id, subject_id, dz, auroc from candidate_ranking"
        " where not transposed and not flip_0 and not flip_1 and auroc is not null"
    )
    first = scanned.get_column("subject_id").unique().sort()[:2].to_list()
    for method_id, chosen in rows.select("method_id", "selection_dz").iter_rows():
        mine = scanned.filter((pl.col("method_id") == method_id) & pl.col("subject_id").is_in(first))
        means = mine.group_by("dz").agg(pl.col("auroc").mean())
        assert means.sort("auroc").get_column("dz").to_list()[-1] == chosen


def test_subsets_are_nested_and_the_first_is_everyone(query: Callable[[str], pl.DataFrame]) -> None:
    rows = query("select subset_id, n_subjects from sensitivity_subset where metric_id = 'voxel_auroc'").unique()
    found = dict(rows.iter_rows())
    assert found["all"] == TEST_SUBJECTS - 1 == found["registered"] > found["inside_every_view"] > 0
    outside = query(
        "select count(distinct subject_id) from gate_overlap join subject using (subject_id)"
        " where split = 'test' and in_view_fraction < 1"
    ).item()
    assert found["inside_every_view"] == TEST_SUBJECTS - 1 - outside


def test_the_jaccard_bound_is_that_of_the_three_masks(query: Callable[[str], pl.DataFrame], study_file: Path) -> None:
    """By the masks themselves, for the method that is stored on the canonical grid but for a view that crops it."""
    rows = query("select * from jaccard_excess where method_id = 'sharp'").sort("subject_id")
    level = query(
        "select level from threshold_choice cross join protocol where method_id = 'sharp'"
        " and reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'"
        " and threshold_rule_id = 'validation' and budget_cm3 = reference_budget_cm3"
    ).item()
    assert rows.height == TEST_SUBJECTS
    for subject_id, difference, distance in rows.drop("method_id", "excess").iter_rows():

        def image(path: str, subject_id: str = subject_id) -> NDArray[Any]:
            return np.asarray(nib.Nifti1Image.from_filename(study_file.parent / path / f"{subject_id}.nii.gz").dataobj)

        canonical, brain = image("reference") != 0, image("brain") != 0
        own, scores = np.zeros_like(canonical), np.zeros(canonical.shape, np.float32)
        start = (canonical.shape[2] - image("maps/sharp").shape[2]) // 2
        view = slice(start, start + image("maps/sharp").shape[2])
        scores[:, :, view] = image("maps/sharp")
        own[:, :, view] = image("maps/sharp", f"{subject_id}_label") != 0
        predicted = (scores > np.float32(level / 200)) & brain

        def jaccard(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
            return 1 - float((a & b).sum() / (a | b).sum()) if (a | b).any() else 0.0

        assert difference == pytest.approx(abs(jaccard(predicted, canonical) - jaccard(predicted, own)))
        assert distance == pytest.approx(jaccard(canonical, own))


def test_the_command_line_asks_for_diagnostics(
    study_file: Path, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(lake, tmp_path / "lake")
    shutil.rmtree(tmp_path / "lake" / "parts" / "candidate_ranking")
    verb = ["mirto", "ingest", str(study_file), "--lake", str(tmp_path / "lake"), "--workers", "1"]
    for options, measured in (([], 0), (["--diagnostics"], METHODS * TEST_SUBJECTS)):
        monkeypatch.setattr(sys, "argv", [*verb, *options])
        with pytest.raises(SystemExit) as end:
            mirto.main()
        assert not end.value.code
        assert f"Measured {measured} parts" in capsys.readouterr().out


def test_without_diagnostics_the_marts_say_what_is_lacking(study_file: Path, lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake, tmp_path / "lake")
    for name in DIAGNOSTIC_TABLES:
        shutil.rmtree(tmp_path / "lake" / "parts" / name)
    assert set(counts(ingest(study_file, tmp_path / "lake", diagnostics=False)).values()) == {0}
    with open_for_building(None, tmp_path / "lake") as connection:
        build_tables(connection, read_manifest(tmp_path / "lake"), WANTED)
        rows = connection.sql("select * from diagnostic").pl()
        lacking = rows.filter(pl.col("diagnostic_id").is_in(["rank_stability", "transform_scan"]))
        assert set(lacking.get_column("status")) == {"unavailable"}
        assert all("--diagnostics" in reason for reason in lacking.get_column("reason"))
        known = rows.filter(pl.col("diagnostic_id").is_in(["anti_location", "shared_conspicuity", "jaccard_bound"]))
        assert set(known.get_column("status")) == {"ok"}
        assert connection.sql("select count(*) from corruption_effect").pl().item() == 0
        assert set(connection.sql("select status from diagnostic_power").pl().get_column("status")) == {"unavailable"}
