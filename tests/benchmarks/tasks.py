"""The tasks that an ingest plans for the benchmarked study, and the part of one map's contract that a peer covers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from expectations.store import Part, PartStore
from expectations.study import load_study
from expectations.tables import lake_tables
from ingest.jobs import Job
from ingest.lesions import Connectivity, label_reference
from ingest.manifest import Failure
from ingest.measurement import LesionsOfSupport, Measurement, Support, subject_shells
from ingest.measures import MEASURES
from ingest.plan import Task
from ingest.regions import load_regions
from ingest.run import Ingest
from ingest.sweep import Sweep
from ingest.volumes import Mask, load_subject

SINGLE_TABLES = (
    "threshold_curve",
    "lesion_curve",
    "lesion_match",
    "voxel_ranking",
    "score_histogram",
    "critical_threshold",
    "slice_score",
    "slice_ranking",
)
"""What is measured of one map whatever its own reference; the lesions of the canonical reference are the subject's."""


@dataclass
class Collecting:
    """A runner that measures nothing and keeps the jobs."""

    jobs: list[Job] = field(default_factory=list[Job])

    def run(self, jobs: Sequence[Job], store: PartStore, on_done: Callable[[], None]) -> list[Failure]:
        """Keep the jobs."""
        del store, on_done
        self.jobs += jobs
        return []


def plan_tasks(study: Path, lake: Path) -> list[Task]:
    """The full contract of every map of a study: what an ingest into an empty lake would measure."""
    runner = Collecting()
    Ingest(load_study(study), lake, runner).run()
    return [job for job in runner.jobs if isinstance(job, Task)]


class SingleMeasurement(Measurement):
    """One map against the canonical reference, in the brain, 6-connected."""

    @cached_property
    def references(self) -> dict[str, Mask]:
        """The canonical reference."""
        return {"canonical": self.volumes.reference}

    @cached_property
    def supports(self) -> tuple[Support, ...]:
        """The brain."""
        brain, unclipped = self.volumes.brain, self.scores.unclipped
        clipped = np.clip(unclipped, np.float32(0), np.float32(1))
        return (Support(("brain",), brain, clipped, unclipped[brain], self.references),)

    @cached_property
    def lesions(self) -> list[LesionsOfSupport]:
        """Its 6-connected lesions."""
        return [{6: {"canonical": label_reference(self.volumes.reference, self.volumes.brain, 6)}}]

    @cached_property
    def sweeps(self) -> list[Mapping[Connectivity, Sweep]]:
        """The 6-connected pass."""
        return [{6: self.read_off(6)[0]}]


def measure_single(task: Task, store: PartStore) -> None:
    """Read, measure and store one map against the canonical reference, in the brain, 6-connected."""
    measurement = SingleMeasurement(task)
    for part in task.parts:
        if part.table in SINGLE_TABLES:
            store.write(part, lake_tables()[part.table], MEASURES[part.table](measurement))


def part_of(task: Task, table: str) -> Part:
    """The task's part of a table."""
    return next(part for part in task.parts if part.table == table)


def forget_subject() -> None:
    """Let the next task read reference and brain again, as the first of a subject does."""
    load_subject.cache_clear()
    subject_shells.cache_clear()
    load_regions.cache_clear()
