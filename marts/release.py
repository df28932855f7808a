"""Building a release: every mart into one DuckDB file, beside the live one.

A release materialises the marts and reads the lake tables through views over an explicit list of parts, by paths
relative to the lake, so that a lake that was moved or copied keeps working.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from threadpoolctl import threadpool_limits

from expectations.tables import Table, lake_tables
from ingest.manifest import Manifest
from marts.catalog import BadMart, Mart, build_order, marts, needed_by
from marts.declared import declared_frames, declared_tables
from transforms import TRANSFORMS, Transform

STORAGE_VERSION = "v1.5.0"  # the newest file format that the current DuckDB command line opens


@dataclass(frozen=True)
class Built:
    """What a release holds, by name: declared tables, lake tables, transforms and marts, in the order of building."""

    tables: Mapping[str, Table]
    marts: Mapping[str, Mart]


def open_for_building(file: Path | None, lake: Path) -> duckdb.DuckDBPyConnection:
    """Open a new DuckDB file (or one in memory) that reads parts relative to the lake."""
    connection = duckdb.connect(file or ":memory:", config={"storage_compatibility_version": STORAGE_VERSION})
    connection.execute(f"set file_search_path = {quoted(str(lake))}")
    connection.execute("set enable_external_file_cache = false")  # it grows to gigabytes, and saves no time here
    tune(connection)
    return connection


def tune(connection: duckdb.DuckDBPyConnection) -> None:
    """Settings of every connection: no progress bar, and no aggregate pushed below a join onto a whole curve."""
    # only where it is on: in a notebook without ipywidgets it is off, and DuckDB refuses any change of it
    if first_row(connection, "select current_setting('enable_progress_bar')") == (True,):
        connection.execute("set enable_progress_bar = false")
    connection.execute("set disabled_optimizers = 'partial_aggregate_pushdown'")
    connection.execute("set parquet_metadata_cache = true")  # parts never change, and every mart reads them again


def first_row(connection: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object] = ()) -> tuple[Any, ...] | None:
    """The first row of a query, or None; reads the result to its end, so that the connection is free again."""
    rows = connection.execute(sql, list(values)).fetchall()
    return rows[0] if rows else None


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def build_tables(
    connection: duckdb.DuckDBPyConnection,
    manifest: Manifest,
    wanted: Sequence[str] = (),
    on_step: Callable[[str], None] = lambda _name: None,
    given: Mapping[str, pl.DataFrame] | None = None,
) -> Built:
    """Fill an empty DuckDB file from a manifest.

    Args:
        connection: From `open_for_building`.
        manifest: The lake's current state.
        wanted: Marts to build, with what they need; all when empty.
        on_step: Told the name of each table before it is built.
        given: Rows of lake tables that are at hand, instead of those of the manifest's parts.

    Raises:
        BadMart: A mart cannot be built, or does not give the columns that it declares.
    """
    found = marts(Path(manifest.sql_folder) if manifest.sql_folder else None)
    if unknown := [name for name in wanted if name not in found and name not in TRANSFORMS]:
        raise BadMart(f"there is no mart {unknown[0]}. Known: {', '.join(found)}.")
    needed = needed_by(wanted, found) if wanted else set(build_order(found))
    tables: dict[str, Table] = {}
    for name, frame in declared_frames(manifest).items():
        _store(connection, name, frame)
        tables[name] = declared_tables()[name]
    for name, table in lake_tables().items():
        if given is not None and name in given:
            _store(connection, name, given[name])
        else:
            _view(connection, table, manifest.files(name))
        tables[name] = table
    for name in build_order(found):
        if name not in needed:
            continue
        on_step(name)
        if name in found:
            _build_mart(connection, found[name])
            tables[name] = found[name].table
        else:
            _run_transform(connection, manifest, TRANSFORMS[name])
            tables[name] = TRANSFORMS[name].table
    connection.execute("begin")  # one transaction: a thousand small ones take a second
    for table in tables.values():
        _comment(connection, table, name_is_view(table.name, found))
    connection.execute("commit")
    return Built(tables, found)


def name_is_view(name: str, found: Mapping[str, Mart]) -> bool:
    """Whether a table of a release is a view."""
    return name in lake_tables() or (name in found and found[name].is_view)


def _store(connection: duckdb.DuckDBPyConnection, name: str, frame: pl.DataFrame) -> None:
    connection.register("incoming", frame)
    connection.execute(f"create table {name} as select * from incoming")
    connection.unregister("incoming")


def _view(connection: duckdb.DuckDBPyConnection, table: Table, files: Sequence[str]) -> None:
    """A lake table: a view over its files, or an empty table of the same columns where it has none."""
    columns = ", ".join(f"{column.name}::{column.duckdb_type} as {column.name}" for column in table.columns)
    if files:
        connection.execute(f"create view {table.name} as select {columns} from {parts_source(files)}")
    else:
        _store(connection, table.name, table.frame())


def parts_source(paths: Sequence[str]) -> str:
    """The SQL that reads some parts or bundles."""
    return f"read_parquet([{', '.join(quoted(path) for path in paths)}])"


def _build_mart(connection: duckdb.DuckDBPyConnection, mart: Mart) -> None:
    table = mart.table
    body = mart.sql.strip().rstrip(";")
    try:
        given = [str(row[0]) for row in connection.execute(f"describe {body}").fetchall()]
        if sorted(given) != sorted(table.column_names):
            missing = sorted(set(table.column_names) - set(given))
            extra = sorted(set(given) - set(table.column_names))
            raise BadMart(f"{table.name}.sql: gives no {missing or 'column missing'}, and beyond its header {extra}.")
        columns = ", ".join(f"{column.name}::{column.duckdb_type} as {column.name}" for column in table.columns)
        if mart.is_view:
            connection.execute(f"create view {table.name} as select {columns} from (\n{body}\n)")
        else:
            order = f" order by {', '.join(table.key)}" if table.key else ""
            connection.execute(f"create table {table.name} as select {columns} from (\n{body}\n){order}")
    except duckdb.Error as error:
        raise BadMart(f"{_culprit(connection, mart)}: {error}") from error


def _culprit(connection: duckdb.DuckDBPyConnection, mart: Mart) -> str:
    """The file by which a mart fails: the first whose SELECT does not run by itself, else its own."""
    for name, sql in mart.pieces.items():
        try:
            connection.execute(sql).fetchall()
        except duckdb.Error:
            return name
    return f"{mart.table.name}.sql"


def _run_transform(connection: duckdb.DuckDBPyConnection, manifest: Manifest, transform: Transform) -> None:
    with threadpool_limits(1):  # transforms bring their own threads: a product of matrices takes none beside them
        frame = transform.run(manifest.protocol, lambda query: connection.sql(query).pl())
    _store(connection, transform.table.name, frame)


def _comment(connection: duckdb.DuckDBPyConnection, table: Table, may_be_view: bool) -> None:
    kind = "view" if may_be_view and is_view(connection, table.name) else "table"
    comments = [f"comment on {kind} {table.name} is {quoted(table.row)}"]
    comments += [f"comment on column {table.name}.{c.name} is {quoted(c.meaning)}" for c in table.columns]
    connection.execute(";\n".join(comments))


def is_view(connection: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Whether a name is a view's: a lake table without parts, for one, is none."""
    return first_row(connection, "select 1 from duckdb_views() where view_name = ?", [name]) is not None


def content_hash(connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> str:
    """SHA-256 of tables in a canonical export: rows by key, floats in their shortest exact form.

    The same inputs give the same hash, on any number of threads.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        frame = connection.sql(f"select * from {name}").pl()
        rows = frame.sort(frame.columns, nulls_last=True).write_csv().encode()
        digest.update(json.dumps([name, len(rows)]).encode() + rows)
    return digest.hexdigest()
