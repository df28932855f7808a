"""Declared rules by SQL, for tables too large for a frame; and which tables a release is held against."""

import duckdb
import pytest

from expectations.tables import Table, columns_of, lake_tables
from marts import quality
from marts.quality import check_release, declared_findings
from marts.release import Built

TABLE = Table("large", "One row per method.", ("method_id",), columns_of(("method_id",), ("exceedance", "n_subjects?")))


def findings_of(rows: str) -> dict[str, int]:
    with duckdb.connect() as connection:
        connection.execute(
            f"create table large as select * from (values {rows}) as t(method_id, exceedance, n_subjects)"
        )
        return {finding.rule: finding.row_count for finding in declared_findings(connection, TABLE)}


def test_good_rows_break_nothing() -> None:
    assert findings_of("('a', 0.0::double, 3), ('b', 1.0, null)") == {}


def test_every_declared_rule_is_found_with_its_rows() -> None:
    rows = "('a', 0.5::double, 3), ('a', 1.5, 3), (null, null, -1), ('c', -0.5, 3)"
    assert findings_of(rows) == {
        "method_id is null": 1,
        "exceedance is null": 1,
        "exceedance is below 0": 1,
        "exceedance is above 1": 1,
        "n_subjects is below 0": 1,
        "key (method_id) repeats": 1,
    }


def test_of_a_view_the_first_rows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "VIEWED_ROWS", 2)
    with duckdb.connect() as connection:
        connection.execute(
            "create table rows as from (values ('a', 2.0, 1), ('a', 0.5, 2), ('a', 3.0, 3)) as t(m, e, n)"
        )
        connection.execute("create view large as select m as method_id, e as exceedance, n as n_subjects from rows")
        first, every = (
            {finding.rule: finding.row_count for finding in declared_findings(connection, TABLE, reads_all)}
            for reads_all in (False, True)
        )
    assert first == {"exceedance is above 1": 1, "key (method_id) repeats": 1}
    assert every == {"exceedance is above 1": 2, "key (method_id) repeats": 2}


@pytest.mark.parametrize("reads_all", [False, True])
def test_a_part_is_held_against_its_declaration_again_where_asked(reads_all: bool) -> None:
    with duckdb.connect() as connection:
        for name, table in lake_tables().items():
            columns = ", ".join(f"{column.name} {column.duckdb_type}" for column in table.columns)
            connection.execute(f"create table {name} ({columns})")
        connection.execute("insert into slice_ranking (method_id, subject_id, auroc) values ('a', 's', 1.5)")
        findings = check_release(connection, Built(lake_tables(), {}), None, reads_all)
    assert ("auroc is above 1" in {finding.rule for finding in findings}) == reads_all
