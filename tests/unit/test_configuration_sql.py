"""The SQL that says which training sets stand beside each other, on tables written by hand."""

from collections.abc import Sequence

import duckdb
import pytest

from marts.catalog import sql_folder

Rows = list[tuple[object, ...]]
LATER = {
    "selection": "selection_rule_id varchar, split varchar, position bigint, model_id varchar, method_id varchar,"
    " training_set varchar"
}


def release(
    entries: Sequence[tuple[str, str, str, str | None]],
    held_out: Sequence[str] = (),
    holes: Sequence[tuple[str, int]] = (),
) -> duckdb.DuckDBPyConnection:
    """A release of some entries (method, model, kind, training set) with three universes, one of them dropped."""
    connection = duckdb.connect()
    connection.execute(
        "create table method (method_id varchar, model_id varchar, kind varchar, position bigint, training_set varchar)"
    )
    connection.execute(
        "create table ranked_method (method_id varchar, kind varchar, position bigint, is_ranked bool, reason varchar)"
    )
    connection.execute("create table cell_score (cell_id bigint, method_id varchar, score double)")
    connection.execute(
        "create table universe as from (values (1, 1, true, 'ok'), (2, 2, false, 'ok'),"
        " (3, 3, true, 'unavailable')) as t(universe_id, cell_id, is_defensible, status)"
    )
    connection.execute(f"create table selection ({LATER['selection']})")
    for position, (method, model, kind, training_set) in enumerate(entries):
        reason = "fails the gate" if method in held_out else None
        connection.execute("insert into method values (?, ?, ?, ?, ?)", [method, model, kind, position, training_set])
        row = [method, kind, position, reason is None, reason]
        connection.execute("insert into ranked_method values (?, ?, ?, ?, ?)", row)
        for cell in (1, 2, 3) if reason is None else ():
            score = None if (method, cell) in holes or cell == 3 else 0.5
            connection.execute("insert into cell_score values (?, ?, ?)", [cell, method, score])
    return connection


def built(connection: duckdb.DuckDBPyConnection, *names: str) -> None:
    for name in names:
        connection.execute(f"create table {name} as {(sql_folder() / f'{name}.sql').read_text()}")


def levels(connection: duckdb.DuckDBPyConnection) -> dict[tuple[str, str], tuple[int, str, str | None]]:
    built(connection, "configuration", "configuration_level")
    query = "select universe_set, training_set, model_count, status, reason from configuration_level"
    return {(row[0], row[1]): row[2:] for row in connection.sql(query).fetchall()}


def members(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    built(connection, "configuration_member")
    query = "select configuration_set, list(method_id order by model_position) from configuration_member group by all"
    return dict(connection.sql(query).fetchall())


BALANCED = [
    ("a", "a", "method", "X"),
    ("b", "b", "method", "X"),
    ("t2", "t2", "baseline", None),
    ("a~Y", "a", "configuration", "Y"),
    ("b~Y", "b", "configuration", "Y"),
]
OK = (2, "ok", None)


def test_a_study_of_one_training_set_has_no_configuration() -> None:
    connection = release(BALANCED[:3])
    assert levels(connection) == {}
    assert members(connection) == {}


def test_training_sets_that_every_model_has_are_levels() -> None:
    connection = release(BALANCED)
    assert levels(connection) == {(u, t): OK for u in ("all", "defensible") for t in ("X", "Y")}
    assert members(connection) == {"primary": ["a", "b"], "all X": ["a", "b"], "all Y": ["a~Y", "b~Y"]}


def test_a_model_without_a_training_set_keeps_it_from_being_a_level() -> None:
    connection = release(BALANCED[:4])
    found = levels(connection)
    assert found["defensible", "Y"] == found["all", "Y"] == (1, "unavailable", "no ranked maps of b")
    assert found["all", "X"] == OK
    assert members(connection) == {"primary": ["a", "b"], "all X": ["a", "b"]}


def test_a_model_of_one_unnamed_training_set_is_in_no_common_set() -> None:
    connection = release([*BALANCED[:1], ("b", "b", "method", None), *BALANCED[3:4]])
    assert {status for _, status, _ in levels(connection).values()} == {"unavailable"}
    assert members(connection) == {"primary": ["a", "b"]}


def test_maps_that_are_held_out_are_none() -> None:
    connection = release(BALANCED, held_out=["b~Y"])
    assert levels(connection)["all", "Y"] == (1, "unavailable", "no ranked maps of b")
    reasons = dict(connection.sql("select method_id, reason from configuration where not is_ranked").fetchall())
    assert reasons == {"b~Y": "fails the gate"}


def test_a_model_whose_primary_maps_are_held_out_takes_no_part() -> None:
    connection = release(BALANCED, held_out=["b"])
    assert set(levels(connection).values()) == {(1, "ok", None)}
    assert members(connection) == {"primary": ["a"], "all X": ["a"], "all Y": ["a~Y"]}


@pytest.mark.parametrize(("cell", "sets"), [(1, ["all", "defensible"]), (2, ["all"]), (3, [])])
def test_a_hole_counts_where_the_primary_maps_have_a_score(cell: int, sets: list[str]) -> None:
    found = levels(release(BALANCED, holes=[("b~Y", cell)]))
    reason = "b~Y has no score in 1 universes that the primary maps score"
    assert {key: value for key, value in found.items() if value != OK} == {
        (name, "Y"): (2, "unavailable", reason) for name in sets
    }


def test_a_selected_set_takes_the_first_rule_that_chooses_for_every_model() -> None:
    connection = release([*BALANCED, ("c", "c", "method", None)])
    rows: Rows = [
        ("v0", "validation", 0, "a", None, None),
        ("v0", "validation", 0, "b", "b~Y", "Y"),
        ("v1", "validation", 1, "a", "a", "X"),
        ("v1", "validation", 1, "b", "b~Y", "Y"),
        ("v2", "validation", 2, "a", "a~Y", "Y"),
        ("v2", "validation", 2, "b", "b~Y", "Y"),
        ("t0", "test", 3, "a", None, None),
        ("t0", "test", 3, "b", None, None),
    ]
    connection.executemany("insert into selection values (?, ?, ?, ?, ?, ?)", rows)
    levels(connection)
    assert members(connection) == {"primary": ["a", "b", "c"], "validation_selected": ["a", "b~Y", "c"]}
