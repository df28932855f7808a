"""The notebook as a researcher runs it: on a fresh release, from the root or from its own folder, without an error."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode, validate

from expectations.study import load_study
from ingest.jobs import InProcess
from ingest.phantom import write_phantom
from ingest.run import Ingest
from marts.lake import LIVE, build_release, connect

ROOT = Path(__file__).parents[2]
FIRST_LOOK = ROOT / "notebooks" / "first_look.ipynb"
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'`(=])(?:/|~/|[A-Za-z]:[\\/]{1,2})[\w.]""", re.MULTILINE)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published lake of a small phantom, in `demo/lake` of a folder of its own; never changed."""
    folder = tmp_path_factory.mktemp("first_look") / "demo"
    file = write_phantom(folder / "study", validation=10, test=4, spacing_mm=6.0)
    few = "multiverse_replicates = 20\ncontrast_replicates = 100\nconformal_split_count = 20\n"
    file.write_text(f"{file.read_text()}\n[protocol]\n{few}")
    study = load_study(file)
    report = Ingest(study, folder / "lake", InProcess()).run()
    assert build_release(folder / "lake", report.manifest).release is not None
    return folder / "lake"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A kernel's environment: no profile of this machine's user, and nothing said of lake or figures."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MIRTO_LAKE", raising=False)
    monkeypatch.delenv("MIRTO_FIGURES", raising=False)
    return monkeypatch


def stored() -> NotebookNode:
    """The notebook as it lies in the repository, each cell's lines joined."""
    notebook = json.loads(FIRST_LOOK.read_text(encoding="utf-8"), object_hook=NotebookNode)
    assert isinstance(notebook, NotebookNode)
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def outputs(notebook: NotebookNode, folder: Path) -> list[dict[str, Any]]:
    """Execute a notebook in a folder; the outputs of all its cells."""
    NotebookClient(
        notebook, kernel_name="python3", timeout=120, allow_errors=False, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def of_kind(shown: list[dict[str, Any]], mime: str) -> list[str]:
    return [output["data"][mime] for output in shown if mime in output.get("data", {})]


def test_it_runs_on_a_release(lake: Path, tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MIRTO_LAKE", str(lake))
    environment.setenv("MIRTO_FIGURES", str(tmp_path / "figures"))
    before = sha256((lake / LIVE).read_bytes()).digest()
    with connect(lake) as release:
        methods = {method for (method,) in release.execute("select method_id from ranked_method").fetchall()}
        metrics = release.execute("select distinct metric_id from universe where status = 'ok'").fetchall()

    shown = outputs(stored(), ROOT)

    assert [output for output in shown if output["output_type"] == "error"] == []
    assert [output["text"] for output in shown if "Warning" in output.get("text", "")] == []
    assert len(of_kind(shown, "image/png")) == 4
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {
        "gate.pdf",
        "burden.pdf",
        "curve_dice.pdf",
        "variance.pdf",
    }
    tables = of_kind(shown, "text/html")
    assert len(tables) == 6
    assert "phantom" in tables[0]
    cells = set(re.findall(r"<t[dh]>([^<]+)</t[dh]>", "".join(tables)))
    assert methods | {metric for (metric,) in metrics} <= cells
    assert sha256((lake / LIVE).read_bytes()).digest() == before


@pytest.mark.usefixtures("environment")
def test_it_finds_the_demo_from_its_own_folder(lake: Path) -> None:
    folder = lake.parents[1] / "notebooks"
    folder.mkdir()
    notebook = stored()
    first = next(i for i, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code")
    notebook["cells"] = notebook["cells"][: first + 1]
    assert "phantom" in of_kind(outputs(notebook, folder), "text/html")[0]


def test_it_is_stored_without_outputs() -> None:
    notebook = stored()
    validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})


@pytest.mark.parametrize("path", ["'/data/lake'", "in ~/lakes", 'open("C:\\\\lake")', "see /tmp"])
def test_the_pattern_finds_absolute_paths(path: str) -> None:
    assert ABSOLUTE_PATH.search(path)


def test_it_is_stored_without_absolute_paths() -> None:
    sources = [cell["source"] for cell in stored()["cells"]]
    assert [source for source in sources if ABSOLUTE_PATH.search(source)] == []
