"""Which numbers moved between two releases of one lake."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb

from marts.lake import connect
from marts.release import first_row, quoted

NUMBERS = ("DOUBLE", "FLOAT", "BIGINT", "UTINYINT", "UINTEGER", "HUGEINT", "INTEGER")


@dataclass(frozen=True)
class Moved:
    """A column whose values differ between two releases, over the rows that both have."""

    table: str
    column: str
    changed_count: int
    row_count: int
    largest: str
    example: str


def moved(lake: Path, first: str, second: str) -> Iterator[Moved]:
    """Compare the materialised marts of two releases by key.

    Args:
        lake: The lake's folder.
        first: An earlier release.
        second: A later release.

    Yields:
        One record per column that moved, and one per mart whose rows came or went (column `rows`).

    Raises:
        NoRelease: One of the releases is not there.
    """
    connect(lake, first).close()  # both must be there before anything is compared
    connect(lake, second).close()
    with duckdb.connect() as connection:
        for alias, release in (("a", first), ("b", second)):
            file = quoted(str(lake.resolve() / "releases" / f"{release}.duckdb"))
            connection.execute(f"attach {file} as {alias} (read_only)")
        both = connection.execute(
            "select table_name, x.key from a.release_table as x join b.release_table as y using (table_name)"
            " where not x.is_view and x.key = y.key and x.key <> '' order by table_name"
        ).fetchall()
        for table, key in both:
            yield from _moved_in(connection, str(table), [name.strip() for name in str(key).split(",")])


def _moved_in(connection: duckdb.DuckDBPyConnection, table: str, key: list[str]) -> Iterator[Moved]:
    match = " and ".join(f"x.{name} is not distinct from y.{name}" for name in key)
    joined = f"from a.{table} as x join b.{table} as y on {match}"
    shared = _one(connection, f"select count(*) {joined}")
    gone = _one(connection, f"select count(*) from a.{table}") - shared
    come = _one(connection, f"select count(*) from b.{table}") - shared
    if gone or come:
        yield Moved(table, "rows", gone + come, shared, f"{come} came, {gone} went", "")
    columns = {name: kind for name, kind, *_ in connection.execute(f"describe a.{table}").fetchall()}
    others = {name for name, *_ in connection.execute(f"describe b.{table}").fetchall()}
    for name, kind in columns.items():
        if name not in key and name in others:
            yield from _moved_column(connection, table, str(name), str(kind) in NUMBERS, key, joined)


def _moved_column(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, is_number: bool, key: list[str], joined: str
) -> Iterator[Moved]:
    size = f"abs(x.{column}::double - y.{column}::double)" if is_number else "1"
    where = " || ', ' || ".join(f"coalesce(x.{name}::varchar, 'null')" for name in key)
    row = first_row(
        connection,
        f"select count(*), max({size}), max_by({where}, coalesce({size}, 0)) {joined}"
        f" where x.{column} is distinct from y.{column}",
    )
    if row and row[0]:
        largest = f"{row[1]:.3g}" if is_number and row[1] is not None else ""
        yield Moved(table, column, int(row[0]), _one(connection, f"select count(*) {joined}"), largest, str(row[2]))


def _one(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    row = first_row(connection, sql)
    return int(row[0]) if row else 0
