"""The command line as its users meet it: what is printed, what is published, and the exit code of each kind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import nibabel as nib
import numpy as np
import pytest

import mirto
from ingest.phantom import write_phantom, write_volume
from marts import quality
from marts.lake import connect, live_release, writing

# A quarter of the universes and few replicates: these tests are about the way, not about the multiverse.
FEW = "multiverse_replicates = 20\ncontrast_replicates = 100\nconformal_split_count = 20\n"
ONE_BUDGET = f"\n[protocol]\n{FEW}budgets_cm3 = [20]\nreference_budget_cm3 = 20\n"
GUARDED_ROWS = quality.GUARDED_ROWS  # outside the tests, which check small marts in SQL
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small phantom study; never changed."""
    folder = tmp_path_factory.mktemp("cli") / "study"
    study = write_phantom(folder, validation=3, test=3, spacing_mm=6.0)
    study.write_text(study.read_text() + ONE_BUDGET)
    return folder


@pytest.fixture(scope="session")
def published(study_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with one release of the phantom, its marts guarded by Great Expectations; never changed."""
    lake = tmp_path_factory.mktemp("cli-lake") / "lake"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "GUARDED_ROWS", GUARDED_ROWS)
        patch.setattr(
            sys, "argv", ["mirto", "rebuild", str(study_folder / "study.toml"), "--lake", str(lake), "--workers", "1"]
        )
        with pytest.raises(SystemExit) as end:
            mirto.main()
    assert not end.value.code
    return lake


@pytest.fixture
def own_study(study_folder: Path, tmp_path: Path) -> Path:
    """A copy of the study that a test may spoil."""
    shutil.copytree(study_folder, tmp_path / "study")
    return tmp_path / "study"


@pytest.fixture
def own_lake(published: Path, tmp_path: Path) -> Path:
    """A copy of the published lake that a test may change."""
    shutil.copytree(published, tmp_path / "lake")
    return tmp_path / "lake"


def rebuild(run: Run, study: Path, lake: Path, *options: str) -> tuple[int, str, str]:
    return run("rebuild", study / "study.toml", "--lake", lake, "--workers", "1", *options)


def release_of(lake: Path) -> str:
    live = live_release(lake)
    assert live is not None
    return live.release_id


def scalar(lake: Path, sql: str) -> object:
    with connect(lake) as connection:
        return connection.execute(sql).fetchall()[0][0]


def test_a_release_is_published_with_its_docs_and_nothing_left_beside(published: Path) -> None:
    release = release_of(published)
    assert (published / "releases" / f"{release}.duckdb").samefile(published / "mirto.duckdb")
    assert (published / "docs" / release / "index.html").is_file()
    assert [p for p in published.rglob(".*") if p.name != ".lock"] == []
    assert scalar(published, "select count(*) from universe") == 155_520 // 4
    assert scalar(published, "select count(*) from identity_check where not holds") == 0


def test_an_unchanged_study_has_nothing_to_do(run: Run, study_folder: Path, own_lake: Path) -> None:
    before = release_of(own_lake)
    code, out, _ = rebuild(run, study_folder, own_lake)
    assert code == 0
    assert "Measured 0 parts" in out and "Nothing to do" in out
    assert release_of(own_lake) == before


def test_new_budgets_measure_critical_thresholds_and_nothing_else(run: Run, own_study: Path, own_lake: Path) -> None:
    file = own_study / "study.toml"
    file.write_text(file.read_text().replace(ONE_BUDGET, ONE_BUDGET.replace("[20]", "[10, 20]")))
    before = set(own_lake.glob("parts/*/*.parquet"))
    assert rebuild(run, own_study, own_lake)[0] == 0
    fresh = set(own_lake.glob("parts/*/*.parquet")) - before
    assert {part.parent.name for part in fresh} == {"critical_threshold"}
    assert scalar(own_lake, "select count(distinct budget_cm3) from operating_point") == 2
    assert scalar(own_lake, "select count(*) from universe") == 155_520 // 2


def test_a_new_method_measures_only_itself(run: Run, own_study: Path, own_lake: Path) -> None:
    file = own_study / "study.toml"
    text = file.read_text()
    second = text[text.index("[[method]]", text.index("[[method]]") + 1) :]
    first = text[text.index("[[method]]") : text.index(second)]
    file.write_text(text.replace(first, first + first.replace('id = "diffuse"', 'id = "again"')))
    before = set(own_lake.glob("parts/*/*.parquet"))
    assert rebuild(run, own_study, own_lake)[0] == 0
    fresh = [part for part in set(own_lake.glob("parts/*/*.parquet")) - before if part.parent.name != "method"]
    assert fresh and all(part.name.startswith("again@") for part in fresh)  # `method` rows hold the declared order
    with connect(own_lake) as connection:
        same = connection.execute(
            "select count(*) from operating_point as a join operating_point as d"
            " using (threshold_rule_id, budget_cm3, postprocess_id)"
            " where a.method_id = 'again' and d.method_id = 'diffuse' and a.dice_mean = d.dice_mean"
        ).fetchall()[0][0]
    assert same > 0


def test_a_wrong_reversed_flag_stops_and_leaves_the_live_release(run: Run, own_study: Path, own_lake: Path) -> None:
    before = release_of(own_lake)
    file = own_study / "study.toml"
    assert "reversed = [false, true, false]" in file.read_text()
    file.write_text(file.read_text().replace("reversed = [false, true, false]", "reversed = [false, false, false]"))
    code, _, err = rebuild(run, own_study, own_lake)
    assert code == mirto.STOPPED
    assert "gate_summary" in err and "method_id=diffuse" in err
    assert "lip 1 would give" in err and "toggle reversed[1] in the transform of diffuse" in err
    assert "under [method.transform] of diffuse, write\n     reversed = [false, true, false]\n" in err
    assert release_of(own_lake) == before
    assert (own_lake / "docs" / "stopped" / "index.html").is_file()


def test_a_failed_method_can_be_held_out(run: Run, own_study: Path, own_lake: Path) -> None:
    file = own_study / "study.toml"
    spoilt = file.read_text().replace("reversed = [false, true, false]", "reversed = [false, false, false]")
    file.write_text(spoilt + 'gate_failure = "hold_out"\n')
    code, _, err = rebuild(run, own_study, own_lake)
    assert code == 0
    assert "WARN gate_summary" in err
    assert scalar(own_lake, "select count(*) from operating_point where method_id = 'diffuse'") == 0
    assert scalar(own_lake, "select reason from ranked_method where not is_ranked") is not None
    assert scalar(own_lake, "select count(*) from cohort_subject where not is_included") == 0


def spoil_with_nan(path: Path) -> None:
    image = nib.Nifti1Image.from_filename(path)
    values = np.asanyarray(image.dataobj).astype(np.float32)
    values.flat[:7] = np.nan
    write_volume(path, values, (6.0, 6.0, 6.0))


def test_a_bad_file_is_named_and_nothing_is_published_without_leave(run: Run, own_study: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    map_path = next((own_study / "maps" / "diffuse").glob("phantom02*"))
    maps = sorted(p for p in (own_study / "maps" / "diffuse").iterdir() if "label" not in p.name and "02" in p.name)
    spoil_with_nan(maps[0])
    truncated = sorted(p for p in (own_study / "maps" / "sharp").iterdir() if "label" not in p.name and "05" in p.name)[
        0
    ]
    truncated.write_bytes(truncated.read_bytes()[:-200])
    assert map_path.exists()
    code, _, err = rebuild(run, own_study, lake)
    assert code == mirto.BAD_INPUT
    assert f"maps/diffuse/{maps[0].name}: holds 7 NaN or infinite values" in err
    assert f"maps/sharp/{truncated.name}: " in err
    assert not (lake / "mirto.duckdb").exists()
    code, out, err = rebuild(run, own_study, lake, "--allow-incomplete")
    assert code == 0
    assert "Measured 0 parts" in out
    assert scalar(lake, "select count(*) from failure") == 2
    assert scalar(lake, "select failure_count from release") == 2
    assert scalar(lake, "select count(*) from cohort_subject where not is_included") == 2
    assert scalar(lake, "select max(n_subjects) from operating_point") == 2  # of three test subjects


def test_check_lists_all_problems_at_once(run: Run, own_study: Path) -> None:
    maps = sorted(p for p in (own_study / "maps" / "diffuse").iterdir() if "label" not in p.name)
    spoil_with_nan(maps[0])
    maps[1].write_bytes(b"")
    maps[2].unlink()
    code, out, _ = run("check", own_study / "study.toml", "--workers", "1", "--json")
    assert code == mirto.BAD_INPUT
    problems = {problem["path"]: problem["found"] for problem in json.loads(out)}
    assert len(problems) == 3
    assert "NaN" in problems[f"maps/diffuse/{maps[0].name}"]
    assert "no such file" in problems[f"maps/diffuse/{maps[2].name}"]
    code, out, _ = run("check", own_study / "study.toml", "--workers", "1", "--quick")
    assert code == mirto.BAD_INPUT
    assert "NaN" not in out and "2 problems." in out


def test_check_of_a_good_study_is_fine(run: Run, study_folder: Path) -> None:
    code, out, _ = run("check", study_folder / "study.toml", "--workers", "1")
    assert code == 0
    assert "fine" in out


def test_a_bad_study_file_is_told_without_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('[study]\nname = "x"\nvoxel_size_mm = [1, 1]\n')
    code, _, err = run("rebuild", tmp_path / "study.toml", "--lake", tmp_path / "lake")
    assert code == mirto.BAD_INPUT
    assert "study.voxel_size_mm" in err and "files" in err and "Traceback" not in err
    assert not (tmp_path / "lake").exists()


def test_a_second_writer_is_told_to_wait(run: Run, study_folder: Path, tmp_path: Path) -> None:
    holder = "import sys, time; from pathlib import Path; from marts.lake import writing\n"
    holder += "with writing(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    lake = tmp_path / "lake"
    with subprocess.Popen([sys.executable, "-c", holder, str(lake)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        code, _, err = rebuild(run, study_folder, lake)
        process.kill()
    assert code == mirto.BUSY
    assert "another run" in err
    with writing(lake):  # the lock went with the process
        assert lake.is_dir()


def test_a_killed_ingest_leaves_whole_parts_and_resumes(
    run: Run, study_folder: Path, published: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    arguments = [sys.executable, "-m", "mirto", "ingest", str(study_folder / "study.toml"), "--lake", str(lake)]
    with subprocess.Popen(
        [*arguments, "--workers", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(lake.glob("parts/threshold_curve/*.parquet"))) < 5:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    survivors = {p.name for p in lake.glob("parts/*/*.parquet")}
    assert 5 <= len(list(lake.glob("parts/threshold_curve/*.parquet"))) < 36
    assert not (lake / "manifest.json").exists()
    assert run("ingest", study_folder / "study.toml", "--lake", lake, "--workers", "1")[0] == 0
    assert not list(lake.glob("parts/*/.*"))
    now = {p.name for p in lake.glob("parts/*/*.parquet")}
    assert survivors <= now
    assert now == {p.name for p in published.glob("parts/*/*.parquet")}


def test_a_stop_check_of_the_study_keeps_the_live_release(run: Run, own_study: Path, own_lake: Path) -> None:
    before = release_of(own_lake)
    (own_study / "sql").mkdir()
    (own_study / "sql" / "dice_of_method.sql").write_text(
        "-- One row per method.\n-- key: method_id\n-- columns: dice_mean?\n"
        "-- stop: dice_mean > 2 | no Dice is that high\n"
        "select method_id, max(dice_mean) as dice_mean from operating_point group by method_id\n"
    )
    file = own_study / "study.toml"
    file.write_text(file.read_text().replace("[study]\n", '[study]\nsql = "sql"\n', 1))
    code, _, err = rebuild(run, own_study, own_lake)
    assert code == mirto.STOPPED
    assert "STOP dice_of_method: dice_mean > 2 (6 rows)" in err and "no Dice is that high" in err
    assert release_of(own_lake) == before
    mart = own_study / "sql" / "dice_of_method.sql"
    mart.write_text(mart.read_text().replace("stop: dice_mean > 2", "warn: dice_mean > 2"))
    code, _, err = rebuild(run, own_study, own_lake)
    assert code == 0
    assert "WARN dice_of_method" in err
    assert scalar(own_lake, "select count(*) from dice_of_method") == 6


def test_a_bad_mart_names_its_file(run: Run, own_study: Path, own_lake: Path) -> None:
    (own_study / "sql").mkdir()
    (own_study / "sql" / "wrong.sql").write_text(
        "-- One row per method.\n-- key: method_id\nselect method from nowhere\n"
    )
    file = own_study / "study.toml"
    file.write_text(file.read_text().replace("[study]\n", '[study]\nsql = "sql"\n', 1))
    code, _, err = rebuild(run, own_study, own_lake)
    assert code == mirto.BAD_INPUT
    assert "wrong.sql reads nowhere" in err


def test_a_study_replaces_a_hypothesis_and_a_wrong_one_is_named(run: Run, own_study: Path, own_lake: Path) -> None:
    (own_study / "sql" / "hypothesis").mkdir(parents=True)
    ours = own_study / "sql" / "hypothesis" / "H6_ours.sql"
    ours.write_text(
        "-- Our claim: every method is measured.\n-- criterion: one subject\n-- cases: every\n-- needs: a method\n"
        "select 'primary' as configuration_set, method_id as item, n_subjects as estimate, null as estimate_low,\n"
        "null as estimate_high, n_subjects - 1 as criterion_margin, n_subjects >= 1 as is_supported, 'so' as reason\n"
        "from gate_summary\n"
    )
    file = own_study / "study.toml"
    file.write_text(file.read_text().replace("[study]\n", '[study]\nsql = "sql"\n', 1))
    code, out, _ = rebuild(run, own_study, own_lake)
    assert code == 0
    assert "Our claim" in out and "Ranking instability" in out and "Test-tuning optimism" not in out
    assert scalar(own_lake, "select verdict from hypothesis where hypothesis_id = 'H6'") == "supported"
    stored = scalar(own_lake, "select sql from hypothesis_criterion where hypothesis_id = 'H6'")
    assert stored == ours.read_text()
    before = release_of(own_lake)
    ours.write_text(ours.read_text().replace("n_subjects as estimate", "n_people as estimate"))
    code, _, err = rebuild(run, own_study, own_lake)
    assert code == mirto.BAD_INPUT
    assert "H6_ours.sql" in err and "n_people" in err
    assert release_of(own_lake) == before


def test_a_moved_lake_keeps_working(
    run: Run, study_folder: Path, own_lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = own_lake.rename(tmp_path / "moved elsewhere")
    code, out, _ = run("query", moved, "select count(*) as n from threshold_curve", "--format", "json")
    assert code == 0
    assert json.loads(out)[0]["n"] > 0
    monkeypatch.chdir(moved)
    with duckdb.connect("mirto.duckdb", read_only=True) as plain:  # any DuckDB client, after cd LAKE
        assert plain.execute("select count(*) from threshold_curve").fetchall()[0][0] > 0
    monkeypatch.chdir(tmp_path)
    assert "Nothing to do" in rebuild(run, study_folder, moved)[1]


@pytest.mark.parametrize(
    "attack",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('{lake}/manifest.json')",
        "select * from glob('/etc/*')",
        "copy (select 1) to '{lake}/stolen.csv'",
        "create table mine as select 1",
        "drop table operating_point",
        "delete from operating_point",
        "attach '{lake}/other.duckdb'",
        "set enable_external_access = true",
        "install httpfs",
        "export database '{lake}/all'",
    ],
)
def test_a_query_can_neither_write_nor_read_elsewhere(run: Run, published: Path, attack: str) -> None:
    files = sorted(published.rglob("*"))
    code, out, err = run("query", published, attack.format(lake=published))
    assert code == mirto.BAD_INPUT
    assert err and not out.strip()
    assert sorted(published.rglob("*")) == files


def test_query_formats(run: Run, published: Path) -> None:
    sql = "select method_id, kind from method order by position"
    assert run("query", published, sql, "--format", "csv")[1].splitlines()[:2] == ["method_id,kind", "diffuse,method"]
    assert json.loads(run("query", published, sql, "--format", "json")[1])[0] == {
        "method_id": "diffuse",
        "kind": "method",
    }
    table = run("query", published, "select subject_id from subject order by all", "--limit", "2")[1]
    assert "phantom01" in table and "phantom03" not in table and "2 shown" in table
    wide = run("query", published, "from hypothesis where hypothesis_id = 'H1'")[1].splitlines()
    assert wide[0] == "row 1" and any(line.split() == ["required_cases", "any"] for line in wide)


def test_the_data_dictionary(run: Run, published: Path) -> None:
    out = run("tables", published)[1]
    assert "threshold_curve" in out and "flip_share" in out
    out = run("tables", published, "operating_point")[1]
    assert "burden_cm3_p95" in out and "[cm3]" in out
    code, _, err = run("tables", published, "nonsense")
    assert code == mirto.NOT_FOUND and "no table nonsense" in err


def test_earlier_releases_stay_readable_until_pruned(run: Run, own_study: Path, own_lake: Path) -> None:
    first = release_of(own_lake)
    time.sleep(1.1)  # releases are named by the second
    file = own_study / "study.toml"
    file.write_text(file.read_text().replace('id = "T2"\n', 'id = "T2w"\n'))
    assert rebuild(run, own_study, own_lake)[0] == 0
    second = release_of(own_lake)
    assert second != first
    listed = run("releases", own_lake)[1]
    assert f"{second} (live)" in listed and first in listed
    sql = "select count(*) as n from method where method_id = 'T2'"
    assert json.loads(run("query", own_lake, sql, "--release", first, "--format", "json")[1]) == [{"n": 1}]
    assert json.loads(run("query", own_lake, sql, "--format", "json")[1]) == [{"n": 0}]
    out = run("diff", own_lake, first, second)[1]
    assert "operating_point" in out and "rows" in out
    parts = set(own_lake.glob("parts/*/*.parquet"))
    code, out, _ = run("prune", own_lake, "--keep", "1")
    assert code == 0 and "Dropped 1 releases" in out
    gone = parts - set(own_lake.glob("parts/*/*.parquet"))
    assert gone and all(part.name.startswith("T2@") for part in gone)
    assert run("query", own_lake, "select 1", "--release", first)[0] == mirto.NOT_FOUND
    assert run("query", own_lake, "select count(*) from threshold_curve")[0] == 0


def test_no_release_yet(run: Run, tmp_path: Path) -> None:
    code, _, err = run("query", tmp_path, "select 1")
    assert code == mirto.NOT_FOUND and "no release yet" in err
    code, _, err = run("build", tmp_path)
    assert code == mirto.NOT_FOUND and "is no lake" in err


def test_build_tries_a_mart_without_publishing(run: Run, own_lake: Path) -> None:
    before = release_of(own_lake)
    code, out, _ = run("build", own_lake, "phi_max")
    assert code == 0 and "phi_max:" in out
    assert release_of(own_lake) == before
    assert run("build", own_lake, "no_such_mart")[0] == mirto.BAD_INPUT


def test_validate_keeps_the_live_release(run: Run, published: Path) -> None:
    code, out, _ = run("validate", published)
    assert code == 0 and "keeps every rule" in out


def help_of(verb: Sequence[str]) -> str:
    arguments = [sys.executable, "-m", "mirto", *verb, "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def test_help_names_every_verb() -> None:
    text = help_of([])
    for verb in (
        "demo",
        "check",
        "ingest",
        "rebuild",
        "build",
        "validate",
        "query",
        "tables",
        "releases",
        "diff",
        "prune",
        "report",
    ):
        assert verb in text
