"""Bars 4 (memory), 7 and 8: ingest of one map from files to parts, where its time goes, and two workers."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from expectations.store import PartStore
from expectations.study import load_study
from expectations.tables import lake_tables
from ingest.jobs import Processes
from ingest.lesions import label_reference
from ingest.measure import measure_task, warm_up
from ingest.measurement import WORKSPACE, Measurement
from ingest.measures import MEASURES
from ingest.nifti import read_labels, read_scores
from ingest.phantom import write_phantom
from ingest.plan import Task
from ingest.run import Ingest
from ingest.sweep import order_voxels, sweep
from tests.benchmarks.bars import Bars, Benchmark, Row, Timing, row_of_race, timed
from tests.benchmarks.conftest import NO_PEERS, ROOT, Peers
from tests.benchmarks.tasks import forget_subject, measure_single, part_of, plan_tasks
from tests.benchmarks.twins import curve_by_levels
from tests.benchmarks.workload import LEVEL, SHAPE, MapName, Volumes

FLOAT32_BYTES = 4 * int(np.prod(SHAPE))
ROUNDS = 5


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake that the benchmarks of this file write to."""
    warm_up()
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def tasks(study: Path, lake: Path) -> dict[str, Task]:
    """The task of the first subject for each map."""
    return {task.entry.method_id: task for task in reversed(plan_tasks(study, lake))}


def curve_is_right(store: PartStore, task: Task, volumes: Volumes, name: MapName) -> bool:
    """Whether the stored curve of plain thresholding is that of counting level by level."""
    stored = pl.read_parquet(store.path(part_of(task, "threshold_curve"))).filter(
        reference_id="canonical", support_id="brain", postprocess_id="plain"
    )
    expected = curve_by_levels(volumes.maps[name], volumes.brain, volumes.reference)
    found = (
        stored.sort("level").get_column(column).to_numpy() for column in ("predicted_voxels", "true_positive_voxels")
    )
    return all(np.array_equal(ours, twin) for ours, twin in zip(found, expected, strict=True))


def stored_dice(store: PartStore, task: Task) -> float:
    """Dice at the peers' threshold, by the stored curve."""
    row = pl.read_parquet(store.path(part_of(task, "threshold_curve"))).row(
        by_predicate=(pl.col("level") == LEVEL)
        & (pl.col("reference_id") == "canonical")
        & (pl.col("support_id") == "brain")
        & (pl.col("postprocess_id") == "plain"),
        named=True,
    )
    return 2 * row["true_positive_voxels"] / (row["predicted_voxels"] + row["reference_voxels"])


@pytest.mark.parametrize("contract", ["single", "full"])
@pytest.mark.parametrize("name", ["sparse", "dense"])
def bench_one_map(
    benchmark: Benchmark,
    bars: Bars,
    volumes: Volumes,
    peers: Peers,
    lake: Path,
    tasks: dict[str, Task],
    name: MapName,
    contract: str,
) -> None:
    store, task = PartStore(lake), tasks[name]
    measure, what, limit = {
        "single": (measure_single, "one map, one reference, support, connectivity", 0.2),
        "full": (measure_task, "one map, 3 references, 2 supports, 2 connectivities", 0.6),
    }[contract]

    def ingest() -> None:
        forget_subject()
        measure(task, store)

    peers.call("brats-evaluation", f"peers/{name}.nii.gz", "reference/one.nii.gz")
    ours = timed(benchmark, ingest, ROUNDS)
    same = curve_is_right(store, task, volumes, name)
    peer = peers.call("brats-evaluation", f"peers/{name}.nii.gz", "reference/one.nii.gz")
    what = f"{what}, {name}"
    if peer is None:
        bars.add(Row(7, what, str(ours.best), f"brats-evaluation: {NO_PEERS}", limit, None, None, same))
        return
    same &= abs(stored_dice(store, task) - peer.dice) < 1e-12
    bars.add(row_of_race(7, what, ours.best, ("brats-evaluation", peer.timing), limit, same=same))


@pytest.mark.parametrize("name", ["sparse", "dense"])
def bench_peak_memory(benchmark: Benchmark, bars: Bars, study: Path, tmp_path: Path, name: MapName) -> None:
    script = Path(__file__).with_name("memory.py")
    command = [sys.executable, script, study, tmp_path, name]

    def peak_bytes() -> int:
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout)

    peak = benchmark.pedantic(peak_bytes)
    assert isinstance(peak, int)
    what = f"peak memory of one map, all tables, {name}"
    rival = f"its float32 array: {FLOAT32_BYTES / 1e6:.0f} MB"
    bars.add(Row(4, what, f"{peak / 1e6:.0f} MB", rival, 4, peak / FLOAT32_BYTES, None, same=peak > 0))


@dataclass
class Stages:
    """Best times of the stages of a measurement, in order."""

    best: dict[str, Timing] = field(default_factory=dict[str, Timing])

    def run(self, name: str, step: Callable[[], object]) -> None:
        """Time one stage."""
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        spent = Timing(time.process_time() - cpu, time.perf_counter() - wall)
        known = self.best.get(name, spent)
        self.best[name] = Timing(min(known.cpu_s, spent.cpu_s), min(known.wall_s, spent.wall_s))


def run_stages(stages: Stages, task: Task, store: PartStore) -> None:
    """`measure_task`, with everything that its tables share brought forward stage by stage."""
    forget_subject()
    measurement = Measurement(task)
    stages.run("read reference and brain", lambda: measurement.volumes)
    stages.run("shells around lesions", lambda: measurement.shells)
    stages.run("regions of lesions", lambda: measurement.regions)
    stages.run("read and map the map", lambda: measurement.scores)
    stages.run("read the own reference", lambda: measurement.own)
    stages.run("own_mapped, round_trip", lambda: measurement.references)
    stages.run("supports", lambda: [(s.positive, s.clipped_inside) for s in measurement.supports])
    stages.run("label lesions", lambda: measurement.lesions)
    stages.run("passes (supports x connectivities)", lambda: measurement.sweeps)
    stages.run("slices", lambda: measurement.slices)
    frames: dict[str, pl.DataFrame] = {}
    for part in task.parts:
        stages.run(
            f"table {part.table}", lambda part=part: frames.update({part.table: MEASURES[part.table](measurement)})
        )
    for part in task.parts:
        table = lake_tables()[part.table]
        stages.run(f"write {part.table}", lambda part=part, table=table: store.write(part, table, frames[part.table]))


def run_floor(stages: Stages, task: Task) -> None:
    """What no ingest of this map can do without: reading its files, and one pass."""
    sources = [source for source in task.sources if source.role != "map"]
    stages.run("floor: decode map", lambda: read_scores(task.inputs.map.url))
    stages.run("floor: decode masks", lambda: [read_labels(source.url, source.labels) for source in sources])
    measurement = Measurement(task)
    support = measurement.supports[0]
    lesions = [label_reference(support.references["canonical"], support.mask, 6)]
    stages.run(
        "floor: one pass",
        lambda: sweep(order_voxels(support.clipped, support.mask, WORKSPACE), lesions, 6, [1.0], 50.0, 50.0),
    )


@pytest.mark.parametrize("name", ["sparse", "dense"])
def bench_where_the_time_goes(
    benchmark: Benchmark, bars: Bars, lake: Path, tasks: dict[str, Task], name: MapName
) -> None:
    stages, floor, store = Stages(), Stages(), PartStore(lake)

    def round_of_both() -> None:
        run_floor(floor, tasks[name])
        run_stages(stages, tasks[name], store)

    benchmark.pedantic(round_of_both, rounds=ROUNDS)
    written = [timing for stage, timing in stages.best.items() if stage.startswith("write ")]
    whole = total(list(stages.best.values()))
    assert whole.cpu_s > 0
    floor.best["floor: write"] = total(written)
    least = total(list(floor.best.values()))
    bars.shares[name] = stages.best | {"all": whole} | floor.best | {"floor: all": least}


def total(timings: list[Timing]) -> Timing:
    """The sum of several timings."""
    return Timing(sum(timing.cpu_s for timing in timings), sum(timing.wall_s for timing in timings))


def contents(lake: Path) -> dict[str, str]:
    """SHA-256 of every part of a lake, by relative path."""
    parts = (lake / "parts").rglob("*.parquet")
    return {str(part.relative_to(lake)): hashlib.sha256(part.read_bytes()).hexdigest() for part in parts}


def bench_two_workers(benchmark: Benchmark, bars: Bars, study: Path, tmp_path: Path) -> None:
    runners = {workers: Processes(workers) for workers in (1, 2)}
    phantom = write_phantom(tmp_path / "phantom", validation=1, test=3, spacing_mm=6.0)
    times: dict[int, list[float]] = {1: [], 2: []}
    found: dict[int, dict[str, str]] = {}
    load = os.getloadavg()[0]

    def ingest(workers: int, turn: int) -> None:
        lake = tmp_path / f"{workers}-{turn}"
        start = time.perf_counter()
        report = Ingest(load_study(study), lake, runners[workers]).run()
        times[workers].append(time.perf_counter() - start)
        assert not report.manifest.failures
        found[workers] = contents(lake)

    def turns() -> None:
        for turn in range(2):
            for workers in runners:
                ingest(workers, turn)

    try:
        for workers, runner in runners.items():  # a phantom starts the pools: they are started once in a run
            Ingest(load_study(phantom), tmp_path / f"phantom-{workers}", runner).run()
        benchmark.pedantic(turns)
    finally:
        for runner in runners.values():
            runner.close()
    one, two = (min(times[workers]) for workers in (1, 2))
    what = f"ingest of 8 maps, two workers (load before: {load:.1f})"
    ours, rival = f"{two:.2f} s by clock", f"one worker: {one:.2f} s by clock"
    same = found[1] == found[2]
    bars.add(Row(8, what, ours, rival, 1.5, one / two, one / two, same, at_least=True))
