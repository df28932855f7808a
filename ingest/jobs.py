"""Running jobs in parallel: in this process, in spawned processes, or on a `distributed` cluster.

A job writes its own parts; what comes back is nothing, or a failure. A worker that dies (killed, out of memory) takes
only the job that killed it along: the jobs then in flight are run again, each alone in a new pool.
"""

import multiprocessing
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dask.callbacks import Callback
from dask.multiprocessing import get as run_graph

from expectations.store import PartStore
from expectations.tables import ContractBroken
from ingest.manifest import Failure
from ingest.plan import CheckTask, DiagnosticTask, FileTask, SubjectTask, Task
from ingest.problems import BadInput

Job = Task | SubjectTask | FileTask | CheckTask
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS", "NUMBA_NUM_THREADS")


class Runner(Protocol):
    """Whatever runs jobs."""

    def run(self, jobs: Sequence[Job], store: PartStore, on_done: Callable[[], None]) -> list[Failure]:
        """Run every job, tell of each that ended, and return what failed."""
        ...


def execute(job: Job, lake: str) -> Failure | None:
    """Run one job; whatever goes wrong with it is a failure with a reason, so that the others go on."""
    try:
        _measure(job, PartStore(Path(lake)))
    except BadInput as problem:
        return failure(job, problem.path, problem.found, problem.remedy)
    except ContractBroken as broken:
        return failure(job, "", f"measured rows break their declaration: {broken}", "Report this defect")
    except MemoryError:
        return failure(job, "", "the worker ran out of memory", "Use fewer workers")
    except OSError as error:
        return failure(job, "", f"cannot be read or stored: {error}", "Mend the disk or the path and run it again")
    except Exception as error:
        found = f"measuring stopped with {type(error).__name__}: {error}"
        return failure(job, "", found, "Report this defect with the file's header")
    return None


def _measure(job: Job, store: PartStore) -> None:
    from ingest.diagnosis import diagnose  # numba: only in workers
    from ingest.measure import check_file, describe_files, measure_subject, measure_task

    if isinstance(job, DiagnosticTask):
        diagnose(job, store)
    elif isinstance(job, Task):
        measure_task(job, store)
    elif isinstance(job, SubjectTask):
        measure_subject(job, store)
    elif isinstance(job, FileTask):
        describe_files(job, store)
    else:
        check_file(job)


def failure(job: Job, url: str, reason: str, remedy: str) -> Failure:
    """A failure of a job, at one of its files (the first where the URL is none of them)."""
    source = next((source for source in job.sources if source.url == url), job.sources[0])
    return Failure(
        task=", ".join(sorted({part.table for part in job.parts})) or "check",
        subject_id=source.subject_id,
        method_id=job.entry.method_id if isinstance(job, Task) else source.method_id,
        path=source.path,
        reason=reason,
        remedy=remedy,
    )


@dataclass(frozen=True)
class InProcess:
    """Runs jobs one after another in this process."""

    def run(self, jobs: Sequence[Job], store: PartStore, on_done: Callable[[], None]) -> list[Failure]:
        """Run every job here."""
        failures: list[Failure] = []
        for job in jobs:
            if found := execute(job, str(store.lake)):
                failures.append(found)
            on_done()
        return failures


class _Watch(Callback):
    """Follows a dask computation: which jobs are in flight, and what each that ended returned."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        super().__init__()
        self.on_done = on_done
        self.in_flight: set[int] = set()
        self.ended: dict[int, Failure | None] = {}

    def _pretask(self, key: int, _dsk: object, _state: object) -> None:
        self.in_flight.add(key)

    def _posttask(self, key: int, result: Failure | None, _dsk: object, _state: object, _worker: object) -> None:
        self.in_flight.discard(key)
        self.ended[key] = result
        self.on_done()


@dataclass
class Processes:
    """Runs jobs in spawned processes through dask's local scheduler, one thread each.

    Fork is never used: it hangs with Polars, and numba refuses it.
    """

    workers: int
    pool: ProcessPoolExecutor | None = field(default=None, init=False)

    def run(self, jobs: Sequence[Job], store: PartStore, on_done: Callable[[], None]) -> list[Failure]:
        """Run every job; after a worker died, the jobs in flight are run again, each alone."""
        together, alone = dict(enumerate(jobs)), dict[int, Job]()
        failures: list[Failure] = []
        while together:
            watch = self._compute(together, store, on_done)
            failures += [found for found in watch.ended.values() if found]
            alone |= {number: jobs[number] for number in watch.in_flight}
            together = {n: job for n, job in together.items() if n not in watch.ended and n not in watch.in_flight}
        for number, job in alone.items():
            watch = self._compute({number: job}, store, on_done)
            found = failure(job, "", "the worker process died measuring it, twice", "Use fewer workers, or more memory")
            failures += [found for found in [watch.ended.get(number, found)] if found]
        return failures

    def _compute(self, jobs: dict[int, Job], store: PartStore, on_done: Callable[[], None]) -> _Watch:
        """One dask computation; it ends early when a worker dies."""
        graph = {number: (execute, job, str(store.lake)) for number, job in jobs.items()}
        watch = _Watch(on_done)
        try:
            with watch:
                run_graph(graph, list(graph), pool=self._warm_pool(), chunksize=1, optimize_graph=False)
        except BrokenProcessPool:
            self.close()
        return watch

    def _warm_pool(self) -> ProcessPoolExecutor:
        """The one reused pool; its first worker compiles the kernels, so that the others find them on disk."""
        if self.pool is None:
            with _one_thread_each():
                self.pool = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))
                self.pool.submit(warm_up).result()
                for started in [self.pool.submit(os.getpid) for _ in range(self.workers)]:
                    started.result()
        return self.pool

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None


@dataclass(frozen=True)
class Cluster:
    """Runs jobs on a `distributed` scheduler; its workers must see the same files and lake."""

    address: str

    def run(self, jobs: Sequence[Job], store: PartStore, on_done: Callable[[], None]) -> list[Failure]:
        """Run every job there; the scheduler gives the jobs of a lost worker to another."""
        from distributed import Client, as_completed

        failures: list[Failure] = []
        with Client(self.address) as client:
            futures = {client.submit(execute, job, str(store.lake.resolve()), pure=False): job for job in jobs}
            for future in as_completed(futures):
                error = future.exception()
                lost = failure(futures[future], "", f"the cluster lost it: {error}", "Run it again")
                found = lost if error else future.result()
                failures += [found] if found else []
                on_done()
        return failures


def warm_up() -> None:
    """Import and compile what measuring needs."""
    import ingest.measure

    ingest.measure.warm_up()


@contextmanager
def _one_thread_each() -> Generator[None]:
    """Child processes started inside inherit one thread each for every numeric library."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
