"""Suites: what they find, what they leave alone, and the pages that they write."""

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from expectations.suites import Finding, Guarded, Rule, SuiteBroken, geometry_frames, suite, validate
from expectations.tables import Column, Table, breaches, columns_of, lake_tables
from ingest.gate import candidate_overlaps, overlap
from ingest.grid import Transform

Change = Callable[[pl.DataFrame], pl.DataFrame]
Value = pl.Expr | float | None

NAMES = ("split", "level", "predicted_voxels?", "is_applied?", "dice?", "low", "reason?")
SAMPLE = Table(
    "sample", "One row per sample.", ("method_id", "subject_id"), columns_of(("method_id", "subject_id"), NAMES)
)
SMALL = Table("small", "One row per method.", ("method_id",), columns_of(("method_id",), ("level", "split?")))
SEVERAL = Rule(
    column="predicted_voxels",
    minimum=1,
    severity="warn",
    description="something is predicted",
    remedy="Lower the threshold.",
)


def good_value(column: Column, row: int) -> object:
    """A value that keeps a column's declaration."""
    declared = column.declaration
    if column.values:
        return column.values[row % len(column.values)]
    if declared.type in ("id", "text"):
        return f"{column.name}{row}"
    if declared.type == "bool":
        return row % 2 == 0
    low = 0.0 if declared.minimum is None else declared.minimum
    high = low + 5 if declared.maximum is None else declared.maximum
    return (
        low + (high - low) * (row % 11) / 10
        if column.polars_type.is_float()
        else int(low) + row % (int(high - low) + 1)
    )


def good_frame(table: Table, rows: int = 4) -> pl.DataFrame:
    """Rows that keep a declaration; every second row is null where it may be."""
    return table.frame(
        [
            [None if column.nullable and row % 2 else good_value(column, row) for column in table.columns]
            for row in range(rows)
        ]
    )


def found(frame: pl.DataFrame, *rules: Rule, table: Table = SAMPLE) -> list[Finding]:
    return validate([Guarded(table, frame, rules)])


def with_values(values: Sequence[tuple[str, object]], table: Table = SAMPLE) -> pl.DataFrame:
    """Good rows with one value replaced in each, which its `subject_id` names."""
    rows = [list(row) for row in good_frame(table, len(values)).rows()]
    for number, (column, value) in enumerate(values):
        rows[number][table.column_names.index("subject_id")] = f"{column}{number}"
        rows[number][table.column_names.index(column)] = value
    return table.frame(rows)


def test_good_frames_of_all_lake_tables_keep_their_suites() -> None:
    tables = [Table(t.name, t.row, t.key, t.columns) for t in (*lake_tables().values(), SAMPLE)]  # columns alone
    frames = {table.name: good_frame(table) for table in tables}
    assert [breach for table in tables for breach in breaches(frames[table.name], table)] == []
    assert validate([Guarded(table, frames[table.name]) for table in tables]) == []


def test_frames_without_rows_keep_every_rule() -> None:
    tables = lake_tables()
    geometry = geometry_frames(
        tables["gate_candidate"].frame(),
        tables["gate_overlap"].frame(),
        pl.DataFrame(schema={"subject_id": pl.String, "shape_2": pl.Int64}),
    )
    assert [len(one.frame) for one in geometry] == [0, 0, 0, 0]
    assert validate([*geometry, Guarded(SAMPLE, SAMPLE.frame(), (SEVERAL,))]) == []


def test_values_against_the_declaration_stop_and_are_named() -> None:
    values: list[tuple[str, object]] = [
        ("split", None),
        ("split", "train"),
        ("level", None),
        ("level", 201),
        ("dice", 1.25),
        ("dice", -0.5),
        ("dice", float("nan")),
        ("low", None),
        ("low", float("nan")),
        ("low", float("-inf")),
    ]
    shown = {
        "split is never null": ["split0, split=null"],
        "split is one of validation, test": ["split1, split=train"],
        "level is never null": ["level2, level=null"],
        "level is from 0 to 200": ["level3, level=201"],
        "dice is a finite number from 0 to 1": ["dice4, dice=1.25", "dice5, dice=-0.5", "dice6, dice=nan"],
        "low is never null": ["low7, low=null"],
        "low is a finite number": ["low8, low=nan", "low9, low=-inf"],
    }
    findings = found(with_values(values))
    assert {f.rule: [example.split("subject_id=")[1] for example in f.examples] for f in findings} == shown
    assert [f.row_count for f in findings] == [len(f.examples) for f in findings]
    assert findings[0] == Finding(
        table="sample",
        rule="split is never null",
        severity="stop",
        row_count=1,
        examples=("method_id=method_id0, subject_id=split0, split=null",),
        remedy="Mend the SELECT of sample, or what it is declared to be; the live release stays as it is.",
    )
    assert {(f.table, f.severity) for f in findings} == {("sample", "stop")}


def test_a_remedy_for_a_lake_table_speaks_of_its_parts() -> None:
    table = lake_tables()["score_quantile"]
    (finding,) = found(good_frame(table).with_columns(low=pl.lit(None, pl.Float64)), table=table)
    assert finding.rule == "low is never null"
    assert finding.row_count == 4
    assert "parts/score_quantile" in finding.remedy


def test_a_key_that_repeats_is_found_with_every_row_that_shares_it() -> None:
    frame = good_frame(SAMPLE)
    (finding,) = found(pl.concat([frame, frame[1:3], frame[1:2]]))
    assert finding.rule == "no two rows share method_id, subject_id"
    assert (finding.severity, finding.row_count) == ("stop", 5)
    assert finding.examples == (
        "method_id=method_id1, subject_id=subject_id1",
        "method_id=method_id2, subject_id=subject_id2",
    )


def test_a_key_of_one_column_may_not_repeat_either() -> None:
    frame = SMALL.frame([("p01", 1, "test"), ("p02", 1, "test"), ("p01", 2, "validation")])
    (finding,) = found(frame, table=SMALL)
    assert (finding.rule, finding.row_count) == ("no two rows share method_id", 2)
    assert finding.examples == ("method_id=p01",)


def test_rows_of_a_table_without_key_are_named_by_number() -> None:
    table = Table("loose", "One row: a level.", (), columns_of((), ("level",)))
    (finding,) = found(pl.DataFrame({"level": [3, 250, 200]}, schema=table.polars_schema), table=table)
    assert (finding.row_count, finding.examples) == (1, ("row 1, level=250",))


def test_a_null_in_a_key_is_shown_and_found() -> None:
    (finding,) = found(SMALL.frame([("a", 1, "test"), (None, 1, "test")]), table=SMALL)
    assert finding.rule == "method_id is never null"
    assert finding.examples == ("method_id=null",)


def test_a_key_with_a_null_may_not_repeat_either() -> None:
    table = Table("pair", "One row per pair.", ("method_id", "level"), columns_of(("method_id?", "level"), ()))
    (finding,) = found(table.frame([(None, 1), (None, 2), (None, 1)]), table=table)
    assert (finding.rule, finding.row_count) == ("no two rows share method_id, level", 2)
    assert finding.examples == ("method_id=null, level=1",)


def test_at_most_five_rows_are_shown_and_all_are_counted() -> None:
    frame = good_frame(SMALL, rows=9).with_columns(split=pl.lit("train"), level=pl.lit(None, pl.UInt8))
    findings = found(pl.concat([frame, frame]), table=SMALL)
    assert [finding.rule.split()[0] for finding in findings] == ["level", "split", "no"]
    assert [(finding.row_count, len(finding.examples)) for finding in findings] == [(18, 5)] * 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pl.String(), "String"),
        (pl.Float64(), "Float64"),
        (pl.Int8(), "Int8"),
        (pl.Int128(), "Int128"),
        (pl.Boolean(), "Boolean"),
        (pl.Date(), "Date"),
        (pl.Null(), "Null"),
        (pl.List(pl.UInt8()), "List(UInt8)"),
        (pl.Categorical(), "Categorical"),
    ],
)
def test_another_type_is_a_finding_and_leaves_the_other_columns_judged(kind: pl.DataType, name: str) -> None:
    frame = good_frame(SMALL).with_columns(level=pl.lit(None, kind), split=pl.lit("train"))
    kinds, splits = found(frame, replace(SEVERAL, column="level"), table=SMALL)
    assert (kinds.rule, kinds.severity, kinds.row_count) == ("level is stored as UInt8", "stop", 4)
    assert kinds.examples == (f"found {name}",)
    assert splits.rule == "split is one of validation, test"


def test_another_type_is_found_without_rows_too() -> None:
    (finding,) = found(SMALL.frame().with_columns(pl.col("level").cast(pl.Int128)), table=SMALL)
    assert (finding.rule, finding.row_count, finding.examples) == ("level is stored as UInt8", 0, ("found Int128",))


def test_a_number_column_of_text_values_is_a_finding_and_not_a_crash() -> None:
    (finding,) = found(good_frame(SAMPLE).with_columns(pl.col("dice").cast(pl.String)))
    assert (finding.rule, finding.examples) == ("dice is stored as Float64", ("found String",))


def test_rows_are_named_by_what_is_left_of_the_key() -> None:
    frame = with_values([("split", "train")]).with_columns(subject_id=pl.lit(7, pl.Int64))
    assert [(f.rule, f.examples) for f in found(frame)] == [
        ("subject_id is stored as String", ("found Int64",)),
        ("split is one of validation, test", ("method_id=method_id0, split=train",)),
    ]


def test_other_columns_are_one_finding() -> None:
    changes: list[Change] = [
        lambda frame: frame.drop("level"),
        lambda frame: frame.with_columns(more=pl.lit(1)),
        lambda frame: frame.select(reversed(frame.columns)),
        lambda frame: frame.drop("method_id"),
    ]
    for change in changes:
        frame = change(good_frame(SMALL))
        (finding,) = found(frame, replace(SEVERAL, column="level", minimum=0), table=SMALL)
        assert finding.rule == "the columns are method_id, level, split, in this order"
        assert (finding.row_count, finding.examples) == (4, (f"found {', '.join(frame.columns)}",))


def test_a_frame_without_columns_is_one_finding() -> None:
    (finding,) = found(pl.DataFrame(), table=SMALL)
    assert (finding.row_count, finding.examples) == (0, ("found ",))


def test_suites_agree_with_the_check_at_the_write() -> None:
    """The store checks the same declarations by itself, in Polars: both must find the same rows."""
    values: dict[str, list[object]] = {
        "split": [None, "", "TEST", "test"],
        "level": [None, 0, 200, 201, 255],
        "predicted_voxels": [None, 0, 2**32 - 1],
        "is_applied": [None, True],
        "dice": [None, -1e-9, 0.0, 1.0, 1 + 1e-9, float("inf"), float("nan"), -0.0],
        "low": [None, -1e300, float("nan"), float("inf")],
        "reason": [None, ""],
    }
    cells = [(column, value) for column, listed in values.items() for value in listed]
    frame = with_values(cells)
    expected = Counter(column for row, (column, _) in enumerate(cells) if breaches(frame[row], SAMPLE))
    told: Counter[str] = Counter()
    for finding in found(frame):
        told[finding.rule.split()[0]] += finding.row_count
    assert told == expected
    assert expected == {"split": 3, "level": 3, "dice": 4, "low": 3}


def test_rules_warn_or_stop_beyond_the_declaration() -> None:
    truth = Rule(column="is_applied", values=(True,), severity="stop", description="it is applied", remedy="Apply it.")
    cells = [("predicted_voxels", 0), ("is_applied", False), ("predicted_voxels", None), ("predicted_voxels", 1)]
    frame = with_values(cells).with_columns(is_applied=pl.Series([None, False, True, True]))
    warned, stopped = found(frame, SEVERAL, truth)
    assert warned == Finding(
        table="sample",
        rule="something is predicted",
        severity="warn",
        row_count=1,
        examples=("method_id=method_id0, subject_id=predicted_voxels0, predicted_voxels=0",),
        remedy="Lower the threshold.",
    )
    assert (stopped.rule, stopped.severity, stopped.remedy) == ("it is applied", "stop", "Apply it.")
    assert stopped.examples == ("method_id=method_id1, subject_id=is_applied1, is_applied=false",)


def test_findings_come_in_the_order_of_frames_and_suites() -> None:
    frame = SMALL.frame([("a", 201, "train"), ("a", 1, "test")])
    order = [(f.table, f.rule) for f in validate([Guarded(SMALL, frame), Guarded(replace(SMALL, name="b"), frame)])]
    rules = ["level is from 0 to 200", "split is one of validation, test", "no two rows share method_id"]
    assert order == [(table, rule) for table in ("small", "b") for rule in rules]


def test_the_suite_states_every_declaration_once() -> None:
    stated = [expectation.description for expectation in suite(SAMPLE, [SEVERAL])]
    assert len(stated) == len(set(stated))
    assert stated[0].startswith("the columns are ")
    assert [words for words in stated if words.startswith("predicted_voxels")] == ["predicted_voxels is at least 0"]
    assert "dice is never null" not in stated
    assert stated[-1] == "something is predicted"


def test_an_expectation_that_cannot_be_evaluated_is_an_error_and_no_finding() -> None:
    rule = replace(SEVERAL, column="split", description="the split is large")
    with pytest.raises(SuiteBroken, match=r"^small: .*the split is large.* could not be checked"):
        found(good_frame(SMALL), rule, table=SMALL)


def test_rules_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="either a minimum or a maximum, or else values"):
        replace(SEVERAL, minimum=None)
    with pytest.raises(ValueError, match="either a minimum or a maximum, or else values"):
        replace(SEVERAL, values=(1,))
    with pytest.raises(ValueError, match="sample: a rule is on volume"):
        suite(SAMPLE, [replace(SEVERAL, column="volume")])
    with pytest.raises(ValueError, match="sample: two rules say 'something is predicted'"):
        suite(SAMPLE, [SEVERAL, SEVERAL])
    with pytest.raises(ValueError, match="sample is guarded twice"):
        validate([Guarded(SAMPLE, good_frame(SAMPLE))] * 2)


def test_importing_the_module_leaves_the_library_alone() -> None:
    code = "import sys, expectations.suites; sys.exit('great_expectations' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The gate

SEVERAL_SLICES, ONE_SLICE = "m", "s"  # what the subjects' names start with
APPLIED = pl.col("is_applied")
MOVED = pl.col("flip_1") & ~pl.col("flip_0") & ~pl.col("transposed") & (pl.col("dz") == 0)

COUNT = {
    SEVERAL_SLICES: "there are exactly 56 candidate transforms",
    ONE_SLICE: "there are exactly 8 candidate transforms",
}
OFFSETS = {SEVERAL_SLICES: "from -3 to 3", ONE_SLICE: "0: the grid has one slice"}
ONE_APPLIED = "exactly one candidate is the applied transform"
UNMOVED = "the applied candidate neither transposes nor flips, and has offset 0"
ONE_OVERLAP = "there is exactly one row of gate_overlap"
DICE = "Dice is there with a reference in view; without one it is null or 0"
CENTROID = "a centroid distance is null exactly where one of the masks is empty"
SHARE = "the share of the reference in view is null only where the reference is empty"
BEST = "Dice of the applied candidate keeps to what its voxel counts allow"
GRID = "the subject's grid is known"


def put(where: pl.Expr | bool, **values: Value) -> Change:
    """Change values where a condition holds."""

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(**{name: pl.when(where).then(v).otherwise(name) for name, v in values.items()})

    return change


def keep(frame: pl.DataFrame) -> pl.DataFrame:
    return frame


def unseen(where: pl.Expr, **values: Value) -> tuple[Change, Change]:
    """No reference voxel in view, and candidates that say so but for some."""

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        return put(where, **values)(put(True, dice=0.0, centroid_mm=None)(frame))

    return change, put(True, in_view_voxels=0, in_view_fraction=0.0)


# What goes wrong with a subject's candidates and overlap, and the rules that say so.
WRONGS: dict[str, tuple[Change, Change, set[str]]] = {
    "fewer": (lambda frame: frame.filter(~MOVED), keep, {"COUNT"}),
    "without": (lambda frame: frame.clear(), keep, {"COUNT", ONE_APPLIED}),
    "above": (put(MOVED, dz=5), keep, {"the highest through-plane offset is OFFSETS"}),
    "below": (put(MOVED, dz=-4), keep, {"the lowest through-plane offset is OFFSETS"}),
    "unapplied": (put(APPLIED, is_applied=False), keep, {ONE_APPLIED}),
    "both": (put(MOVED, is_applied=True), keep, {ONE_APPLIED, UNMOVED}),
    "other": (put(MOVED | APPLIED, is_applied=~APPLIED), keep, {UNMOVED}),
    "twice": (keep, lambda frame: pl.concat([frame, frame]), {ONE_OVERLAP}),
    "alone": (keep, lambda frame: frame.clear(), {ONE_OVERLAP}),
    "undefined": (put(MOVED, dice=None, centroid_mm=None), keep, {DICE}),
    "ghost": (*unseen(MOVED, dice=0.25), {DICE, CENTROID}),
    "seen": (*unseen(APPLIED, centroid_mm=1.0), {CENTROID}),
    "seen_moved": (*unseen(MOVED, centroid_mm=1.0), {CENTROID}),
    "lost": (put(APPLIED, centroid_mm=None), keep, {CENTROID}),
    "lost_moved": (put(MOVED, centroid_mm=None), keep, {CENTROID}),
    "share": (keep, put(True, in_view_fraction=None), {SHARE}),
    "best": (put(APPLIED, dice=0.95), keep, {BEST}),
}


def gate(subject: str) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Candidates, overlap and shape of a subject as they should be."""
    slices = 1 if subject.startswith(ONE_SLICE) else 30
    offsets = (0,) if slices == 1 else range(-3, 4)
    members = [(*turns, dz) for turns in itertools.product([False, True], repeat=3) for dz in offsets]
    candidates = [("sharp", subject, *m, not any(m), *((0.25, 8.0) if any(m) else (0.9, 1.0))) for m in members]
    columns = ["subject_id", "shape_2", "reference_voxels", "reference_outside_voxels"]
    tables = lake_tables()
    return (
        tables["gate_candidate"].frame(candidates),
        tables["gate_overlap"].frame([("sharp", subject, 1.0, 50, 90, 100, 0.95)]),
        pl.DataFrame([(subject, slices, 60, 40)], schema=columns, orient="row"),
    )


def joined(
    parts: list[tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]],
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    candidates, overlaps, shapes = zip(*parts, strict=True)
    return pl.concat(candidates), pl.concat(overlaps), pl.concat(shapes)


def subjects(finding: Finding) -> set[str]:
    """Subjects that a finding names."""
    return {example.split("subject_id=")[1].split(",")[0] for example in finding.examples}


def test_the_gate_as_it_should_be_is_let_through() -> None:
    frames = geometry_frames(*joined([gate("m1"), gate("m2"), gate("s1")]))
    assert [(one.table.name, len(one.frame)) for one in frames] == [
        ("gate_candidate", 120),
        ("gate_overlap", 3),
        ("gate_geometry", 2),
        ("gate_geometry_single_slice", 1),
    ]
    assert validate(frames) == []


def test_whatever_is_wrong_with_the_gate_is_found_at_its_subject_alone() -> None:
    parts = [gate("m_good"), gate("s_good")]
    expected: dict[tuple[str, str], set[str]] = {}
    for letter, (name, (spoil, spoil_overlap, rules)) in itertools.product(COUNT, WRONGS.items()):
        candidates, overlaps, shapes = gate(f"{letter}_{name}")
        parts.append((spoil(candidates), spoil_overlap(overlaps), shapes))
        for rule in rules:
            words = rule.replace("COUNT", COUNT[letter]).replace("OFFSETS", OFFSETS[letter])
            expected.setdefault((letter, words), set()).add(f"{letter}_{name}")
    findings = validate(geometry_frames(*joined(parts))[2:])
    letters = {"gate_geometry": SEVERAL_SLICES, "gate_geometry_single_slice": ONE_SLICE}
    assert {(letters[f.table], f.rule): subjects(f) for f in findings} == expected
    assert all(f.row_count == len(expected[letters[f.table], f.rule]) for f in findings)
    assert {f.severity for f in findings} == {"stop"}
    assert all("mirto ingest" in f.remedy for f in findings)
    shown = {example for f in findings for example in f.examples}
    assert "method_id=sharp, subject_id=m_fewer, candidate_count=55" in shown
    assert "method_id=sharp, subject_id=s_share, has_view_fraction=false" in shown


def test_a_subject_of_unknown_shape_is_found() -> None:
    candidates, overlaps, shapes = joined([gate("m1"), gate("m2")])
    (finding,) = validate(geometry_frames(candidates, overlaps, shapes[:1])[2:])
    assert (finding.table, finding.rule, finding.row_count) == ("gate_geometry", GRID, 1)
    assert subjects(finding) == {"m2"}


def test_without_its_size_a_reference_out_of_view_is_taken_for_an_empty_one() -> None:
    seen, unseen_one = gate("m1"), gate("m2")
    spoil, spoil_overlap = unseen(pl.lit(False))
    unseen_one = spoil(unseen_one[0]), spoil_overlap(unseen_one[1]), unseen_one[2]
    candidates, overlaps, shapes = joined([seen, unseen_one])
    overlaps = put(True, in_view_fraction=None)(overlaps)
    (finding,) = validate(geometry_frames(candidates, overlaps, shapes)[2:3])
    assert (finding.rule, subjects(finding)) == (SHARE, {"m1", "m2"})
    (finding,) = validate(geometry_frames(candidates, overlaps, shapes.select("subject_id", "shape_2"))[2:3])
    assert (finding.rule, subjects(finding)) == (SHARE, {"m1"})


def test_a_gate_table_of_the_wrong_type_is_a_finding() -> None:
    candidates, overlaps, shapes = gate("m1")
    findings = validate(geometry_frames(candidates.with_columns(pl.col("dice").cast(pl.String)), overlaps, shapes))
    assert [(f.table, f.rule) for f in findings] == [("gate_candidate", "dice is stored as Float64")]


def plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def measured(
    subject: str, own: NDArray[np.bool_], reference: NDArray[np.bool_], transform: Transform
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """What ingest writes of one subject's masks."""
    found = candidate_overlaps(own, reference, transform, (1.0, 1.0, 3.0))
    one = overlap(own, reference, transform, (1.0, 1.0, 3.0))
    members = zip(
        found.transposed.tolist(),
        found.flip_0.tolist(),
        found.flip_1.tolist(),
        found.dz.tolist(),
        found.is_applied.tolist(),
        strict=True,
    )
    values = zip(map(plain, found.dice), map(plain, found.centroid_mm), strict=True)
    counts = (one.own_voxels, one.own_in_view_voxels, one.reference_in_view_voxels)
    tables = lake_tables()
    return (
        tables["gate_candidate"].frame([("sharp", subject, *m, *v) for m, v in zip(members, values, strict=True)]),
        tables["gate_overlap"].frame(
            [("sharp", subject, plain(one.in_view_fraction), *counts, plain(one.round_trip_dice))]
        ),
        pl.DataFrame(
            {
                "subject_id": [subject],
                "shape_2": [reference.shape[2]],
                "reference_voxels": [int(reference.sum())],
                "reference_outside_voxels": [0],
            }
        ),
    )


def test_what_the_gate_measures_keeps_every_rule() -> None:
    """Empty, full and sparse masks, in view and out of it, with several slices and with one."""
    generator = np.random.default_rng(5)
    parts: list[tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]] = []
    for slices, own_share, share, cut in itertools.product([1, 4], [0.0, 0.02, 1.0], [0.0, 0.02, 1.0], [0, 4]):
        shape = (6, 5, slices)
        transform = Transform((0, 1, 2), (cut, 0, 0), (6 - cut, 5, slices), (3, 4, slices), (False, True, False))
        own = generator.random(transform.stored_shape) < own_share
        parts.append(measured(f"p{len(parts)}", own, generator.random(shape) < share, transform))
    candidates, overlaps, shapes = joined(parts)
    assert candidates["dice"].null_count() > 0
    assert overlaps.filter(in_view_voxels=0)["in_view_fraction"].to_list().count(0.0) > 0
    assert validate(geometry_frames(candidates, overlaps, shapes)) == []
    assert validate(geometry_frames(candidates, overlaps, shapes.select("subject_id", "shape_2"))[2:]) == []


# The pages


def pages(docs: Path) -> dict[str, str]:
    return {page.relative_to(docs).as_posix(): page.read_text(encoding="utf-8") for page in docs.rglob("*.html")}


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a suite that stops, one that warns and one that passes."""
    hostile = "<script src='https://evil.example/x.js'></script>"
    stopped = SMALL.frame([("<img src=https://evil.example/y.png>", 1, hostile), ("a", 2, "test"), ("b", 2, None)])
    warned, passed = replace(SMALL, name="warned"), replace(SMALL, name="my-mart.passed")
    rule = replace(SEVERAL, column="level", description="level & <b>more</b> < $2")
    folder = tmp_path_factory.mktemp("pages") / "deep" / "docs"
    guarded = [
        Guarded(SMALL, stopped),
        Guarded(warned, SMALL.frame([("a", 0, "test")]), (rule,)),
        Guarded(passed, good_frame(SMALL), (replace(rule, minimum=0),)),
    ]
    assert [(f.table, f.severity) for f in validate(guarded, folder)] == [("small", "stop"), ("warned", "warn")]
    return folder


def test_pages_are_there_for_every_suite(docs: Path) -> None:
    written = pages(docs)
    for name in ("small", "warned", "my-mart/passed"):
        assert f"suites/expectations/{name}.html" in written
        (page,) = [text for path, text in written.items() if path.startswith(f"suites/validations/{name}/")]
        assert "split is one of validation, test" in page
    assert len(written) == len([path for path in docs.rglob("*") if path.is_file()]) == 7
    assert sum("level &amp; &lt;b&gt;more&lt;/b&gt; &lt; $2" in page for page in written.values()) == 5
    assert not any("<b>more" in page for page in written.values())


def test_the_index_lists_suites_with_their_outcome_and_all_findings(docs: Path) -> None:
    index = pages(docs)["index.html"]
    outcomes = re.findall(r"\.html'>([^<]+)</a></td><td><b class='\w+'>(\w+)</b>", index)
    assert outcomes == [("small", "stopped"), ("warned", "warned"), ("my-mart.passed", "passed")]
    assert "3 suites: 1 stopped, 1 warned, 1 passed." in index
    assert "split is one of validation, test" in index
    assert "Lower the threshold." in index


def test_pages_fetch_and_run_nothing(docs: Path) -> None:
    for path, page in pages(docs).items():
        assert not re.search(r"<(script|link|img|iframe|object|embed|footer)\b", page), path
        assert not re.search(r"url\(|@import", page), path
        assert all("://" not in tag for tag in re.findall(r"<[a-z][^>]*>", page)), path
        assert "default-src 'none'" in page, path


def test_every_link_of_the_pages_leads_to_a_page(docs: Path) -> None:
    links = [
        (path, target) for path, page in pages(docs).items() for target in re.findall(r"href=['\"]([^'\"#]+)", page)
    ]
    assert len(links) >= 12
    assert [
        (path, target) for path, target in links if not (docs / path).parent.joinpath(unquote(target)).exists()
    ] == []


def test_rows_stand_a_line_each_in_the_page_of_a_suite(tmp_path: Path) -> None:
    validate([Guarded(SMALL, good_frame(SMALL).with_columns(split=pl.lit("train")))], tmp_path)
    (page,) = [text for path, text in pages(tmp_path).items() if "/validations/" in path]
    assert "method_id=method_id0<br>method_id=method_id1<br>method_id=method_id2" in page


def test_a_second_run_replaces_the_pages_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "expectations").mkdir()
    (tmp_path / "expectations" / "mine.html").write_text("mine")
    validate([Guarded(replace(SMALL, name="first"), good_frame(SMALL))], tmp_path)
    validate([Guarded(replace(SMALL, name="second"), good_frame(SMALL))], tmp_path)
    assert (tmp_path / "expectations" / "mine.html").read_text() == "mine"
    assert not [path for path, page in pages(tmp_path).items() if "first" in path or "first" in page]


def test_no_frames_leave_an_empty_index(tmp_path: Path) -> None:
    assert validate([], tmp_path / "docs") == []
    assert "0 suites" in pages(tmp_path / "docs")["index.html"]


def test_nothing_is_printed_and_nothing_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("home", "work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "work")
    bad = Guarded(SMALL, SMALL.frame([("a", 201, "train")]))
    assert len(validate([bad])) == len(validate([bad], tmp_path / "docs")) == 2
    assert capfd.readouterr() == ("", "")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(tmp_path / "docs")] == []
