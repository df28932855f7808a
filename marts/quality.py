"""Whether a release may be published: declared rules, checks beside the SQL, and the geometry gate.

Small tables (the gate's, and the published marts) are guarded by Great Expectations suites derived from their
declarations; large ones by SQL generated from the same declarations. A stop-check that fails keeps the live release.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb

from expectations.suites import Finding, Guarded, geometry_frames, validate
from expectations.tables import Column, LakeTable, Table, lake_tables
from marts.catalog import Check
from marts.gate import advice
from marts.release import Built, first_row, is_view, quoted

GUARDED_ROWS = 10_000  # rows up to which a mart is handed to Great Expectations as a frame
VIEWED_ROWS = 1_000_000  # rows of a view that a build checks, its first: one SELECT makes all from checked rows
KEYED_ROWS = 10_000_000  # rows of a view whose key is checked where the others are read whole
EXAMPLES = 5
GATE_TABLES = ("gate_candidate", "gate_overlap")  # guarded with the geometry's own rules, at any size


def check_release(
    connection: duckdb.DuckDBPyConnection, built: Built, docs: Path | None, reads_all: bool = False
) -> list[Finding]:
    """Everything that a built release breaks.

    The gate's tables and the materialised marts of up to `GUARDED_ROWS` rows go to Great Expectations, the rest (views,
    large and empty tables) to SQL that is generated from the same declarations.

    Args:
        connection: The release being built.
        built: What it holds.
        docs: Folder for the Data Docs of this validation; none are written without one.
        reads_all: Whether lake tables are held against their declaration and rules once more (every part was when it
            was written, and never changes), and views to their last row.

    Returns:
        Findings, those that stop the release first; none when all is well.
    """
    guarded, large = _by_size(connection, built)
    frames = [*_geometry(connection), *guarded]
    with ThreadPoolExecutor(1) as beside:  # the library keeps one core busy, and DuckDB waits for no interpreter
        by_suite = beside.submit(validate, frames, docs)
        in_sql = [*_declared_findings(connection, large, reads_all), *_mart_findings(connection, built)]
        in_sql += _part_findings(connection) if reads_all else []
    findings = [*by_suite.result(), *in_sql, *_gate_findings(connection, built)]
    return sorted(findings, key=lambda finding: finding.severity != "stop")


def _declared_findings(
    connection: duckdb.DuckDBPyConnection, tables: Sequence[Table], reads_all: bool
) -> Iterator[Finding]:
    """What tables break of their declarations."""
    for table in tables:
        if reads_all or table.name not in lake_tables():
            yield from declared_findings(connection, table, reads_all)


def _mart_findings(connection: duckdb.DuckDBPyConnection, built: Built) -> Iterator[Finding]:
    """What marts break of the checks beside them."""
    for name, mart in built.marts.items():
        if name in built.tables:
            yield from check_findings(connection, mart.table, mart.checks)


def _part_findings(connection: duckdb.DuckDBPyConnection) -> Iterator[Finding]:
    """What lake tables break of the rules beside their columns, which every part kept when it was written."""
    for table in lake_tables().values():
        yield from check_findings(connection, table, [Check("stop", *rule.split(" | ")) for rule in table.rules])
        yield from falling_findings(connection, table)


def falling_findings(connection: duckdb.DuckDBPyConnection, table: LakeTable) -> Iterator[Finding]:
    """Columns that rise along the last column of the key, and must not."""
    if not table.falls:
        return
    *curve, along = table.key
    counts = ", ".join(f"count(*) filter ({column} > {column}_before)" for column in table.falls)
    before = ", ".join(f"lag({column}) over step as {column}_before" for column in table.falls)
    # one number stands for the key of a curve: every row is sorted here
    numbered = f"select hash({', '.join(curve)}) as curve, {along}, {', '.join(table.falls)} from {table.name}"
    steps = f"select *, {before} from ({numbered}) window step as (partition by curve order by {along})"
    for column, count in zip(table.falls, first_row(connection, f"select {counts} from ({steps})") or (), strict=True):
        if count:
            remedy = "Measure the parts again"
            yield Finding(table.name, f"{column} rises with {along}", "stop", int(count), (), remedy)


def _by_size(connection: duckdb.DuckDBPyConnection, built: Built) -> tuple[list[Guarded], list[Table]]:
    guarded: list[Guarded] = []
    large: list[Table] = []
    for name, table in built.tables.items():
        if not table.columns or name in GATE_TABLES:
            continue
        mart = built.marts.get(name)
        is_stored = mart is not None and not mart.is_view
        if is_stored and 0 < _count(connection, f"select count(*) from {name}") <= GUARDED_ROWS:
            guarded.append(Guarded(table, connection.sql(f"select * from {name}").pl()))
        else:
            large.append(table)
    return guarded, large


def _geometry(connection: duckdb.DuckDBPyConnection) -> list[Guarded]:
    frames = [connection.sql(f"select * from {name}").pl() for name in GATE_TABLES]
    subjects = "select subject_id, shape_2, reference_voxels, reference_outside_voxels from subject"
    return geometry_frames(frames[0], frames[1], connection.sql(subjects).pl())


def _count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    row = first_row(connection, query)
    return 0 if row is None else int(row[0] or 0)


def declared_findings(connection: duckdb.DuckDBPyConnection, table: Table, reads_all: bool = False) -> list[Finding]:
    """What a table's rows break of its declaration, by one SQL pass; of a mart's view, its first rows or all."""
    rules = [rule for column in table.columns for rule in _sql_rules(column)]
    is_part = table.name in lake_tables()
    is_long = not is_part and is_view(connection, table.name)
    rows = f"(from {table.name} limit {VIEWED_ROWS})" if is_long and not reads_all else table.name
    keyed = f"(from {table.name} limit {KEYED_ROWS if reads_all else VIEWED_ROWS})" if is_long else table.name
    findings: list[Finding] = []
    if rules:
        counts = ", ".join(f"count(*) filter ({violation})" for _, violation in rules)
        row = first_row(connection, f"select {counts} from {rows}") or ()
        for (rule, violation), count in zip(rules, row, strict=True):
            if count:
                findings.append(_finding(connection, table, rule, violation, int(count), "stop", "Report this defect"))
    if table.key and not is_part:  # the key of a lake table names the part, so a part's own rows are all there are
        keys = ", ".join(table.key)
        # hashes take a fraction of the memory of the keys, which are compared only where two hashes are the same
        repeated = _count(connection, f"select count(*) - count(distinct hash({keys})) from {keyed}")
        if repeated:
            repeated = _count(connection, f"select count(*) - count(distinct row({keys})) from {keyed}")
        if repeated:
            findings.append(Finding(table.name, f"key ({keys}) repeats", "stop", repeated, (), "Report this defect"))
    return findings


def _sql_rules(column: Column) -> Iterator[tuple[str, str]]:
    """Rules of a column as (in words, SQL that finds violations)."""
    name, declared = column.name, column.declaration
    if not column.nullable:
        yield f"{name} is null", f"{name} is null"
    if declared.type in ("f32", "f64"):
        yield f"{name} is not finite", f"not isfinite({name})"
    if declared.minimum is not None:
        yield f"{name} is below {declared.minimum:g}", f"{name} < {declared.minimum}"
    if declared.maximum is not None:
        yield f"{name} is above {declared.maximum:g}", f"{name} > {declared.maximum}"
    if column.values:
        listed = ", ".join(quoted(value) for value in column.values)
        yield f"{name} is none of {', '.join(column.values)}", f"{name} not in ({listed})"


def check_findings(connection: duckdb.DuckDBPyConnection, table: Table, checks: Sequence[Check]) -> Iterator[Finding]:
    """What a table's rows break of the checks beside it; a condition that is null counts as kept."""
    if not checks:
        return
    violations = [f"not ({check.condition})" for check in checks]
    counts = ", ".join(f"count(*) filter ({violation})" for violation in violations)
    row = first_row(connection, f"select {counts} from {table.name}") or ()
    for check, violation, count in zip(checks, violations, row, strict=True):
        if count:
            yield _finding(connection, table, check.condition, violation, int(count), check.severity, check.remedy)


def _finding(
    connection: duckdb.DuckDBPyConnection,
    table: Table,
    rule: str,
    violation: str,
    count: int,
    severity: str,
    remedy: str,
) -> Finding:
    keys = ", ".join(table.key) if table.key else "*"
    query = f"select {keys} from {table.name} where {violation} limit {EXAMPLES}"
    rows = connection.execute(query).fetchall()
    names = table.key or table.column_names
    examples = tuple(", ".join(f"{n}={v}" for n, v in zip(names, row, strict=True)) for row in rows)
    return Finding(table.name, rule, "stop" if severity == "stop" else "warn", count, examples, remedy)


def _gate_findings(connection: duckdb.DuckDBPyConnection, built: Built) -> list[Finding]:
    """Methods that fail the geometry gate, and what the gate has to say of the others."""
    if "gate_summary" not in built.tables:
        return []
    rows = connection.execute(
        "select method_id, verdict, suggestion, study_lines, n_subjects, gate_failure"
        " from gate_summary cross join protocol where verdict = 'failed' or suggestion is not null order by method_id"
    ).fetchall()
    findings: list[Finding] = []
    for method_id, verdict, suggestion, lines, n_subjects, gate_failure in rows:
        stops = verdict == "failed" and gate_failure == "stop"
        rule = "the declared transform is not where the references overlap most" if verdict == "failed" else "gate"
        rule = "the geometry gate cannot be assessed" if verdict == "not_assessable" else rule
        rule = "the geometry gate passes by a small margin" if verdict == "passed" else rule
        severity = "stop" if stops else "warn"
        remedy = advice(method_id, suggestion, lines)
        findings.append(Finding("gate_summary", rule, severity, n_subjects, (f"method_id={method_id}",), remedy))
    return findings
