import math
import tomllib
from collections.abc import Sequence
from itertools import pairwise

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expectations.protocol import protocol
from expectations.tables import (
    DUCKDB_TYPES,
    FOLDER,
    POLARS_TYPES,
    Breach,
    Column,
    ColumnDeclaration,
    ColumnType,
    ContractBroken,
    Table,
    breaches,
    column_declaration,
    column_declarations,
    columns_of,
    lake_tables,
)
from marts.catalog import marts
from marts.declared import declared_tables
from marts.quality import falling_findings
from transforms import TRANSFORMS

UNITS = ("mm3", "cm3", "mm2", "mm", "s")


def all_tables() -> list[Table]:
    return [
        *lake_tables().values(),
        *declared_tables().values(),
        *(transform.table for transform in TRANSFORMS.values()),
        *(mart.table for mart in marts().values()),
    ]


def test_every_column_of_a_lake_table_is_declared() -> None:
    declared = column_declarations()
    for name, body in tomllib.loads((FOLDER / "tables.toml").read_text(encoding="utf-8")).items():
        names = [column.removesuffix("?") for column in (*body["key"], *body["columns"])]
        assert set(names) <= set(declared), name
        assert lake_tables()[name].column_names == names


def test_every_declared_column_is_used() -> None:
    used = {column.name for table in all_tables() for column in table.columns}
    declared = set(column_declarations())
    assert declared <= used
    assert {name.rpartition("_")[0] for name in used - declared} <= declared
    assert {name.rpartition("_")[2] for name in used - declared} == {"low", "high"}


def test_an_end_of_an_interval_is_derived_from_its_column() -> None:
    (low,) = columns_of((), ("share_low?",))
    share = column_declaration("share")
    assert low.nullable and (low.declaration.type, low.declaration.unit) == (share.type, share.unit)
    assert (low.declaration.minimum, low.declaration.maximum) == (share.minimum, share.maximum)
    assert low.meaning.startswith("Lower end of the percentile interval of share")
    for unknown in ("no_such_column_low", "share_middle"):
        with pytest.raises(KeyError):
            column_declaration(unknown)


def test_every_table_says_what_a_row_is_and_has_each_column_once() -> None:
    for table in all_tables():
        assert table.row.startswith("One row"), table.name
        assert len(set(table.column_names)) == len(table.column_names), table.name
        assert table.column_names[: len(table.key)] == list(table.key), table.name


def test_lake_tables_have_keys_that_are_null_in_rows_of_no_method_only() -> None:
    for table in lake_tables().values():
        assert table.key, table.name
        nullable = {column.name for column in table.columns if column.nullable and column.name in table.key}
        assert nullable <= ({"method_id"} if {"file", "subject"} & set(table.parts) else set[str]()), table.name
        assert table.version >= 1


def test_measured_tables_are_keyed_by_what_a_part_holds() -> None:
    owners = {"measurement": {"method_id", "subject_id"}, "subject": {"subject_id"}, "method": {"method_id"}}
    for table in lake_tables().values():
        assert table.parts, table.name
        for kind in table.parts:
            assert owners.get(kind, set()) <= set(table.key), table.name


@pytest.mark.parametrize("name", column_declarations())
def test_a_column_is_described_and_its_range_is_one(name: str) -> None:
    declared = column_declarations()[name]
    assert declared.description.strip() == declared.description != ""
    assert not declared.description.endswith(".")
    assert declared.minimum is None or declared.maximum is None or declared.minimum < declared.maximum
    is_number = declared.type not in ("id", "text", "bool")
    assert is_number or (declared.minimum, declared.maximum, declared.unit) == (None, None, "")
    assert not declared.values or declared.type == "id"
    assert not (declared.values and declared.axis)


@pytest.mark.parametrize("name", column_declarations())
def test_units_in_names_agree_with_the_declared_unit(name: str) -> None:
    declared, tokens = column_declarations()[name], name.split("_")
    for unit in UNITS:
        assert (unit in tokens) == (declared.unit == unit)
    if name.endswith("_voxels") or "voxels" in tokens:
        assert declared.unit == "voxels"


@pytest.mark.parametrize("name", column_declarations())
def test_prefixes_and_suffixes_agree_with_the_type(name: str) -> None:
    declared = column_declarations()[name]
    if name.startswith(("is_", "has_", "passes_", "uses_")):
        assert declared.type == "bool"
    if name.endswith(("_count", "_voxels")):
        assert declared.type in ("u32", "i64")
        assert declared.minimum is not None and declared.minimum >= 0
    if name.endswith("_id") and name not in ("cell_id", "universe_id", "lesion_id"):
        assert declared.type == "id"
    if name.endswith(("_mm3", "_cm3", "_mm", "_share", "_fraction")):
        assert declared.type in ("f32", "f64")
        assert declared.minimum == 0


def test_columns_that_carry_an_axis_take_its_levels() -> None:
    axes = {axis.column: protocol().level_ids(axis.column) for axis in protocol().axes if axis.parameter is None}
    carried = [name for name, declared in column_declarations().items() if declared.axis]
    assert set(carried) <= set(axes)
    for name in carried:
        [column] = columns_of((name,), ())
        assert column.values == axes[name]


def test_a_question_mark_marks_a_column_that_may_be_null() -> None:
    method, dice, split = columns_of(("method_id",), ("dice?", "split"))
    assert [column.name for column in (method, dice, split)] == ["method_id", "dice", "split"]
    assert [column.nullable for column in (method, dice, split)] == [False, True, False]
    assert (method.is_number, dice.is_number) == (False, True)
    assert split.values == ("validation", "test")


def test_a_column_that_nobody_declares_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_column"):
        columns_of(("method_id",), ("no_such_column?",))


def test_meaning_shows_the_unit() -> None:
    voxel, dice = columns_of((), ("voxel_mm3", "dice"))
    assert voxel.meaning.endswith(" [mm3]")
    assert "[" not in dice.meaning


@pytest.mark.parametrize("name", POLARS_TYPES)
def test_polars_and_duckdb_agree_on_every_type(name: ColumnType) -> None:
    relation = duckdb.sql(f"select null::{DUCKDB_TYPES[name]} as value")
    assert relation is not None
    assert relation.pl().schema["value"] == POLARS_TYPES[name]


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.name)
def test_an_empty_frame_breaks_nothing(table: Table) -> None:
    frame = table.frame()
    assert frame.schema == table.polars_schema
    assert breaches(frame, table) == []


def numbered(kind: ColumnType, minimum: float | None = None, maximum: float | None = None) -> Table:
    """A table of one nullable column of a type."""
    declared = ColumnDeclaration(type=kind, description="x", minimum=minimum, maximum=maximum)
    return Table("t", "One row per x.", (), (Column("x", declared, nullable=True),))


OVERLAP = Table("overlap", "One row per method.", ("method_id",), columns_of(("method_id",), ("split", "dice", "low?")))
GOOD: list[tuple[object, ...]] = [("a", "test", 0.0, None), ("b", "validation", 1.0, -5.5), ("c", "test", 0.5, 1e300)]


def found(rows: Sequence[Sequence[object]], table: Table = OVERLAP) -> dict[str, int]:
    result = breaches(table.frame(rows), table)
    assert all(breach.table == table.name for breach in result)
    return {breach.rule: breach.row_count for breach in result}


def test_good_rows_break_nothing() -> None:
    assert found(GOOD) == {}


def test_a_null_where_none_may_be() -> None:
    assert found([*GOOD, ("d", None, 0.5, None)]) == {"split is null": 1}
    assert found([*GOOD, (None, "test", None, None)]) == {"method_id is null": 1, "dice is null": 1}


def test_a_value_below_the_minimum() -> None:
    assert found([*GOOD, ("d", "test", -1e-12, None), ("e", "test", -1.0, None)]) == {"dice is below 0": 2}


def test_a_value_above_the_maximum() -> None:
    assert found([*GOOD, ("d", "test", 1.0000001, None)]) == {"dice is above 1": 1}


def test_a_value_that_is_none_of_those_declared() -> None:
    assert found([*GOOD, ("d", "Test", 0.5, None)]) == {"split is none of validation, test": 1}


def test_a_level_that_is_none_of_its_axis() -> None:
    table = Table("t", "One row.", (), columns_of((), ("reference_id",)))
    assert found([("canonical",), ("own",), ("round_trip",)], table) == {
        "reference_id is none of canonical, own_mapped, round_trip": 1
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_a_value_that_is_not_finite(kind: ColumnType, value: float) -> None:
    assert found([(0.5,), (None,), (value,)], numbered(kind)) == {"x is not finite": 1}


def test_nan_in_a_column_with_a_range_is_found() -> None:
    assert found([*GOOD, ("d", "test", math.nan, None)])["dice is not finite"] == 1


def test_a_key_that_repeats() -> None:
    assert found([*GOOD, GOOD[0], GOOD[0], GOOD[1]]) == {"key (method_id) repeats": 3}


def test_a_key_of_several_columns() -> None:
    table = Table("t", "One row.", ("method_id", "subject_id"), columns_of(("method_id", "subject_id"), ()))
    assert found([("a", "1"), ("a", "2"), ("b", "1")], table) == {}
    assert found([("a", "1"), ("a", "2"), ("a", "1")], table) == {"key (method_id, subject_id) repeats": 1}


def test_a_null_in_a_key_that_allows_it_still_repeats() -> None:
    table = Table("t", "One row.", ("path", "method_id"), columns_of(("path", "method_id?"), ()))
    assert found([("a", None), ("b", None), ("a", "m")], table) == {}
    assert found([("a", None), ("a", None)], table) == {"key (path, method_id) repeats": 1}


def test_a_table_without_key_may_repeat_rows() -> None:
    assert found([(1,), (1,)], numbered("i64")) == {}


def test_whole_numbers_have_ranges_too() -> None:
    assert found([(-4,), (0,), (3,), (4,)], numbered("i64", -3, 3)) == {"x is below -3": 1, "x is above 3": 1}
    assert found([(0,), (200,), (201,)], numbered("u8", 0, 200)) == {"x is above 200": 1}


@pytest.mark.parametrize(
    "frame",
    [
        OVERLAP.frame(GOOD).drop("low"),
        OVERLAP.frame(GOOD).with_columns(extra=pl.lit(1)),
        OVERLAP.frame(GOOD).rename({"low": "lo"}),
        OVERLAP.frame(GOOD).select("split", "method_id", "dice", "low"),
        OVERLAP.frame(GOOD).with_columns(pl.col("dice").cast(pl.Float32)),
        OVERLAP.frame(GOOD).with_columns(pl.col("method_id").cast(pl.Categorical)),
        OVERLAP.frame().drop("low"),
        pl.DataFrame(),
    ],
    ids=["missing", "extra", "renamed", "order", "type", "categorical", "missing and empty", "nothing"],
)
def test_a_wrong_schema_is_one_breach_that_shows_both(frame: pl.DataFrame) -> None:
    [breach] = breaches(frame, OVERLAP)
    assert breach.row_count == len(frame)
    assert str(dict(frame.schema)) in breach.rule
    assert str(dict(OVERLAP.polars_schema)) in breach.rule


def curve(*levels: tuple[str, int, int, int]) -> pl.DataFrame:
    """A region's curve by rows of method, level, predicted voxels and overlap."""
    rows = [(method, "s", 1, level, predicted, overlap, 9) for method, level, predicted, overlap in levels]
    return lake_tables()["region_curve"].frame(rows)


def test_a_rule_of_a_lake_table_that_a_row_breaks() -> None:
    assert breaches(curve(("a", 0, 5, 5), ("a", 1, 4, 4)), lake_tables()["region_curve"]) == []
    [breach] = breaches(curve(("a", 0, 5, 6), ("b", 0, 4, 4)), lake_tables()["region_curve"])
    assert str(breach) == "region_curve: there are more hits than voxels; measure the part again (1 rows)"


def test_a_curve_that_rises() -> None:
    rising = curve(("a", 7, 2, 1), ("a", 0, 1, 0), ("b", 0, 9, 1), ("b", 1, 9, 0), ("b", 2, 9, 1))
    assert {breach.rule: breach.row_count for breach in breaches(rising, lake_tables()["region_curve"])} == {
        "region_predicted_voxels rises with level": 1,
        "overlap_voxels rises with level": 2,
    }


CURVES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 2)), max_size=8, unique_by=lambda row: row[:2]
)


@given(CURVES)
def test_curves_rise_where_a_row_exceeds_the_one_before_it_in_polars_and_in_sql(
    rows: list[tuple[str, int, int]],
) -> None:
    frame = curve(*((method, level, 5, overlap) for method, level, overlap in rows))
    steps = pairwise(sorted(rows))
    count = sum(first[0] == second[0] and second[2] > first[2] for first, second in steps)
    expected = {"overlap_voxels rises with level": count} if count else {}
    table = lake_tables()["region_curve"]
    assert {breach.rule: breach.row_count for breach in breaches(frame, table)} == expected
    with duckdb.connect() as connection:
        connection.register("region_curve", frame)
        assert {finding.rule: finding.row_count for finding in falling_findings(connection, table)} == expected


def test_a_breach_in_words() -> None:
    breach = Breach("overlap", "dice is null", 3)
    assert str(breach) == "overlap: dice is null (3 rows)"
    assert str(ContractBroken([breach, breach])) == f"{breach}; {breach}"
    assert ContractBroken([breach]).breaches == (breach,)


def naive(rows: Sequence[tuple[str | None, str | None, float | None, float | None]]) -> dict[str, int]:
    """The rules of `OVERLAP` row by row."""
    counts = {
        "method_id is null": sum(method is None for method, _, _, _ in rows),
        "split is null": sum(split is None for _, split, _, _ in rows),
        "split is none of validation, test": sum(split not in (None, "validation", "test") for _, split, _, _ in rows),
        "dice is null": sum(dice is None for _, _, dice, _ in rows),
        "dice is not finite": sum(dice is not None and not math.isfinite(dice) for _, _, dice, _ in rows),
        "dice is below 0": sum(dice is not None and dice < 0 for _, _, dice, _ in rows),
        "low is not finite": sum(low is not None and not math.isfinite(low) for _, _, _, low in rows),
    }
    keys = sorted(method or "" for method, _, _, _ in rows)
    counts["key (method_id) repeats"] = sum(first == second for first, second in pairwise(keys))
    return {rule: count for rule, count in counts.items() if count}


NUMBERS = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.0, -1e-300, -1.0, math.nan, math.inf, -math.inf]))
ROWS = st.tuples(
    st.sampled_from(["a", "b", "c", "d", None]), st.sampled_from(["test", "validation", "x", None]), NUMBERS, NUMBERS
)


@settings(deadline=None)
@given(st.lists(ROWS, max_size=6))
def test_breaches_equal_a_row_by_row_check(
    rows: list[tuple[str | None, str | None, float | None, float | None]],
) -> None:
    result = found(rows)
    result.pop("dice is above 1", None)  # NaN counts as above in Polars; it is found as not finite anyway
    assert result == naive(rows)
