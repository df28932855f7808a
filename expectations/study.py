"""The study file: what a researcher must declare before anything is measured.

`load_study` reads `study.toml` and its subjects file, checks everything that can be checked without opening an image,
and lists all problems at once; each names the file, the field, what was found and what to do.
"""

import csv
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from string import Formatter
from typing import Annotated, Literal, cast

import fsspec
from fsspec.core import split_protocol
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from expectations.protocol import Protocol, override_problems, protocol

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# Strict, so that true is no number and "1" no size; a whole number is a float in TOML too.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Labels = Annotated[tuple[Whole, ...], Field(min_length=1)]
Three = tuple[Whole, Whole, Whole]
Split = Literal["validation", "test"]
# Of an id that is declared with several: it becomes part of `method_id`, of part names and of orders.
TRAINING_SET = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
SUBJECT_ID = r"(?!\s)[^/\\\x00-\x1f\x7f]{1,128}(?<!\s)"


def _one_of(choices: str) -> WrapValidator:
    """One message, under the field's own name, for a field that takes several types."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(f"write {choices}") from error

    return WrapValidator(validate)


Start = Annotated[Whole | Literal["centre"], _one_of("a voxel, or 'centre'")]
Extent = Annotated[Whole | Literal["full"], _one_of("a number of voxels, or 'full'")]
REMEDIES = {
    "missing": "Add it; the README explains each field",
    "extra_forbidden": "Remove it or mend its spelling",
    "tuple_type": "Write a list, as in [1, 1, 1]",
    "model_type": "Write a table",
    "dict_type": "Write a table",
}


class Declared(BaseModel):
    """Base of everything that a study file declares: frozen, and no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StudyTable(Declared):
    """The `[study]` table."""

    name: str
    voxel_size_mm: tuple[Positive, Positive, Positive]
    subjects: str
    roots: tuple[str, ...] = ()
    primary_training_set: str | None = None
    sql: str | None = None


class FilesTable(Declared):
    """The `[files]` table: patterns with `{subject_id}` or any column of the subjects file."""

    reference: str
    brain: str | None = None
    reference_labels: Labels | None = None
    intensity: dict[Identifier, str] = Field(default_factory=dict[str, str])


class TransformTable(Declared):
    """The `[method.transform]` table: where each canonical axis lies in the stored array."""

    source_axis: Three = (0, 1, 2)
    start: tuple[Start, Start, Start] = (0, 0, 0)
    extent: tuple[Extent, Extent, Extent] = ("full", "full", "full")
    reversed: tuple[Flag, Flag, Flag] = (False, False, False)
    align: Literal["centre", "corner"] = "centre"
    source_size: Three | None = None

    @field_validator("source_axis")
    @classmethod
    def _is_permutation(cls, value: Three) -> Three:
        if sorted(value) != [0, 1, 2]:
            raise ValueError("must name each of the axes 0, 1 and 2 once")
        return value

    @field_validator("extent")
    @classmethod
    def _is_positive(cls, value: tuple[int | str, int | str, int | str]) -> tuple[int | str, int | str, int | str]:
        if any(isinstance(extent, int) and extent < 1 for extent in value):
            raise ValueError("must be at least one voxel, or 'full'")
        return value


class Quantiles(Declared):
    """Scale by quantiles of in-brain scores, frozen on validation subjects."""

    quantiles: tuple[Number, Number]

    @model_validator(mode="after")
    def _rises(self) -> "Quantiles":
        low, high = self.quantiles
        if not 0 <= low < high <= 1:
            raise ValueError("quantiles must rise within [0, 1]")
        return self


ScoreScale = Annotated[
    Literal["identity"] | Quantiles | tuple[Number, Number],
    _one_of("'identity', [low, high] that rises, or {quantiles = [low, high]} that rises within [0, 1]"),
]


class MethodTable(Declared):
    """One `[[method]]`: where its maps and its own references lie and how they are stored."""

    id: Identifier
    map: str
    own_reference: str | None = None
    own_reference_labels: Labels | None = None
    family: str | None = None
    training_set: str | None = None
    legacy_voxel_mm3: Positive | None = None
    score_scale: ScoreScale = "identity"
    nan_outside_brain: Literal["refuse", "zero"] = "refuse"
    transform: TransformTable = TransformTable()
    alternative_transform: TransformTable | None = None

    @field_validator("score_scale")
    @classmethod
    def _rises(cls, value: ScoreScale) -> ScoreScale:
        if isinstance(value, tuple) and not value[0] < value[1]:
            raise ValueError("a fixed scale must rise: [low, high]")
        return value


class BaselineTable(Declared):
    """One `[[baseline]]`: an intensity image, z-scored inside the brain, scored like a method."""

    id: Identifier
    intensity: str


class StudyFile(Declared):
    """The whole of `study.toml`."""

    study: StudyTable
    files: FilesTable
    method: tuple[MethodTable, ...] = ()
    baseline: tuple[BaselineTable, ...] = ()
    protocol: dict[str, object] = Field(default_factory=dict[str, object])

    @property
    def primaries(self) -> tuple[MethodTable, ...]:
        """The entry of each method that takes part in the multiverse: its only one, or that of the primary set."""
        several, primary = self.several_sets, self.study.primary_training_set
        return tuple(m for m in self.method if m.id not in several or m.training_set == primary)

    @property
    def configurations(self) -> tuple[MethodTable, ...]:
        """The entries of other training sets than the primary one."""
        several, primary = self.several_sets, self.study.primary_training_set
        return tuple(m for m in self.method if m.id in several and m.training_set != primary)

    @property
    def several_sets(self) -> tuple[str, ...]:
        """Ids that several entries share, in declared order."""
        ids = [method.id for method in self.method]
        return tuple(dict.fromkeys(method_id for method_id in ids if ids.count(method_id) > 1))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a study: where, what was found, and how to mend it."""

    file: str
    field: str
    found: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.field}" if self.field else self.file
        return f"{where}: {self.found}. {self.remedy}."


class BadStudy(Exception):
    """A study that cannot be measured; carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type["BadStudy"], tuple[tuple[Problem, ...]]]:
        return BadStudy, (self.problems,)


@dataclass(frozen=True)
class Subject:
    """A subject with every column of the subjects file."""

    subject_id: str
    split: Split
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Study:
    """A study whose declarations are consistent; its images have not been opened yet."""

    path: Path
    file: StudyFile
    subjects: tuple[Subject, ...]
    protocol: Protocol

    @property
    def folder(self) -> Path:
        """Folder of the study file; relative patterns start here."""
        return self.path.parent

    def locate(self, pattern: str, subject: Subject) -> str:
        """The file or URL that a pattern names for a subject."""
        return located(self.folder, pattern.format_map(subject.fields))


def located(folder: Path, name: str) -> str:
    """An absolute path, or the URL as it stands."""
    return name if split_protocol(name)[0] else str(folder / name)


def exists(url: str) -> bool:
    """Whether a path or URL names a file."""
    if split_protocol(url)[0] is None:
        return Path(url).is_file()
    filesystem, path = fsspec.url_to_fs(url)
    return bool(filesystem.isfile(path))


def load_study(path: Path) -> Study:
    """Read a study file and its subjects.

    Args:
        path: The `study.toml`.

    Returns:
        The study, complete and consistent as far as can be said without opening an image.

    Raises:
        BadStudy: Anything is wrong; carries all problems.
    """
    file = _study_file(path)
    problems = list(_study_problems(path, file))
    subjects, subject_problems = _subjects(path, file)
    problems += subject_problems
    if subjects:
        problems += _file_problems(path, file, subjects)
    if problems:
        raise BadStudy(problems)
    chosen = protocol(file.protocol)
    share, seed = chosen.parameters.calibration_share, chosen.parameters.seed
    if share > 0:
        problems += _share_problems(path, subjects, share)
        if problems:
            raise BadStudy(problems)
        subjects = drawn_for_calibration(subjects, share, seed)
    return Study(path.absolute(), file, tuple(subjects), chosen)


def _share_problems(path: Path, subjects: Sequence[Subject], share: float) -> Iterator[Problem]:
    where, field = str(path), "protocol.calibration_share"
    declared = sum(subject.split == "validation" for subject in subjects)
    if declared:
        found = f"draws validation subjects, but the subjects file declares {declared}"
        yield Problem(where, field, found, "Remove it, or declare every subject as test")
    elif not 0 < round(share * len(subjects)) < len(subjects):
        found = f"{share:g} of {len(subjects)} subjects leaves validation or test without any"
        yield Problem(where, field, found, "Choose another share")


def drawn_for_calibration(subjects: Sequence[Subject], share: float, seed: int) -> list[Subject]:
    """Subjects with a random share of them moved to validation.

    The order of SHA-256 of seed and identifier decides, so the draw is the same on every machine and hardly moves when
    a subject is added.

    Args:
        subjects: All of them test subjects.
        share: Share that becomes validation, rounded to whole subjects.
        seed: Declared seed.
    """
    order = sorted(subjects, key=lambda subject: sha256(f"{seed}/{subject.subject_id}".encode()).digest())
    drawn = {subject.subject_id for subject in order[: round(share * len(subjects))]}
    return [replace(subject, split="validation") if subject.subject_id in drawn else subject for subject in subjects]


def _study_file(path: Path) -> StudyFile:
    if not _is_there(path):
        raise BadStudy([Problem(str(path), "", "there is no such file", "Name the study.toml of your study")])
    try:
        return StudyFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadStudy([Problem(str(path), "", f"is not TOML: {error}", "Mend the line named")]) from error
    except ValidationError as error:
        raise BadStudy([_translated(path, dict(e)) for e in error.errors()]) from error


def _translated(path: Path, error: Mapping[str, object]) -> Problem:
    """A pydantic error in the study file's own terms."""
    places = cast(tuple[int | str, ...], error["loc"])
    field = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".")
    kind, message = str(error["type"]), str(error["msg"]).removeprefix("Value error, ")
    found = {"missing": "is missing", "extra_forbidden": "is no field of a study file"}
    remedy = REMEDIES.get(kind, message[0].upper() + message[1:])
    if field in ("method", "baseline"):
        remedy = f"Write [[{field}]] in double brackets: there may be several"
    return Problem(str(path), field, found.get(kind, f"found {error['input']!r}"), remedy)


def _study_problems(path: Path, file: StudyFile) -> Iterator[Problem]:
    """Problems between the declarations of one study file."""
    where = str(path)
    for name, what in override_problems(file.protocol):
        yield Problem(where, f"protocol.{name}", what, "Mend it or leave it to the default")
    if not file.method and not file.baseline:
        yield Problem(where, "method", "declares no method and no baseline", "Add a [[method]] with id and map")
    yield from _id_problems(where, file)
    for number, baseline in enumerate(file.baseline):
        if baseline.intensity not in file.files.intensity:
            known = ", ".join(file.files.intensity) or "none"
            found = f"{baseline.intensity!r} is no contrast of [files.intensity] (declared: {known})"
            yield Problem(where, f"baseline[{number}].intensity", found, "Declare the contrast's pattern there")
    declared = {method.training_set for method in file.method}
    if not file.several_sets and file.study.primary_training_set not in (None, *declared):
        found = f"{file.study.primary_training_set!r} is the training_set of no method"
        yield Problem(where, "study.primary_training_set", found, "Name one that a method declares")
    if file.study.sql is not None:
        yield from _folder_problems(path, file.study, file.study.sql)


def _id_problems(where: str, file: StudyFile) -> Iterator[Problem]:
    """Ids that entries share although they are not one method with several training sets."""
    baselines = [baseline.id for baseline in file.baseline]
    shared = {i for i in baselines if baselines.count(i) > 1} | (set(baselines) & {method.id for method in file.method})
    for repeated in sorted(shared):
        yield Problem(where, "id", f"{repeated!r} is declared twice", "Give every method and baseline its own id")
    if file.several_sets and file.study.primary_training_set is None:
        found = f"is missing, with several training sets of {', '.join(map(repr, file.several_sets))}"
        yield Problem(where, "study.primary_training_set", found, "Name the one whose maps the multiverse compares")
    for method_id in sorted(file.several_sets):
        yield from _training_set_problems(where, file, method_id)


def _training_set_problems(where: str, file: StudyFile, method_id: str) -> Iterator[Problem]:
    """What keeps the entries of one id from being one method with several training sets."""
    names = [method.training_set for method in file.method if method.id == method_id]
    if None in names:
        remedy = "Give every method and baseline its own id, or every entry of this id its training_set"
        found = f"{method_id!r} is declared twice, {names.count(None)} of its {len(names)} entries without training_set"
        yield Problem(where, "id", found, remedy)
    declared = [name for name in names if name is not None]
    for repeated in sorted({name for name in declared if declared.count(name) > 1}):
        found = f"{method_id!r} is declared twice with the training_set {repeated!r}"
        yield Problem(where, "id", found, "Give every entry of this id its own training_set")
    for number, method in enumerate(file.method):
        name = method.training_set
        if method.id == method_id and name is not None and not re.fullmatch(TRAINING_SET, name):
            remedy = f"Use 1 to 64 letters, digits, '.', '_', '+' and '-': {method_id} has several training sets"
            yield Problem(where, f"method[{number}].training_set", f"found {name!r}", remedy)
    primary = file.study.primary_training_set
    if primary is not None and primary not in names:
        found = f"{primary!r} is the training_set of no entry of {method_id!r}"
        yield Problem(where, "study.primary_training_set", found, "Name one that every such id has")


def _folder_problems(path: Path, study: StudyTable, sql: str) -> Iterator[Problem]:
    if not _is_there(path.parent / sql, is_folder=True):
        yield Problem(str(path), "study.sql", f"{sql!r} is no folder", "Name the folder of your own marts")
    elif not _is_inside(path.parent, study.roots, sql):
        found = f"{sql!r} leaves the study"
        yield Problem(str(path), "study.sql", found, "Move the folder, or declare it in study.roots")


def _is_there(path: Path, is_folder: bool = False) -> bool:
    """Whether a file or folder is there; a name that no disk can hold is not."""
    try:
        return path.is_dir() if is_folder else path.is_file()
    except OSError:
        return False


def _subjects(path: Path, file: StudyFile) -> tuple[list[Subject], list[Problem]]:
    """Read the subjects file as text, with every problem in it."""
    source = path.parent / file.study.subjects
    if not _is_there(source):
        return [], [Problem(str(path), "study.subjects", f"{file.study.subjects!r} is no file", "Name the CSV file")]
    if not _is_inside(path.parent, file.study.roots, file.study.subjects):
        found = f"{file.study.subjects!r} leaves the study"
        return [], [Problem(str(path), "study.subjects", found, "Move it, or declare its folder in study.roots")]
    try:
        with source.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle, restkey="", restval="")
            columns = list(reader.fieldnames or ())
            lines = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        return [], [Problem(str(source), "", f"cannot be read as CSV text: {error}", "Save it as UTF-8 CSV")]
    problems = list(_column_problems(source, columns, bool(lines))) or list(_subject_problems(source, lines))
    if problems:
        return [], problems
    subjects = [(row["subject_id"], row["split"], row) for _, row in lines]
    return [Subject(name, "test" if split == "test" else "validation", row) for name, split, row in subjects], []


def _column_problems(source: Path, columns: Sequence[str], has_rows: bool) -> Iterator[Problem]:
    missing = [name for name in ("subject_id", "split") if name not in columns]
    if missing or not has_rows:
        found = f"has no column {' and no column '.join(missing)}" if has_rows else "lists no subject"
        yield Problem(str(source), "", found, "Start it with the line subject_id,split and a row a subject")
    elif "" in columns:
        yield Problem(str(source), "line 1", "has a column without a name", "Name it, or remove the comma")
    elif repeated := sorted({name for name in columns if columns.count(name) > 1}):
        yield Problem(str(source), "line 1", f"has two columns {repeated[0]}", "Give every column its own name")


def _subject_problems(source: Path, lines: Sequence[tuple[int, Mapping[str, str]]]) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for line, row in lines:
        subject, split = row["subject_id"], row["split"]
        where = f"line {line}"
        if "" in row:
            yield Problem(str(source), where, "has more cells than the first line", "Quote cells that hold commas")
        if not re.fullmatch(SUBJECT_ID, subject) or subject in (".", ".."):
            remedy = "Use 1 to 128 characters without slashes and control characters, no blank at the ends"
            yield Problem(str(source), where, f"subject_id {subject!r}", remedy)
        elif subject in seen:
            found = f"subject {subject!r} stands on line {seen[subject]} already"
            yield Problem(str(source), where, found, "Keep one row a subject")
        if split not in ("validation", "test"):
            yield Problem(str(source), where, f"split {split!r}", "Write validation or test")
        seen.setdefault(subject, line)


def _patterns(file: StudyFile) -> Iterator[tuple[str, str]]:
    """Every pattern as (field, pattern)."""
    yield "files.reference", file.files.reference
    if file.files.brain is not None:
        yield "files.brain", file.files.brain
    for contrast, pattern in file.files.intensity.items():
        yield f"files.intensity.{contrast}", pattern
    for number, method in enumerate(file.method):
        yield f"method[{number}].map", method.map
        if method.own_reference is not None:
            yield f"method[{number}].own_reference", method.own_reference


def _file_problems(path: Path, file: StudyFile, subjects: Sequence[Subject]) -> list[Problem]:
    """Patterns that cannot be filled, leave the study, or name the same file twice; missing files are found later."""
    problems: list[Problem] = []
    for field, pattern in _patterns(file):
        problem = _pattern_problem(pattern, subjects[0].fields)
        problem = problem or _escape_problem(path.parent, file.study.roots, pattern, subjects)
        if problem:
            problems.append(Problem(str(path), field, problem[0], problem[1]))
    return problems or list(_shared_images(path, file, subjects[0]))


def _shared_images(path: Path, file: StudyFile, subject: Subject) -> Iterator[Problem]:
    """Two contrasts that name the same file."""
    seen: dict[str, str] = {}
    for contrast, pattern in file.files.intensity.items():
        name = pattern.format_map(subject.fields)
        if name in seen:
            found = f"{name!r} is the image of {seen[name]} too"
            yield Problem(str(path), f"files.intensity.{contrast}", found, "Give every contrast its own image")
        seen.setdefault(name, contrast)


def _pattern_problem(pattern: str, fields: Mapping[str, str]) -> tuple[str, str] | None:
    plain = "Write columns in single braces and nothing else in them, as in {subject_id}"
    try:
        parsed = [part for part in Formatter().parse(pattern) if part[1] is not None]
    except ValueError as error:
        return f"{pattern!r} is no pattern: {error}", plain
    if any(spec or conversion for _, _, spec, conversion in parsed):
        return f"{pattern!r} formats a column", plain
    names = [name for _, name, _, _ in parsed if name is not None]
    unknown = [name for name in names if name not in fields]
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in fields)
        return f"{pattern!r} uses {{{unknown[0]}}}, no column of the subjects file", f"Use {known}"
    if not any(name in fields for name in names):
        return (
            f"{pattern!r} holds no {{subject_id}}",
            "A file is per subject: write {subject_id} where its name differs",
        )
    try:
        pattern.format_map(fields)
    except (LookupError, ValueError, AttributeError):
        return f"{pattern!r} uses a column whose name no pattern can hold", "Rename it: letters, digits and _"
    return None


def _escape_problem(
    folder: Path, roots: Sequence[str], pattern: str, subjects: Sequence[Subject]
) -> tuple[str, str] | None:
    seen: dict[str, str] = {}
    for subject in subjects:
        name = pattern.format_map(subject.fields)
        try:
            inside = _is_inside(folder, roots, name)
        except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a null character
            return f"{name!r} is no path: {error}", "Mend the link, or the name"
        if not inside:
            return f"{name!r} leaves the study", "Move the file, or declare its folder in study.roots"
        if name in seen:
            found = f"{pattern!r} names {name!r} for both {seen[name]!r} and {subject.subject_id!r}"
            return found, "Add {subject_id} to the pattern"
        seen[name] = subject.subject_id
    return None


def _is_inside(folder: Path, roots: Sequence[str], name: str) -> bool:
    """Whether a name stays inside the study's folder or a declared root, links followed."""
    if split_protocol(name)[0] is not None:
        return ".." not in name.split("/") and any(name.startswith(root.rstrip("/") + "/") for root in roots)
    target = (folder / name).resolve()
    allowed = [folder, *(folder / root for root in roots if split_protocol(root)[0] is None)]
    return any(target.is_relative_to(root.resolve()) for root in allowed)
