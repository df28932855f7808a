"""Declared rules by SQL, for tables too large for a frame."""

import duckdb

from expectations.tables import Table, columns_of
from marts.quality import declared_findings

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
