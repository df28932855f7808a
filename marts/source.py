"""SQL files with a declared header: how one is read, and where the project's own lie.

A header is the comment that a file starts with: lines in words, then fields such as `-- key: method_id`; a line that is
no field continues the one before it.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError

HERE = Path(__file__).parent
HEADER_LINE = re.compile(r"--\s?(.*)")


class BadMart(Exception):
    """A SQL file that cannot be used: names the file, what was found and what to do."""


@dataclass(frozen=True)
class Source:
    """A SQL file: its header in words and fields, its text, and the tables that its one SELECT reads."""

    file: Path
    description: str
    fields: tuple[tuple[str, str], ...]
    sql: str
    inputs: tuple[str, ...]


def sql_folder() -> Path:
    """The project's own SQL: beside the packages in a checkout, inside `marts` once installed."""
    inside = HERE / "sql"
    return inside if inside.is_dir() else HERE.parent / "sql"


def read_source(file: Path, known: tuple[str, ...]) -> Source:
    """Read one SQL file.

    Args:
        file: The file.
        known: Names of the fields that its header may hold.

    Raises:
        BadMart: There is no header, a field is unknown, or the file is not one SELECT.
    """
    text = file.read_text(encoding="utf-8")
    description, fields = _header(file, text)
    unknown = [name for name, _ in fields if name not in known]
    if unknown:
        raise BadMart(f"{file}: the header has {unknown[0]!r}. It may hold {', '.join(known)}.")
    return Source(file, description, tuple(fields), text, _inputs(file, text))


def _header(file: Path, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The header's description and its fields, in order."""
    description: list[str] = []
    fields: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = HEADER_LINE.fullmatch(line)
        if match is None:
            break
        name, colon, value = match[1].partition(": ")
        if colon and re.fullmatch(r"[a-z]+", name):
            fields.append((name, value.strip()))
        elif fields:
            fields[-1] = (fields[-1][0], f"{fields[-1][1]} {match[1].strip()}")
        else:
            description.append(match[1].strip())
    if not description and not fields:
        raise BadMart(f"{file}: has no header. Start it with '-- One row per ...' and '-- key: ...'.")
    return " ".join(description), fields


def _inputs(file: Path, text: str) -> tuple[str, ...]:
    """Tables that a SELECT reads, without its own common table expressions."""
    try:
        return tables_read(text)
    except ParseError as error:
        raise BadMart(f"{file}: is not one SELECT: {error}") from error
    except ValueError as error:
        raise BadMart(f"{file}: {error}") from error


@cache
def tables_read(text: str) -> tuple[str, ...]:
    """Tables that a SELECT reads, by name, without its own common table expressions.

    Raises:
        ValueError: The text is not one SELECT.
    """
    statements = [s for s in sqlglot.parse(text, dialect="duckdb") if s is not None]
    if len(statements) != 1 or not isinstance(statements[0], exp.Query):
        raise ValueError(f"holds {len(statements)} statements. A mart is one SELECT.")
    own = {cte.alias for cte in statements[0].find_all(exp.CTE)}
    return tuple(sorted({table.name for table in statements[0].find_all(exp.Table)} - own))
