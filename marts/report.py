"""A release as one page that can be mailed or put beside a paper: tables, figures, and where every number is.

The page reads a release through its marts alone, fetches and runs nothing, and is the same, byte for byte, whenever it
is made of the same release by the same version. What a release cannot say is said to be not testable, with the reason.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import duckdb

from expectations.page import head, html_table
from expectations.store import write_text
from ingest.problems import BadInput
from marts.figures import Drawn, figures, in_words
from marts.findings import QUESTIONS, Question, Shown, answers, summary
from marts.gate import read_verdicts
from marts.lake import connect
from marts.release import first_row
from marts.source import tables_read

NAME = "report.html"
MESSAGES = 20  # of the gate that are shown
ONE_TRAINING_SET = "The study declares no further training sets."
END = "END"  # of a SELECT on standard input
STYLE = """
:root { color-scheme: light dark; }
body { max-width: 62rem; }
h1, h2, h3 { line-height: 1.25; margin: 1.6rem 0 0.5rem; }
h2 { border-bottom: 2px solid #d5d9dd; padding-bottom: 0.2rem; margin-top: 2.4rem; }
table { font-size: 0.86rem; font-variant-numeric: tabular-nums; }
.facts th { width: 14rem; }
.scroll { overflow-x: auto; }
.answer { border-left: 4px solid #0072b2; padding: 0.1rem 1rem; background: #f3f6f9; }
.empty { font-style: italic; }
.where, figcaption, .reading { color: #555; font-size: 0.86rem; }
figure { margin: 1rem 0 2rem; }
figcaption { margin-top: 0.4rem; }
figure svg { display: block; width: 100%; height: auto; max-width: 56rem; background: #fff; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f6f9; padding: 0.5rem; font-size: 0.8rem; }
code { font-size: 0.9em; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e6e8; background: #16191c; }
  a { color: #8ec7ff; }
  th, td, h2 { border-color: #444a50; }
  th, .answer, pre { background: #23282d; }
  .where, figcaption, .reading { color: #b3b9bf; }
  figure svg { padding: 0.5rem; border-radius: 4px; box-sizing: border-box; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  table { font-size: 8pt; }
  nav { display: none; }
  .scroll { overflow: visible; }
  h2, h3 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
}
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: its heading, the marts whose questions belong here, and the figures, by how they begin."""

    anchor: str
    title: str
    marts: frozenset[str]
    figures: tuple[str, ...]
    intro: str


SECTIONS = (
    Section(
        "geometry",
        "Do the maps lie where their references do?",
        frozenset({"gate_summary", "diagnostic"}),
        (),
        "Without this nothing below means anything: a map that lies elsewhere is scored at the wrong voxels.",
    ),
    Section(
        "thresholds",
        "What did the thresholds come to?",
        frozenset({"operating_point"}),
        ("transfer",),
        "A budget only names how a threshold was chosen; a reader wants to know what it came to on test.",
    ),
    Section(
        "ranking",
        "Does the ranking hold under every defensible evaluation?",
        frozenset({"flip_share", "order_share"}),
        ("curves", "flips", "orders"),
        "A universe is one full set of choices of the evaluation (reference, threshold rule, budget, post-processing,"
        " aggregation, metric and so on); it is defensible if each of its choices could stand in a paper.",
    ),
    Section(
        "variance",
        "Whose is the variance?",
        frozenset({"variance_share"}),
        ("variance",),
        "The more of it belongs to the method, the more the ranking is the methods' own.",
    ),
    Section(
        "contrasts",
        "Which differences stand?",
        frozenset({"paired_contrast"}),
        ("contrasts",),
        "Paired differences over the same test subjects, adjusted for how many were looked at.",
    ),
    Section(
        "hypotheses",
        "What becomes of the hypotheses?",
        frozenset({"hypothesis"}),
        (),
        "Each is decided by a SELECT over the marts; what cannot be decided is not testable, which is not a no.",
    ),
    Section(
        "training",
        "Does the choice of a training set matter?",
        frozenset({"selection", "configuration_order", "configuration_level"}),
        (),
        "Only where methods bring maps from several training sets.",
    ),
    Section(
        "left-out",
        "What was left out, and what did the checks find?",
        frozenset({"dropped_level"}),
        (),
        "Nothing is imputed: what could not be measured or compared left, and says here why.",
    ),
)
OTHER = Section("further", "Further findings", frozenset(), (), "")


@dataclass(frozen=True)
class Listed:
    """A table of the page that no question of the findings asks for.

    Attributes:
        title: Its heading.
        reading: How to read it.
        sql: The SELECT.
        why_empty: What to say where it has no row.
    """

    title: str
    reading: str
    sql: str
    why_empty: str


HYPOTHESES = (
    Listed(
        "The hypotheses in words",
        "Cases: how many must meet the criterion, any or every.",
        """
        select hypothesis_id as id, statement, criterion as "supported if", required_cases as cases
        from hypothesis_criterion
        order by position
        """,
        "No hypothesis is declared.",
    ),
)
LEFT_OUT = (
    Listed(
        "Methods, baselines and training sets that are not ranked",
        "",
        "select method_id as method, kind, reason from ranked_method where not is_ranked order by position",
        "None: every one is ranked.",
    ),
    Listed(
        "Subjects left out",
        "A subject leaves for all methods, so that all are compared on the same ones.",
        """
        select subject_id as subject, split, reason
        from cohort_subject
        where not is_included
        order by split, subject_id
        """,
        "None: every subject takes part.",
    ),
    Listed(
        "Files or tasks that could not be measured",
        "",
        """
        select path, task, method_id as method, subject_id as subject, reason, remedy
        from failure
        order by path, task, method_id
        """,
        "None: everything was measured.",
    ),
    Listed(
        "Threshold rules without a threshold",
        "Canonical reference in the brain; how many methods and budgets it concerns.",
        """
        select t.threshold_rule_id as rule, t.status, t.reason, count(*) as "methods and budgets"
        from threshold_choice as t
        join ranked_method as m on m.method_id = t.method_id and m.kind = 'method' and m.is_ranked
        where t.threshold is null and t.reason is not null and t.reference_id = 'canonical' and t.support_id = 'brain'
            and t.voxel_volume_id = 'true'
        group by t.threshold_rule_id, t.status, t.reason
        order by t.threshold_rule_id, t.status, t.reason
        """,
        "None: every rule has a threshold for every method.",
    ),
    Listed(
        "Universes that are not scored",
        "With the first reason of each; a universe without a score for one method leaves for all.",
        """
        select
            metric_id as metric, reason,
            count(*) as universes, count(*) filter (is_defensible) as "of them defensible"
        from universe
        where status <> 'ok'
        group by metric_id, reason
        order by metric_id, universes desc, reason
        """,
        "None: every planned universe is scored.",
    ),
    Listed(
        "What the checks found when the release was published",
        "A finding that stops keeps a release from being published; these are the ones that it was published with.",
        """
        select table_name as "table", severity, rule, row_count as "rows", examples, remedy
        from release_finding
        order by table_name, rule
        """,
        "None: every rule held when the release was published.",
    ),
)


@dataclass(frozen=True)
class Facts:
    """What a release is made of."""

    study: str
    release_id: str
    created_at: str
    content_hash: str
    failures: int
    methods: int
    baselines: int
    validation: int
    test: int
    left_out: int
    planned: int
    scored: int
    planned_defensible: int
    defensible: int
    training_sets: int

    @property
    def why_no_ranking(self) -> str | None:
        """Why nothing can be said about a ranking; None where something can."""
        if self.methods == 0:
            return "no method takes part in the ranking (see the geometry gate, and what was left out)"
        if self.methods == 1:
            return "one method alone has no ranking: it takes two that pass the geometry gate"
        if self.test == 0:
            return "no test subject takes part"
        if self.defensible == 0:
            return "no defensible universe is scored for every method (see what was left out)"
        return None


@dataclass(frozen=True)
class Traced:
    """Where the numbers of a table or figure are: the marts, and the SELECT where there is one."""

    title: str
    marts: tuple[str, ...]
    sql: str


def write_report(lake: Path, release_id: str | None = None, file: Path | None = None) -> Path:
    """Write a release's report, whole or not at all.

    Args:
        lake: The lake's folder.
        release_id: An earlier release; the live one without it.
        file: Where to; `report.html` in the lake without it.

    Returns:
        The file.

    Raises:
        NoRelease: There is no such release.
        BadInput: The file cannot be written.
    """
    target = file or lake / NAME
    with connect(lake, release_id) as connection:
        page = report(connection)
    try:
        write_text(target, page)
    except OSError as error:
        found = f"cannot be written: {error.strerror or error}"
        raise BadInput(str(target), found, "Name a file in a folder that can be written with --output") from error
    return target


def report(connection: duckdb.DuckDBPyConnection) -> str:
    """The page of a release, as HTML.

    Args:
        connection: From `marts.lake.connect`.
    """
    facts = read_facts(connection)
    drawn = list(figures(connection))
    tables = [(_section_of(question.sql), question, shown) for question, shown in _answered(connection, facts)]
    traced: list[Traced] = []
    parts: list[tuple[str, str, str]] = [("answer", "The answer in short", _answer(connection, facts))]
    for section in (*SECTIONS, OTHER):
        body = [f"<p>{escape(section.intro)}</p>"] if section.intro else []
        own = [(question, shown) for place, question, shown in tables if place is section]
        pictures = [one for one in drawn if one.name.startswith(section.figures)] if section.figures else []
        if not own and not pictures:
            continue
        if section.anchor == "training" and not facts.training_sets:
            parts.append((section.anchor, section.title, f'<p class="empty">{ONE_TRAINING_SET}</p>'))
            continue
        for question, shown in own:
            marts = tables_read(question.sql)
            body.append(_table(shown.title, shown.reading, shown.columns, shown.rows, _why_empty(marts, facts)))
            if shown.rows:
                traced.append(Traced(shown.title, marts, question.sql))
        for one in pictures:
            body.append(_figure(one))
            if one.figure is not None:
                traced.append(Traced(one.title, one.marts, ""))
        body += _further(connection, section, traced)
        parts.append((section.anchor, section.title, "".join(body)))
    parts.append(("trace", "How to trace a number", _trace(connection, facts, traced)))
    return _page(facts, parts)


def _answered(connection: duckdb.DuckDBPyConnection, facts: Facts) -> Iterator[tuple[Question, Shown]]:
    """Every question with its answer; one method alone has an order in every universe, which answers nothing."""
    for question, shown in zip(QUESTIONS, answers(connection), strict=True):
        is_void = facts.why_no_ranking is not None and "order_share" in tables_read(question.sql)
        yield question, replace(shown, rows=()) if is_void else shown


def _section_of(sql: str) -> Section:
    """Where the answer to a question belongs, by the marts that it reads."""
    read = set(tables_read(sql))
    return next((section for section in SECTIONS if section.marts & read), OTHER)


def read_facts(connection: duckdb.DuckDBPyConnection) -> Facts:
    """Read what a release is made of."""
    row = first_row(
        connection,
        """
        select
            study, release_id, created_at, content_hash, failure_count,
            (select count(*) from ranked_method where kind = 'method' and is_ranked),
            (select count(*) from ranked_method where kind = 'baseline' and is_ranked),
            (select count(*) from cohort_subject where is_included and split = 'validation'),
            (select count(*) from cohort_subject where is_included and split = 'test'),
            (select count(*) from cohort_subject where not is_included),
            (select count(*) from universe),
            (select count(*) from universe where status = 'ok'),
            (select count(*) from universe where is_defensible),
            (select count(*) from universe where status = 'ok' and is_defensible),
            (select count(*) from ranked_method where kind = 'configuration')
        from release
        """,
    )
    return Facts(*(row or ()))


# --- The answer


def _answer(connection: duckdb.DuckDBPyConnection, facts: Facts) -> str:
    """Who was compared, and in words what the marts say to the question of the title."""
    told = [
        ("Study", facts.study),
        ("Release", f"{facts.release_id}, published {facts.created_at} UTC"),
        ("Content hash (SHA-256)", facts.content_hash),
        ("Subjects", f"{facts.validation} validation, {facts.test} test, {facts.left_out} left out"),
        ("Files or tasks that failed", f"{facts.failures:,}"),
        ("Ranked methods and baselines", f"{facts.methods} and {facts.baselines}"),
        (
            "Universes per method",
            f"{facts.planned:,} planned, {facts.scored:,} scored;"
            f" of the {facts.planned_defensible:,} defensible ones {facts.defensible:,} scored",
        ),
        ("Made by", f"mirto {version('mirto')}"),
    ]
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in told)
    words = " ".join(_answer_in_words(connection, facts))
    return (
        f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'
        f'<p class="answer">{escape(words)}</p><p>{escape(summary(connection))}</p>'
    )


def _answer_in_words(connection: duckdb.DuckDBPyConnection, facts: Facts) -> Iterator[str]:
    if facts.why_no_ranking is not None:
        yield f"Whether the ranking belongs to the method or to the evaluation is not testable: {facts.why_no_ranking}."
        return
    yield _flips_in_words(connection)
    yield _variance_in_words(connection)
    verdicts = connection.sql("""
        select hypothesis_id, split_part(statement, ':', 1), replace(verdict, '_', ' ')
        from hypothesis
        where configuration_set = 'primary' and hypothesis_id in ('H1', 'H2')
        order by position
    """).fetchall()
    if verdicts:
        stated = "; ".join(f"{name} ({identifier}): {verdict}" for identifier, name, verdict in verdicts)
        yield f"By the criteria of the protocol: {stated}."
    level = first_row(connection, "select interval_level from protocol") or (0.0,)
    yield f"All of this holds for the {facts.test} test subjects of this cohort; brackets are {100 * level[0]:g} %"
    yield "intervals over resamples of them."


def _flips_in_words(connection: duckdb.DuckDBPyConnection) -> str:
    """The pair that flips most within a metric, never without the size of its differences."""
    row = first_row(
        connection,
        """
        select
            method_a, method_b, metric_id, flip_share, flip_share_low, flip_share_high,
            median_abs_difference, median_lead_a, median_lead_b, greater_count + less_count + tie_count,
            (
                select count(distinct c.cell_id)
                from method_cell as c
                where c.universe_set = f.universe_set and c.metric_id = f.metric_id
            )
        from flip_share as f
        where universe_set = 'defensible' and not is_baseline_pair and metric_id <> 'all'
        order by flip_share desc, median_abs_difference desc, metric_id, method_a, method_b
        limit 1
        """,
    )
    if row is None:
        return "Flips are not testable: no pair of methods has a universe in common."
    first, second, metric, share, low, high, difference, lead_a, lead_b, universes, cells = row
    if share == 0:
        return "No pair of methods flips within a metric: every defensible universe gives each pair the same order."
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None else " (no interval)"
    leads = [
        f"{method} leads by {lead:.4f} (median) where it leads" if lead is not None else f"{method} never leads"
        for method, lead in ((first, lead_a), (second, lead_b))
    ]
    return (
        f"The largest flip share within a metric is {share:.3f}{interval}, of {first} against {second} in"
        f" {in_words(metric)}: that share of {universes:,} defensible universes ({cells:,} distinct cells) gives the"
        f" rarer order, ties half."
        f" There the two differ by {difference:.4f} (median); {leads[0]}, {leads[1]}."
    )


def _variance_in_words(connection: duckdb.DuckDBPyConnection) -> str:
    """The metrics in which least and most of the variance is the method's, against the axes."""
    rows = connection.sql("""
        select m.metric_id, m.share, m.share_low, m.share_high, a.share
        from variance_share as m
        join variance_share as a using (universe_set, metric_id)
        where m.universe_set = 'defensible' and m.metric_id <> 'all' and m.term = 'method' and a.term = 'axes'
            and m.share is not null
        order by m.share, m.metric_id
    """).fetchall()
    if not rows:
        return "Shares of variance are not testable: no metric has any variance to share out."

    def told(row: tuple[str, float, float | None, float | None, float]) -> str:
        metric, own, low, high, axes = row
        interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        return f"{own:.3f}{interval} in {in_words(metric)}, where the axes of the evaluation have {axes:.3f}"

    if len(rows) == 1:
        return f"The method's share of the variance is {told(rows[0])}."
    return (
        f"The method's share of the variance within a metric is lowest with {told(rows[0])}; it is highest with"
        f" {told(rows[-1])}."
    )


# --- Tables, figures, and reasons where there are none


def _prose(text: str) -> str:
    """Words as HTML, what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(
    title: str, reading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], why_empty: str = "None."
) -> str:
    """A table under its heading, or why there is none."""
    heading = f"<h3>{escape(title)}</h3>"
    if not rows:
        return f'{heading}<p class="empty">{_prose(why_empty)}</p>'
    table = html_table([escape(column) for column in columns], [[_prose(cell) for cell in row] for row in rows])
    return f'{heading}<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">{table}</div>' + (
        f'<p class="reading">{_prose(reading)}</p>' if reading else ""
    )


def _why_empty(marts: Sequence[str], facts: Facts) -> str:
    """Why a question has no answer, by the marts that it reads."""
    read = set(marts)
    if "diagnostic" in read:
        return "Not measured: `mirto rebuild --diagnostics` measures it."
    if read & {"selection", "configuration_order", "configuration_level"} or "ledger_set" in read:
        return (
            "Nothing to tell: every training set is a level, or agrees with the primary maps."
            if facts.training_sets
            else ONE_TRAINING_SET
        )
    if "dropped_level" in read:
        return "None: every level of every axis stayed."
    if "gate_summary" in read:
        return "No method brings own references: nothing can be judged."
    if facts.why_no_ranking is not None:
        return f"Not testable: {facts.why_no_ranking}."
    if "flip_share" in read:
        return "No pair flips: every defensible universe gives each pair the same order."
    if "paired_contrast" in read:
        return "Not testable: no pair has a contrast in mean Dice at the reference budget."
    return "Not testable: the marts hold no row of it. The reasons stand under what was left out."


def _figure(drawn: Drawn) -> str:
    """A figure with its caption, or why there is none."""
    if drawn.figure is None:
        return f'<p class="empty">No figure ({escape(drawn.name)}): {escape(drawn.title)}</p>'
    marts = ", ".join(f"<code>{escape(mart)}</code>" for mart in drawn.marts)
    return (
        f"<h3>{escape(drawn.title)}</h3><figure>{inline_svg(drawn.svg(), drawn.name, drawn.title)}"
        f"<figcaption>{escape(drawn.caption)} Numbers: {marts}.</figcaption></figure>"
    )


def inline_svg(svg: str, name: str, alt: str) -> str:
    """An SVG file as a part of a page.

    Args:
        svg: The file's text.
        name: Unique on the page; put before every identifier that something in the picture refers to.
        alt: What it shows, for those who cannot see it.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href=", "href=")
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', body))
    kept = {first or second for first, second in used}

    def identified(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in kept else ""

    body = re.sub(r'\sid="([^"]*)"', identified, body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    words = f'<svg role="img" aria-label="{escape(alt)}"'
    return re.sub(r"\n\s*", "\n", body.replace("<svg", words, 1)).strip()


def _further(connection: duckdb.DuckDBPyConnection, section: Section, traced: list[Traced]) -> list[str]:
    """What a section says beyond its questions and figures."""
    if section.anchor == "geometry":
        messages = read_verdicts(connection).messages
        if not messages:
            return []
        shown = "".join(f"<li><pre>{escape(message)}</pre></li>" for message in messages[:MESSAGES])
        more = f"<p>{len(messages) - MESSAGES} more: see <code>gate_subject</code>.</p>" if messages[MESSAGES:] else ""
        return [f"<h3>What would mend it</h3><ul>{shown}</ul>{more}"]
    listed = {"hypotheses": HYPOTHESES, "left-out": LEFT_OUT}.get(section.anchor, ())
    told: list[str] = []
    for one in listed:
        result = connection.execute(one.sql)
        columns = [str(column[0]) for column in result.description or ()]
        rows = [["-" if value is None else str(value) for value in row] for row in result.fetchall()]
        told.append(_table(one.title, one.reading, columns, rows, one.why_empty))
        if rows:
            traced.append(Traced(one.title, tables_read(one.sql), one.sql))
    return told


# --- Where a number is


def _trace(connection: duckdb.DuckDBPyConnection, facts: Facts, traced: Sequence[Traced]) -> str:
    """The marts behind every table and figure, with the line that shows them."""
    described = dict(connection.sql("select table_name, description from release_table").fetchall())
    marts = sorted({mart for one in traced for mart in one.marts})
    prefix = f"mirto query LAKE --release {facts.release_id}"
    listed = html_table(
        ("Mart", "Holds", "Shows it"),
        [
            [
                f"<code>{escape(mart)}</code>",
                _prose(str(described.get(mart, "What the release is, or was published with."))),
                f"<code>{escape(prefix)} &quot;from {escape(mart)}&quot;</code>",
            ]
            for mart in marts
        ],
    )
    behind = "".join(
        f"<details><summary>{escape(one.title)}: {escape(', '.join(one.marts))}</summary>"
        f"<pre>{escape(prefix)} - &lt;&lt;&#x27;{END}&#x27;\n{escape(dedent(one.sql).strip())}\n{END}</pre></details>"
        for one in traced
        if one.sql
    )
    pictures = "".join(
        f"<li>{escape(one.title)}: {', '.join(f'<code>{escape(mart)}</code>' for mart in one.marts)}</li>"
        for one in traced
        if not one.sql
    )
    return (
        "<p>LAKE is the lake's folder. <code>mirto tables LAKE TABLE</code> says what every column of a mart means and"
        " in which unit; <code>mirto validate LAKE</code> checks the release once more.</p>"
        f'<h3>Marts</h3><div class="scroll" role="region" tabindex="0" aria-label="Marts">{listed}</div>'
        f"<h3>The SELECT behind each table</h3>{behind}<h3>The marts behind each figure</h3><ul>{pictures}</ul>"
    )


def _page(facts: Facts, parts: Sequence[tuple[str, str, str]]) -> str:
    title = f"{facts.study}: does the ranking belong to the method or to the evaluation?"
    contents = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name, _ in parts)
    body = "\n".join(
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{i}. {escape(name)}</h2>{text}</section>'
        for i, (anchor, name, text) in enumerate(parts, start=1)
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head(STYLE, title)}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"></head>\n'
        f'<body><main><h1>{escape(title)}</h1><nav aria-label="Contents"><ol>{contents}</ol></nav>\n{body}\n'
        "</main></body></html>\n"
    )
