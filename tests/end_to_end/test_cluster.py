"""Ingest over a `distributed` scheduler on loopback, one of its worker processes killed midway."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from expectations.study import load_study
from ingest.jobs import Cluster, InProcess
from ingest.phantom import write_phantom
from ingest.run import Ingest

LOOPBACK = "127.0.0.1"


@contextmanager
def cluster(folder: Path) -> Generator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two worker processes without nannies, so that a killed worker stays dead."""
    file = folder / "scheduler.json"
    scheduler = start(
        "dask_scheduler", "--host", LOOPBACK, "--port", "0", "--no-dashboard", "--scheduler-file", str(file)
    )
    options = ["--no-nanny", "--nthreads", "1", "--host", LOOPBACK, "--no-dashboard", "--local-directory", str(folder)]
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [start("dask_worker", "--scheduler-file", str(file), *options) for _ in range(2)]
    try:
        yield address_in(file), workers
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def start(module: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"distributed.cli.{module}", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def address_in(file: Path) -> str:
    return str(json.loads(file.read_text())["address"])


@pytest.mark.filterwarnings("default")  # a lost worker is logged and warned of by distributed itself
def test_a_cluster_that_loses_a_worker_gives_the_same_parts(tmp_path: Path) -> None:
    study = load_study(write_phantom(tmp_path / "study", validation=2, test=3, spacing_mm=6.0))
    with cluster(tmp_path) as (address, workers):
        lake = tmp_path / "lake"

        def kill_one_midway() -> None:
            deadline = time.monotonic() + 120
            while len(list(lake.glob("parts/threshold_curve/*.parquet"))) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(workers[0].pid, signal.SIGKILL)

        killer = Thread(target=kill_one_midway)
        killer.start()
        report = Ingest(study, lake, Cluster(address)).run()
        killer.join()
        assert workers[0].wait() == -signal.SIGKILL
    assert report.manifest.failures == ()
    alone = Ingest(study, tmp_path / "alone", InProcess()).run()
    assert report.manifest.parts == alone.manifest.parts
    for paths in report.manifest.parts.values():
        for path in paths:
            assert (lake / path).read_bytes() == (tmp_path / "alone" / path).read_bytes()
