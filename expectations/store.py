"""The part store: immutable Parquet files, content-addressed, checked against their declaration as they are written.

A part is written beside its place, synced and renamed, so a killed run leaves whole parts or none. Its name carries the
fingerprint of exactly what its rows depend on; a part is current exactly when its fingerprint is.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import polars as pl

from expectations.tables import ContractBroken, LakeTable, breaches

LONGEST_OWNER = 160  # of the 255 bytes of a file name; a longer owner is cut, and told apart by a hash
FINGERPRINT_HEX = 24  # 96 bits: no collision among any number of parts that a disk can hold


def fingerprint(ingredients: Mapping[str, object]) -> str:
    """A short hash of what a part depends on; equal ingredients give equal fingerprints on every machine."""
    text = json.dumps(ingredients, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_HEX]


@dataclass(frozen=True, order=True)
class Part:
    """One Parquet file of a lake table: its table, whose rows it holds, and their fingerprint."""

    table: str
    owner: str
    fingerprint: str

    @property
    def relative_path(self) -> str:
        """Path inside the lake, with forward slashes."""
        name = quote(self.owner, safe="@")
        if len(name) > LONGEST_OWNER:
            name = f"{name[:LONGEST_OWNER]}~{fingerprint({'owner': self.owner})}"
        return f"parts/{self.table}/{name}.{self.fingerprint}.parquet"


def owner(method_id: str | None, subject_id: str | None) -> str:
    """Name of a part's rows: `method@subject`, `method@` or `@subject`."""
    return f"{method_id or ''}@{subject_id or ''}"


@dataclass(frozen=True)
class PartStore:
    """The parts of one lake folder."""

    lake: Path

    def path(self, part: Part) -> Path:
        """Where a part lies or would lie."""
        return self.lake / part.relative_path

    def has(self, part: Part) -> bool:
        """Whether a part is there; a part that is there is whole."""
        return self.path(part).exists()

    def write(self, part: Part, table: LakeTable, frame: pl.DataFrame) -> None:
        """Check rows against their declaration, then write them so that they appear whole or not at all.

        Args:
            part: Where the rows belong.
            table: The declaration of `part.table`.
            frame: Rows in declared columns; they are sorted by key here. May be empty.

        Raises:
            ContractBroken: The rows break the declaration; nothing is written.
        """
        if found := breaches(frame, table):
            raise ContractBroken(found)
        metadata = {"mirto.table": part.table, "mirto.owner": part.owner, "mirto.fingerprint": part.fingerprint}
        write_frame(self.path(part), frame.sort(table.key), metadata)

    def sweep(self) -> int:
        """Remove what killed writers left in the lake; how many files that were."""
        folders = ("parts/*", "bundles/*", "cache", ".")
        leftovers = [file for folder in folders for file in self.lake.glob(f"{folder}/.*.tmp")]
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        return len(leftovers)


def publish(beside: Path, target: Path) -> None:
    """Sync a file that was written beside its place, then rename it there: readers see the old file or the new one."""
    with beside.open("rb") as handle:
        os.fsync(handle.fileno())
    beside.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_frame(target: Path, frame: pl.DataFrame, metadata: dict[str, str], rows_together: int | None = None) -> None:
    """Write a Parquet file so that it appears whole or not at all.

    Args:
        target: Where it goes; its folder is made.
        frame: Its rows.
        metadata: Its key-value metadata.
        rows_together: Rows of a row group; as the library sees fit without it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        frame.write_parquet(
            beside, compression="zstd", compression_level=3, row_group_size=rows_together, metadata=metadata
        )
        publish(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a small text file so that it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        publish(beside, target)
    finally:
        beside.unlink(missing_ok=True)
