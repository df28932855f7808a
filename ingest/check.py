"""Checking a study's inputs without measuring: every file is opened, and all problems are listed at once."""

from collections.abc import Callable
from pathlib import Path

from expectations.store import PartStore
from expectations.study import Study, exists
from ingest.jobs import Job, Runner
from ingest.manifest import Failure
from ingest.plan import CheckTask, Plan, Source, plan_study


def check_study(study: Study, runner: Runner, quick: bool, on_done: Callable[[], None]) -> list[Failure]:
    """Open every input of a study.

    Args:
        study: A study whose declarations are consistent.
        runner: Runs the checks.
        quick: Read headers only; otherwise every voxel is read and checked against the declarations.
        on_done: Called once per check.

    Returns:
        What is wrong, by file; nothing where a file is fine.
    """
    plan = plan_study(study)
    missing = [source for source in plan.sources if not exists(source.url)]
    absent = {source.url for source in missing}
    found = [_missing(source) for source in missing]
    jobs = [job for job in check_jobs(plan, quick) if not any(source.url in absent for source in job.sources)]
    found += runner.run(jobs, PartStore(Path()), on_done)
    return sorted(set(found), key=lambda failure: (failure.path, failure.reason))


def check_jobs(plan: Plan, quick: bool) -> list[Job]:
    """One check per canonical image, map and own reference."""
    jobs: list[Job] = []
    for subject in plan.subjects:
        jobs += [CheckTask(None, subject, source, None, quick) for source in subject.sources]
        for entry in plan.entries:
            inputs = plan.maps[entry.method_id, subject.subject_id]
            if entry.kind != "baseline":
                jobs.append(CheckTask(entry, subject, inputs.map, inputs, quick))
            if inputs.own_reference is not None:
                jobs.append(CheckTask(entry, subject, inputs.own_reference, inputs, quick))
    return jobs


def _missing(source: Source) -> Failure:
    return Failure(
        task="check",
        subject_id=source.subject_id,
        method_id=source.method_id,
        path=source.path,
        reason="there is no such file",
        remedy="Add it, or mend the pattern in the study file",
    )
