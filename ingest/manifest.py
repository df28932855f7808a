"""What a lake holds now: the study as declared, the current parts and bundles, and what could not be measured.

Written by `ingest`, read by `marts`: a release is built from a manifest and needs the study's images no more.
"""

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from expectations.protocol import Protocol, protocol
from expectations.store import write_text
from ingest.bundles import files_of

FILE_NAME = "manifest.json"


class Failure(BaseModel):
    """A file or task that could not be measured."""

    model_config = ConfigDict(frozen=True)

    task: str
    subject_id: str | None
    method_id: str | None
    path: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. {self.remedy}."


class NoLake(Exception):
    """A folder that holds no lake."""


class Manifest(BaseModel):
    """One lake's current state."""

    model_config = ConfigDict(frozen=True)

    study: str
    overrides: dict[str, object]
    sql_folder: str | None
    subject_count: int
    method_ids: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    bundles: tuple[str, ...] = ()
    failures: tuple[Failure, ...]

    @property
    def protocol(self) -> Protocol:
        """The protocol under the study's overrides."""
        return protocol(self.overrides)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that a release depends on, but for the SQL; bundles hold what parts hold."""
        content = self.model_dump(mode="json", exclude={"sql_folder", "bundles"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def files(self, table: str) -> list[str]:
        """The files that hold the rows of a table: bundles, and parts that lie in none."""
        return files_of(table, self.parts.get(table, ()), self.bundles)

    def write(self, lake: Path) -> None:
        """Replace the lake's manifest, whole or not at all."""
        write_text(lake / FILE_NAME, self.model_dump_json(indent=1))


def read_manifest(lake: Path) -> Manifest:
    """The manifest of a lake.

    Raises:
        NoLake: The folder holds no manifest: nothing was ingested into it.
    """
    file = lake / FILE_NAME
    if not file.exists():
        raise NoLake(f"{lake} is no lake: it holds no {FILE_NAME}. Run `mirto ingest STUDY --lake {lake}`.")
    return Manifest.model_validate_json(file.read_text(encoding="utf-8"))
