"""The SQL cases: small inputs and the rows that a mart must make of them, worked out by hand, as data.

A case is one file, `tests/sql/MART/CASE.toml`:

    title = "A tie counts half"            # what the case shows, in a sentence
    why = "..."                            # optional: the working
    through = ["cell_order"]               # optional: marts between the given tables and the one under test
    breaks = ["holds"]                     # optional: conditions of the mart's stop-checks that the rows break

    [protocol]                             # optional: parameters that differ from the protocol's defaults
    [same]                                 # optional: columns that hold one value in every given table that has them

    [given]                                # rows of the tables that are read, by name; one that is left out is empty
    cell_score = '''
    cell_id | method_id | score
    1       | a         | 1/3
    '''

    [expected]                             # all rows of the mart, in any order; only the columns of interest
    where = "metric_id = 'dice'"           # optional: which of its rows
    rows = '''
    method_id | value
    a         | 0.5
    '''

A cell may be a fraction; an empty one is null. Given columns that are left out are null. Rows are compared to nine
decimals.
A case of `hypothesis_case` is of one hypothesis: its identifier, with or without `_` and more, is the file's name.
The protocol's own tables (`protocol`, `axis_level`, `metric_axis`, `budget`) hold its defaults unless they are given.
"""

import difflib
import itertools
import re
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from scipy import stats

from expectations.protocol import protocol
from expectations.tables import Table, lake_tables
from ingest.manifest import Manifest
from marts.catalog import Mart, marts
from marts.declared import declared_frames, declared_tables
from marts.hypotheses import hypotheses
from marts.quality import check_findings
from marts.source import sql_folder
from transforms import TRANSFORMS

anova: Any = import_module("statsmodels.stats.anova")
formulas: Any = import_module("statsmodels.formula.api")

CASES = Path(__file__).parents[1] / "sql"
FIELDS = {"title", "why", "through", "breaks", "protocol", "same", "given", "expected"}
DECIMALS = 9
BAR = re.compile(r"(?:\s|^)\|(?=\s|$)")  # a bar inside a word is part of it

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A mart, the tables that it is given, and what is otherwise said in the file."""

    mart: str
    given: Mapping[str, pl.DataFrame]
    through: Sequence[str] = ()
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])


@cache
def known_marts() -> dict[str, Mart]:
    return marts()


@cache
def known_tables() -> dict[str, Table]:
    tables = {**lake_tables(), **declared_tables()}
    tables |= {name: transform.table for name, transform in TRANSFORMS.items()}
    return tables | {name: mart.table for name, mart in known_marts().items()}


@contextmanager
def built(case: Case) -> Generator[duckdb.DuckDBPyConnection]:
    """A database in memory that holds the case's tables and the mart, built by its own SQL.

    Raises:
        ValueError: A given table is read by none of the marts.
    """
    steps = [known_marts()[name] for name in (*case.through, case.mart)]
    read = {name for step in steps for name in step.inputs}
    if unread := sorted(set(case.given) - read):
        raise ValueError(f"{case.mart} does not read {', '.join(unread)}; it reads {', '.join(sorted(read))}")
    none = Manifest(
        study="", overrides=dict(case.overrides), sql_folder=None, subject_count=0, method_ids=(), parts={}, failures=()
    )
    declared = declared_frames(none)
    with duckdb.connect() as connection:
        for name in sorted(read - set(case.through)):
            frame = case.given.get(name, declared[name] if name in declared else known_tables()[name].frame())
            connection.register("incoming", frame)
            connection.execute(f"create table {name} as from incoming")
        for step in steps:
            columns = ", ".join(f"{c.name}::{c.duckdb_type} as {c.name}" for c in step.table.columns)
            connection.execute(f"create table {step.table.name} as select {columns} from ({step.sql})")
        yield connection


def block(text: str) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of a block of text: one line each, cells between bars.

    Raises:
        ValueError: A row has not one cell for each column.
    """
    columns, *rows = [[cell.strip() for cell in BAR.split(line)] for line in text.strip().splitlines()]
    if ragged := [" | ".join(row) for row in rows if len(row) != len(columns)]:
        raise ValueError(f"{ragged[0]!r} has not one cell for each of {', '.join(columns)}")
    return columns, rows


def value_of(text: str, kind: str) -> Any:
    """A cell as a value of its column's declared type."""
    if text == "":
        return None
    if kind in ("id", "text"):
        return text
    if kind == "bool":
        return {"true": True, "false": False}[text]
    number = Fraction(text)
    return float(number) if kind in ("f32", "f64") else int(number)


def kinds_of(table: Table, columns: Sequence[str]) -> dict[str, str]:
    """The declared types of columns.

    Raises:
        ValueError: The table has no such column.
    """
    kinds = {column.name: str(column.declaration.type) for column in table.columns}
    if unknown := [name for name in columns if name not in kinds]:
        raise ValueError(f"{table.name} has no column {', '.join(unknown)}; it has {', '.join(kinds)}")
    return {name: kinds[name] for name in columns}


def frame_of(name: str, rows: Sequence[Mapping[str, object]]) -> pl.DataFrame:
    """Rows of a table; null in columns that they leave out."""
    table = known_tables()[name]
    return table.frame([[row.get(column) for column in table.column_names] for row in rows])


def given_frame(table: Table, text: str, same: Mapping[str, object]) -> pl.DataFrame:
    """A given table: the columns of the text, those that hold one value, and null in all others."""
    columns, rows = block(text)
    kinds = kinds_of(table, columns)
    values = [dict(same) | {c: value_of(v, kinds[c]) for c, v in zip(columns, row, strict=True)} for row in rows]
    return frame_of(table.name, values)


def shown(value: Any) -> str:
    """A value as the expected rows write it: floats to nine decimals, null as nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{round(value, DECIMALS) + 0.0:.12g}" if isinstance(value, float) else str(value)


def differences(expected: Sequence[Row], found: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as text, those of one side only marked by - (expected) or + (found); nothing where both agree."""
    cells = [[[shown(row[name]) for name in columns] for row in rows] for rows in (expected, found)]
    widths = [max(map(len, column)) for column in zip(columns, *cells[0], *cells[1], strict=True)]
    head, *lines = [
        [" | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in side]
        for side in ([columns], *cells)
    ]
    first, second = map(sorted, lines)
    if first == second:
        return ""
    marked = [line for line in difflib.ndiff(first, second) if not line.startswith("?")]
    return "\n".join([f"  {head[0]}", *marked])


def read_case(file: Path) -> tuple[Case, dict[str, Any]]:
    """A case from its file, with all that the file says."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := sorted(set(content) - FIELDS):
        raise ValueError(f"{file.name} has {', '.join(unknown)}; it may have {', '.join(sorted(FIELDS))}")
    same, through = content.get("same", {}), content.get("through", [])
    tables = {name: given_frame(known_tables()[name], text, same) for name, text in content["given"].items()}
    return Case(file.parent.name, tables, through, content.get("protocol", {})), content


def case_files() -> list[Path]:
    return sorted(CASES.glob("*/*.toml"))


@pytest.mark.parametrize("file", case_files(), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_case(file: Path) -> None:
    case, content = read_case(file)
    mart = known_marts()[case.mart]
    columns, rows = block(content["expected"]["rows"])
    kinds = kinds_of(mart.table, columns)
    expected = [{c: value_of(v, kinds[c]) for c, v in zip(columns, row, strict=True)} for row in rows]
    with built(case) as connection:
        found = connection.sql(f"from {case.mart} where {content['expected'].get('where', 'true')}").pl().to_dicts()
        broken = [f.rule for f in check_findings(connection, mart.table, mart.checks) if f.severity == "stop"]
    if difference := differences(expected, found, columns):
        pytest.fail(f"{content['title']}\n- expected, + found:\n{difference}", pytrace=False)
    assert broken == content.get("breaks", [])


def test_every_mart_has_a_case() -> None:
    assert {file.parent.name for file in case_files()} == set(known_marts())


def test_no_mart_counts_nulls_alone_as_null() -> None:
    careless = [file.name for file in sql_folder().rglob("*.sql") if "count_if(" in file.read_text(encoding="utf-8")]
    assert not careless, f"{careless}: count_if of nothing but nulls is null, so write count(*) filter (...)"


def test_every_hypothesis_has_a_case() -> None:
    files = [file for file in case_files() if file.parent.name == "hypothesis_case"]
    assert {file.stem.split("_")[0] for file in files} == {one.hypothesis_id for one in hypotheses()}


# The runner


def test_a_difference_shows_the_rows_of_both_sides() -> None:
    rows: list[Row] = [{"a": 1, "b": 0.1 + 0.2}, {"a": 2, "b": None}]
    assert differences(rows, [{"a": 2, "b": None}, {"a": 1, "b": 0.3}], ["a", "b"]) == ""
    assert differences(rows, [{"a": 1, "b": 0.3}], ["a", "b"]).splitlines() == ["  a | b  ", "  1 | 0.3", "- 2 |    "]
    assert "+ 1 | 0.300000002" in differences(rows, [{"a": 1, "b": 0.300000002}], ["a", "b"])


def test_a_bar_inside_a_word_and_cells_that_are_empty() -> None:
    assert block("x | y | z\na|b | | 1\n | 2 |\n") == (["x", "y", "z"], [["a|b", "", "1"], ["", "2", ""]])


@pytest.mark.parametrize(
    ("text", "problem"),
    [("method_id | nonsense", "no column nonsense"), ("method_id | position\na", "one cell for each")],
)
def test_given_rows_that_do_not_fit_their_table(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        given_frame(known_tables()["ranked_method"], text, {})


def test_a_given_table_that_the_mart_does_not_read() -> None:
    unread = known_tables()["subject"].frame()
    with pytest.raises(ValueError, match="phi_max does not read subject"), built(Case("phi_max", {"subject": unread})):
        pass


# Peers: the same SQL on random inputs against statsmodels and scipy

AXES = {"reference_id": ("canonical", "own_mapped", "round_trip"), "aggregation_id": ("mean", "median")}
ALONE: dict[str, object] = {
    "support_id": "brain",
    "voxel_volume_id": "true",
    "threshold_rule_id": "validation",
    "budget_cm3": 20.0,
    "postprocess_id": "plain",
    "lesion_definition_id": "conn6_floor",
    "hit_criterion_id": "iou_10",
    "metric_id": "dice",
}


def methods_frame(methods: Sequence[str]) -> pl.DataFrame:
    return known_tables()["ranked_method"].frame([(name, "method", k, True, None) for k, name in enumerate(methods)])


def universe_frame(universes: Sequence[dict[str, object]]) -> pl.DataFrame:
    scored: dict[str, object] = {"is_defensible": True, "status": "ok"}
    return frame_of(
        "universe",
        [
            ALONE | scored | {"universe_id": k, "cell_id": k, "is_reference": k == 0} | levels
            for k, levels in enumerate(universes)
        ],
    )


def scores_frame(scores: NDArray[np.float64], methods: Sequence[str]) -> pl.DataFrame:
    """Scores, universes x methods, as `cell_score`; each universe is its own cell."""
    rows = [
        (cell, method, "dice", score, 5, 1)
        for cell, line in enumerate(scores.tolist())
        for method, score in zip(methods, line, strict=True)
    ]
    return known_tables()["cell_score"].frame(rows)


@pytest.mark.parametrize(("method_count", "seed"), [(2, 1), (3, 2), (5, 3)])
def test_sums_of_squares_are_those_of_statsmodels(method_count: int, seed: int) -> None:
    """Type 1 sums of squares of main effects and interactions with the method; the design is balanced."""
    methods = [f"m{k}" for k in range(method_count)]
    universes: list[dict[str, object]] = [
        dict(zip(AXES, levels, strict=True)) for levels in itertools.product(*AXES.values())
    ]
    scores = np.random.Generator(np.random.PCG64(seed)).random((len(universes), method_count))
    given = {
        "universe": universe_frame(universes),
        "cell_score": scores_frame(scores, methods),
        "ranked_method": methods_frame(methods),
    }
    with built(Case("variance_share", given, through=("variance_term",))) as connection:
        found = dict(
            connection.execute(
                "select term, sum_of_squares from variance_share"
                " where universe_set = 'defensible' and metric_id = 'dice' and coalesce(level_count, 2) > 1"
            ).fetchall()
        )
    long = pl.DataFrame(
        [
            {**u, "method": m, "score": s}
            for u, line in zip(universes, scores.tolist(), strict=True)
            for m, s in zip(methods, line, strict=True)
        ]
    ).to_pandas()
    formula = "score ~ C(method) * C(reference_id) + C(method) * C(aggregation_id)"
    peer = anova.anova_lm(formulas.ols(formula, long).fit(), typ=1)["sum_sq"].to_dict()
    named = {"method": "C(method)", "remainder": "Residual"}
    named |= {axis: f"C({axis})" for axis in AXES} | {f"method:{axis}": f"C(method):C({axis})" for axis in AXES}
    assert {term: found[term] for term in named} == pytest.approx({t: peer[n] for t, n in named.items()}, abs=1e-12)
    assert found["total"] == pytest.approx(sum(peer.values()), abs=1e-12)
    assert found["axes"] == pytest.approx(sum(peer[named[t]] for t in named if t.endswith("_id")), abs=1e-12)


@pytest.mark.parametrize(("method_count", "seed"), [(2, 1), (3, 2), (6, 3)])
def test_rank_agreement_is_that_of_scipy(method_count: int, seed: int) -> None:
    """Kendall's tau-b on scores with many ties; scipy gives NaN where one side is all tied."""
    methods = [f"m{k}" for k in range(method_count)]
    scores = np.random.Generator(np.random.PCG64(seed)).integers(0, 4, (200, method_count)) / 8
    scores[0] = np.minimum(np.arange(method_count), max(method_count - 2, 1))  # with a tie where there is room for one
    scores[1] = 0.5
    given = {
        "universe": universe_frame([ALONE] * len(scores)),
        "cell_score": scores_frame(scores, methods),
        "ranked_method": methods_frame(methods),
    }
    with built(Case("rank_agreement", given, through=["cell_agreement"])) as connection:
        found = connection.sql("select kendall_tau_b from rank_agreement order by universe_id").pl()
    taus = found.get_column("kendall_tau_b").cast(pl.Float64).fill_null(np.nan).to_numpy()
    peer = [float(stats.kendalltau(line, scores[0]).statistic) for line in scores]
    np.testing.assert_allclose(taus, peer, rtol=0, atol=1e-12)
    assert np.isnan(taus[1]) and (taus < 1).any()


@pytest.mark.parametrize("n", [8, 9, 18, 19, 24])
def test_conformal_thresholds_are_those_of_a_search_in_fractions(n: int) -> None:
    """CRC by its definition: the smallest level with (exceedances + 1) / (n + 1) <= alpha; burdens of whole cm3.

    At n = 9, 19 and 24 alpha (n + 1) is whole for some alpha, and one subject fewer is infeasible or stricter.
    """
    generator, budget = np.random.Generator(np.random.PCG64(n)), 20
    false_positives = -np.sort(-generator.integers(0, 60, (n, 201)), axis=1)
    same = {"method_id": "a", "reference_id": "canonical", "support_id": "brain", "voxel_volume_id": "true"}
    same |= {"postprocess_id": "plain", "split": "validation", "is_included": True, "is_ranked": True}
    same |= {"voxel_mm3": 1000.0, "true_positive_voxels": 0, "reference_voxels": 1, "kind": "method", "position": 0}
    given = {
        "threshold_curve": frame_of(
            "threshold_curve",
            [
                same | {"subject_id": str(i), "level": k, "threshold": k / 200, "predicted_voxels": count}
                for i, curve in enumerate(false_positives.tolist())
                for k, count in enumerate(curve)
            ],
        ),
        "cohort_subject": frame_of("cohort_subject", [same | {"subject_id": str(i)} for i in range(n)]),
        "method": frame_of("method", [same]),
        "ranked_method": frame_of("ranked_method", [same]),
    }
    study = protocol({"budgets_cm3": [float(budget)]})
    given["calibration_rule"] = TRANSFORMS["calibration_rule"].compute(study, given)
    case = Case(
        "threshold_choice",
        given,
        through=["subject_curve", "cohort_curve", "exceedance_curve"],
        overrides={"budgets_cm3": [float(budget)]},
    )
    with built(case) as connection:
        query = "select threshold_rule_id, level from threshold_choice where threshold_rule_id like 'crc_%0%'"
        found = dict(connection.sql(query).fetchall())
    exceeding = (false_positives > budget).sum(axis=0).tolist()
    for rule in study.threshold_rules:
        if rule.kind == "crc" and rule.exact_alpha is not None:
            kept = [k for k, count in enumerate(exceeding) if Fraction(count + 1, n + 1) <= rule.exact_alpha]
            assert found[rule.id] == (kept[0] if kept else None), rule.id
    assert (found["crc_10"] is None) == (n < 9) and (found["crc_05"] is None) == (n < 19)
