"""What must survive: readers during a publish, a worker that dies, threads and repetition, a full disk."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import duckdb
import polars as pl
import pytest

from expectations.store import Part, PartStore
from expectations.study import Study, load_study
from expectations.suites import Finding
from expectations.tables import lake_tables
from ingest import bundles
from ingest.jobs import InProcess, Job, Processes
from ingest.manifest import Manifest, read_manifest
from ingest.phantom import write_phantom
from ingest.plan import CheckTask, SubjectTask, plan_study
from ingest.run import Ingest
from marts.lake import build_release, connect, live_release, prune, validate_live
from marts.release import build_tables, content_hash, name_is_view, open_for_building


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("reliable") / "study"
    file = write_phantom(folder, validation=2, test=3, spacing_mm=6.0)
    few = "multiverse_replicates = 20\ncontrast_replicates = 100\nconformal_split_count = 20\nbudgets_cm3 = [20]\n"
    file.write_text(f"{file.read_text()}\n[protocol]\n{few}")
    return load_study(file)


@pytest.fixture(scope="module")
def measured(study: Study, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    lake = tmp_path_factory.mktemp("reliable-lake") / "lake"
    return lake, Ingest(study, lake, InProcess()).run().manifest


def hash_of(lake: Path, manifest: Manifest, threads: int) -> str:
    with open_for_building(None, lake) as connection:
        connection.execute(f"set threads = {threads}")
        built = build_tables(connection, manifest)
        return content_hash(connection, [name for name in built.tables if not name_is_view(name, built.marts)])


def test_the_same_inputs_give_the_same_content_on_any_number_of_threads(measured: tuple[Path, Manifest]) -> None:
    lake, manifest = measured
    assert len({hash_of(lake, manifest, threads) for threads in (1, 2)}) == 1


def test_a_lake_in_bundles_gives_the_same_content_as_its_parts(
    phantom_lake: Path, phantom_marts: duckdb.DuckDBPyConnection
) -> None:
    manifest = read_manifest(phantom_lake)
    assert manifest.files("threshold_curve") != list(manifest.parts["threshold_curve"])
    in_parts = manifest.model_copy(update={"bundles": ()})
    assert in_parts.fingerprint == manifest.fingerprint
    with open_for_building(None, phantom_lake) as connection:
        built = build_tables(connection, in_parts)
        names = [name for name in built.tables if not name_is_view(name, built.marts)]
        assert content_hash(connection, names) == content_hash(phantom_marts, names)


def test_bundles_are_validated_and_pruned(
    measured: tuple[Path, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FEWEST", 4)
    lake = tmp_path / "lake"
    shutil.copytree(measured[0], lake)
    manifest = measured[1].model_copy(update={"bundles": bundles.bundle_parts(lake, measured[1].parts)})
    manifest.write(lake)
    assert build_release(lake, manifest).release is not None
    assert [finding for finding in validate_live(lake) if finding.severity == "stop"] == []

    older = bundles.bundle_parts(lake, {"lesion_match": manifest.parts["lesion_match"][1:]})
    gone = set(older) - set(manifest.bundles)
    assert gone and prune(lake, 1) == ([], len(gone))
    assert {file.relative_to(lake).as_posix() for file in lake.glob("bundles/*/*")} == set(manifest.bundles)
    with connect(lake) as connection:
        assert connection.execute("select count(*) from lesion_match").fetchall() != [(0,)]

    altered = lake / next(path for path in manifest.bundles if path.startswith("bundles/slice_ranking/"))
    pl.read_parquet(altered).with_columns(pl.col("auroc") * 0.5).write_parquet(altered)
    [finding] = [finding for finding in validate_live(lake) if finding.table == "slice_ranking"]
    assert (
        finding.rule == "a bundle differs from the parts that it copies" and "bundles/slice_ranking" in finding.remedy
    )


def test_two_workers_measure_the_same_parts(study: Study, measured: tuple[Path, Manifest], tmp_path: Path) -> None:
    processes = Processes(2)
    try:
        report = Ingest(study, tmp_path / "lake", processes).run()
    finally:
        processes.close()
    assert report.manifest.parts == measured[1].parts
    for paths in report.manifest.parts.values():
        for path in paths:
            assert (tmp_path / "lake" / path).read_bytes() == (measured[0] / path).read_bytes()


class Deadly:
    """A job that ends the worker process that unpickles it."""

    parts: tuple[Part, ...] = ()

    def __init__(self, like: CheckTask) -> None:
        self.sources = like.sources

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (9,)


def test_a_worker_that_dies_takes_only_its_own_job_along(study: Study, tmp_path: Path) -> None:
    plan = plan_study(study)
    store = PartStore(tmp_path)
    table = lake_tables()["subject"].name
    good: list[Job] = [
        SubjectTask(s, plan.voxel_size_mm, plan.parameters, (Part(table, f"@{s.subject_id}", "0"),))
        for s in plan.subjects
    ]
    deadly = cast(Job, Deadly(CheckTask(None, plan.subjects[0], plan.subjects[0].reference, None, True)))
    done: list[None] = []
    processes = Processes(2)
    try:
        failures = processes.run([good[0], deadly, *good[1:]], store, lambda: done.append(None))
    finally:
        processes.close()
    assert ["died" in failure.reason for failure in failures] == [True]
    assert all(store.has(part) for job in good for part in job.parts)


def no_findings(*_arguments: object) -> list[Finding]:
    return []


def test_readers_see_one_whole_release_or_the_next(
    measured: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, manifest = measured
    # what is swapped matters, not the checks, nor every mart
    monkeypatch.setattr("marts.lake.check_release", no_findings)
    monkeypatch.setattr("marts.lake.build_tables", partial(build_tables, wanted=["universe"]))
    assert build_release(lake, manifest).release is not None
    stop = threading.Event()
    seen: list[tuple[int, int]] = []
    torn: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                with connect(lake) as connection:
                    counts = connection.execute(
                        "select (select count(*) from universe), (select count(*) from threshold_curve)"
                    ).fetchall()[0]
                seen.append((int(counts[0]), int(counts[1])))
            except Exception as error:
                torn.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(2):
            assert build_release(lake, manifest).release is not None
    finally:
        stop.set()
        reader.join()
    assert torn == []
    assert len(seen) > 2 and len(set(seen)) == 1


def test_a_full_disk_leaves_no_part_and_says_so(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    lake = tmp_path / "lake"
    plan = plan_study(study)
    job = SubjectTask(plan.subjects[0], plan.voxel_size_mm, plan.parameters, (Part("subject", "@x", "0"),))
    monkeypatch.setattr(os, "fsync", full)
    failures = InProcess().run([job], PartStore(lake), lambda: None)
    assert len(failures) == 1 and "No space left" in failures[0].reason
    assert list(lake.rglob("*.parquet")) == [] and list(lake.rglob("*.tmp")) == []


def test_a_build_that_breaks_off_leaves_the_live_release(
    measured: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, manifest = measured
    before = live_release(lake) or build_release(lake, manifest).release

    def broken(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("marts.lake.check_release", broken)
    with pytest.raises(OSError, match="No space left"):
        build_release(lake, manifest)
    assert live_release(lake) == before
    assert list((lake / "releases").glob(".*")) == []
