"""Tables as they are declared: columns with types, units and ranges, keys, and what each table depends on.

`columns.toml` is the one home of a column, `tables.toml` of a lake table; a mart is declared in the header of its SQL
file and uses the same columns. Polars, Arrow and DuckDB types and the data dictionary are derived here.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import BaseModel, ConfigDict

from expectations.protocol import declaration

FOLDER = Path(__file__).parent
ColumnType = Literal["id", "text", "bool", "u8", "u32", "i64", "f32", "f64"]
PartKind = Literal["measurement", "diagnosis", "subject", "method", "file"]

POLARS_TYPES: dict[ColumnType, pl.DataType] = {
    "id": pl.String(),
    "text": pl.String(),
    "bool": pl.Boolean(),
    "u8": pl.UInt8(),
    "u32": pl.UInt32(),
    "i64": pl.Int64(),
    "f32": pl.Float32(),
    "f64": pl.Float64(),
}
DUCKDB_TYPES: dict[ColumnType, str] = {
    "id": "VARCHAR",
    "text": "VARCHAR",
    "bool": "BOOLEAN",
    "u8": "UTINYINT",
    "u32": "UINTEGER",
    "i64": "BIGINT",
    "f32": "FLOAT",
    "f64": "DOUBLE",
}
INTERVAL_ENDS = {"low": "Lower", "high": "Upper"}


class ColumnDeclaration(BaseModel):
    """What `columns.toml` says of one column."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: ColumnType
    description: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    values: tuple[str, ...] = ()
    axis: bool = False


class TableDeclaration(BaseModel):
    """What `tables.toml` says of one lake table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: str
    parts: tuple[PartKind, ...]
    version: int
    depends: tuple[str, ...]
    key: tuple[str, ...]
    columns: tuple[str, ...]
    rules: tuple[str, ...] = ()
    falls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of one table."""

    name: str
    declaration: ColumnDeclaration
    nullable: bool

    @property
    def polars_type(self) -> pl.DataType:
        """The column's type in Polars."""
        return POLARS_TYPES[self.declaration.type]

    @property
    def duckdb_type(self) -> str:
        """The column's type in DuckDB."""
        return DUCKDB_TYPES[self.declaration.type]

    @property
    def is_number(self) -> bool:
        """Whether the column holds numbers."""
        return self.declaration.type not in ("id", "text", "bool")

    @property
    def values(self) -> tuple[str, ...]:
        """The values the column may hold, or nothing where any will do."""
        if not self.declaration.axis:
            return self.declaration.values
        axis = next(a for a in declaration().axis if a.column == self.name)
        return tuple(level.id for level in axis.levels)

    @property
    def meaning(self) -> str:
        """Description with unit, for comments and the data dictionary."""
        unit = f" [{self.declaration.unit}]" if self.declaration.unit else ""
        return self.declaration.description + unit


@dataclass(frozen=True)
class Table:
    """A table: what one row is, its key, and its columns in order (the key's first)."""

    name: str
    row: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def column_names(self) -> list[str]:
        """Names of all columns, in order."""
        return [column.name for column in self.columns]

    @property
    def polars_schema(self) -> pl.Schema:
        """The table's schema in Polars."""
        return pl.Schema([(column.name, column.polars_type) for column in self.columns])

    def frame(self, rows: Sequence[Sequence[object]] = ()) -> pl.DataFrame:
        """A frame of this table from rows in column order; empty without rows."""
        return pl.DataFrame(rows, schema=self.polars_schema, orient="row")


@dataclass(frozen=True)
class LakeTable(Table):
    """A table that `ingest` measures and stores as immutable parts.

    Attributes:
        parts: Whose rows a part holds.
        version: Counts changes of what the code measures.
        depends: What the rows depend on.
        rules: What must hold in every row: a SQL condition, a bar, and what is wrong where it does not.
        falls: Columns that never rise along the last column of the key.
    """

    parts: tuple[PartKind, ...]
    version: int
    depends: tuple[str, ...]
    rules: tuple[str, ...]
    falls: tuple[str, ...]


@cache
def column_declarations() -> dict[str, ColumnDeclaration]:
    """Read `columns.toml` once."""
    text = (FOLDER / "columns.toml").read_text()
    return {name: ColumnDeclaration.model_validate(body) for name, body in tomllib.loads(text).items()}


def column_declaration(name: str) -> ColumnDeclaration:
    """The declaration of a column; `X_low` and `X_high` are derived from X where they have no entry of their own.

    Raises:
        KeyError: The name is not declared in `columns.toml`, nor is it an end of an interval of one that is.
    """
    declared = column_declarations()
    base, _, end = name.rpartition("_")
    if name in declared or base not in declared or end not in INTERVAL_ENDS:
        return declared[name]
    description = f"{INTERVAL_ENDS[end]} end of the percentile interval of {base} over resampled test subjects"
    return declared[base].model_copy(update={"description": description})


def columns_of(key: Sequence[str], columns: Sequence[str]) -> tuple[Column, ...]:
    """Look names up in the column dictionary.

    Args:
        key: Names of key columns; a key column is null only where its name ends in a question mark.
        columns: Names of the other columns; a trailing question mark marks a column that may be null.

    Raises:
        KeyError: A name is not declared in `columns.toml`.
    """
    return tuple(Column(n.rstrip("?"), column_declaration(n.rstrip("?")), n.endswith("?")) for n in (*key, *columns))


@cache
def lake_tables() -> dict[str, LakeTable]:
    """The lake tables in declared order."""
    text = (FOLDER / "tables.toml").read_text()
    tables: dict[str, LakeTable] = {}
    for name, body in tomllib.loads(text).items():
        declared = TableDeclaration.model_validate(body)
        tables[name] = LakeTable(
            name=name,
            row=declared.row,
            key=tuple(column.rstrip("?") for column in declared.key),
            columns=columns_of(declared.key, declared.columns),
            parts=declared.parts,
            version=declared.version,
            depends=declared.depends,
            rules=declared.rules,
            falls=declared.falls,
        )
    return tables


@dataclass(frozen=True)
class Breach:
    """A rule of a declaration that rows break."""

    table: str
    rule: str
    row_count: int

    def __str__(self) -> str:
        return f"{self.table}: {self.rule} ({self.row_count} rows)"


class ContractBroken(Exception):
    """A frame does not keep its table's declaration; nothing is written."""

    def __init__(self, breaches: Sequence[Breach]) -> None:
        self.breaches = tuple(breaches)
        super().__init__("; ".join(str(breach) for breach in breaches))


def breaches(frame: pl.DataFrame, table: Table) -> list[Breach]:
    """Every rule of a table's declaration that a frame breaks; none for a good (or empty) frame."""
    if dict(frame.schema) != dict(table.polars_schema) or frame.columns != table.column_names:
        return [
            Breach(table.name, f"has columns {dict(frame.schema)}, declared {dict(table.polars_schema)}", len(frame))
        ]
    found = {rule: frame.filter(violation).height for column in table.columns for rule, violation in _rules(column)}
    if table.key:
        found[f"key ({', '.join(table.key)}) repeats"] = len(frame) - frame.select(table.key).n_unique()
    if isinstance(table, LakeTable):
        for condition, wrong in (rule.split(" | ") for rule in table.rules):
            found[wrong] = frame.filter(~pl.sql_expr(condition)).height  # a condition that is null counts as kept
        *curve, along = table.key
        for column in table.falls:
            before = pl.col(column).shift().over(curve, order_by=along)
            found[f"{column} rises with {along}"] = frame.filter(pl.col(column) > before).height
    return [Breach(table.name, rule, count) for rule, count in found.items() if count > 0]


def _rules(column: Column) -> list[tuple[str, pl.Expr]]:
    """Rules of a column as (what is wrong, expression that finds the rows)."""
    value, declared = pl.col(column.name), column.declaration
    rules: list[tuple[str, pl.Expr]] = []
    if not column.nullable:
        rules.append((f"{column.name} is null", value.is_null()))
    if declared.type in ("f32", "f64"):
        rules.append((f"{column.name} is not finite", ~value.is_finite()))
    if declared.minimum is not None:
        rules.append((f"{column.name} is below {declared.minimum:g}", value < declared.minimum))
    if declared.maximum is not None:
        rules.append((f"{column.name} is above {declared.maximum:g}", value > declared.maximum))
    if column.values:
        rules.append((f"{column.name} is none of {', '.join(column.values)}", ~value.is_in(column.values)))
    return rules
