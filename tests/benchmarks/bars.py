"""Bars: two ways to do one thing, timed in turns, and the table of their ratios."""

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Generic, Protocol, TypeVar

R = TypeVar("R")
S = TypeVar("S")

PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "polars",
    "nibabel",
    "deflate",
    "scikit-learn",
    "connected-components-3d",
    "pytest-benchmark",
)


class Benchmark(Protocol):
    """The part of pytest-benchmark's fixture that is used here."""

    def pedantic(
        self, target: Callable[[], object], *, setup: Callable[[], None] | None = None, rounds: int = 1
    ) -> object:
        """Time `target` so often, with `setup` untimed before each round."""
        ...


@dataclass(frozen=True)
class Timing:
    """Best of several rounds, in seconds: processor time of the process, and time by the clock."""

    cpu_s: float
    wall_s: float

    def __str__(self) -> str:
        return f"{self.cpu_s:.4f} s" if self.cpu_s < 0.1 else f"{self.cpu_s:.2f} s"


class Stopwatch(Generic[R]):
    """Runs a task, keeping its last result and its best times."""

    def __init__(self, task: Callable[[], R]) -> None:
        self.task = task
        self.best = Timing(float("inf"), float("inf"))

    def __call__(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self.result = self.task()
        spent = Timing(time.process_time() - cpu, time.perf_counter() - wall)
        self.best = Timing(min(self.best.cpu_s, spent.cpu_s), min(self.best.wall_s, spent.wall_s))


def timed(benchmark: Benchmark, task: Callable[[], R], rounds: int) -> Stopwatch[R]:
    """Time a task under pytest-benchmark, once compiled and warm."""
    watch = Stopwatch(task)
    task()
    benchmark.pedantic(watch, rounds=rounds)
    return watch


def race(
    benchmark: Benchmark, task: Callable[[], R], rival: Callable[[], S], rounds: int = 7, rival_rounds: int = 3
) -> tuple[Stopwatch[R], Stopwatch[S]]:
    """Time a task and its rival in turns, so that a busy machine slows both."""
    watch, rival_watch = Stopwatch(task), Stopwatch(rival)
    turns = iter(range(rival_rounds))

    def rival_turn() -> None:
        if next(turns, None) is not None:
            rival_watch()

    task()
    benchmark.pedantic(watch, setup=rival_turn, rounds=rounds)
    return watch, rival_watch


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        bar: Number of the bar.
        what: What is measured, and on which map.
        ours: Our figure.
        rival: What it is compared with, and its figure or why there is none.
        limit: The bar: the largest ratio allowed, or with `at_least` the smallest.
        ratio: By processor time, or whatever decides; None where the rival is missing.
        wall_ratio: By the clock; None where that means nothing.
        same: Whether results are the same as the slow twin's.
        at_least: Whether more is better.
    """

    bar: int
    what: str
    ours: str
    rival: str
    limit: float
    ratio: float | None
    wall_ratio: float | None
    same: bool
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Wrong results, or pass, or miss."""
        if not self.same:
            return "RESULTS DIFFER"
        if self.ratio is None:
            return "not run"
        return "pass" if (self.ratio >= self.limit if self.at_least else self.ratio <= self.limit) else "miss"

    @property
    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        ratio, wall = ("" if value is None else f"{value:.3f}x" for value in (self.ratio, self.wall_ratio))
        limit = f"{'>=' if self.at_least else '<='} {self.limit:g}x"
        return str(self.bar), self.what, self.ours, self.rival, ratio, wall, limit, self.verdict


def row_of_race(bar: int, what: str, ours: Timing, rival: tuple[str, Timing], limit: float, *, same: bool) -> Row:
    """A line that compares two timings."""
    name, timing = rival
    ratio, wall = ours.cpu_s / timing.cpu_s, ours.wall_s / timing.wall_s
    return Row(bar, what, str(ours), f"{name}: {timing}", limit, ratio, wall, same)


@dataclass
class Bars:
    """All that one run found: lines, and the stages of one map by name of the map, the floor of all of them last."""

    rows: list[Row] = field(default_factory=list[Row])
    shares: dict[str, dict[str, Timing]] = field(default_factory=dict[str, dict[str, Timing]])
    peers: dict[str, str] = field(default_factory=dict[str, str])
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, row: Row) -> None:
        """Keep a line; a benchmark fails only where results differ.

        Raises:
            AssertionError: Results are not those of the slow twin.
        """
        self.rows.append(row)
        assert row.same, f"bar {row.bar}, {row.what}: results differ from the slow twin's"

    def text(self) -> str:
        """The table, where one map's time goes, and the machine."""
        header = ("bar", "what", "mirto", "against", "ratio", "by clock", "limit", "verdict")
        lines = aligned([header, *(row.cells for row in sorted(self.rows, key=lambda row: row.bar))])
        return "\n".join([*lines, "", *self._where_the_time_goes(), *self._facts()])

    def _where_the_time_goes(self) -> list[str]:
        """Lines of a table of stages against the floor, the last stage of each map; none where it was not measured."""
        if not self.shares:
            return []
        header = ["where the time of one map goes"]
        for name in self.shares:
            header += [f"{name} map", "by clock", "of floor"]
        table = [tuple(header)]
        for stage in next(iter(self.shares.values())):
            cells = [stage]
            for stages in self.shares.values():
                spent, floor = stages[stage], list(stages.values())[-1]
                cells += [f"{1000 * spent.cpu_s:.1f} ms", f"{1000 * spent.wall_s:.1f} ms"]
                cells += [f"{spent.cpu_s / floor.cpu_s:.2f}x"]
            table.append(tuple(cells))
        return [*aligned(table), ""]

    def _facts(self) -> list[str]:
        installed = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        peers = ", ".join(f"{name} {number}" for name, number in self.peers.items()) or "none installed"
        load = f"load {self.load_at_start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
        return [
            "Best of several rounds taken in turns. ratio: by processor time, which a busy machine disturbs less.",
            f"machine: {processor()}, {os.cpu_count()} cores, {platform.system()}, {load}",
            f"mirto's environment: Python {platform.python_version()}, {installed}",
            f"peers' environment: {peers}",
        ]


def aligned(table: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table with columns as wide as their longest cell."""
    rows = list(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def processor() -> str:
    """Name of the processor."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
