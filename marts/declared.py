"""Tables of a release that come from declarations alone: the protocol, its axes and budgets, and what failed.

With them a mart reads every parameter by name (`from protocol`) and every level from a table, and never repeats one.
"""

from pathlib import Path
from typing import cast

import polars as pl

from expectations.protocol import Protocol, declaration
from expectations.tables import Table, columns_of
from ingest.manifest import Manifest
from marts.hypotheses import hypotheses

PARAMETER_TYPES = {int: pl.Int64, float: pl.Float64, str: pl.String}


def declared_tables() -> dict[str, Table]:
    """Declarations of these tables, but for `protocol`, whose columns are the parameters themselves."""
    return {
        "protocol": Table("protocol", "One row: every single-valued parameter of the protocol, by name.", (), ()),
        "parameter": _table("parameter", "One row per parameter.", ("parameter",), ("parameter_value", "why")),
        "axis_level": _table(
            "axis_level",
            "One row per axis and level of the multiverse.",
            ("axis_column", "level_id"),
            ("axis_position", "position", "is_defensible", "uses_budget", "uses_voxel_volume", "description"),
        ),
        "metric_axis": _table(
            "metric_axis", "One row per metric and axis that changes it.", ("metric_id", "axis_column"), ()
        ),
        "budget": _table("budget", "One row per false-positive budget.", ("budget_cm3",), ("position", "level_id")),
        "hypothesis_criterion": _table(
            "hypothesis_criterion",
            "One row per hypothesis: what it claims, when it counts as supported, and the SELECT that decides.",
            ("hypothesis_id",),
            ("position", "statement", "criterion", "required_cases", "needs", "sql"),
        ),
        "failure": _table(
            "failure",
            "One row per file or task that could not be measured.",
            ("path", "task", "method_id?"),
            ("subject_id?", "reason", "remedy"),
        ),
    }


def _table(name: str, row: str, key: tuple[str, ...], columns: tuple[str, ...]) -> Table:
    return Table(name, row, tuple(k.rstrip("?") for k in key), columns_of(key, columns))


def declared_frames(manifest: Manifest) -> dict[str, pl.DataFrame]:
    """These tables' rows for one lake."""
    protocol, tables = manifest.protocol, declared_tables()
    own_sql = Path(manifest.sql_folder) if manifest.sql_folder else None
    values = protocol.parameters.model_dump()
    single = {name: value for name, value in values.items() if not isinstance(value, tuple)}
    schema = {name: PARAMETER_TYPES[type(value)] for name, value in single.items()}
    failures = [(f.path, f.task, f.method_id, f.subject_id, f.reason, f.remedy) for f in manifest.failures]
    return {
        "protocol": pl.DataFrame([tuple(single.values())], schema=schema, orient="row"),
        "parameter": tables["parameter"].frame(
            [(name, _text(value), declaration().parameter[name].why) for name, value in values.items()]
        ),
        "axis_level": tables["axis_level"].frame(_levels(protocol)),
        "metric_axis": tables["metric_axis"].frame(
            [(metric.id, column) for metric in protocol.axis("metric_id").levels for column in metric.acts]
        ),
        "budget": tables["budget"].frame(
            [(value, position, f"{value:g}") for position, value in enumerate(protocol.parameters.budgets_cm3)]
        ),
        "hypothesis_criterion": tables["hypothesis_criterion"].frame(
            [
                (h.hypothesis_id, position, h.statement, h.criterion, h.cases, h.needs, h.source.sql)
                for position, h in enumerate(hypotheses(own_sql))
            ]
        ),
        "failure": tables["failure"].frame(failures),
    }


def _levels(protocol: Protocol) -> list[tuple[object, ...]]:
    return [
        (
            axis.column,
            level.id,
            axis_position,
            position,
            level.defensible,
            level.uses_budget,
            level.uses_voxel_volume,
            level.description,
        )
        for axis_position, axis in enumerate(protocol.axes)
        for position, level in enumerate(axis.levels)
    ]


def _text(value: object) -> str:
    return ", ".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)
