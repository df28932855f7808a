"""Shared by the benchmarks: the generated volumes, their study, the peers, and the table at the end."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # an ordinary test run loads this file too: keep it light
    from tests.benchmarks.bars import Bars, Timing
    from tests.benchmarks.workload import Volumes

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-bench"
NO_PEERS = "no .venv-bench: run `make .venv-bench/ready`"


@dataclass(frozen=True)
class PeerCall:
    """What a peer took for one call, and the Dice that it found."""

    timing: "Timing"
    dice: float


@dataclass(frozen=True)
class Peers:
    """The tools of others, each call timed in a process of their own environment."""

    folder: Path
    bars: "Bars"
    best: dict[tuple[str, str], "Timing"]

    def call(self, peer: str, predicted: str, reference: str) -> PeerCall | None:
        """Time a peer on two of the study's files; None where its environment is missing.

        Asked again, it is timed again, and the better times of all calls are given: so a benchmark asks before and
        after its own rounds, and a machine that is busy for a while does no favours.
        """
        from tests.benchmarks.bars import Timing

        if not (PEERS / "ready").exists():
            return None
        script = Path(__file__).with_name("peers.py")
        command = [PEERS / "bin" / "python", script, peer, self.folder / predicted, self.folder / reference]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        self.bars.peers.update(found["versions"])
        timing = Timing(found["cpu_s"], found["wall_s"])
        known = self.best.get((peer, predicted), timing)
        self.best[peer, predicted] = Timing(min(timing.cpu_s, known.cpu_s), min(timing.wall_s, known.wall_s))
        return PeerCall(self.best[peer, predicted], found["dice"])


BARS = pytest.StashKey["Bars"]()


@pytest.fixture(scope="session")
def bars(pytestconfig: pytest.Config) -> "Bars":
    """The lines of this run, printed at its end."""
    from tests.benchmarks.bars import Bars

    return pytestconfig.stash.setdefault(BARS, Bars())


@pytest.fixture(scope="session")
def volumes() -> "Volumes":
    """The generated subject. Read only."""
    from tests.benchmarks.workload import make_volumes

    return make_volumes()


@pytest.fixture(scope="session")
def study(volumes: "Volumes", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study file of the generated subject. Read only."""
    from tests.benchmarks.workload import write_study

    return write_study(tmp_path_factory.mktemp("study"), volumes)


@pytest.fixture(scope="session")
def peers(study: Path, bars: "Bars") -> Peers:
    """The peers, on the study's files."""
    return Peers(study.parent, bars, {})


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table below everything else."""
    if (found := config.stash.get(BARS, None)) is not None:
        terminalreporter.section("bars")
        terminalreporter.write_line(found.text())
