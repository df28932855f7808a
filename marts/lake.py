"""Reading and publishing: the live release, earlier ones, and the lock that keeps writers apart.

Readers never block and never see a torn state: a release is built beside the live one and swapped in by a rename.
"""

import os
import shutil
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import duckdb
import polars as pl
from filelock import FileLock, Timeout

from expectations.store import publish
from expectations.suites import Finding
from expectations.tables import lake_tables
from ingest.bundles import bundles_of
from ingest.manifest import Manifest, read_manifest
from marts.catalog import mart_version, marts
from marts.declared import declared_tables
from marts.hypotheses import hypothesis_files
from marts.quality import check_release
from marts.release import (
    Built,
    build_tables,
    content_hash,
    first_row,
    name_is_view,
    open_for_building,
    parts_source,
    quoted,
    tune,
)
from transforms import TRANSFORMS

LIVE = "mirto.duckdb"


def silent(_text: str) -> None:
    """Tell nobody."""


class LakeBusy(Exception):
    """Another process writes to the lake."""


class NoRelease(Exception):
    """The lake has no such release, or the release no such table."""


@dataclass(frozen=True)
class Release:
    """A published release, as its own `release` table tells it."""

    release_id: str
    created_at: str
    study: str
    fingerprint: str
    content_hash: str
    subject_count: int
    failure_count: int

    @property
    def is_complete(self) -> bool:
        """Whether every file of the study was measured."""
        return self.failure_count == 0


@dataclass(frozen=True)
class Outcome:
    """What a build came to: the release where it was published, and all findings."""

    release: Release | None
    findings: tuple[Finding, ...]

    @property
    def stopped(self) -> tuple[Finding, ...]:
        """The findings that stopped it."""
        return tuple(finding for finding in self.findings if finding.severity == "stop")


@contextmanager
def writing(lake: Path) -> Generator[None]:
    """Hold the lake's one writer's lock; the operating system releases it when the process ends, however it ends.

    Raises:
        LakeBusy: Another process holds it.
    """
    lake.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lake / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise LakeBusy(f"{lake}: another run writes to this lake. Wait for it to end, or stop it.") from error


def release_fingerprint(manifest: Manifest) -> str:
    """Hash of everything that a release depends on: the manifest, our SQL and code, and the study's own SQL."""
    digest = sha256(manifest.fingerprint.encode() + mart_version().encode())
    if manifest.sql_folder:
        own = Path(manifest.sql_folder)
        for file in (*sorted(own.glob("*.sql")), *hypothesis_files(own)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(lake: Path, manifest: Manifest) -> bool:
    """Whether the live release is what a build would give."""
    live = live_release(lake)
    return live is not None and live.fingerprint == release_fingerprint(manifest)


def build_release(lake: Path, manifest: Manifest, on_step: Callable[[str], None] = silent) -> Outcome:
    """Build a release aside, validate it, and swap it in if nothing stops it.

    Args:
        lake: The lake's folder; the caller holds its lock.
        manifest: The lake's current state.
        on_step: Told what is being done.

    Returns:
        The release and its findings; no release where a check stopped it, and then the live one is untouched.

    Raises:
        BadMart: A mart cannot be built.
    """
    folder = lake / "releases"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*"):
        leftover.unlink()
    created = datetime.now(UTC)
    fingerprint = release_fingerprint(manifest)
    release_id = f"{created:%Y%m%dT%H%M%S}Z-{fingerprint[:8]}"
    beside = folder / f".{release_id}.duckdb"
    docs = lake / "docs" / f".{release_id}"
    try:
        release, findings = _build(beside, lake, manifest, release_id, created, docs, on_step)
        kept_docs = lake / "docs" / (release_id if release else "stopped")
        shutil.rmtree(kept_docs, ignore_errors=True)
        if docs.is_dir():
            docs.rename(kept_docs)
        if release is not None:
            publish(beside, folder / f"{release_id}.duckdb")
            _make_live(lake, folder / f"{release_id}.duckdb")
        return Outcome(release, tuple(findings))
    finally:
        for leftover in folder.glob(f".{release_id}*"):
            leftover.unlink()
        shutil.rmtree(docs, ignore_errors=True)


def _build(
    file: Path,
    lake: Path,
    manifest: Manifest,
    release_id: str,
    created: datetime,
    docs: Path,
    on_step: Callable[[str], None],
) -> tuple[Release | None, list[Finding]]:
    with open_for_building(file, lake) as connection:
        built = build_tables(connection, manifest, on_step=on_step)
        on_step("checks")
        findings = check_release(connection, built, docs)
        if any(finding.severity == "stop" for finding in findings):
            return None, findings
        materialised = [name for name in built.tables if not name_is_view(name, built.marts)]
        release = Release(
            release_id=release_id,
            created_at=f"{created:%Y-%m-%d %H:%M:%S}",
            study=manifest.study,
            fingerprint=release_fingerprint(manifest),
            content_hash=content_hash(connection, materialised),
            subject_count=manifest.subject_count,
            failure_count=len(manifest.failures),
        )
        _describe(connection, release, built, manifest, findings)
        connection.execute("force checkpoint")
    return release, findings


def _describe(
    connection: duckdb.DuckDBPyConnection,
    release: Release,
    built: Built,
    manifest: Manifest,
    findings: Sequence[Finding],
) -> None:
    """The release's own tables: what it is, its parts, what each table is, and the findings it was published with."""
    frames = {
        "release": pl.DataFrame([release.__dict__]),
        "release_part": pl.DataFrame(
            [(name, path) for name in manifest.parts for path in manifest.files(name)],
            schema={"table_name": pl.String, "path": pl.String},
            orient="row",
        ),
        "release_table": pl.DataFrame(
            [(t.name, t.row, ", ".join(t.key), name_is_view(t.name, built.marts)) for t in built.tables.values()],
            schema={"table_name": pl.String, "description": pl.String, "key": pl.String, "is_view": pl.Boolean},
            orient="row",
        ),
        "release_finding": pl.DataFrame(
            [(f.table, f.rule, f.severity, f.row_count, "; ".join(f.examples), f.remedy) for f in findings],
            schema={
                "table_name": pl.String,
                "rule": pl.String,
                "severity": pl.String,
                "row_count": pl.Int64,
                "examples": pl.String,
                "remedy": pl.String,
            },
            orient="row",
        ),
    }
    for name, frame in frames.items():
        connection.register("incoming", frame)
        connection.execute(f"create table {name} as select * from incoming")
        connection.unregister("incoming")


def _make_live(lake: Path, file: Path) -> None:
    """Swap a release in: the live name becomes another name of its file, or a copy where links are not to be had."""
    beside = lake / f".{uuid.uuid4().hex}.duckdb"
    try:
        try:
            os.link(file, beside)
        except OSError:
            shutil.copyfile(file, beside)
        publish(beside, lake / LIVE)
    finally:
        beside.unlink(missing_ok=True)


def live_release(lake: Path) -> Release | None:
    """The live release, or None where nothing was published yet."""
    return _read_release(lake / LIVE) if (lake / LIVE).exists() else None


def releases(lake: Path) -> list[Release]:
    """All releases that are kept, oldest first."""
    return [_read_release(file) for file in sorted((lake / "releases").glob("*.duckdb"))]


def _read_release(file: Path) -> Release:
    with duckdb.connect(file, read_only=True) as connection:
        row = first_row(connection, f"select {', '.join(Release.__annotations__)} from release")
    if row is None:
        raise NoRelease(f"{file} is no release: it does not say what it is. Build it again.")
    return Release(*row)


def connect(lake: Path | str, release_id: str | None = None) -> duckdb.DuckDBPyConnection:
    """Open a release for reading: marts and lake tables by name, and nothing else.

    The connection cannot write, and reads no file but the release and its parts, whatever SQL it is given.

    Args:
        lake: The lake's folder.
        release_id: An earlier release; the live one without it.

    Raises:
        NoRelease: There is no such release.
    """
    lake = Path(lake).resolve()
    file = lake / LIVE if release_id is None else lake / "releases" / f"{release_id}.duckdb"
    if not file.is_file():
        what = f"no release {release_id}" if release_id else "no release yet"
        raise NoRelease(f"{lake} has {what}. `mirto releases {lake}` lists them; `mirto rebuild` publishes one.")
    connection = duckdb.connect(file, read_only=True)
    tune(connection)
    parts: dict[str, list[str]] = {}
    for table, path in connection.execute("select table_name, path from release_part").fetchall():
        parts.setdefault(table, []).append(str(lake / path))
    for table, paths in parts.items():
        connection.execute(f"create temp view {table} as select * from {parts_source(paths)}")
    allowed = ", ".join(quoted(path) for paths in parts.values() for path in paths)
    connection.execute(f"set allowed_paths = [{allowed}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def prune(lake: Path, keep: int) -> tuple[list[str], int]:
    """Drop all but the newest releases and the live one, and the parts and bundles that only the dropped ones use.

    Args:
        lake: The lake's folder; the caller holds its lock.
        keep: How many releases to keep, at least 1.

    Returns:
        Identifiers of the dropped releases and how many files of parts went with them.
    """
    live = live_release(lake)
    kept = {release.release_id for release in releases(lake)[-keep:]} | ({live.release_id} if live else set[str]())
    dropped = [release.release_id for release in releases(lake) if release.release_id not in kept]
    for release_id in dropped:
        (lake / "releases" / f"{release_id}.duckdb").unlink()
        shutil.rmtree(lake / "docs" / release_id, ignore_errors=True)
    manifest = read_manifest(lake)
    used = {*manifest.bundles, *(path for paths in manifest.parts.values() for path in paths)}
    for release_id in kept:
        with duckdb.connect(lake / "releases" / f"{release_id}.duckdb", read_only=True) as connection:
            used |= {path for (path,) in connection.execute("select path from release_part").fetchall()}
    files = [file for kind in ("parts", "bundles") for file in lake.glob(f"{kind}/*/*.parquet")]
    unused = [file for file in files if file.relative_to(lake).as_posix() not in used]
    for file in unused:
        file.unlink()
    return dropped, len(unused)


def validate_live(lake: Path) -> list[Finding]:
    """Check the live release once more, and the lake's bundles against the parts that they copy.

    Raises:
        NoRelease: Nothing was published yet.
    """
    manifest = read_manifest(lake)
    found = marts(Path(manifest.sql_folder) if manifest.sql_folder else None)
    declared = {**declared_tables(), **lake_tables()}
    declared |= {name: transform.table for name, transform in TRANSFORMS.items()}
    declared |= {name: mart.table for name, mart in found.items()}
    with connect(lake) as connection:
        names = [str(name) for (name,) in connection.execute("select table_name from release_table").fetchall()]
        built = Built({name: declared[name] for name in names if name in declared}, found)
        findings = check_release(connection, built, None, reads_all=True)
    return [*_bundle_findings(lake, manifest), *findings]


def _bundle_findings(lake: Path, manifest: Manifest) -> Iterator[Finding]:
    """Tables whose bundles do not hold the rows of the parts that they copy."""
    with open_for_building(None, lake) as connection:
        for name, parts in manifest.parts.items():
            bundles = [bundle for bundle in bundles_of(name, parts) if bundle.path in manifest.bundles]
            if not bundles:
                continue
            copied = [part for bundle in bundles for part in bundle.parts]
            sides = (copied, [bundle.path for bundle in bundles])
            # rows in any order: how many there are, and what their hashes come to
            both = [
                first_row(connection, f"select count(*), bit_xor(hash(t)) from {parts_source(side)} as t")
                for side in sides
            ]
            if both[0] != both[1]:
                remedy = f"Remove the folder bundles/{name} from the lake and rebuild"
                yield Finding(name, "a bundle differs from the parts that it copies", "stop", 1, (), remedy)


def try_marts(lake: Path, manifest: Manifest, names: Sequence[str]) -> Generator[tuple[str, int, pl.DataFrame]]:
    """Build some marts, with what they need, in memory; nothing is published.

    Yields:
        Name, number of rows and the first rows of each.

    Raises:
        BadMart: A mart is not there or cannot be built.
    """
    with open_for_building(None, lake) as connection:
        build_tables(connection, manifest, names)
        for name in names:
            row_count = connection.sql(f"select count(*) from {name}").pl().item()
            yield name, int(row_count), connection.sql(f"select * from {name} limit 10").pl()


def table_dictionary(connection: duckdb.DuckDBPyConnection) -> list[list[str]]:
    """Every table of a release: name, what one row is, its key, and whether it is a lake table, a mart or a view."""
    rows = connection.execute("select table_name, description, key, is_view from release_table").fetchall()
    kinds = {name: "lake" for name in lake_tables()} | {name: "protocol" for name in declared_tables()}
    return [[name, row, key, kinds.get(name, "view" if is_view else "mart")] for name, row, key, is_view in rows]


def column_dictionary(connection: duckdb.DuckDBPyConnection, table: str) -> tuple[str, list[list[str]]]:
    """What one row of a table is, and its columns with types and meanings.

    Raises:
        NoRelease: The release has no such table.
    """
    described = first_row(connection, "select description from release_table where table_name = ?", [table])
    if described is None:
        raise NoRelease(f"the release has no table {table}. `mirto tables LAKE` lists them.")
    rows = connection.execute(
        "select column_name, data_type, comment from duckdb_columns()"
        " where table_name = ? and not internal and schema_name = 'main' and database_name <> 'temp'"
        " order by column_index",
        [table],
    ).fetchall()
    return str(described[0]), [[str(name), str(kind), comment or ""] for name, kind, comment in rows]
