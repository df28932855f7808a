"""Hypotheses as files: what a header must say, how a study takes one over, and how cases come to a verdict."""

from pathlib import Path

import duckdb
import pytest

from marts.catalog import marts, read_mart
from marts.hypotheses import CASE_COLUMNS, hypotheses
from marts.source import BadMart, sql_folder

HEADER = "-- Ours: the sky is high.\n-- criterion: height at least 1\n-- cases: any\n-- needs: a sky\n"
SELECT = """select 'primary' as configuration_set, 'sky' as item, 2 as estimate, null as estimate_low,
null as estimate_high, 1 as criterion_margin, true as is_supported, 'it is' as reason"""


def own(folder: Path, name: str, text: str = HEADER + SELECT) -> Path:
    (folder / "hypothesis").mkdir(exist_ok=True)
    file = folder / "hypothesis" / name
    file.write_text(text)
    return file


def test_the_ledger_holds_the_protocols_hypotheses() -> None:
    listed = [one.hypothesis_id for one in hypotheses()]
    assert listed == sorted(listed)
    assert {"H1", "H2", "H3", "H5", "H6", "H8"} <= set(listed)
    for one in hypotheses():
        assert one.statement.endswith(".") and one.statement.count(":") == 1, one.hypothesis_id


def test_a_study_takes_a_hypothesis_over_by_its_identifier_and_adds_its_own(tmp_path: Path) -> None:
    own(tmp_path, "H1_my_reading.sql")
    own(tmp_path, "X1_sky.sql")
    found = {one.hypothesis_id: one for one in hypotheses(tmp_path)}
    assert {name for name in found} == {one.hypothesis_id for one in hypotheses()} | {"X1"}
    assert found["H1"].source.file == tmp_path / "hypothesis" / "H1_my_reading.sql"
    assert found["H1"].statement == "Ours: the sky is high."
    assert "'sky' as item" in marts(tmp_path)["hypothesis_case"].sql
    assert "configuration_phi_max" not in marts(tmp_path)["hypothesis_case"].inputs
    assert "configuration_phi_max" in marts()["hypothesis_case"].inputs


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SELECT, "has no header"),
        (HEADER.replace("-- cases: any\n", "") + SELECT, "the header needs a line '-- cases: ...'"),
        (HEADER.replace("any", "most") + SELECT, "cases is 'most'. Write any or every"),
        (HEADER.replace("needs", "wants") + SELECT, "the header has 'wants'"),
        ("-- criterion: a\n-- cases: any\n-- needs: b\n" + SELECT, "a first line that says what is claimed"),
        (HEADER + SELECT + ";" + SELECT, "holds 2 statements"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, found: str) -> None:
    file = own(tmp_path, "H1_wrong.sql", text)
    with pytest.raises(BadMart) as caught:
        hypotheses(tmp_path)
    assert str(caught.value).startswith(f"{file}: ") and found in str(caught.value)


def test_a_file_must_begin_with_an_identifier(tmp_path: Path) -> None:
    file = own(tmp_path, "it's_mine.sql")
    with pytest.raises(BadMart) as caught:
        hypotheses(tmp_path)
    assert str(caught.value).startswith(f'{file}: "it\'s" is no identifier')


def test_two_files_of_one_identifier_are_refused(tmp_path: Path) -> None:
    own(tmp_path, "H1_first.sql")
    own(tmp_path, "H1_second.sql")
    with pytest.raises(BadMart, match="there are two of H1"):
        hypotheses(tmp_path)


CASES = """
    ('A', 'primary', 'a', 1.0, 0.5, 1.5, 0.2, true, 'best'),
    ('A', 'primary', 'b', 0.0, null, null, -0.3, false, 'worse'),
    ('E', 'primary', 'a', 1.0, 0.5, 1.5, 0.2, true, 'fine'),
    ('E', 'primary', 'b', 0.0, null, null, -0.3, false, 'misses most'),
    ('E', 'primary', 'c', 0.0, null, null, -0.1, false, 'misses'),
    ('F', 'primary', 'a', 1.0, null, null, 0.2, true, 'fine'),
    ('F', 'primary', 'b', 1.0, null, null, 0.1, true, 'barely'),
    ('F', 'primary', 'c', null, null, null, null, null, 'undecided'),
    ('F', 'all IXI', 'a', 1.0, null, null, -0.2, false, 'not there'),
    ('U', 'primary', 'a', null, null, null, null, null, 'nothing to decide by'),
    ('N', 'primary', 'a', 1.0, null, null, -1.0, false, 'no')
"""
VERDICTS = {
    ("A", "primary"): ("supported", "a", 1, 2, 0, "best"),
    ("E", "primary"): ("not_supported", "b", 1, 3, 0, "misses most"),
    ("F", "primary"): ("supported", "b", 2, 2, 1, "barely"),
    ("F", "all IXI"): ("not_supported", "a", 0, 1, 0, "not there"),
    ("N", "primary"): ("not_supported", "a", 0, 1, 0, "no"),
    ("U", "primary"): ("not_testable", "a", 0, 0, 1, "nothing to decide by"),
    ("Z", "primary"): ("not_testable", None, 0, 0, 0, "needs data"),
}


def test_cases_come_to_a_verdict() -> None:
    with duckdb.connect() as connection:
        connection.execute(
            "create table hypothesis_criterion as select name as hypothesis_id, row_number() over () as position,"
            " 'Claim: it is.' as statement, 'words' as criterion,"
            " case when name in ('A', 'N') then 'any' else 'every' end as required_cases, 'data' as needs"
            " from unnest(['A', 'E', 'F', 'N', 'U', 'Z']) as t(name)"
        )
        columns = ", ".join(("hypothesis_id", *CASE_COLUMNS))
        connection.execute(f"create table hypothesis_case as from (values {CASES}) as t({columns})")
        connection.execute("create table ledger_set as select 'primary' as configuration_set")
        body = read_mart(sql_folder() / "hypothesis.sql").sql
        rows = connection.sql(
            "select hypothesis_id, configuration_set, verdict, item, supported_count, case_count, undecided_count,"
            f" reason from ({body})"
        ).fetchall()
    assert {(name, which): tuple(rest) for name, which, *rest in rows} == VERDICTS
