"""Tables that SQL cannot say well: exact rational arithmetic, special functions, search, resampling.

Each is declared like a mart (row, key, columns, inputs) with a function from its inputs to rows; `marts` runs it in its
place among the SQL files. Where a function needs only a projection of large tables, it declares the SQL of that
projection; every input is read when the function asks for it, so that it holds no more than it needs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from expectations.protocol import Protocol
from expectations.tables import Table, columns_of

Inputs = Mapping[str, pl.DataFrame]
VALUE = "$value"


@dataclass(frozen=True)
class Transform:
    """A table computed in Python from other tables of a release.

    Attributes:
        table: Its declaration.
        inputs: Tables that it reads, directly or through a query.
        compute: From the protocol and the inputs (tables and queries by name) to rows.
        queries: Named SQL projections of the inputs.
    """

    table: Table
    inputs: tuple[str, ...]
    compute: Callable[[Protocol, Inputs], pl.DataFrame]
    queries: Mapping[str, str]

    def run(self, protocol: Protocol, read: Callable[[str], pl.DataFrame]) -> pl.DataFrame:
        """Compute the rows, in declared columns.

        Args:
            protocol: The protocol under the study's overrides.
            read: Runs a SELECT on the release that is being built.
        """
        whole = {name: f"select * from {name}" for name in self.inputs}
        return self.compute(protocol, _Reader(read, whole | dict(self.queries))).select(self.table.column_names)


class _Reader(Mapping[str, pl.DataFrame]):
    """Inputs that are read anew each time they are asked for."""

    def __init__(self, read: Callable[[str], pl.DataFrame], queries: Mapping[str, str]) -> None:
        self._read, self._queries = read, queries

    def __getitem__(self, name: str) -> pl.DataFrame:
        query, _, value = name.partition(":")
        return self._read(self._queries[query].replace(VALUE, value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


def declared(
    name: str,
    row: str,
    key: tuple[str, ...],
    columns: tuple[str, ...],
    inputs: tuple[str, ...],
    queries: Mapping[str, str] | None = None,
) -> Callable[[Callable[[Protocol, Inputs], pl.DataFrame]], Transform]:
    """Declare a table that the decorated function computes.

    Args:
        name: Name of the table.
        row: "One row per ...".
        key: Key columns.
        columns: The other columns; a trailing question mark marks one that may be null.
        inputs: Tables that the function or its queries read, by name.
        queries: SELECTs over the inputs whose results the function reads, by a name that is no table's. One that holds
            `$value` is asked for with it: `inputs["curve:2"]` puts 2 in its place.
    """
    table = Table(name, row, tuple(k.rstrip("?") for k in key), columns_of(key, columns))
    return lambda compute: Transform(table, inputs, compute, queries or {})
