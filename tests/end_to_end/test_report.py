"""The report of a release: its numbers are those of the marts, it fetches nothing, and it is the same every time."""

import html
import os
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import duckdb
import pytest

import mirto
from expectations.store import write_text
from expectations.study import load_study
from ingest.jobs import InProcess
from ingest.manifest import read_manifest
from ingest.run import Ingest
from marts.figures import Drawn, contrasts, figures, flips, transfer
from marts.findings import answers
from marts.lake import build_release, connect, live_release
from marts.release import is_view
from marts.report import inline_svg, read_facts, report

Run = Callable[..., tuple[int, str, str]]
VOID = {"meta", "br", "hr", "img", "link", "input"}


def publish(lake: Path) -> None:
    """Publish what a lake holds, with one budget and so a quarter of the universes."""
    manifest = read_manifest(lake)
    one_budget = {"budgets_cm3": [20.0], "reference_budget_cm3": 20.0}
    manifest = manifest.model_copy(update={"overrides": {**manifest.overrides, **one_budget}})
    assert build_release(lake, manifest).release is not None


@pytest.fixture(scope="module")
def published(phantom_lake: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the phantom's lake with a release; never changed."""
    lake = tmp_path_factory.mktemp("report") / "lake"
    shutil.copytree(phantom_lake, lake)
    publish(lake)
    return lake


@pytest.fixture(scope="module")
def page(published: Path) -> str:
    with connect(published) as connection:
        return report(connection)


@pytest.fixture(scope="module")
def drawn(published: Path) -> dict[str, Drawn]:
    """Every figure of the release, by name."""
    with connect(published) as connection:
        return {one.name: one for one in figures(connection)}


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, which take seconds to draw."""

    def none(_connection: duckdb.DuckDBPyConnection) -> tuple[Drawn, ...]:
        return ()

    monkeypatch.setattr("marts.report.figures", none)


@pytest.fixture
def spoilt(published: Path, tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A writable copy of the release, to take rows from; its lake tables are read from the lake."""
    file = tmp_path / "spoilt.duckdb"
    shutil.copyfile(published / "mirto.duckdb", file)
    with duckdb.connect(file) as connection:
        connection.execute(f"set file_search_path = '{published}'")
        yield connection


def empty(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Leave a table or a view without rows."""
    connection.execute(f"create temp table kept as from {name} limit 0")
    kind = "view" if is_view(connection, name) else "table"
    connection.execute(f"drop {kind} {name}")
    connection.execute(f"create table {name} as from kept; drop table kept")


class Reader(HTMLParser):
    """Reads a page: tables as rows of texts, every attribute, identifiers, and whether elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.in_cell = True
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.cells[-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def words(page: str) -> str:
    """The text of a page without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_the_tables_are_those_that_rebuild_prints(published: Path, page: str) -> None:
    cells = read(page).cells
    with connect(published) as connection:
        shown = [one for one in answers(connection) if one.rows]
    assert len(shown) >= 6
    at = {cell: [i for i, other in enumerate(cells) if other == cell] for cell in set(cells)}
    for one in shown:
        first = [cell.replace("`", "") for cell in one.rows[0]]
        assert any(cells[i : i + len(first)] == first for i in at[first[0]]), one.title


def test_the_answer_says_what_the_marts_say(published: Path, page: str) -> None:
    told = words(page)
    with connect(published) as connection:
        flip = connection.sql("""
            select max(flip_share) from flip_share
            where universe_set = 'defensible' and not is_baseline_pair and metric_id <> 'all'
        """).fetchall()[0][0]
        low, high = connection.sql("""
            select min(share), max(share) from variance_share
            where universe_set = 'defensible' and metric_id <> 'all' and term = 'method'
        """).fetchall()[0]
        verdict = connection.sql("select verdict from hypothesis where hypothesis_id = 'H1'").fetchall()[0][0]
        content_hash, release_id = connection.sql("select content_hash, release_id from release").fetchall()[0]
    assert f"The largest flip share within a metric is {flip:.3f} [" in told
    assert f"within a metric is lowest with {low:.3f}" in told
    assert f"it is highest with {high:.3f}" in told
    assert f"Ranking instability (H1): {verdict.replace('_', ' ')}" in told
    assert content_hash in told and release_id in told
    assert "11 validation, 4 test, 0 left out" in told
    assert "3,888 defensible ones" in told


def test_every_line_that_traces_a_number_runs(published: Path, page: str) -> None:
    told = words(page)
    start = f"mirto query LAKE --release {release_of(published)}"
    lines = re.findall(rf'{start} "([^"]+)"', told)
    selects = re.findall(rf"{start} - <<'END'\n(.*?)\nEND", told, flags=re.DOTALL)
    assert len(lines) >= 10 and len(selects) >= 8
    with connect(published) as connection:
        for sql in (*lines, *selects):
            assert connection.execute(sql).fetchall() != []


def test_every_figure_is_there_with_its_caption_and_words(published: Path, page: str, drawn: dict[str, Drawn]) -> None:
    reader = read(page)
    assert {"flips", "orders", "variance", "variance_terms", "transfer", "contrasts", "curves_dice"} <= set(drawn)
    assert reader.tags.count("svg") == reader.tags.count("figcaption") == len(drawn)
    labels = [value for tag, name, value in reader.attributes if (tag, name) == ("svg", "aria-label")]
    assert sorted(labels) == sorted(one.title for one in drawn.values())
    told = words(page)
    for one in drawn.values():
        assert "n = " in one.caption and one.caption in told
        assert all(f'mirto query LAKE --release {release_of(published)} "from {mart}"' in told for mart in one.marts)


def release_of(lake: Path) -> str:
    live = live_release(lake)
    assert live is not None
    return live.release_id


def test_a_headline_of_a_figure_tells_a_number_of_its_mart(published: Path, drawn: dict[str, Drawn]) -> None:
    with connect(published) as connection:
        shares = connection.sql("""
            select min(share), max(share) from variance_share
            where universe_set = 'defensible' and metric_id <> 'all' and term = 'method'
        """).fetchall()[0]
        above, count = connection.sql("""
            select count(*) filter (burden_cm3_mean > budget_cm3), count(*)
            from operating_point join ranked_method using (method_id)
            where threshold_rule_id = 'validation' and postprocess_id = 'plain' and kind = 'method'
        """).fetchall()[0]
        spread = connection.sql("""
            select max(spread) from (
                select max(score) - min(score) as spread
                from method_cell join ranked_method using (method_id)
                where universe_set = 'defensible' and metric_id = 'dice' and kind = 'method' group by method_id
            )
        """).fetchall()[0][0]
    assert f"{100 * shares[0]:.0f} to {100 * shares[1]:.0f} %" in drawn["variance"].title
    assert f"at {above} of {count} points" in drawn["transfer"].title
    assert drawn["curves_dice"].title.endswith(f"by up to {spread:.3f}")


def test_the_page_is_whole_and_fetches_and_runs_nothing(page: str) -> None:
    reader = read(page)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(reader.tags)
    assert "http:" not in page and "https:" not in page and "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    for _, name, value in reader.attributes:
        assert name != "src" and not name.startswith("on")
        assert name != "href" or value.startswith("#")
    identifiers = [value for _, name, value in reader.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    pointed = {value[1:] for _, name, value in reader.attributes if name == "href"}
    pointed |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert pointed <= set(identifiers)
    assert reader.tags.count("h1") == 1
    assert str(Path.home()) not in page


def test_the_same_release_gives_the_same_bytes(run: Run, published: Path, page: str, tmp_path: Path) -> None:
    file = tmp_path / "again.html"
    assert run("report", published, "-o", file, "--release", release_of(published))[0] == 0
    assert file.read_bytes() == page.encode()


@pytest.mark.usefixtures("no_figures")
def test_the_report_lies_in_the_lake(run: Run, published: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    shutil.copytree(published, lake)
    code, out, _ = run("report", lake)
    assert code == 0 and str(lake / "report.html") in out
    assert (lake / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_no_lake_and_no_release(run: Run, published: Path, tmp_path: Path) -> None:
    code, _, err = run("report", tmp_path / "nothing")
    assert code == mirto.NOT_FOUND and "no release yet" in err
    code, _, err = run("report", published, "--release", "another", "-o", tmp_path / "r.html")
    assert code == mirto.NOT_FOUND and "no release another" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_figures")
def test_an_output_that_cannot_be_written_leaves_nothing(run: Run, published: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    code, _, err = run("report", published, "-o", tmp_path / "folder.html")
    assert code == mirto.BAD_INPUT and "cannot be written" in err and "--output" in err
    (tmp_path / "file").write_text("mine")
    code, _, err = run("report", published, "-o", tmp_path / "file" / "r.html")
    assert code == mirto.BAD_INPUT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html"]
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "folder.html").iterdir()) == []


def test_a_write_that_breaks_leaves_the_earlier_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    write_text(tmp_path / "report.html", "earlier")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(tmp_path / "report.html", "later")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "earlier"


@pytest.mark.usefixtures("no_figures")
def test_hostile_names_are_text(spoilt: duckdb.DuckDBPyConnection) -> None:
    hostile = "<script>alert('x')</script>\" onload=\"y $\\frac{1}{2}$ &amp; `--><b>"
    spoilt.execute("update release set study = ?", [hostile])
    spoilt.execute("insert into release_finding values ('t', ?, 'warn', 1, ?, ?)", [hostile] * 3)
    spoilt.execute("insert into failure values (?, 'task', null, null, ?, ?)", [hostile] * 3)
    page = report(spoilt)
    reader = read(page)
    assert "script" not in reader.tags and "b" not in reader.tags
    assert all(not name.startswith("on") for _, name, _ in reader.attributes)
    assert words(page).count(hostile) >= 4
    assert hostile in reader.cells


def test_hostile_method_names_are_drawn_as_they_are(spoilt: duckdb.DuckDBPyConnection) -> None:
    hostile = "--><script>$\\bad{"
    for table, column in (("ranked_method", "method_id"), ("flip_share", "method_a"), ("flip_share", "method_b")):
        spoilt.execute(f"update {table} set {column} = ? where {column} = 'diffuse'", [hostile])
    spoilt.execute("delete from flip_share where method_a <> ?", [hostile])
    figure = flips(spoilt)
    reader = read(inline_svg(figure.svg(), figure.name, figure.title))
    assert "script" not in reader.tags
    assert any(name == "aria-label" and f"{hostile} vs" in value for _, name, value in reader.attributes)


def only(monkeypatch: pytest.MonkeyPatch, draw: Callable[[duckdb.DuckDBPyConnection], Drawn]) -> None:
    """Pages with one figure."""

    def one(connection: duckdb.DuckDBPyConnection) -> tuple[Drawn, ...]:
        return (draw(connection),)

    monkeypatch.setattr("marts.report.figures", one)


def section(page: str, anchor: str) -> str:
    found = re.search(rf'<section aria-labelledby="{anchor}">.*?</section>', page, flags=re.DOTALL)
    assert found is not None
    return words(found[0])


@pytest.mark.usefixtures("no_figures")
def test_without_flips_it_says_so(spoilt: duckdb.DuckDBPyConnection) -> None:
    spoilt.execute("update flip_share set flip_share = 0, flip_share_low = 0, flip_share_high = 0")
    page = report(spoilt)
    assert "No pair of methods flips within a metric" in section(page, "answer")
    assert "No pair flips: every defensible universe gives each pair the same order" in section(page, "ranking")


def test_without_contrasts_it_says_why(spoilt: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, contrasts)
    spoilt.execute("update paired_contrast set estimate = null")
    told = section(report(spoilt), "contrasts")
    assert "Not testable: no pair has a contrast in mean Dice" in told
    assert "No figure (contrasts): No pair of methods has a contrast" in told


def test_with_nothing_scored_every_section_says_why(spoilt: duckdb.DuckDBPyConnection) -> None:
    spoilt.execute("update universe set status = 'dropped', reason = 'none of it'")
    for table in ("flip_share", "variance_share", "order_share", "method_cell", "operating_point", "paired_contrast"):
        empty(spoilt, table)
    page = report(spoilt)
    assert "is not testable: no defensible universe is scored for every method" in section(page, "answer")
    for anchor in ("ranking", "variance", "contrasts"):
        assert "Not testable: no defensible universe is scored" in section(page, anchor)
        assert "No figure (" in section(page, anchor)
    assert "none of it" in section(page, "left-out")


@pytest.mark.usefixtures("no_figures")
def test_a_failed_method_is_told_with_the_lines_that_mend_it(spoilt: duckdb.DuckDBPyConnection) -> None:
    spoilt.execute(
        "update gate_summary set verdict = 'failed', suggestion = 'toggle it', study_lines = 'reversed = [true]'"
        " where method_id = 'diffuse'"
    )
    spoilt.execute("update ranked_method set is_ranked = false, reason = 'fails the gate' where kind = 'method'")
    page = report(spoilt)
    told = section(page, "geometry")
    assert "Toggle it. In the study file, under [method.transform] of diffuse, write\nreversed = [true]" in told
    assert "not testable: no method takes part in the ranking" in section(page, "answer")
    assert "fails the gate" in section(page, "left-out")
    assert read_facts(spoilt).methods == 0


@pytest.mark.usefixtures("no_figures")
def test_what_was_left_out_is_told(spoilt: duckdb.DuckDBPyConnection) -> None:
    spoilt.execute(
        "update cohort_subject set is_included = false, reason = 'lies elsewhere' where split = 'validation'"
    )
    spoilt.execute("insert into failure values ('maps/a.nii', 'map', 'diffuse', 's1', 'is cut short', 'Copy it again')")
    spoilt.execute("insert into release_finding values ('cell', 'a rule', 'warn', 3, 'an example', 'mend it')")
    spoilt.execute("insert into dropped_level values ('metric_id', 'dice', 0, 4, 'has no value')")
    page = report(spoilt)
    assert "0 validation, 4 test, 11 left out" in section(page, "answer")
    told = section(page, "left-out")
    for words_of_it in ("lies elsewhere", "is cut short", "Copy it again", "a rule", "an example", "has no value"):
        assert words_of_it in told


def test_without_validation_subjects_there_is_a_page(
    phantom_study: Path, phantom_lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, transfer)
    shutil.copytree(phantom_study.parent, tmp_path / "study")
    (tmp_path / "study" / "subjects.csv").write_text(
        "subject_id,split\nphantom12,test\nphantom13,test\nphantom15,test\n"
    )
    file, lake = tmp_path / "study" / phantom_study.name, tmp_path / "lake"
    text = file.read_text().replace("multiverse_replicates = 40", "multiverse_replicates = 5")
    file.write_text(text.replace("contrast_replicates = 200", "contrast_replicates = 20"))
    shutil.copytree(phantom_lake, lake)
    Ingest(load_study(file), lake, InProcess()).run()
    publish(lake)
    with connect(lake) as connection:
        page = report(connection)
    read(page)
    assert "0 validation, 3 test" in section(page, "answer")
    assert "crossfit" in section(page, "thresholds")
    assert re.search(r"needs \d+ validation subjects", section(page, "left-out"))


def test_a_figure_is_kept_as_pdf(drawn: dict[str, Drawn], tmp_path: Path) -> None:
    drawn["variance"].save(tmp_path / "first.pdf")
    drawn["variance"].save(tmp_path / "second.pdf")
    assert (tmp_path / "first.pdf").read_bytes() == (tmp_path / "second.pdf").read_bytes()
    assert (tmp_path / "first.pdf").read_bytes().startswith(b"%PDF")
    assert drawn["variance"].title.split(",")[0] not in drawn["variance"].svg()  # the headline is the page's
    nothing = Drawn("nothing", "There is nothing.", "", (), None)
    nothing.save(tmp_path / "nothing.pdf")
    assert nothing.svg() == "" and not (tmp_path / "nothing.pdf").exists()
