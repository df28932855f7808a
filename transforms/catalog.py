"""Tables that SQL cannot say well: exact rational arithmetic, special functions, search.

Each is declared like a mart (row, key, columns, inputs) with a function from its inputs to rows; `marts` runs it in its
place among the SQL files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl

from expectations.protocol import Protocol
from expectations.tables import Table, columns_of

Inputs = Mapping[str, pl.DataFrame]


@dataclass(frozen=True)
class Transform:
    """A table computed in Python from other tables of a release."""

    table: Table
    inputs: tuple[str, ...]
    compute: Callable[[Protocol, Inputs], pl.DataFrame]


def declared(
    name: str, row: str, key: tuple[str, ...], columns: tuple[str, ...], inputs: tuple[str, ...]
) -> Callable[[Callable[[Protocol, Inputs], pl.DataFrame]], Transform]:
    """Declare a table that the decorated function computes.

    Args:
        name: Name of the table.
        row: "One row per ...".
        key: Key columns.
        columns: The other columns; a trailing question mark marks one that may be null.
        inputs: Tables that the function reads, by name.
    """
    table = Table(name, row, tuple(k.rstrip("?") for k in key), columns_of(key, columns))
    return lambda compute: Transform(table, inputs, compute)
