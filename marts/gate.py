"""The geometry gate before any map is measured: its verdicts are the marts of a release, over its own parts alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import polars as pl

from ingest.run import GateReport
from marts.release import build_tables, open_for_building


@dataclass(frozen=True)
class Verdicts:
    """The marts `gate_summary` and `gate_subject` of a study, methods in declared order, subjects by id."""

    methods: pl.DataFrame
    subjects: pl.DataFrame

    @property
    def has_failed(self) -> bool:
        """Whether some method fails the gate."""
        return "failed" in self.methods["verdict"]

    @property
    def messages(self) -> list[str]:
        """What to mend: every method that fails or cannot be judged well, then every misregistered subject."""
        told = [
            f"{row['method_id']}: {advice(row['method_id'], row['suggestion'], row['study_lines'])}"
            for row in self.methods.filter(pl.col("suggestion").is_not_null()).iter_rows(named=True)
        ]
        verdict_of = dict(self.methods.select("method_id", "verdict").iter_rows())
        misplaced = self.subjects.filter(pl.col("verdict") == "misregistered").iter_rows(named=True)
        return told + [_subject_advice(row) for row in misplaced if verdict_of[row["method_id"]] != "failed"]


def judge(lake: Path, gate: GateReport) -> Verdicts:
    """The verdicts of a gate that was measured alone.

    Args:
        lake: The lake that holds its parts.
        gate: What `ingest.run.Ingest.run_gate` returned.

    Returns:
        Verdicts of all methods (not of baselines) and subjects; empty frames where there is none.
    """
    with open_for_building(None, lake) as connection:
        build_tables(connection, gate.report.manifest, ["gate_summary", "gate_subject"], given=gate.given)
        return read_verdicts(connection)


def read_verdicts(connection: duckdb.DuckDBPyConnection) -> Verdicts:
    """The verdicts of a release, or of a gate that was built alone; methods in declared order, subjects by id."""
    ordered = "join method as m using (method_id) order by m.position"
    return Verdicts(
        connection.sql(f"select g.* from gate_summary as g {ordered}").pl(),
        connection.sql(f"select g.* from gate_subject as g {ordered}, g.subject_id").pl(),
    )


def advice(method_id: str, suggestion: str, study_lines: str | None) -> str:
    """A suggestion of the gate as a sentence, and below it the lines to put into the study file, ready to paste.

    Args:
        method_id: The method.
        suggestion: Of `gate_summary`.
        study_lines: Of `gate_summary`; nothing where no line would mend it.
    """
    sentence = suggestion[0].upper() + suggestion[1:]
    if study_lines is None:
        return sentence
    return f"{sentence}. In the study file, under [method.transform] of {method_id}, write\n{study_lines}"


def _subject_advice(row: Mapping[str, str | None]) -> str:
    """What to do about one subject that lies elsewhere than its method's others, from its row of `gate_subject`."""
    found = f"{row['method_id']}, {row['subject_id']}: {row['reason']}."
    if row["study_lines"] is None:
        return f"{found} Compare its map and its own reference with those of other subjects."
    return (
        f"{found} The method's other subjects lie where its transform says: store this one as they are stored. A method"
        f" of its own for it would write, under [method.transform],\n{row['study_lines']}"
    )
