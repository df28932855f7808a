"""Bundles: many parts of a table copied into one file, so that a query opens dozens of files instead of thousands.

A part is what was measured; a bundle is a copy that a release reads in its place. It holds the parts of some subjects,
of every method, and lays together what a query filters by (reference, support, post-processing and the like), so that a
question in one setting reads a stretch of it. Its name carries a fingerprint of the parts that it holds: a bundle is
current exactly when its fingerprint is, and one new subject makes one new bundle a table.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

import polars as pl

from expectations.store import fingerprint, write_frame
from expectations.tables import lake_tables

FEWEST = 64  # parts a bundle on average, at least; at most twice as many
ROWS_TOGETHER = 122_880  # rows of a row group: what DuckDB reads at once
VERSION = 1  # counts changes of how a bundle is laid out


@dataclass(frozen=True)
class Bundle:
    """A copy of some parts of a lake table: its path inside the lake, and the paths of the parts that it holds."""

    path: str
    parts: tuple[str, ...]


def bundles_of(table: str, parts: Sequence[str]) -> list[Bundle]:
    """How the parts of a table are bundled; not at all where there are few.

    Args:
        table: Its name.
        parts: Paths inside the lake.
    """
    if len(parts) < FEWEST:
        return []
    count = 1 << ((len(parts) // FEWEST).bit_length() - 1)  # a power of two, so that most bundles last as a study grows
    groups: dict[int, list[str]] = {}
    for part in sorted(parts):
        groups.setdefault(_group(part, count), []).append(part)
    found: list[Bundle] = []
    for number, members in sorted(groups.items()):
        stamp = fingerprint({"version": VERSION, "parts": members})
        found.append(Bundle(f"bundles/{table}/{number}.{stamp}.parquet", tuple(members)))
    return found


def _group(part: str, count: int) -> int:
    """The bundle of a part: by its subject, so that all methods' maps of one lie in one bundle."""
    subject = PurePosixPath(part).name.rsplit(".", 2)[0].partition("@")[2]  # METHOD@SUBJECT.FINGERPRINT.parquet
    return int.from_bytes(sha256(subject.encode()).digest()[:8]) % count


def bundle_parts(
    lake: Path,
    parts: Mapping[str, Sequence[str]],
    on_start: Callable[[int], None] = lambda _count: None,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[str, ...]:
    """Copy the parts of a lake into the bundles that are not there yet.

    Args:
        lake: The lake's folder.
        parts: Paths of the parts inside the lake, by table.
        on_start: Told how many bundles are to be written, where any are.
        on_done: Called once for each of them.

    Returns:
        Paths of the bundles that are there now.
    """
    wanted = [(table, bundle) for table, paths in parts.items() for bundle in bundles_of(table, paths)]
    missing = [(table, bundle) for table, bundle in wanted if not (lake / bundle.path).exists()]
    if missing:
        on_start(len(missing))
    for table, bundle in missing:
        write_bundle(lake, table, bundle)
        on_done()
    return tuple(bundle.path for _, bundle in wanted if (lake / bundle.path).exists())


def write_bundle(lake: Path, table: str, bundle: Bundle) -> None:
    """Copy parts into their bundle, which appears whole or not at all.

    Rows of one setting (key columns of few declared values) lie together; among them parts keep their order. Where a
    part cannot be read there is no bundle: who reads the parts themselves names it.

    Raises:
        OSError: The bundle cannot be written.
    """
    try:
        rows = pl.read_parquet([lake / part for part in bundle.parts], glob=False)
    except (pl.exceptions.PolarsError, FileNotFoundError):
        return
    declared = lake_tables()[table]
    settings = [column.name for column in declared.columns if column.name in declared.key and column.values]
    if settings and not rows.is_empty():
        by_setting = rows.partition_by(settings, maintain_order=True, as_dict=True)
        rows = pl.concat([by_setting[key] for key in sorted(by_setting, key=str)])
    metadata = {"mirto.table": table, "mirto.parts": json.dumps(bundle.parts)}
    write_frame(lake / bundle.path, rows, metadata, ROWS_TOGETHER)


def files_of(table: str, parts: Sequence[str], bundled: Collection[str]) -> list[str]:
    """The files of a lake that hold the rows of some parts of a table: bundles that are there, and the other parts."""
    there = [bundle for bundle in bundles_of(table, parts) if bundle.path in bundled]
    held = {part for bundle in there for part in bundle.parts}
    return [*(bundle.path for bundle in there), *(part for part in parts if part not in held)]
