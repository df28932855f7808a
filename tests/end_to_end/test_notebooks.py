"""The notebooks as a researcher runs them: on a fresh release, from the root or their own folder, without an error."""

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import duckdb
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode, validate

from expectations.study import load_study
from ingest.jobs import InProcess
from ingest.phantom import write_phantom
from ingest.run import Ingest
from marts.lake import LIVE, build_release, connect

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'`(=])(?:/|~/|[A-Za-z]:[\\/]{1,2})[\w.]""", re.MULTILINE)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published lake of a small phantom, in `demo/lake` of a folder of its own; never changed.

    In one Dice cell all methods are made to tie, so that there is no order to agree or disagree with the reference.
    """
    folder = tmp_path_factory.mktemp("first_look") / "demo"
    file = write_phantom(folder / "study", validation=10, test=4, spacing_mm=6.0)
    few = "multiverse_replicates = 20\ncontrast_replicates = 100\nconformal_split_count = 20\n"
    file.write_text(f"{file.read_text()}\n[protocol]\n{few}")
    study = load_study(file)
    report = Ingest(study, folder / "lake", InProcess()).run()
    assert build_release(folder / "lake", report.manifest).release is not None
    with duckdb.connect(folder / "lake" / LIVE) as connection:
        connection.execute(
            "update cell_agreement set kendall_tau_b = null, reproduces_reference = null"
            " where cell_id = (select min(cell_id) from cell where metric_id = 'dice')"
        )
    return folder / "lake"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A kernel's environment: no profile of this machine's user, and nothing said of lake or figures."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MIRTO_LAKE", raising=False)
    monkeypatch.delenv("MIRTO_FIGURES", raising=False)
    return monkeypatch


def stored(name: str) -> NotebookNode:
    """A notebook as it lies in the repository, each cell's lines joined."""
    notebook = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"), object_hook=NotebookNode)
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


@dataclass(frozen=True)
class Run:
    """What the cells of a notebook show, the figures it kept, and what it could have known."""

    outputs: list[dict[str, Any]]
    figures: set[str]
    methods: set[str]
    metrics: set[str]

    @property
    def cells(self) -> set[str]:
        """The texts in the cells of its tables."""
        return set(re.findall(r"<t[dh]>([^<]+)</t[dh]>", "".join(of_kind(self.outputs, "text/html"))))


def run(name: str, lake: Path, folder: Path, environment: pytest.MonkeyPatch) -> Run:
    """Run a notebook on a lake, which it must leave as it is, without an error or a warning."""
    environment.setenv("MIRTO_LAKE", str(lake))
    environment.setenv("MIRTO_FIGURES", str(folder))
    before = sha256((lake / LIVE).read_bytes()).digest()
    with connect(lake) as release:
        methods = {method for (method,) in release.execute("select method_id from ranked_method").fetchall()}
        metrics = {m for (m,) in release.execute("select metric_id from universe where status = 'ok'").fetchall()}
    shown = outputs(stored(name), ROOT)
    assert [output for output in shown if output["output_type"] == "error"] == []
    assert [output["text"] for output in shown if "Warning" in output.get("text", "")] == []
    assert sha256((lake / LIVE).read_bytes()).digest() == before
    return Run(shown, {file.stem for file in folder.iterdir()}, methods, metrics)


def test_the_first_look_runs_on_a_release(lake: Path, tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    first_look = run("first_look.ipynb", lake, tmp_path / "figures", environment)
    assert len(of_kind(first_look.outputs, "image/png")) == 4
    assert first_look.figures == {"gate", "burden", "curve_dice", "variance"}
    tables = of_kind(first_look.outputs, "text/html")
    assert len(tables) == 8
    assert "phantom" in tables[0] and "exact boundaries" in tables[6] and "local AUROC" in tables[7]
    assert first_look.methods | first_look.metrics <= first_look.cells


def test_the_multiverse_runs_on_a_release(lake: Path, tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    multiverse = run("multiverse.ipynb", lake, tmp_path / "figures", environment)
    once = {"flips", "variance", "variance_terms", "transfer", "contrasts", "orders"}
    assert multiverse.figures == once | {f"curves_{metric}" for metric in multiverse.metrics}
    assert len(of_kind(multiverse.outputs, "image/png")) == len(multiverse.figures)
    assert multiverse.metrics <= multiverse.cells
    said = "".join(output["text"] for output in multiverse.outputs if output["output_type"] == "stream")
    assert "crc_05: needs 19 validation subjects, the cohort has 10" in said


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_finds_the_demo_from_its_own_folder(name: str, lake: Path) -> None:
    folder = lake.parents[1] / "notebooks"
    folder.mkdir(exist_ok=True)
    shown_first = {"first_look.ipynb": "phantom", "multiverse.ipynb": "lesion_sensitivity"}
    notebook = stored(name)
    first = next(i for i, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code")
    notebook["cells"] = notebook["cells"][: first + 1]
    assert shown_first[name] in of_kind(outputs(notebook, folder), "text/html")[0]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_without_outputs(name: str) -> None:
    notebook = stored(name)
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


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_without_absolute_paths(name: str) -> None:
    sources = [cell["source"] for cell in stored(name)["cells"]]
    assert [source for source in sources if ABSOLUTE_PATH.search(source)] == []
