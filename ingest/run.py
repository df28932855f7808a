"""Running an ingest: find what is missing, measure it in parallel, and write down what the lake holds.

Work is spread over (method, subject) by dask: spawned processes here, or a `distributed` scheduler by address. Parts
are content-addressed, so a run that was killed is simply run again.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from expectations.store import Part, PartStore
from expectations.study import Study
from expectations.tables import lake_tables
from ingest.bundles import bundle_parts
from ingest.digests import Digest, digest_all
from ingest.jobs import Job, Runner
from ingest.manifest import Failure, Manifest
from ingest.nifti import read_header
from ingest.plan import (
    DiagnosticTask,
    Entry,
    Exchanged,
    FileTask,
    Fingerprints,
    Role,
    Scale,
    Source,
    SubjectInputs,
    SubjectTask,
    Task,
    plan_study,
)
from ingest.problems import BadInput


@dataclass(frozen=True)
class Progress:
    """Where an ingest reports to: a stage starts with its number of steps, then each step is told."""

    start: Callable[[str, int], None]
    step: Callable[[], None]


SILENT = Progress(start=lambda _stage, _steps: None, step=lambda: None)
GATE_ROLES: tuple[Role, ...] = ("reference", "own_reference")
Digests = Mapping[str, Digest]
UNREAD: Digest = ("", 0)  # stands for the digest of a file that is not read


@dataclass(frozen=True)
class Report:
    """What an ingest did."""

    manifest: Manifest
    measured_parts: int
    kept_parts: int


@dataclass(frozen=True)
class GateReport:
    """What a run of the geometry gate alone did, and what its verdicts need beside the parts.

    Attributes:
        report: Its manifest holds the gate's parts alone and lies in no lake: no release could be built from it.
        given: Rows of `method` and of `subject`, the latter without what only a brain or the voxels would tell.
    """

    report: Report
    given: Mapping[str, pl.DataFrame]


class Ingest:
    """One run over one study and lake.

    With `diagnostics` the diagnostic tables of the test subjects are measured too; without, those that are there and
    still current stay in the lake, and stale ones drop out.
    """

    def __init__(
        self, study: Study, lake: Path, runner: Runner, progress: Progress = SILENT, diagnostics: bool = False
    ) -> None:
        self.study = study
        self.store = PartStore(lake)
        self.runner = runner
        self.progress = progress
        self.diagnostics = diagnostics
        self.plan = plan_study(study)
        self.failures: list[Failure] = []
        self.current: dict[str, list[Part]] = {name: [] for name in lake_tables()}
        self.measured = 0

    def run(self) -> Report:
        """Measure what is missing, write the manifest, and bundle what the lake holds.

        Returns:
            The manifest (its failures say what could not be measured) and how many parts were measured or kept.
        """
        self.store.lake.mkdir(parents=True, exist_ok=True)
        self.store.sweep()
        self.digests: Digests = self._digests()
        self.stamps = Fingerprints(self.plan, self.digests)
        self._perform("subjects and files", [*self._subject_jobs(), *self._file_jobs()])
        scales = self._scales()
        self._perform("maps", self._map_jobs(scales))
        self._perform("diagnostics", self._diagnostic_jobs(scales))
        report = self._report()
        report.manifest.write(self.store.lake)
        return replace(report, manifest=self._bundled(report.manifest))

    def run_gate(self, *, is_kept: bool) -> GateReport:
        """Measure the geometry gate alone: own references against canonical ones, and the headers of the maps.

        No voxel of a map is read, no brain and no image. Parts are those that `run` would measure.

        Args:
            is_kept: Whether the lake is kept. Its parts are named by the SHA-256 of the maps too, which takes reading
                the maps' bytes once; in a lake that is thrown away their names may do without.
        """
        self.store.lake.mkdir(parents=True, exist_ok=True)
        self.store.sweep()
        roles: tuple[Role, ...] = (*GATE_ROLES, "map") if is_kept else GATE_ROLES
        unread: Digests = {source.url: UNREAD for source in self.plan.sources if source.role not in roles}
        self.digests = {**unread, **self._digests(roles)}
        self.stamps = Fingerprints(self.plan, self.digests)
        self._perform("geometry gate", self._gate_jobs())
        methods = [(e.method_id, *e.declaration.values()) for e in self.plan.entries if e.kind != "baseline"]
        subjects = [(s.subject_id, s.split, *shape) for s, shape in self._shapes()]
        frame = pl.DataFrame(subjects, schema=("subject_id", "split", "shape_0", "shape_1", "shape_2"), orient="row")
        rows = pl.concat([lake_tables()["subject"].frame(), frame], how="diagonal_relaxed")
        return GateReport(self._report(), {"method": lake_tables()["method"].frame(methods), "subject": rows})

    def _shapes(self) -> list[tuple[SubjectInputs, tuple[int, int, int]]]:
        """Canonical shapes of the subjects whose reference can be read."""
        shapes: list[tuple[SubjectInputs, tuple[int, int, int]]] = []
        for subject in self.plan.subjects:
            if self._readable([subject.reference]):
                try:
                    shapes.append((subject, read_header(subject.reference.url).shape))
                except BadInput as problem:
                    path = subject.reference.path
                    self._fail("read reference", subject.subject_id, None, problem, path)
        return shapes

    def _gate_jobs(self) -> list[Job]:
        """Tasks of the gate alone, the methods of a subject one after another so that its reference is read once."""
        jobs: list[Job] = []
        for subject in self.plan.subjects:
            for entry in self.plan.entries:
                inputs = self.plan.maps[entry.method_id, subject.subject_id]
                sources = [subject.reference, *inputs.sources]
                if inputs.own_reference is None or not self._readable(sources):
                    continue
                if missing := self._missing(self.stamps.gate_parts(entry, subject)):
                    jobs.append(self._map_job(entry, subject, None, missing))
        return jobs

    def _report(self) -> Report:
        manifest = Manifest(
            study=self.study.file.study.name,
            overrides=dict(self.study.file.protocol),
            sql_folder=self._sql_folder(),
            subject_count=len(self.plan.subjects),
            method_ids=tuple(entry.method_id for entry in self.plan.entries),
            parts={name: tuple(sorted(p.relative_path for p in parts)) for name, parts in self.current.items()},
            failures=tuple(sorted(self.failures, key=lambda f: (f.path, f.task, f.method_id or ""))),
        )
        total = sum(len(parts) for parts in self.current.values())
        return Report(manifest, self.measured, total - self.measured)

    def _bundled(self, manifest: Manifest) -> Manifest:
        """Copy parts into bundles where there are many; a manifest that says which bundles there are."""
        lake, progress = self.store.lake, self.progress
        there = bundle_parts(lake, manifest.parts, lambda count: progress.start("bundling parts", count), progress.step)
        bundled = manifest.model_copy(update={"bundles": there})
        bundled.write(lake)
        return bundled

    def _sql_folder(self) -> str | None:
        folder = self.study.file.study.sql
        return None if folder is None else str((self.study.folder / folder).resolve())

    def _digests(self, roles: Sequence[Role] | None = None) -> Digests:
        """Digests of the files of some roles, or of all; a file that cannot be read is a failure."""
        sources = {source.url: source for source in self.plan.sources if roles is None or source.role in roles}
        self.progress.start("hashing inputs", len(sources))
        cache = self.store.lake / "cache" / "digests.json"
        digests, problems = digest_all(list(sources), cache, self.progress.step, are_all=roles is None)
        for problem in problems:
            source = sources[problem.path]
            self._fail(f"read {source.role}", source.subject_id, source.method_id, problem, source.path)
        return digests

    def _fail(self, task: str, subject: str | None, method: str | None, problem: BadInput, path: str) -> None:
        self.failures.append(
            Failure(
                task=task,
                subject_id=subject,
                method_id=method,
                path=path,
                reason=problem.found,
                remedy=problem.remedy,
            )
        )

    def _readable(self, sources: Sequence[Source | None]) -> bool:
        return all(source is None or source.url in self.digests for source in sources)

    @property
    def _readable_subjects(self) -> list[SubjectInputs]:
        return [s for s in self.plan.subjects if self._readable([s.reference, s.support, s.contrast])]

    def _subject_jobs(self) -> list[Job]:
        return [
            SubjectTask(subject, self.plan.voxel_size_mm, self.plan.parameters, missing)
            for subject in self._readable_subjects
            if (missing := self._missing(self.stamps.subject_parts(subject)))
        ]

    def _file_jobs(self) -> list[Job]:
        jobs: list[Job] = []
        for subject in self.plan.subjects:
            methods = [entry for entry in self.plan.entries if entry.kind != "baseline"]
            groups: list[tuple[Entry | None, list[Source]]] = [(None, subject.sources)]
            groups += [(entry, self.plan.maps[entry.method_id, subject.subject_id].sources) for entry in methods]
            jobs += [job for entry, sources in groups if (job := self._file_job(entry, subject, sources))]
        return jobs

    def _file_job(self, entry: Entry | None, subject: SubjectInputs, sources: Sequence[Source]) -> FileTask | None:
        readable = [source for source in sources if source.url in self.digests]
        if not readable or (entry is not None and subject.reference.url not in self.digests):
            return None
        missing = self._missing([self.stamps.file_part(entry, subject.subject_id, readable)])
        digests = {source.url: self.digests[source.url] for source in readable}
        if not missing:
            return None
        return FileTask(tuple(readable), digests, entry, subject.reference, self.plan.voxel_size_mm, missing)

    def _missing(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """The parts that are not there yet; those that are become current."""
        for part in parts:
            self.current[part.table].append(part)
        return tuple(part for part in parts if not self.store.has(part))

    def _perform(self, stage: str, jobs: Sequence[Job]) -> None:
        """Run jobs; parts of a job that failed are not current."""
        if not jobs:
            return
        self.progress.start(stage, len(jobs))
        self.failures += self.runner.run(jobs, self.store, self.progress.step)
        for job in jobs:
            for part in job.parts:
                if self.store.has(part):
                    self.measured += 1
                else:
                    self.current[part.table].remove(part)

    def _scales(self) -> dict[str, Scale]:
        """The frozen scale of each entry; an entry whose scale cannot be had is a failure and is not measured."""
        scaled = [entry for entry in self.plan.entries if entry.quantiles is not None]
        self._perform("score scales", [job for entry in scaled for job in self._quantile_jobs(entry)])
        scales: dict[str, Scale] = {}
        for entry in self.plan.entries:
            try:
                scales[entry.method_id] = entry.fixed_scale or self._quantile_scale(entry)
            except BadInput as problem:
                self._fail("scale scores", None, entry.method_id, problem, problem.path)
        for entry in self.plan.entries:
            self._write_method(entry, scales.get(entry.method_id))
        return scales

    def _quantile_jobs(self, entry: Entry) -> list[Job]:
        # a scale reads no reference, so where a study declares no validation subject all of its subjects give it
        has_validation = any(subject.split == "validation" for subject in self.plan.subjects)
        return [
            self._map_job(entry, subject, None, missing)
            for subject in self._readable_subjects
            if (subject.split == "validation" or not has_validation)
            and self._readable([self.plan.maps[entry.method_id, subject.subject_id].map])
            and (missing := self._missing([self.stamps.quantile_part(entry, subject)]))
        ]

    def _map_job(self, entry: Entry, subject: SubjectInputs, scale: Scale | None, parts: tuple[Part, ...]) -> Task:
        inputs = self.plan.maps[entry.method_id, subject.subject_id]
        return Task(entry, subject, inputs, scale, self.plan.voxel_size_mm, self.plan.parameters, parts)

    def _quantile_scale(self, entry: Entry) -> Scale:
        mine = [p for p in self.current["score_quantile"] if p.owner.startswith(f"{entry.method_id}@")]
        frames = [pl.read_parquet(self.store.path(part), glob=False) for part in sorted(mine)]
        rows = pl.concat(frames).sort("subject_id") if frames else pl.DataFrame()
        if rows.is_empty():
            found = f"{entry.method_id} is scaled by quantiles of validation subjects, and none could be read"
            raise BadInput(entry.map, found, "Mend these maps; a method may declare score_scale = [low, high] instead")
        low, high = (statistics.median(rows.get_column(name).to_list()) for name in ("low", "high"))
        if not low < high:
            found = f"{entry.method_id} has the same score at both quantiles ({low:g})"
            raise BadInput(entry.map, found, "Declare wider quantiles, or score_scale = [low, high]")
        return Scale("quantiles", low, high)

    def _write_method(self, entry: Entry, scale: Scale | None) -> None:
        """The `method` and `score_scale` parts are written here: they come from declarations, not from images."""
        rows: list[tuple[Part, tuple[object, ...]]] = [
            (self.stamps.method_part(entry), (entry.method_id, *entry.declaration.values()))
        ]
        if scale is not None:
            part = self.stamps.scale_part(entry, scale)
            rows.append((part, (entry.method_id, scale.kind, scale.low, scale.high)))
        for part, row in rows:
            if self._missing([part]):
                table = lake_tables()[part.table]
                self.store.write(part, table, table.frame([row]))
                self.measured += 1

    def _map_jobs(self, scales: Mapping[str, Scale]) -> list[Job]:
        """Measurement tasks, the methods of a subject one after another so that its reference is read once."""
        jobs: list[Job] = []
        for subject in self._readable_subjects:
            for entry in self.plan.entries:
                inputs = self.plan.maps[entry.method_id, subject.subject_id]
                if entry.method_id not in scales or not self._readable([inputs.map, inputs.own_reference]):
                    continue
                scale = scales[entry.method_id]
                if missing := self._missing(self.stamps.measurement_parts(entry, subject, scale)):
                    jobs.append(self._map_job(entry, subject, scale, missing))
        return jobs

    def _diagnostic_jobs(self, scales: Mapping[str, Scale]) -> list[Job]:
        """Diagnostic tasks of test subjects; none where diagnostics are not asked for, but current parts stay."""
        jobs: list[Job] = []
        tested = [subject for subject in self._readable_subjects if subject.split == "test"]
        methods = [entry for entry in self.plan.entries if entry.kind == "method" and entry.method_id in scales]
        for subject in tested:
            for entry in methods:
                inputs, scale = self.plan.maps[entry.method_id, subject.subject_id], scales[entry.method_id]
                if not self._readable([inputs.map]):
                    continue
                exchanged = self._exchanged(entry, subject)
                parts = self.stamps.diagnostic_parts(entry, subject, scale, exchanged)
                if not self.diagnostics:
                    parts = [part for part in parts if self.store.has(part)]
                if missing := self._missing(parts):
                    task = self._map_job(entry, subject, scale, missing)
                    jobs.append(DiagnosticTask(**vars(task), exchanged=exchanged))
        return jobs

    def _exchanged(self, entry: Entry, subject: SubjectInputs) -> Exchanged | None:
        """The subject whose map is put in this one's place; None where there is no other, or it cannot be read."""
        other = self.plan.next_in_split(subject)
        if other is None:
            return None
        source = self.plan.maps[entry.method_id, other.subject_id].map
        return Exchanged(other, source) if self._readable([source, other.reference, other.support]) else None


def default_workers() -> int:
    """One worker per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
