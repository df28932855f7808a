"""The command line: from a study of anomaly maps to marts that say what belongs to the method.

Every verb is a thin layer over the packages; heavy imports stay inside the verbs, so that `mirto --help` is quick.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from expectations.study import Study
    from expectations.suites import Finding
    from ingest.jobs import Runner
    from ingest.manifest import Failure, Manifest
    from ingest.run import GateReport, Progress, Report
    from marts.gate import Verdicts

STOPPED, BAD_INPUT, BUSY, NOT_FOUND = 1, 2, 3, 4
EXIT_CODES = {
    "BadStudy": BAD_INPUT,
    "BadInput": BAD_INPUT,
    "BadMart": BAD_INPUT,
    "BadQuery": BAD_INPUT,
    "LakeBusy": BUSY,
    "NoRelease": NOT_FOUND,
    "NoLake": NOT_FOUND,
}
FAILURES_SHOWN = 20
WIDEST_CELL = 40  # characters of a cell that a table counts on; longer ones fold
FEW_PAIRS = 200  # of a method and a subject: two worker processes take as long to start as these take in one
GATE_COLUMNS = {
    "method_id": "method",
    "verdict": "verdict",
    "n_subjects": "n",
    "passed_count": "passed",
    "label_fidelity_count": "fidelity",
    "misregistered_count": "misplaced",
    "not_assessable_count": "unclear",
    "dice_in_view_median": "overlap",
    "dice_in_view_minimum": "lowest",
    "centroid_mm_median": "mm apart",
    "in_view_fraction_median": "in view",
    "best_candidate": "best candidate",
    "margin": "margin",
}
PLAN_COLUMNS = {
    "threshold_rule_id": "rule",
    "smallest_n": "needs",
    "allowed_exceedances": "j",
    "status": "status",
    "beta_exceedance_mean": "mean",
    "beta_exceedance_high": "97.5 %",
    "beta_within_alpha": "P(<= alpha)",
    "betabinomial_exceedance_low": "observed 2.5 %",
    "betabinomial_exceedance_high": "to 97.5 %",
}

app = typer.Typer(
    help="Does the ranking belong to the method or to the evaluation? From anomaly maps to an honest answer.",
    epilog="Exit codes: 0 done, 1 a check stopped it, 2 bad input, 3 the lake is busy, 4 no such lake or release.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
WIDTH = None if sys.stdout.isatty() else 140  # a file or pipe has no width of its own
out = Console(highlight=False, width=WIDTH)
err = Console(stderr=True, highlight=False)

DemoFolder = Annotated[Path, typer.Argument(help="Where to put the phantom study and its lake.")]
StudyArgument = Annotated[Path, typer.Argument(help="The study.toml of a study.", metavar="STUDY")]
LakeArgument = Annotated[Path, typer.Argument(help="The lake's folder.", metavar="LAKE")]
LakeOption = Annotated[Path, typer.Option("--lake", help="The lake's folder; made if it is not there.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes; 0 is one per core, 1 is this process.")]
Scheduler = Annotated[str | None, typer.Option("--scheduler", help="Address of a dask.distributed scheduler.")]
Diagnostics = Annotated[
    bool, typer.Option("--diagnostics", help="Measure the maps of test subjects under known corruptions too.")
]
ReleaseOption = Annotated[str | None, typer.Option("--release", help="An earlier release; the live one without it.")]


class BadQuery(Exception):
    """SQL that cannot be run on a release."""


def main() -> None:
    """Run the command line: a known problem is one message and the exit code of its kind, never a traceback."""
    try:
        app()
    except Exception as problem:
        code = EXIT_CODES.get(type(problem).__name__)
        if code is None:
            raise
        err.print(str(problem), markup=False, soft_wrap=True)
        raise SystemExit(code) from None


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where to put the phantom study and its lake.")] = Path("demo"),
) -> None:
    """Run the whole job on the built-in phantom cohort and show what it finds."""
    from ingest.phantom import write_phantom

    study, lake = folder / "study" / "study.toml", folder / "lake"
    if not study.exists():
        out.print(f"Writing a phantom cohort of 28 subjects to {study.parent} (simulated images and maps) ...")
        write_phantom(study.parent)
    rebuild(study, lake)
    out.print("[bold]Where to look next[/]")
    for command, purpose in (
        (f"mirto tables {lake}", "every table and what one row of it is"),
        (f"mirto query {lake} \"select * from flip_share where metric_id = 'dice'\"", "any SQL over lake and marts"),
        (f"mirto report {lake}", "the release as one HTML file, with figures, to mail or to put beside a paper"),
        (f"mirto rebuild {study} --lake {lake}", "the scheduled job; it finds nothing to do now"),
        (f"less {study}", "the study file, to copy for your own maps"),
    ):
        out.print(f"  {command}", markup=False, soft_wrap=True)
        out.print(f"      {purpose}", style="dim", soft_wrap=True)


@app.command()
def check(
    study: StudyArgument,
    quick: Annotated[bool, typer.Option("--quick", help="Read headers only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the problems as JSON.")] = False,
    workers: Workers = 0,
) -> None:
    """Validate a study and every input without measuring; list all problems at once."""
    from expectations.study import BadStudy, load_study
    from ingest.check import check_study

    problems: list[dict[str, str | None]]
    try:
        loaded = load_study(study)
    except BadStudy as bad:
        problems = [{"path": p.file, "field": p.field, "found": p.found, "remedy": p.remedy} for p in bad.problems]
    else:
        with _runner(workers, None) as runner, _progress() as progress:
            progress.start("checking", _check_count(loaded, quick))
            failures = check_study(loaded, runner, quick, progress.step)
        problems = [{"path": f.path, "field": "", "found": f.reason, "remedy": f.remedy} for f in failures]
    if as_json:
        typer.echo(json.dumps(problems, indent=1))
    else:
        for p in problems:
            where = f"{p['path']}: {p['field']}" if p["field"] else p["path"]
            out.print(f"{where}: {p['found']}. {p['remedy']}.", markup=False, soft_wrap=True)
        out.print(f"{len(problems)} problems." if problems else "The study and its inputs are fine.")
    if problems:
        raise typer.Exit(BAD_INPUT)


def _check_count(study: Study, quick: bool) -> int:
    from ingest.check import check_jobs
    from ingest.plan import plan_study

    return len(check_jobs(plan_study(study), quick))


@app.command()
def gate(
    study: StudyArgument,
    lake: Annotated[
        Path | None, typer.Option("--lake", help="Keep what is measured in this lake, as `mirto ingest` would.")
    ] = None,
    workers: Workers = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts and failures as JSON.")] = False,
) -> None:
    """Judge the geometry alone, before any map is measured; say which lines of the study file would mend it."""
    from tempfile import TemporaryDirectory

    from expectations.study import load_study
    from marts.lake import writing

    loaded = load_study(study)
    if lake is not None:
        with writing(lake):
            measured, verdicts = _judge(loaded, lake, workers, is_kept=True)
    else:
        with TemporaryDirectory(prefix="mirto-gate-") as folder:
            measured, verdicts = _judge(loaded, Path(folder), workers, is_kept=False)
    failures = measured.report.manifest.failures
    if as_json:
        found = {"methods": verdicts.methods.to_dicts(), "subjects": verdicts.subjects.to_dicts()}
        typer.echo(json.dumps(found | {"failures": [failure.model_dump() for failure in failures]}, indent=1))
    else:
        _show_verdicts(verdicts)
        if failures:
            _show_failures(failures)
    if failures or verdicts.has_failed:
        raise typer.Exit(BAD_INPUT if failures else STOPPED)


def _judge(study: Study, lake: Path, workers: int, *, is_kept: bool) -> tuple[GateReport, Verdicts]:
    """Measure and judge the gate; a small study is not worth the start of other processes."""
    from ingest.run import Ingest
    from marts.gate import judge

    pair_count = len(study.subjects) * len(study.file.method)
    with _runner(workers or (1 if pair_count <= FEW_PAIRS else 0), None) as runner, _progress() as progress:
        measured = Ingest(study, lake, runner, progress).run_gate(is_kept=is_kept)
    return measured, judge(lake, measured)


def _show_verdicts(verdicts: Verdicts) -> None:
    rows = [
        [_cell(round(value, 4) if isinstance(value, float) else value) for value in row]
        for row in verdicts.methods.select(GATE_COLUMNS.keys()).iter_rows()
    ]
    _show_table(
        "Geometry gate: does each method's own reference land on the canonical one?", [*GATE_COLUMNS.values()], rows
    )
    out.print(
        "Subjects per verdict; overlap (Dice) in the field of view, median and lowest; margin: mean overlap of the"
        " declared transform minus that of the best other candidate.\n",
        style="dim",
    )
    for message in verdicts.messages:
        out.print(message, markup=False, soft_wrap=True)
        out.print()
    if not verdicts.messages:
        out.print("Every method lies where its transform says.")


@app.command()
def propose(
    study: StudyArgument,
    method: Annotated[str, typer.Argument(help="The id of a method with own references.", metavar="METHOD")],
    subjects: Annotated[int, typer.Option("--subjects", min=1, help="How many subjects to compare, by id.")] = 10,
) -> None:
    """Propose a method's transform from its own references, never from scores, as lines for the study file."""
    from expectations.study import load_study
    from ingest.propose import propose as search

    loaded = load_study(study)
    with err.status("comparing references"):
        found = search(loaded, method, subjects)
    count, parameters = len(found.subject_ids), loaded.protocol.parameters
    out.print(f"From the own references of {count} subjects ({found.subject_ids[0]} to {found.subject_ids[-1]}):\n")
    for place, proposal in enumerate(found.proposals):
        told = f"{place + 1}. overlap {proposal.overlap:.4f}; in view: overlap {proposal.dice_in_view:.4f} of"
        told += f" {100 * proposal.in_view_fraction:.1f} % of the reference"
        likeness = found.likeness(proposal, parameters.overlap_tolerance) if place else None
        out.print(told + (" (as declared)" if place == found.declared_place else ""), markup=False, soft_wrap=True)
        if likeness is not None:
            out.print(f"   It {likeness}.", markup=False, soft_wrap=True)
        out.print(indent(f"[method.transform]\n{proposal.study_lines}\n", "   "), markup=False, soft_wrap=True)
    if found.declared is not None and found.declared_place is None:
        out.print(f"The declared transform gives {found.declared.overlap:.4f} on these subjects.")
    if found.proposals[0].overlap < parameters.overlap_floor:
        out.print(
            f"No transform brings the references to an overlap of {parameters.overlap_floor}: the maps' grid is coarse"
            " for these lesions, or the subjects are not all stored alike, or the files do not belong together.",
            soft_wrap=True,
        )
    out.print("Judge it with `mirto gate`, and look at it with `mirto look`: it was chosen on these subjects.")


@app.command()
def look(
    study: StudyArgument,
    method: Annotated[str, typer.Argument(help="The id of a method or baseline.", metavar="METHOD")],
    subject: Annotated[str, typer.Argument(help="The id of a subject.", metavar="SUBJECT")],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="The PNG to write; look_METHOD_SUBJECT.png here without it.")
    ] = None,
) -> None:
    """Draw a map with the outlines of its references: a misregistration is seen at a glance."""
    from expectations.study import load_study
    from ingest.look import draw, look_at

    file = out_file or Path(f"look_{method}_{subject}.png")
    seen = look_at(load_study(study), method, subject)
    draw(seen, file)
    out.print(f"{seen.title}.\nDrawn in {file}.", markup=False, soft_wrap=True)


@app.command()
def ingest(
    study: StudyArgument,
    lake: LakeOption,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    diagnostics: Diagnostics = False,
) -> None:
    """Measure what is missing or changed; a run that was killed resumes where it stopped."""
    from expectations.study import load_study
    from marts.lake import writing

    loaded = load_study(study)
    with writing(lake):
        report = _ingest(loaded, lake, workers, scheduler, diagnostics)
    if report.manifest.failures:
        _show_failures(report.manifest.failures)
        raise typer.Exit(BAD_INPUT)


@app.command(name="rebuild")
def rebuild(
    study: StudyArgument,
    lake: LakeOption,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Publish although some files could not be measured.")
    ] = False,
    diagnostics: Diagnostics = False,
) -> None:
    """Ingest, build, validate and publish: the scheduled job."""
    from expectations.study import load_study
    from marts.lake import is_current, writing

    loaded = load_study(study)
    with writing(lake):
        report = _ingest(loaded, lake, workers, scheduler, diagnostics)
        if report.manifest.failures:
            _show_failures(report.manifest.failures)
            if not allow_incomplete:
                err.print("The good files are measured; nothing is published. `--allow-incomplete` publishes the rest.")
                raise typer.Exit(BAD_INPUT)
        if is_current(lake, report.manifest):
            out.print("Nothing to do: the live release is what a build would give.")
            return
        _publish(lake, report.manifest)
    _show_findings(lake)


@app.command()
def build(
    lake: LakeArgument,
    names: Annotated[
        list[str] | None, typer.Argument(help="Marts to try; all are built and published without.")
    ] = None,
) -> None:
    """Build and publish a release from what is measured; or try some marts without publishing."""
    from ingest.manifest import read_manifest
    from marts.lake import try_marts, writing

    manifest = read_manifest(lake)
    with writing(lake):
        if not names:
            _publish(lake, manifest)
            return
        for name, row_count, frame in try_marts(lake, manifest, names):
            out.print(f"{name}: {row_count:,} rows; the first are", markup=False)
            _show_rows(frame.columns, [[_cell(v) for v in row] for row in frame.iter_rows()])


@app.command()
def validate(lake: LakeArgument) -> None:
    """Check the live release once more against everything that it must keep."""
    from marts.lake import validate_live

    with _spinner() as say:
        say("checks")
        findings = validate_live(lake)
    _show_checks(findings)
    if any(finding.severity == "stop" for finding in findings):
        raise typer.Exit(STOPPED)
    out.print("The live release keeps every rule that stops a release.")


@app.command()
def query(
    lake: LakeArgument,
    sql: Annotated[str, typer.Argument(help="One SQL statement, or - to read it from standard input.")],
    form: Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="How to print the rows.")] = "table",
    limit: Annotated[int, typer.Option(min=1, help="Rows that a table shows; csv and json give all.")] = 100,
    release: ReleaseOption = None,
) -> None:
    """Run SQL over the marts and lake tables of a release; it can read nothing else and write nothing."""
    import duckdb

    from marts.lake import connect

    statement = sys.stdin.read() if sql == "-" else sql
    with connect(lake, release) as connection:
        try:
            result = connection.execute(statement)
            columns = [str(column[0]) for column in result.description or ()]
            rows = result.fetchall()
        except duckdb.Error as error:
            raise BadQuery(f"{error}") from None
    if form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([columns, *(["" if v is None else v for v in row] for row in rows)])
    elif form == "json":
        typer.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], default=str, indent=1))
    else:
        _show_rows(columns, [[_cell(value) for value in row] for row in rows[:limit]])
        if len(rows) > limit:
            out.print(f"{len(rows):,} rows, {limit:,} shown; --limit or --format csv gives more.", style="dim")


@app.command()
def tables(
    lake: LakeArgument,
    table: Annotated[str | None, typer.Argument(help="A table, to see its columns.")] = None,
    release: ReleaseOption = None,
) -> None:
    """The data dictionary: every table, or the columns of one."""
    from marts.lake import column_dictionary, connect, table_dictionary

    with connect(lake, release) as connection:
        if table is None:
            rows = table_dictionary(connection)
            _show_table("", ["table", "one row", "key", "kind"], rows)
            return
        row, columns = column_dictionary(connection, table)
    out.print(f"{table}: {row}", markup=False, soft_wrap=True)
    _show_table("", ["column", "type", "meaning"], columns)


@app.command()
def releases(lake: LakeArgument) -> None:
    """What was published when, and from how complete an input."""
    from marts.lake import live_release
    from marts.lake import releases as all_releases

    live = live_release(lake)
    rows = [
        [
            release.release_id + (" (live)" if live and release.release_id == live.release_id else ""),
            release.created_at,
            release.study,
            str(release.subject_count),
            "complete" if release.is_complete else f"{release.failure_count} failures",
            release.content_hash[:12],
        ]
        for release in all_releases(lake)
    ]
    _show_table("", ["release", "published (UTC)", "study", "subjects", "input", "content"], rows)


@app.command()
def diff(
    lake: LakeArgument,
    first: Annotated[str, typer.Argument(help="An earlier release.", metavar="A")],
    second: Annotated[str, typer.Argument(help="A later release.", metavar="B")],
) -> None:
    """Which numbers moved between two releases."""
    from marts.diff import moved

    rows = [
        [m.table, m.column, f"{m.changed_count:,} of {m.row_count:,}", m.largest, m.example]
        for m in moved(lake, first, second)
    ]
    if not rows:
        out.print("No number moved.")
        return
    _show_table("", ["table", "column", "rows that moved", "largest change", "where"], rows)


@app.command()
def report(
    lake: LakeArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; report.html in the lake without it.")
    ] = None,
    release: ReleaseOption = None,
) -> None:
    """Write a release as one HTML file to mail or to put beside a paper: tables, figures, and where every number is."""
    from marts.report import write_report

    with err.status("drawing"):
        file = write_report(lake, release, output)
    out.print(f"Written to {file}.", markup=False, soft_wrap=True)


@app.command()
def prune(
    lake: LakeArgument,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest releases to keep; the live one stays.")] = 5,
) -> None:
    """Drop old releases and the parts that only they use."""
    from marts.lake import prune as prune_lake
    from marts.lake import writing

    with writing(lake):
        dropped, file_count = prune_lake(lake, keep)
    out.print(f"Dropped {len(dropped)} releases and {file_count} files of parts that nothing else uses.")


@app.command()
def plan(
    validation: Annotated[int, typer.Option(min=0, help="Validation subjects, which calibrate.")] = 0,
    test: Annotated[int, typer.Option(min=0, help="Test subjects, on which the exceedance will be observed.")] = 0,
    study: Annotated[Path | None, typer.Option(help="Take both numbers and the protocol from a study.toml.")] = None,
) -> None:
    """Before any data: what each conformal rule can promise, and how many universes a study will have."""
    from expectations.protocol import protocol
    from expectations.study import load_study
    from transforms.conformal import plan_table, planned_universes
    from transforms.thresholds import crossfit_folds

    chosen, lacking, training_sets = protocol(), list[tuple[str, str]](), list[str]()
    if study is not None:
        loaded = load_study(study)
        chosen = loaded.protocol
        validation = sum(subject.split == "validation" for subject in loaded.subjects)
        test = len(loaded.subjects) - validation
        if not all(method.legacy_voxel_mm3 for method in loaded.file.primaries):
            lacking.append(("voxel_volume_id", "legacy"))
        if not all(method.own_reference for method in loaded.file.primaries):
            lacking.append(("reference_id", "own_mapped"))
        training_sets += _training_sets(loaded)
    rows = plan_table(validation, test, chosen.parameters.rcps_delta)
    title = f"Share of scans above their budget, with {validation} validation and {test} test subjects"
    shown = rows.select(PLAN_COLUMNS.keys()).iter_rows()
    _show_table(title, list(PLAN_COLUMNS.values()), [[_cell(value) for value in row] for row in shown])
    if (folds := crossfit_folds(validation, test, chosen.parameters)) is not None:
        out.print(f"Without validation subjects thresholds are cross-fitted over {folds} folds of the test subjects.")
    universes = planned_universes(chosen, lacking)
    out.print(f"Universes per method: {universes['all']:,}, of them {universes['defensible']:,} defensible.")
    for column, level in lacking:
        out.print(f"  {column} {level} is lacking: not every method declares what it needs.", style="dim")
    for line in training_sets:
        out.print(line, markup=False, soft_wrap=True)


def _training_sets(study: Study) -> list[str]:
    """What the eleventh axis will be, in words; nothing where no method has several training sets."""
    file = study.file
    if not file.configurations:
        return []
    names = dict.fromkeys(method.training_set for method in (*file.primaries, *file.configurations))
    models = {method.id for method in file.method}
    shared = [str(name) for name in names if name and {m.id for m in file.method if m.training_set == name} == models]
    axis = f"{', '.join(shared)}" if len(shared) > 1 else "none, as no two are shared by all methods"
    return [
        f"Training sets: the multiverse compares {file.study.primary_training_set};"
        f" {len(file.configurations)} other sets of maps stand beside it.",
        f"  Levels of the training set as an eleventh axis: {axis}.",
    ]


def _ingest(study: Study, lake: Path, workers: int, scheduler: str | None, diagnostics: bool) -> Report:
    from ingest.run import Ingest

    with _runner(workers, scheduler) as runner, _progress() as progress:
        report = Ingest(study, lake, runner, progress, diagnostics).run()
    kept = f"{report.kept_parts:,} were there already"
    out.print(f"Measured {report.measured_parts:,} parts; {kept}.")
    return report


@contextmanager
def _runner(workers: int, scheduler: str | None) -> Generator[Runner]:
    """The runner that the options ask for."""
    from ingest.jobs import Cluster, InProcess, Processes
    from ingest.run import default_workers

    if scheduler is not None:
        yield Cluster(scheduler)
    elif (count := workers or default_workers()) == 1:
        yield InProcess()
    else:
        processes = Processes(count)
        try:
            yield processes
        finally:
            processes.close()


@contextmanager
def _progress() -> Generator[Progress]:
    """A progress bar on a terminal; one line a stage elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from ingest.run import Progress

    bar = Bar(TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err)

    def start(stage: str, steps: int) -> None:
        bar.add_task(stage, total=steps)

    def step() -> None:
        bar.advance(bar.task_ids[-1])

    with bar:
        yield Progress(start, step)


@contextmanager
def _spinner() -> Generator[Callable[[str], None]]:
    """What is being built, on one line."""
    with err.status("building") as status:
        yield lambda name: status.update(f"building {name}")


def _publish(lake: Path, manifest: Manifest) -> None:
    """Build and publish; a check that stops it leaves the live release and exits with 1."""
    from marts.lake import build_release

    with _spinner() as say:
        outcome = build_release(lake, manifest, say)
    _show_checks(outcome.findings)
    if outcome.release is None:
        err.print("Nothing is published; the live release is as it was.", style="bold red")
        raise typer.Exit(STOPPED)
    out.print(f"Published release {outcome.release.release_id} of {outcome.release.study}.", soft_wrap=True)


def _show_checks(findings: Sequence[Finding]) -> None:
    for finding in findings:
        style = "bold red" if finding.severity == "stop" else "yellow"
        err.print(f"{finding.severity.upper()} {finding.table}: {finding.rule} ({finding.row_count} rows)", style=style)
        for example in finding.examples:
            err.print(f"     {example}", markup=False, soft_wrap=True)
        err.print(indent(finding.remedy, "     "), markup=False, soft_wrap=True)


def _show_failures(failures: Sequence[Failure]) -> None:
    err.print(f"{len(failures)} files or tasks could not be measured:", style="bold red")
    for failure in failures[:FAILURES_SHOWN]:
        err.print(f"  {failure}", markup=False, soft_wrap=True)
    if len(failures) > FAILURES_SHOWN:
        err.print(f"  ... and {len(failures) - FAILURES_SHOWN} more; `mirto check STUDY` lists them all.")


def _show_findings(lake: Path) -> None:
    from marts.findings import answers, summary
    from marts.lake import connect

    with connect(lake) as connection:
        out.print(summary(connection), soft_wrap=True)
        for shown in answers(connection):
            if shown.rows:
                out.print()
                _show_table(shown.title, shown.columns, shown.rows)
                out.print(shown.reading, style="dim")


def _show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)


def _show_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table where it fits the terminal, else one line per value: folded cells of many columns cannot be read."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if sum(min(width, WIDEST_CELL) + 1 for width in widths) <= out.width:
        _show_table("", columns, rows)
        return
    longest = max(map(len, columns))
    for number, row in enumerate(rows, start=1):
        out.print(f"row {number}", style="bold")
        for column, value in zip(columns, row, strict=True):
            out.print(f"  {column:<{longest}}  {value}", markup=False, highlight=False, soft_wrap=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
