"""Both studies laid out from real MRI, against scikit-learn and plain numpy; skipped where the data are absent."""

import subprocess
import sys
from pathlib import Path
from typing import cast

import duckdb
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

from expectations.study import load_study
from ingest.jobs import InProcess
from ingest.run import Ingest, Report
from marts.quality import check_release
from marts.release import build_tables, open_for_building

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "open_ms"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the open MS data are not beside this project")
Volume = NDArray[np.float32]
WANTED = ("gate_summary", "voxel_metric", "threshold_choice", "identity_check", "dropped_level")


def lay_out(folder: Path, *options: str) -> Path:
    subprocess.run([sys.executable, str(DATA / "make_study.py"), *options], check=True, capture_output=True)
    return folder / "study.toml"


def read(path: Path) -> Volume:
    return np.asanyarray(nib.Nifti1Image.from_filename(path).dataobj).astype(np.float32)


def measured(study: Path, lake: Path) -> tuple[Report, duckdb.DuckDBPyConnection]:
    report = Ingest(load_study(study), lake, InProcess()).run()
    assert report.manifest.failures == ()
    connection = open_for_building(None, lake)
    built = build_tables(connection, report.manifest, WANTED)
    assert [f for f in check_release(connection, built, None) if f.severity == "stop"] == []
    return report, connection


@pytest.fixture(scope="module")
def mni(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, duckdb.DuckDBPyConnection]:
    """Three subjects, maps from the real FLAIR."""
    folder = tmp_path_factory.mktemp("mni")
    study = lay_out(folder / "study", "mni", str(folder / "study"))
    return folder / "study", measured(study, folder / "lake")[1]


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, duckdb.DuckDBPyConnection]:
    """Nine subjects at 3 mm, simulated maps stored in four ways."""
    folder = tmp_path_factory.mktemp("cohort")
    study = lay_out(folder / "study", "cohort", str(folder / "study"), "--spacing", "3", "--subjects", "9")
    return folder / "study", measured(study, folder / "lake")[1]


def rows(connection: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[object, ...]]:
    return connection.execute(sql).fetchall()


def test_the_flair_baseline_equals_scikit_learn(mni: tuple[Path, duckdb.DuckDBPyConnection]) -> None:
    study, connection = mni
    found = rows(
        connection,
        "select subject_id, auroc, average_precision from voxel_ranking"
        " where method_id = 'FLAIR' and support_id = 'brain'",
    )
    assert len(found) == 3
    for subject, auroc, precision in found:
        brain = read(study / f"brain/{subject}.nii.gz") > 0.5
        truth = (read(study / f"reference/{subject}.nii.gz") > 0.5)[brain]
        image = read(study / f"intensity/FLAIR/{subject}.nii.gz")[brain].astype(np.float64)
        scores = ((image - image.mean()) / image.std()).astype(np.float32)
        assert auroc == pytest.approx(roc_auc_score(truth, scores), abs=1e-6)  # the frozen scale rounds to float32
        assert precision == pytest.approx(average_precision_score(truth, scores), abs=1e-4)


def test_flair_mean_test_auroc(mni: tuple[Path, duckdb.DuckDBPyConnection]) -> None:
    sql = (
        "select value, n_subjects from voxel_metric where method_id = 'FLAIR' and metric_id = 'voxel_auroc'"
        " and support_id = 'brain' and aggregation_id = 'mean'"
    )
    value, n_subjects = rows(mni[1], sql)[0]
    assert n_subjects == 2
    assert value == pytest.approx(0.94, abs=0.005)


def test_conformal_rules_are_infeasible_with_one_validation_subject(
    mni: tuple[Path, duckdb.DuckDBPyConnection],
) -> None:
    sql = "select distinct status, reason, threshold from threshold_choice where threshold_rule_id = 'crc_10'"
    assert rows(mni[1], sql) == [("infeasible", "needs 9 validation subjects, the cohort has 1", None)]
    assert ("crc_10",) in rows(mni[1], "select level_id from dropped_level")


@pytest.mark.parametrize("study_name", ["mni", "cohort"])
def test_the_gate_passes_every_store(study_name: str, request: pytest.FixtureRequest) -> None:
    connection = cast("tuple[Path, duckdb.DuckDBPyConnection]", request.getfixturevalue(study_name))[1]
    verdicts = rows(connection, "select verdict, misregistered_count from gate_summary")
    assert verdicts == [("passed", 0)] * 4


@pytest.mark.parametrize("study_name", ["mni", "cohort"])
def test_identities_hold(study_name: str, request: pytest.FixtureRequest) -> None:
    connection = cast("tuple[Path, duckdb.DuckDBPyConnection]", request.getfixturevalue(study_name))[1]
    assert rows(connection, "select count(*) from identity_check where not holds") == [(0,)]
    kinds = {row[0] for row in rows(connection, "select distinct identity from identity_check")}
    assert {"identity_1", "identity_2", "true_and_false_positives"} <= kinds


def test_curves_of_a_permuted_reversed_store_equal_brute_force(cohort: tuple[Path, duckdb.DuckDBPyConnection]) -> None:
    """`diffuse` swaps axes 0 and 1 and reverses canonical axis 1; `sharp` is cropped through-plane."""
    study, connection = cohort
    for method, subject in (("diffuse", "patient03"), ("sharp", "patient05")):
        brain = read(study / f"brain/{subject}.nii.gz") > 0.5
        truth = (read(study / f"reference/{subject}.nii.gz") > 0.5)[brain]
        stored = read(study / f"maps/{method}/{subject}.nii.gz")
        scores = np.zeros(brain.shape, np.float32)
        if method == "diffuse":
            scores[...] = stored.transpose(1, 0, 2)[:, ::-1, :]
        else:
            first = (brain.shape[2] - stored.shape[2]) // 2
            scores[:, :, first : first + stored.shape[2]] = stored
        inside = scores[brain]
        sql = (
            "select level, predicted_voxels, true_positive_voxels from threshold_curve"
            f" where method_id = '{method}' and subject_id = '{subject}' and support_id = 'brain'"
            " and reference_id = 'canonical' and voxel_volume_id = 'true' and postprocess_id = 'plain' order by level"
        )
        expected = [
            (
                level,
                int((inside > np.float32(level / 200)).sum()),
                int((truth & (inside > np.float32(level / 200))).sum()),
            )
            for level in range(201)
        ]
        assert rows(connection, sql) == expected
