"""The marts: one SQL file each, with a declared header and one SELECT; found, read and put in order here.

A header is the comment that a file starts with:

    -- One row per method and subject.
    -- key: method_id, subject_id
    -- columns: dice?, verdict
    -- stop: dice <= best_dice | a candidate beats the best one; report this defect
    -- warn: burden_cm3 < 1000 | ...

The first lines say what a row is. A column with a question mark may be null. `kind: view` keeps a table of many rows
unmaterialised. `stop` and `warn` state what must hold in every row, and what to do where it does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

from expectations.tables import Table, columns_of, lake_tables
from marts.declared import declared_tables
from marts.hypotheses import CASE_COLUMNS, Hypothesis, hypotheses, hypothesis_files
from marts.source import BadMart, read_source, sql_folder
from transforms import TRANSFORMS

HERE = Path(__file__).parent
READERS = [HERE / name for name in ("diff.py", "figures.py", "findings.py", "report.py")]  # read releases, build none
CASE_KEY = ("hypothesis_id", "configuration_set", "item")
FIELDS = ("key", "columns", "kind", "stop", "warn")


@dataclass(frozen=True)
class Check:
    """What must hold in every row of a mart; a stop-check that fails keeps the live release as it is."""

    severity: Literal["stop", "warn"]
    condition: str
    remedy: str


@dataclass(frozen=True)
class Mart:
    """A mart: its declaration, its SELECT, the tables that this reads, and the SELECT of each file that it is made of.

    Most are one file; the cases of the hypotheses are put together from many.
    """

    table: Table
    sql: str
    is_view: bool
    inputs: tuple[str, ...]
    checks: tuple[Check, ...]
    pieces: Mapping[str, str]


def marts(extra: Path | None = None) -> dict[str, Mart]:
    """All marts in an order in which they can be built.

    Args:
        extra: A folder of the study's own marts; a file there may not carry the name of one of ours.

    Raises:
        BadMart: A file's header or SQL is wrong, a name is taken, a column is not declared, or marts need each other.
    """
    files = sorted(sql_folder().glob("*.sql")) + (sorted(extra.glob("*.sql")) if extra else [])
    found: dict[str, Mart] = {}
    for file in files:
        mart = read_mart(file)
        if mart.table.name in found or mart.table.name in TRANSFORMS or mart.table.name in lake_tables():
            raise BadMart(f"{file}: the name {mart.table.name} is taken. Rename the file.")
        found[mart.table.name] = mart
    cases = _case_mart(hypotheses(extra))
    found[cases.table.name] = cases
    return {name: found[name] for name in build_order(found) if name in found}


def read_mart(file: Path) -> Mart:
    """Read one SQL file.

    Raises:
        BadMart: The header or the SQL is wrong.
    """
    source = read_source(file, FIELDS)
    values = {name: value for name, value in source.fields if name in ("key", "columns", "kind")}
    if not source.description or "key" not in values:
        raise BadMart(f"{file}: the header needs a first line 'One row per ...' and a line '-- key: ...'.")
    key, columns = _names(values["key"]), _names(values.get("columns", ""))
    try:
        declared = columns_of(key, columns)
    except KeyError as error:
        raise BadMart(f"{file}: column {error} is not declared. Declare it in expectations/columns.toml.") from error
    checks = tuple(_check(file, name, value) for name, value in source.fields if name in ("stop", "warn"))
    table = Table(file.stem, source.description, tuple(name.rstrip("?") for name in key), declared)
    return Mart(table, source.sql, values.get("kind") == "view", source.inputs, checks, {file.name: source.sql})


def _case_mart(listed: Sequence[Hypothesis]) -> Mart:
    """The mart that every hypothesis's SELECT adds its cases to."""
    table = Table(
        name="hypothesis_case",
        row="One row per hypothesis, configuration set and case: what the criterion's SELECT says of it.",
        key=CASE_KEY,
        columns=columns_of(CASE_KEY, [f"{name}?" for name in CASE_COLUMNS if name not in CASE_KEY]),
    )
    inputs = tuple(sorted({name for one in listed for name in one.source.inputs}))
    decided = "(is_supported is null) = (criterion_margin is null)"
    agrees = "not is_supported or criterion_margin >= 0"
    remedy = "a hypothesis contradicts its own margin; mend its SELECT"
    checks = (Check("stop", decided, remedy), Check("stop", agrees, remedy))
    pieces = {one.source.file.name: one.case_sql for one in listed}
    return Mart(table, "\nunion all\n".join(pieces.values()), False, inputs, checks, pieces)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check(file: Path, severity: str, text: str) -> Check:
    condition, bar, remedy = text.partition(" | ")
    if not bar:
        raise BadMart(f"{file}: the check {text!r} has no remedy. Write 'condition | what to do'.")
    return Check("stop" if severity == "stop" else "warn", condition.strip(), remedy.strip())


def build_order(found: Mapping[str, Mart]) -> list[str]:
    """Marts and transforms, inputs before what reads them.

    Raises:
        BadMart: A mart reads a table that nobody declares, or marts need each other.
    """
    known = {*found, *TRANSFORMS, *lake_tables(), *declared_tables()}
    graph: dict[str, Iterable[str]] = {name: mart.inputs for name, mart in found.items()}
    graph |= {name: transform.inputs for name, transform in TRANSFORMS.items()}
    for name, inputs in graph.items():
        if missing := [table for table in inputs if table not in known]:
            raise BadMart(f"{name}.sql reads {missing[0]}, which is no table of the lake and no mart. Mend its name.")
    try:
        order = TopologicalSorter(graph).static_order()
        return [name for name in order if name in graph]
    except CycleError as error:
        raise BadMart(f"marts need each other: {' -> '.join(error.args[1])}. Break the circle.") from error


def needed_by(names: Sequence[str], found: Mapping[str, Mart]) -> set[str]:
    """The named marts with everything that they read, directly or not."""
    needed: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in needed:
            continue
        needed.add(name)
        inputs = found[name].inputs if name in found else TRANSFORMS[name].inputs if name in TRANSFORMS else ()
        pending += inputs
    return needed


@cache
def mart_version() -> str:
    """A hash of the project's SQL and of the code that builds marts: a release is current only under the same one."""
    from hashlib import sha256

    root = HERE.parent
    folders = [sql_folder(), HERE, root / "transforms", root / "expectations"]
    files = [f for folder in folders for f in sorted(folder.glob("*")) if f.suffix in (".sql", ".py", ".toml")]
    files = [file for file in files if file not in READERS]
    files += hypothesis_files(sql_folder())
    digest = sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
