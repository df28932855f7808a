"""A small phantom study, measured once per session, for every test that needs a lake; and the command line."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest


@pytest.fixture(scope="session", autouse=True)
def marts_are_checked_in_sql() -> Iterator[None]:
    """Marts are checked as large ones are, by SQL from the same declarations.

    Some fifty suites of Great Expectations take longer than all the rest of a small release; the tests that are about
    them set the number of rows that they guard.
    """
    from marts import quality

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "GUARDED_ROWS", 0)
        yield


@pytest.fixture(scope="session")
def phantom_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study file of a phantom of 15 subjects at 6 mm. Read only: copy its folder before changing anything.

    Eleven validation subjects are the fewest for which one RCPS rule is feasible, so every kind of conformal rule has
    a level that stands and one that does not. The last test subject has an empty reference. The volume floors fit
    voxels of 216 mm3: the protocol's 50 mm3 would remove nothing. Few replicates keep the tests quick.
    """
    from ingest.phantom import write_phantom

    study = write_phantom(tmp_path_factory.mktemp("phantom_study"), validation=11, test=4, spacing_mm=6.0)
    floors = "lesion_floor_mm3 = 450.0\nminimum_component_mm3 = 900.0\n"
    few = "multiverse_replicates = 40\ncontrast_replicates = 200\nconformal_split_count = 50\n"
    study.write_text(f"{study.read_text()}\n[protocol]\n{floors}{few}")
    return study


@pytest.fixture(scope="session")
def phantom_lake(phantom_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lake of the phantom, ingested, with its manifest. Read only: copy the folder before writing to it."""
    from expectations.study import load_study
    from ingest.jobs import InProcess
    from ingest.run import Ingest

    lake = tmp_path_factory.mktemp("phantom_lake")
    report = Ingest(load_study(phantom_study), lake, InProcess()).run()
    assert not report.manifest.failures
    return lake


@pytest.fixture(scope="session")
def phantom_marts(phantom_lake: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory with every mart of the phantom lake, and the lake tables as views."""
    from ingest.manifest import read_manifest
    from marts.release import build_tables, open_for_building

    connection = open_for_building(None, phantom_lake)
    build_tables(connection, read_manifest(phantom_lake))
    yield connection
    connection.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; exit code, standard output and error."""
    import mirto

    def run_verb(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mirto", *map(str, arguments)])
        try:
            mirto.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_verb
