"""Great Expectations suites, derived from the declarations, and the Data Docs that they leave.

A suite says of a frame what its table's declaration says: columns and types, nulls, ranges, values and a key that does
not repeat. Further rules add what a declaration cannot say, each with a severity, words and a remedy. Nothing is
written twice: a suite is made from a `Table` when it runs. Great Expectations takes seconds to import, so it is
imported where it runs and nowhere else.
"""

import html
import os
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict
from urllib.parse import quote

import polars as pl

from expectations.page import head, html_table
from expectations.tables import (
    POLARS_TYPES,
    Column,
    ColumnDeclaration,
    ColumnType,
    LakeTable,
    Table,
    columns_of,
    lake_tables,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from great_expectations import EphemeralDataContext, ExpectationValidationResult, PandasDatasource
    from great_expectations.expectations import Expectation
    from numpy.typing import NDArray

Severity = Literal["stop", "warn"]

EXAMPLES = 5
SITE = "suites"
KEY = ("method_id", "subject_id")
GX_SEVERITIES: dict[Severity, str] = {"stop": "critical", "warn": "warning"}
PANDAS_TYPES: dict[ColumnType, str] = {
    "id": "str",
    "text": "str",
    "bool": "bool",
    "u8": "uint8",
    "u32": "uint32",
    "i64": "int64",
    "f32": "float32",
    "f64": "float64",
}

GEOMETRY_COLUMNS: dict[str, tuple[ColumnType, str]] = {
    "slice_count": ("i64", "Slices of the canonical grid"),
    "has_shape": ("bool", "Whether the subject has a row in `subject`"),
    "candidate_count": ("i64", "Rows of `gate_candidate`"),
    "lowest_dz": ("i64", "Lowest through-plane offset among the candidates"),
    "highest_dz": ("i64", "Highest through-plane offset among the candidates"),
    "applied_count": ("i64", "Candidates that are marked as applied"),
    "moved_applied_count": ("i64", "Applied candidates that transpose, flip or move through the plane"),
    "overlap_count": ("i64", "Rows of `gate_overlap`"),
    "wrong_dice_count": ("i64", "Candidates that lack a Dice which has a value, or have one which has none"),
    "wrong_centroid_count": ("i64", "Candidates that lack a centroid distance, or have one, against the voxel counts"),
    "has_view_fraction": ("bool", "Whether the share of the reference in view is there, or the reference is empty"),
    "excess_dice": ("f64", "Dice of the applied candidate above the best that the two voxel counts allow"),
}

STYLE = """
h1, h2, h4, h5, h6 { margin: 1.2rem 0 0.5rem; line-height: 1.2; }
h5 { font-size: 1.15rem; }
h6, .h6 { font-size: 1rem; font-weight: 600; }
ol, ul { list-style: none; margin: 0; padding: 0; }
.breadcrumb li { display: inline; }
.breadcrumb li + li::before { content: " / "; }
.alert-secondary { border-bottom: 2px solid #d5d9dd; margin-top: 1.5rem; }
.nav li { display: inline-block; margin-right: 1rem; }
.navbar { height: auto !important; }
.passed, .text-success { color: #1b6e34; }
.warned, .text-warning { color: #8a5a00; }
.stopped, .text-danger { color: #b3261e; }
.fas { font-style: normal; font-weight: 700; }
.fa-check-circle::before { content: "\\2713"; }
.fa-times::before { content: "\\2717"; }
.fa-exclamation-triangle::before { content: "!"; }
.card.mb-3, .collapse, [data-toggle="collapse"], [hidden] { display: none; }
"""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What must hold in a column beyond its declaration; a null keeps every rule.

    Attributes:
        column: Name of the column.
        minimum: Least value allowed.
        maximum: Greatest value allowed.
        values: The values allowed.
        severity: Whether rows that break the rule stop a release or are only told.
        description: The rule in words.
        remedy: What to do about rows that break it.

    Raises:
        ValueError: The rule gives neither bounds nor values, or both.
    """

    column: str
    minimum: float | None = None
    maximum: float | None = None
    values: tuple[object, ...] = ()
    severity: Severity
    description: str
    remedy: str

    def __post_init__(self) -> None:
        is_range = self.minimum is not None or self.maximum is not None
        if is_range == bool(self.values):
            raise ValueError(f"the rule {self.description!r} needs either a minimum or a maximum, or else values")


@dataclass(frozen=True)
class Guarded:
    """A frame to validate, the table that it must be, and rules beyond the table's declaration.

    Attributes:
        table: The declaration; every rule that comes from it stops.
        frame: The rows, any number.
        rules: Further rules, on columns of the table.
    """

    table: Table
    frame: pl.DataFrame
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A rule that rows break.

    Attributes:
        table: Name of the table.
        rule: The rule in words.
        severity: Whether it stops a release.
        row_count: Rows that break it; all rows where the columns or a type are wrong.
        examples: Up to five of the rows by key, with the value found: `method_id=sharp, subject_id=p01, dice=2.0`. Rows
            of a table without key by number. Where the columns or a type are wrong: what was found.
        remedy: What to do about it.
    """

    table: str
    rule: str
    severity: Severity
    row_count: int
    examples: tuple[str, ...]
    remedy: str


class SuiteBroken(Exception):
    """An expectation could not be evaluated: nothing is known of the rows, so this is no finding."""


class _Words(TypedDict):
    """How an expectation speaks: the same for every kind."""

    description: str
    severity: str
    notes: str


def suite(table: Table, rules: Sequence[Rule] = ()) -> "list[Expectation]":
    """The expectations of a table, from its declaration and further rules.

    Args:
        table: The declaration.
        rules: Further rules, on columns of the table.

    Returns:
        Columns in their order, then column by column nulls, ranges and values, the key, and the rules. Floats must be
        finite (neither NaN nor infinite) where they are not null. Descriptions are escaped for HTML.

    Raises:
        ValueError: A rule is on a column that the table does not have, or two say the same words.
    """
    if unknown := [rule.column for rule in rules if rule.column not in table.column_names]:
        raise ValueError(f"{table.name}: a rule is on {unknown[0]}, which is no column of it")
    with warnings.catch_warnings(action="ignore"):
        stated = [*_shape_expectations(table, ()), *_value_expectations(table, table.columns, rules)]
    words = Counter(html.unescape(expectation.description) for expectation in stated)
    if repeated := [description for description, count in words.items() if count > 1]:
        raise ValueError(f"{table.name}: two rules say {repeated[0]!r}; give them different words")
    return stated


def _shape_expectations(table: Table, mistyped: Sequence[Column]) -> "list[Expectation]":
    """All columns in order, and the types of those whose type is wrong: that of a frame's other columns is known."""
    from great_expectations import expectations as gx

    return [
        gx.ExpectTableColumnsToMatchOrderedList(
            column_list=table.column_names,
            **_declared(table, f"the columns are {', '.join(table.column_names)}, in this order"),
        ),
        *(
            gx.ExpectColumnValuesToBeOfType(
                column=column.name,
                type_=PANDAS_TYPES[column.declaration.type],
                **_declared(table, f"{column.name} is stored as {column.polars_type}"),
            )
            for column in mistyped
        ),
    ]


def _value_expectations(table: Table, sound: Sequence[Column], rules: Sequence[Rule]) -> "list[Expectation]":
    """What the values of sound columns must keep: columns that are there, in their type."""
    names = {column.name for column in sound}
    return [
        *(expectation for column in sound for expectation in _column_expectations(table, column)),
        *(_key_expectations(table) if names.issuperset(table.key) else []),
        *(_rule_expectation(rule) for rule in rules if rule.column in names),
    ]


def _column_expectations(table: Table, column: Column) -> "list[Expectation]":
    """Nulls, ranges and values of one column."""
    from great_expectations import expectations as gx

    stated: list[Expectation] = []
    if not column.nullable:
        words = _declared(table, f"{column.name} is never null")
        stated.append(gx.ExpectColumnValuesToNotBeNull(column=column.name, **words))
    if (wording := _range_words(column)) is not None:
        low, high = _bounds(column)
        words = _declared(table, wording)
        stated.append(gx.ExpectColumnValuesToBeBetween(column=column.name, min_value=low, max_value=high, **words))
    if column.values:
        words = _declared(table, f"{column.name} is one of {', '.join(column.values)}")
        stated.append(gx.ExpectColumnValuesToBeInSet(column=column.name, value_set=column.values, **words))
    return stated


def _bounds(column: Column) -> tuple[float | None, float | None]:
    """Least and greatest value of a column; those of the finite numbers where a float declares none."""
    low, high = column.declaration.minimum, column.declaration.maximum
    if column.declaration.type in ("f32", "f64"):
        return -sys.float_info.max if low is None else low, sys.float_info.max if high is None else high
    return low, high


def _range_words(column: Column) -> str | None:
    """A column's range in words; nothing for a column that may hold every value of its type."""
    low, high = column.declaration.minimum, column.declaration.maximum
    number = " a finite number" if column.declaration.type in ("f32", "f64") else ""
    if low is not None and high is not None:
        return f"{column.name} is{number} from {low:g} to {high:g}"
    if low is not None:
        return f"{column.name} is{number}{' of' if number else ''} at least {low:g}"
    if high is not None:
        return f"{column.name} is{number}{' of' if number else ''} at most {high:g}"
    return f"{column.name} is{number}" if number else None


def _key_expectations(table: Table) -> "list[Expectation]":
    """The key does not repeat; a null in it counts as a value where there is more than one column."""
    from great_expectations import expectations as gx

    if not table.key:
        return []
    words = _declared(table, f"no two rows share {', '.join(table.key)}")
    if len(table.key) == 1:
        return [gx.ExpectColumnValuesToBeUnique(column=table.key[0], **words)]
    return [gx.ExpectCompoundColumnsToBeUnique(column_list=table.key, ignore_row_if="never", **words)]


def _rule_expectation(rule: Rule) -> "Expectation":
    """A rule's range or values."""
    from great_expectations import expectations as gx

    words = _words(rule.description, rule.severity, rule.remedy)
    if rule.values:
        return gx.ExpectColumnValuesToBeInSet(column=rule.column, value_set=rule.values, **words)
    low, high = rule.minimum, rule.maximum
    return gx.ExpectColumnValuesToBeBetween(column=rule.column, min_value=low, max_value=high, **words)


def _declared(table: Table, description: str) -> _Words:
    """Words of a rule that comes from the declaration."""
    remedy = (
        f"Remove the parts of these rows under parts/{table.name} and run `mirto ingest` again; if they come back, "
        "report this defect."
        if isinstance(table, LakeTable)
        else f"Mend the SELECT of {table.name}, or what it is declared to be; the live release stays as it is."
    )
    return _words(description, "stop", remedy)


def _words(description: str, severity: Severity, remedy: str) -> _Words:
    """Words of an expectation; the library writes a description into its pages as it stands, so it is escaped."""
    return _Words(description=html.escape(description, quote=False), severity=GX_SEVERITIES[severity], notes=remedy)


def validate(guarded: Sequence[Guarded], docs: Path | None = None) -> list[Finding]:
    """Run the suites of frames, and write what came of it as Data Docs.

    Values are judged only in columns that are there in their declared type; where one is not, that is the finding.

    Args:
        guarded: The frames, each of a table of its own name. Without rows a frame keeps every rule about rows.
        docs: Folder for the HTML pages, made where it is missing: `index.html` lists the suites with their outcome and
            every finding; the folder `suites` beside it, replaced as a whole, holds the pages of each. Nothing in them
            is fetched from elsewhere.

    Returns:
        One finding per rule that rows break, in the order of the frames and of their suites.

    Raises:
        SuiteBroken: An expectation could not be evaluated, or a page not be written.
        ValueError: Two frames are of one table, or a rule is on a column that its table does not have.
    """
    names = [one.table.name for one in guarded]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{repeated[0]} is guarded twice; a table has one suite")
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with warnings.catch_warnings(action="ignore"):  # the library's own deprecations are no business of a run
        context = _new_context(docs)
        source = context.data_sources.add_pandas("lakehouse")
        outcomes = [_judge(context, source, one) for one in guarded]
        if docs is not None:
            _write_docs(context, docs, outcomes)
    return [finding for outcome in outcomes for finding in outcome.findings]


@dataclass(frozen=True)
class _Outcome:
    """What came of one suite."""

    table: Table
    row_count: int
    expectation_count: int
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Literal["passed", "warned", "stopped"]:
        severities = {finding.severity for finding in self.findings}
        return "stopped" if "stop" in severities else "warned" if severities else "passed"


def _new_context(docs: Path | None) -> "EphemeralDataContext":
    """A context that lives in memory and writes nothing but the docs: no progress bars, no analytics."""
    import great_expectations as gx
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    sites: dict[str, object] = {}
    if docs is not None:
        backend = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve() / SITE)}
        sites["docs"] = {"class_name": "SiteBuilder", "show_how_to_buttons": False, "store_backend": backend}
    config = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(),
        data_docs_sites=sites,
        progress_bars=ProgressBarsConfig(globally=False),
        analytics_enabled=False,
    )
    return gx.get_context(mode="ephemeral", project_config=config)


def _judge(context: "EphemeralDataContext", source: "PandasDatasource", one: Guarded) -> _Outcome:
    """Run the suite of one frame."""
    import great_expectations as gx

    table, frame = one.table, one.frame
    stated = suite(table, one.rules)
    present = [column for column in table.columns if column.name in frame.columns]
    sound = [column for column in present if frame.schema[column.name] == column.polars_type]
    if len(sound) < len(table.columns):
        mistyped = [column for column in present if column not in sound]
        stated = [*_shape_expectations(table, mistyped), *_value_expectations(table, sound, one.rules)]
    key = [column.name for column in sound if column.name in table.key]
    batch = source.add_dataframe_asset(table.name).add_batch_definition_whole_dataframe("all rows")
    added = context.suites.add(gx.ExpectationSuite(name=table.name, expectations=stated))
    definition = gx.ValidationDefinition(name=table.name, data=batch, suite=added)
    results = context.validation_definitions.add(definition).run(
        batch_parameters={"dataframe": _pandas_frame(frame, key)},
        result_format={"result_format": "COMPLETE", "return_unexpected_index_query": False},
    )
    order = {expectation.description: place for place, expectation in enumerate(stated)}
    ordered = sorted(results.results, key=lambda result: order[result.expectation_config.description])
    findings = [finding for result in ordered if (finding := _finding(table, frame, key, result))]
    return _Outcome(table, len(frame), len(stated), tuple(findings))


def _pandas_frame(frame: pl.DataFrame, key: Sequence[str]) -> "pd.DataFrame":
    """A frame for Great Expectations, its rows labelled by key, or by number where there is no key.

    The labels are what a failed expectation lists: naming key columns to the library instead costs a look-up per cell,
    20 seconds where 75,000 rows break two rules.
    """
    import pandas as pd

    rows = pd.DataFrame({series.name: _pandas_values(series) for series in frame})
    named = [pl.format(f"{name}={{}}", pl.col(name).cast(pl.String).fill_null("null")) for name in key]
    label = pl.concat_str(named, separator=", ") if named else pl.format("row {}", pl.int_range(pl.len()))
    rows.index = pd.Index(frame.select(label.alias("label"))["label"].to_list())
    return rows


def _pandas_values(series: pl.Series) -> "pd.api.extensions.ExtensionArray | NDArray[np.generic]":
    """A column's values in exactly the type that stands for its own, where pandas would turn nulls into floats."""
    import pandas as pd

    if series.dtype not in POLARS_TYPES.values():
        # No column is declared so, and nothing but the type is judged: its name stands for the values, since some
        # types (a sum that DuckDB widens to 128 bits, say) have no counterpart in pandas.
        return pd.Categorical([str(series.dtype)]).repeat(len(series))
    null = series.is_null()
    if series.dtype.is_float():
        # Pandas takes NaN for a null, unless it is masked apart: a NaN must be found.
        if series.is_nan().any():
            return pd.arrays.FloatingArray(series.fill_null(0).to_numpy(), null.to_numpy())
        return series.to_numpy()
    if series.dtype == pl.String or not null.any():
        return series.to_pandas().array
    if series.dtype == pl.Boolean:
        return pd.arrays.BooleanArray(series.fill_null(False).to_numpy(), null.to_numpy())
    return pd.arrays.IntegerArray(series.fill_null(0).to_numpy(), null.to_numpy())


def _finding(
    table: Table, frame: pl.DataFrame, key: Sequence[str], result: "ExpectationValidationResult"
) -> Finding | None:
    """What one expectation found; nothing where it is met.

    Raises:
        SuiteBroken: It could not be evaluated.
    """
    stated = result.expectation_config
    rule = html.unescape(stated.description)
    if (error := _error(result)) is not None:
        raise SuiteBroken(f"{table.name}: that {rule} could not be checked: {error}")
    if result.success:
        return None
    severity: Severity = "stop" if stated.severity == GX_SEVERITIES["stop"] else "warn"
    count = result.result.get("unexpected_count", len(frame))
    examples = _examples(frame, key, result) if "unexpected_count" in result.result else _shape(frame, result)
    return Finding(table.name, rule, severity, count, examples, stated.notes)


def _error(result: "ExpectationValidationResult") -> str | None:
    """What was raised while an expectation was evaluated; the library lists it by metric, or by itself."""
    info = result.exception_info
    entries = [info] if "raised_exception" in info else info.values()
    return next((str(entry["exception_message"]) for entry in entries if entry["raised_exception"]), None)


def _shape(frame: pl.DataFrame, result: "ExpectationValidationResult") -> tuple[str, ...]:
    """The column's type, or the columns, that were found."""
    column = result.expectation_config.kwargs.get("column")
    return (f"found {', '.join(frame.columns) if column is None else frame.schema[column]}",)


def _examples(frame: pl.DataFrame, key: Sequence[str], result: "ExpectationValidationResult") -> tuple[str, ...]:
    """Rows that break a rule, by label, with the value where the label does not hold it."""
    labels: list[str] = result.result["unexpected_index_list"]
    column = result.expectation_config.kwargs.get("column")
    if column is None or column in key:
        return tuple(dict.fromkeys(labels))[:EXAMPLES]
    if result.expectation_config.type == "expect_column_values_to_not_be_null":
        return tuple(f"{label}, {column}=null" for label in labels[:EXAMPLES])
    found = islice(zip(labels, result.result["unexpected_list"], strict=True), EXAMPLES)
    is_truth = frame.schema[column] == pl.Boolean
    return tuple(f"{label}, {column}={str(value).lower() if is_truth else value}" for label, value in found)


def _write_docs(context: "EphemeralDataContext", docs: Path, outcomes: Sequence[_Outcome]) -> None:
    """Build the library's site, make its pages whole without the web, and put our index before them."""
    site = docs / SITE
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    context.build_data_docs(build_index=False)
    shutil.rmtree(site / "static", ignore_errors=True)  # fonts and pictures that no page needs any more
    for page in site.rglob("*.html"):
        page.write_text(_detached(page.read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "index.html").write_text(_index(docs, outcomes), encoding="utf-8")


def _detached(page: str) -> str:
    """A page of the library without what it fetches, runs or advertises, and with our style."""
    page = re.sub(r"<(script|style|footer)\b.*?</\1>|<(link|img)\b[^>]*>", "", page, flags=re.DOTALL)
    page = re.sub(r"> *Data asset: None<br>", ">", page).replace(" / __none__ / ", " / ")
    page = page.replace("CategoricalDtypeType", "another type")
    page = re.sub(r"(href=\"(?:\.\./)+)index\.html", r"\1../index.html", page)
    page = re.sub(r">\s*Index\s*<", ">Rows<", page)
    page = re.sub(r">((\w+)=[^<]+)<", _one_row_a_line, page)
    return page.replace("<head>", f"<head>{head(STYLE)}", 1)


def _one_row_a_line(cell: re.Match[str]) -> str:
    """A cell of row labels, broken where the next label starts: where its first name comes again."""
    return f">{cell[1].replace(f', {cell[2]}=', f'<br>{cell[2]}=')}<"


def _index(docs: Path, outcomes: Sequence[_Outcome]) -> str:
    """The first page: suites with their outcome, and every finding."""
    suites = html_table(
        ("Suite", "Outcome", "Rows", "Rules", "Broken", "Description"), [_suite_cells(docs, one) for one in outcomes]
    )
    findings = [finding for one in outcomes for finding in one.findings]
    told = html_table(
        ("Table", "Rule", "Severity", "Rows", "Examples", "What to do"), [_finding_cells(one) for one in findings]
    )
    counts = Counter(one.verdict for one in outcomes)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("stopped", "warned", "passed"))
    return (
        f"<!DOCTYPE html><html lang='en'><head>{head(STYLE, 'Data Docs')}</head><body><main>"
        f"<h1>Data Docs</h1><p>{len(outcomes)} suites: {summary}.</p>{suites}"
        f"<h2>Findings</h2>{told if findings else '<p>None: every rule holds.</p>'}</main></body></html>"
    )


def _suite_cells(docs: Path, one: _Outcome) -> list[str]:
    """One line of the list of suites, with links to its pages."""
    name, place = one.table.name, one.table.name.replace(".", "/")  # the library makes a folder of every dot
    result = next((docs / SITE / "validations" / place / "__none__").rglob("*.html"), None)
    if result is None:
        raise SuiteBroken(f"{name}: its page of the Data Docs could not be written")
    return [
        f"<a href='{quote(result.relative_to(docs).as_posix())}'>{html.escape(name)}</a>",
        f"<b class='{one.verdict}'>{one.verdict}</b>",
        f"{one.row_count:,}",
        f"<a href='{SITE}/expectations/{quote(place)}.html'>{one.expectation_count}</a>",
        f"{len(one.findings)}",
        html.escape(one.table.row),
    ]


def _finding_cells(one: Finding) -> list[str]:
    """One line of the list of findings."""
    told = "<br>".join(html.escape(example) for example in one.examples)
    verdict = "stopped" if one.severity == "stop" else "warned"
    severity = f"<b class='{verdict}'>{one.severity}</b>"
    return [
        html.escape(one.table),
        html.escape(one.rule),
        severity,
        f"{one.row_count:,}",
        told,
        html.escape(one.remedy),
    ]


def geometry_frames(gate_candidate: pl.DataFrame, gate_overlap: pl.DataFrame, shapes: pl.DataFrame) -> list[Guarded]:
    """What guards the outputs of the geometry gate.

    Beside both tables stand two derived ones with a row per method and subject, so that a rule about a group of rows is
    a rule about a number: `gate_geometry`, and `gate_geometry_single_slice` for subjects whose canonical grid has one
    slice, where no candidate moves through the plane.

    That the applied candidate does not exceed the best one holds of any rows whatever. What is asked instead is that
    its Dice keeps to the best that its two voxel counts allow, ``2 min(a, b) / (a + b)``, which ties the two tables.

    Args:
        gate_candidate: The lake table.
        gate_overlap: The lake table.
        shapes: A row per subject with `subject_id` and `shape_2`. Where it has `reference_voxels` and
            `reference_outside_voxels` too, as the lake table `subject` has, an empty reference is known as such; else
            any reference without a voxel in view is taken for one.

    Returns:
        The frames with their rules; the lake tables alone where one of them has not its declared columns, which is
        then what their suites find.
    """
    tables = lake_tables()
    lake = [Guarded(tables["gate_candidate"], gate_candidate), Guarded(tables["gate_overlap"], gate_overlap)]
    if any(one.frame.schema != one.table.polars_schema for one in lake):
        return lake
    pairs = _pairs(gate_candidate, gate_overlap, shapes)
    is_single = pl.col("slice_count").eq_missing(1)
    return [
        *lake,
        Guarded(_geometry_table("gate_geometry"), pairs.filter(~is_single), _geometry_rules(56, 3)),
        Guarded(_geometry_table("gate_geometry_single_slice"), pairs.filter(is_single), _geometry_rules(8, 0)),
    ]


def _geometry_table(name: str) -> Table:
    """A derived table of the gate, with a row per method and subject."""
    columns = (
        Column(column, ColumnDeclaration(type=kind, description=description), nullable=True)
        for column, (kind, description) in GEOMETRY_COLUMNS.items()
    )
    return Table(name, "One row per method and subject of the gate.", KEY, (*columns_of(KEY, ()), *columns))


def _geometry_rules(count: int, reach: int) -> tuple[Rule, ...]:
    """Rules of a derived table, where there are `count` candidates with offsets up to `reach`."""
    measure_again = (
        "Remove the parts of these methods and subjects under parts/gate_candidate and parts/gate_overlap and run "
        "`mirto ingest` again; if it comes back, report this defect."
    )
    ingest = "Run `mirto ingest`: it measures what is missing. If the subject failed there, mend what the failure says."
    offsets = f"from -{reach} to {reach}" if reach else "0: the grid has one slice"

    def number(column: str, low: float | None, high: float, words: str, remedy: str = measure_again) -> Rule:
        return Rule(column=column, minimum=low, maximum=high, severity="stop", description=words, remedy=remedy)

    def truth(column: str, words: str, remedy: str = measure_again) -> Rule:
        return Rule(column=column, values=(True,), severity="stop", description=words, remedy=remedy)

    return (
        truth("has_shape", "the subject's grid is known", ingest),
        number("candidate_count", count, count, f"there are exactly {count} candidate transforms"),
        number("lowest_dz", -reach, reach, f"the lowest through-plane offset is {offsets}"),
        number("highest_dz", -reach, reach, f"the highest through-plane offset is {offsets}"),
        number("applied_count", 1, 1, "exactly one candidate is the applied transform"),
        number("moved_applied_count", 0, 0, "the applied candidate neither transposes nor flips, and has offset 0"),
        number("overlap_count", 1, 1, "there is exactly one row of gate_overlap"),
        number("wrong_dice_count", 0, 0, "Dice is there with a reference in view; without one it is null or 0"),
        number("wrong_centroid_count", 0, 0, "a centroid distance is null exactly where one of the masks is empty"),
        truth("has_view_fraction", "the share of the reference in view is null only where the reference is empty"),
        number("excess_dice", None, 0, "Dice of the applied candidate keeps to what its voxel counts allow"),
    )


def _pairs(candidate: pl.DataFrame, overlap: pl.DataFrame, shapes: pl.DataFrame) -> pl.DataFrame:
    """The numbers of `GEOMETRY_COLUMNS` for each method and subject of either table."""
    measures = pl.col("in_view_fraction", "own_in_view_voxels", "in_view_voxels").first()
    overlaps = overlap.group_by(KEY).agg(measures, overlap_count=pl.len())
    numbers = candidate.join(overlaps, on=KEY, how="left").group_by(KEY).agg(**_candidate_numbers())
    is_known = {"reference_voxels", "reference_outside_voxels"} <= set(shapes.columns)
    reference = (
        pl.col("reference_voxels") + pl.col("reference_outside_voxels") if is_known else pl.col("in_view_voxels")
    )
    own, view = pl.col("own_in_view_voxels"), pl.col("in_view_voxels")
    has_fraction = pl.col("in_view_fraction").is_not_null()
    counts = ("candidate_count", "applied_count", "moved_applied_count", "overlap_count")
    return (
        pl.concat([candidate.select(KEY), overlap.select(KEY)])
        .unique()
        .join(numbers, on=KEY, how="left")
        .join(overlaps, on=KEY, how="left")
        .join(shapes.unique("subject_id"), on="subject_id", how="left")
        .with_columns(
            pl.col(*counts).fill_null(0),
            slice_count=pl.col("shape_2"),
            has_shape=pl.col("shape_2").is_not_null(),
            has_view_fraction=pl.when(pl.col("overlap_count") > 0).then(has_fraction | (reference == 0)),
            excess_dice=(pl.col("applied_dice") - 2 * pl.min_horizontal(own, view) / (own + view)).fill_nan(None),
        )
        .select(*KEY, *(pl.col(name).cast(POLARS_TYPES[kind]) for name, (kind, _) in GEOMETRY_COLUMNS.items()))
        .sort(KEY)
    )


def _candidate_numbers() -> dict[str, pl.Expr]:
    """Numbers over the candidates of one method and subject, the columns of `gate_overlap` beside them."""
    applied, dice, view = pl.col("is_applied"), pl.col("dice"), pl.col("in_view_voxels")
    has_dice, has_centroid = dice.is_not_null(), pl.col("centroid_mm").is_not_null()
    is_moved = pl.col("transposed") | pl.col("flip_0") | pl.col("flip_1") | (pl.col("dz") != 0)
    wrong_dice = pl.when(view > 0).then(~has_dice).when(view == 0).then(dice > 0)
    # Only the applied candidate's own voxels are counted; of the others it is known that voxels overlap or none do.
    wrong_centroid = (
        pl.when(applied)
        .then(has_centroid == ((pl.col("own_in_view_voxels") == 0) | (view == 0)))
        .otherwise(pl.when(has_centroid).then(~has_dice | (view == 0)).otherwise(dice > 0))
    )
    return {
        "candidate_count": pl.len(),
        "lowest_dz": pl.col("dz").min(),
        "highest_dz": pl.col("dz").max(),
        "applied_count": applied.sum(),
        "moved_applied_count": (applied & is_moved).sum(),
        "wrong_dice_count": wrong_dice.sum(),
        "wrong_centroid_count": wrong_centroid.sum(),
        "applied_dice": dice.filter(applied).first(),
    }
