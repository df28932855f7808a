"""What must be measured: inputs of each subject and method, their fingerprints, and the parts that are missing.

A study becomes entries (methods, baselines, then other training sets of the methods) and subjects; every (entry,
subject) is one task. What a part depends on is declared in `tables.toml`; its fingerprint is made of exactly those
ingredients, so that a new method measures only itself and a new budget nothing but what uses budgets.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from expectations.protocol import Parameters
from expectations.store import Part, fingerprint, owner
from expectations.study import MethodTable, Quantiles, Study, Subject, TransformTable, located
from expectations.tables import LakeTable, lake_tables

Role = Literal["map", "own_reference", "reference", "brain", "intensity"]
Kind = Literal["method", "baseline", "configuration"]

# The version of what is measured as a whole; raise a table's own version in tables.toml where only that table changed.
MEASURING_VERSION = 1


@dataclass(frozen=True)
class Source:
    """One input file: where it lies, how the study spells it, and what it is to the study."""

    url: str
    path: str
    role: Role
    subject_id: str
    method_id: str | None = None
    contrast: str | None = None
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SubjectInputs:
    """The files of one subject that every method is compared with."""

    subject_id: str
    split: Literal["validation", "test"]
    reference: Source
    brain: Source | None
    intensity: Mapping[str, Source]

    @property
    def support(self) -> Source | None:
        """The file that the brain support is read from: the mask, else the first contrast, else none."""
        return self.brain or self.contrast

    @property
    def contrast(self) -> Source | None:
        """The image that lesion contrast is read from: the first declared one, or none."""
        return next(iter(self.intensity.values()), None)

    @property
    def sources(self) -> list[Source]:
        """All files of the subject."""
        return [self.reference, *([self.brain] if self.brain else []), *self.intensity.values()]


@dataclass(frozen=True)
class Scale:
    """A linear scale: `low` becomes 0 and `high` 1."""

    kind: Literal["identity", "range", "quantiles"]
    low: float
    high: float


@dataclass(frozen=True)
class Entry:
    """A method, a baseline, or a method with another training set: how its maps are stored and scaled."""

    method_id: str
    model_id: str
    kind: Kind
    position: int
    map: str
    own_reference: str | None
    own_reference_labels: tuple[int, ...] | None
    family: str | None
    training_set: str | None
    legacy_voxel_mm3: float | None
    transform: TransformTable
    alternative_transform: TransformTable | None
    fixed_scale: Scale | None
    quantiles: tuple[float, float] | None
    nan_outside_brain: Literal["refuse", "zero"]

    @property
    def declaration(self) -> dict[str, object]:
        """What the `method` table says of this entry."""
        return {
            "model_id": self.model_id,
            "kind": self.kind,
            "position": self.position,
            "family": self.family,
            "training_set": self.training_set,
            "legacy_voxel_mm3": self.legacy_voxel_mm3,
            "transform": json.dumps(self.transform.model_dump(mode="json"), sort_keys=True),
        }


@dataclass(frozen=True)
class MapInputs:
    """The files of one entry for one subject."""

    map: Source
    own_reference: Source | None

    @property
    def sources(self) -> list[Source]:
        """All files."""
        return [self.map, *([self.own_reference] if self.own_reference else [])]


@dataclass(frozen=True)
class Plan:
    """A study laid out as entries, subjects and their files."""

    voxel_size_mm: tuple[float, float, float]
    entries: tuple[Entry, ...]
    subjects: tuple[SubjectInputs, ...]
    maps: Mapping[tuple[str, str], MapInputs]
    parameters: Parameters

    def next_in_split(self, subject: SubjectInputs) -> SubjectInputs | None:
        """The next subject by id of the same split, after the last the first; None where there is no other."""
        alike = [other for other in self.subjects if other.split == subject.split]
        following = alike[(alike.index(subject) + 1) % len(alike)]
        return None if following is subject else following

    @property
    def sources(self) -> list[Source]:
        """Every file of the study that is the study's or a method's own (a baseline's map is the subject's image)."""
        own = [s for (m, _), inputs in self.maps.items() for s in inputs.sources if s.method_id == m]
        return [source for subject in self.subjects for source in subject.sources] + own


def plan_study(study: Study) -> Plan:
    """Lay a study out; opens no file.

    Args:
        study: A study whose declarations are consistent.

    Returns:
        Entries in declared order (methods, then baselines, then other training sets, so that adding one of these moves
        nothing else), subjects sorted by id, and the files of each pair.
    """
    file = study.file
    methods = [_method_entry(position, method) for position, method in enumerate(file.primaries)]
    baselines = [
        _baseline_entry(position, baseline.id, baseline.intensity, study)
        for position, baseline in enumerate(file.baseline, start=len(methods))
    ]
    others = [
        _method_entry(position, method, "configuration")
        for position, method in enumerate(file.configurations, start=len(methods) + len(baselines))
    ]
    entries = (*methods, *baselines, *others)
    ordered = sorted(study.subjects, key=lambda subject: subject.subject_id)
    subjects = tuple(_subject_inputs(study, subject) for subject in ordered)
    maps = {
        (entry.method_id, subject.subject_id): _map_inputs(study, entry, subject, inputs)
        for subject, inputs in zip(ordered, subjects, strict=True)
        for entry in entries
    }
    return Plan(file.study.voxel_size_mm, entries, subjects, maps, study.protocol.parameters)


def configuration_id(model_id: str, training_set: str | None) -> str:
    """The `method_id` of a method with another training set than the primary one; no declared id holds a tilde."""
    return f"{model_id}~{training_set}"


def _method_entry(position: int, method: MethodTable, kind: Kind = "method") -> Entry:
    scale = method.score_scale
    quantiles = scale.quantiles if isinstance(scale, Quantiles) else None
    fixed = Scale("identity", 0.0, 1.0) if scale == "identity" else None
    if isinstance(scale, tuple):
        fixed = Scale("range", scale[0], scale[1])
    return Entry(
        method_id=method.id if kind == "method" else configuration_id(method.id, method.training_set),
        model_id=method.id,
        kind=kind,
        position=position,
        map=method.map,
        own_reference=method.own_reference,
        own_reference_labels=method.own_reference_labels,
        family=method.family,
        training_set=method.training_set,
        legacy_voxel_mm3=method.legacy_voxel_mm3,
        transform=method.transform,
        alternative_transform=method.alternative_transform,
        fixed_scale=fixed,
        quantiles=quantiles,
        nan_outside_brain=method.nan_outside_brain,
    )


def _baseline_entry(position: int, baseline_id: str, contrast: str, study: Study) -> Entry:
    return Entry(
        method_id=baseline_id,
        model_id=baseline_id,
        kind="baseline",
        position=position,
        map=contrast,
        own_reference=None,
        own_reference_labels=None,
        family=None,
        training_set=None,
        legacy_voxel_mm3=None,
        transform=TransformTable(),
        alternative_transform=None,
        fixed_scale=None,
        quantiles=study.protocol.parameters.baseline_quantiles,
        nan_outside_brain="zero",
    )


def _subject_inputs(study: Study, subject: Subject) -> SubjectInputs:
    files = study.file.files

    def source(pattern: str, role: Role, contrast: str | None = None) -> Source:
        path = pattern.format_map(subject.fields)
        labels = files.reference_labels if role == "reference" else None
        return Source(located(study.folder, path), path, role, subject.subject_id, None, contrast, labels)

    return SubjectInputs(
        subject_id=subject.subject_id,
        split=subject.split,
        reference=source(files.reference, "reference"),
        brain=source(files.brain, "brain") if files.brain else None,
        intensity={c: source(pattern, "intensity", c) for c, pattern in files.intensity.items()},
    )


def _map_inputs(study: Study, entry: Entry, subject: Subject, inputs: SubjectInputs) -> MapInputs:
    if entry.kind == "baseline":
        return MapInputs(inputs.intensity[entry.map], None)

    def source(pattern: str, role: Role, labels: tuple[int, ...] | None) -> Source:
        path = pattern.format_map(subject.fields)
        return Source(located(study.folder, path), path, role, subject.subject_id, entry.method_id, None, labels)

    own = entry.own_reference
    return MapInputs(
        map=source(entry.map, "map", None),
        own_reference=source(own, "own_reference", entry.own_reference_labels) if own else None,
    )


@dataclass(frozen=True)
class Task:
    """The tables to measure for one entry and one subject."""

    entry: Entry
    subject: SubjectInputs
    inputs: MapInputs
    scale: Scale | None
    voxel_size_mm: tuple[float, float, float]
    parameters: Parameters
    parts: tuple[Part, ...]

    @property
    def sources(self) -> list[Source]:
        """Files that the task reads, the map first."""
        return [*self.inputs.sources, self.subject.reference, *([s] if (s := self.subject.support) else [])]


@dataclass(frozen=True)
class Exchanged:
    """Another subject, whose map a diagnostic puts in the place of the subject's own."""

    subject: SubjectInputs
    map: Source


@dataclass(frozen=True)
class DiagnosticTask(Task):
    """The diagnostic tables to measure for one method and one subject."""

    exchanged: Exchanged | None

    @property
    def sources(self) -> list[Source]:
        """Files that the task reads, the map first."""
        other = [] if self.exchanged is None else [self.exchanged.map, self.exchanged.subject.reference]
        support = [s] if (s := self.subject.support) else []
        return [self.inputs.map, self.subject.reference, *support, *other]


@dataclass(frozen=True)
class SubjectTask:
    """The `subject` table of one subject."""

    subject: SubjectInputs
    voxel_size_mm: tuple[float, float, float]
    parameters: Parameters
    parts: tuple[Part, ...]

    @property
    def sources(self) -> list[Source]:
        """Files that the task reads, the reference first."""
        every = [self.subject.reference, self.subject.support, self.subject.contrast]
        return list({source.url: source for source in every if source is not None}.values())


@dataclass(frozen=True)
class FileTask:
    """The `source_file` rows of a subject's own files, or of one entry's files for a subject."""

    sources: tuple[Source, ...]
    digests: Mapping[str, tuple[str, int]]
    entry: Entry | None
    reference: Source
    voxel_size_mm: tuple[float, float, float]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class CheckTask:
    """A check of one file: its header alone, or every voxel against the declarations."""

    entry: Entry | None
    subject: SubjectInputs
    source: Source
    inputs: MapInputs | None
    quick: bool
    parts: tuple[Part, ...] = ()

    @property
    def sources(self) -> list[Source]:
        """Files that the check reads, the one in question first."""
        beside = self.inputs.sources if self.inputs else []
        support = [support] if (support := self.subject.support) else []
        every = [self.source, self.subject.reference, *support, *beside]
        return list({source.url: source for source in every}.values())


GATE_TABLES = ("gate_candidate", "gate_overlap")  # measured where a method declares an own reference
METHOD_INGREDIENTS = ("map", "map_file", "own_reference", "transform", "scale", "quantiles", "legacy_voxel_mm3")


class Fingerprints:
    """Fingerprints of all parts of a plan, from the SHA-256 of its files."""

    def __init__(self, plan: Plan, digests: Mapping[str, tuple[str, int]]) -> None:
        self.plan = plan
        self.digests = digests
        self.references = {subject.subject_id: subject.reference for subject in plan.subjects}

    def _file(self, source: Source | None) -> object:
        return None if source is None else [self.digests[source.url][0], source.labels]

    def _part(self, table: LakeTable, name: str, ingredients: Mapping[str, object]) -> Part:
        used = {need: ingredients[need] for need in table.depends}
        stamp = fingerprint({"table": table.name, "version": [MEASURING_VERSION, table.version], "owner": name, **used})
        return Part(table.name, name, stamp)

    def _subject_ingredients(self, subject: SubjectInputs) -> dict[str, object]:
        return {
            **self.plan.parameters.model_dump(mode="json"),
            "split": subject.split,
            "reference": self._file(subject.reference),
            "support": ["mask" if subject.brain else "image", self._file(subject.support or subject.reference)],
            "contrast": self._file(subject.contrast),
            "voxel_size_mm": self.plan.voxel_size_mm,
        }

    def subject_parts(self, subject: SubjectInputs) -> list[Part]:
        """The parts of one subject that belong to no method: those of its row and of its canonical lesions."""
        ingredients, name = self._subject_ingredients(subject), owner(None, subject.subject_id)
        nobody = dict.fromkeys(METHOD_INGREDIENTS)
        tables = [table for table in lake_tables().values() if "subject" in table.parts]
        return [self._part(table, name, ingredients | nobody) for table in tables]

    def file_part(self, entry: Entry | None, subject_id: str, sources: Sequence[Source]) -> Part:
        """The `source_file` part of some files."""
        files = [[s.path, s.role, *self.digests[s.url]] for s in sources]
        transform = None if entry is None else entry.transform.model_dump(mode="json")
        grid = None if entry is None else self.digests[self.references[subject_id].url][0]  # fills "full" and "centre"
        size = self.plan.voxel_size_mm
        ingredients = {"files": files, "grid": grid, "transform": transform, "voxel_size_mm": size}
        name = owner(entry.method_id if entry else None, subject_id)
        return self._part(lake_tables()["source_file"], name, ingredients)

    def method_part(self, entry: Entry) -> Part:
        """The `method` part of one entry."""
        return self._part(lake_tables()["method"], owner(entry.method_id, None), {"method": entry.declaration})

    def scale_part(self, entry: Entry, scale: Scale) -> Part:
        """The `score_scale` part of one entry."""
        return self._part(lake_tables()["score_scale"], owner(entry.method_id, None), {"scale": asdict(scale)})

    def measurement_parts(self, entry: Entry, subject: SubjectInputs, scale: Scale) -> list[Part]:
        """All measurement parts of one entry and subject, but for quantiles."""
        inputs = self.plan.maps[entry.method_id, subject.subject_id]
        left_out = {"score_quantile"}
        if inputs.own_reference is None:
            left_out |= set(GATE_TABLES)
        tables = [t for t in lake_tables().values() if "measurement" in t.parts and t.name not in left_out]
        return [self._measurement(table, entry, subject, asdict(scale)) for table in tables]

    def gate_parts(self, entry: Entry, subject: SubjectInputs) -> list[Part]:
        """The parts of the geometry gate for one entry with an own reference and one subject; no scale is needed."""
        return [self._measurement(lake_tables()[name], entry, subject, None) for name in GATE_TABLES]

    def diagnostic_parts(
        self, entry: Entry, subject: SubjectInputs, scale: Scale, exchanged: Exchanged | None
    ) -> list[Part]:
        """All diagnostic parts of one method and subject."""
        tables = [table for table in lake_tables().values() if "diagnosis" in table.parts]
        return [self._measurement(table, entry, subject, asdict(scale), exchanged) for table in tables]

    def quantile_part(self, entry: Entry, subject: SubjectInputs) -> Part:
        """The `score_quantile` part of one entry and subject."""
        return self._measurement(lake_tables()["score_quantile"], entry, subject, None)

    def _measurement(
        self,
        table: LakeTable,
        entry: Entry,
        subject: SubjectInputs,
        scale: object,
        exchanged: Exchanged | None = None,
    ) -> Part:
        inputs, alternative = self.plan.maps[entry.method_id, subject.subject_id], entry.alternative_transform
        ingredients = self._subject_ingredients(subject) | {
            "map": [entry.kind, self._file(inputs.map), entry.nan_outside_brain],
            "map_file": self._file(inputs.map),  # its shape alone: round trips, and what an own reference must share
            "own_reference": self._file(inputs.own_reference),
            "transform": entry.transform.model_dump(mode="json"),
            "alternative_transform": alternative.model_dump(mode="json") if alternative else None,
            "exchanged": self._exchanged(entry, exchanged),
            "scale": scale,
            "quantiles": entry.quantiles,
            "legacy_voxel_mm3": entry.legacy_voxel_mm3,
        }
        return self._part(table, owner(entry.method_id, subject.subject_id), ingredients)

    def _exchanged(self, entry: Entry, exchanged: Exchanged | None) -> object:
        """What a map from another subject depends on: the map, the grid it goes to, and where its NaN may lie."""
        if exchanged is None:
            return None
        support = exchanged.subject.support if entry.nan_outside_brain == "zero" else None
        return [self._file(source) for source in (exchanged.map, exchanged.subject.reference, support)]
