"""Bars 1 and 2: every level of one map in one pass, against one call of a peer at one level, and 200 labellings."""

import numpy as np
import pytest

from ingest.lesions import label_reference
from ingest.sweep import LEVELS, Sweep, Workspace, order_voxels, sweep
from tests.benchmarks.bars import Bars, Benchmark, Row, race, row_of_race, timed
from tests.benchmarks.conftest import NO_PEERS, Peers
from tests.benchmarks.twins import FLOOR_VOXELS, label_every_level, sweep_by_levels
from tests.benchmarks.workload import LEVEL, MapName, Volumes

WORKSPACE = Workspace()
WHAT = "201 levels, 3 post-processings, lesions"


def one_pass(volumes: Volumes, name: MapName) -> Sweep:
    """All that the bars count in: the visiting order, the reference's lesions, and the pass."""
    order = order_voxels(volumes.maps[name], volumes.brain, WORKSPACE)
    lesions = label_reference(volumes.reference, volumes.brain, 6)
    return sweep(order, [lesions], 6, [1.0], FLOOR_VOXELS, FLOOR_VOXELS)


def equals_twin(found: Sweep, volumes: Volumes, name: MapName, step: int) -> bool:
    """Whether every `step`-th level is what labelling and matching it on its own gives."""
    levels = range(0, LEVELS, step)
    twin = sweep_by_levels(volumes.maps[name], volumes.brain, volumes.reference, levels)
    pairs = (
        (found.predicted[0][:, levels], twin.predicted),
        (found.true_positive[0, 0][:, levels], twin.true_positive),
        (found.hits[0, 0][..., levels], twin.hits),
    )
    return all(np.array_equal(ours, expected) for ours, expected in pairs)


@pytest.mark.parametrize(("name", "limit"), [("sparse", 1.0), ("dense", 2.0)])
def bench_against_one_panoptica_call(
    benchmark: Benchmark, bars: Bars, volumes: Volumes, peers: Peers, name: MapName, limit: float
) -> None:
    peers.call("panoptica", f"{name}.npy", "reference.npy")
    ours = timed(benchmark, lambda: one_pass(volumes, name), rounds=15)
    same = equals_twin(ours.result, volumes, name, step=5 if name == "sparse" else 10)
    peer = peers.call("panoptica", f"{name}.npy", "reference.npy")
    what = f"{WHAT}, {name} map"
    if peer is None:
        bars.add(Row(1, what, str(ours.best), f"one panoptica call: {NO_PEERS}", limit, None, None, same))
        return
    counts = ours.result.true_positive[0, 0, 0, LEVEL], ours.result.predicted[0, 0, LEVEL]
    dice = 2 * counts[0] / (counts[1] + np.count_nonzero(volumes.reference))
    same &= abs(dice - peer.dice) < 1e-12
    bars.add(row_of_race(1, what, ours.best, ("one panoptica call", peer.timing), limit, same=same))


@pytest.mark.parametrize("name", ["sparse", "dense"])
def bench_against_200_labellings(benchmark: Benchmark, bars: Bars, volumes: Volumes, name: MapName) -> None:
    ours, rival = race(
        benchmark,
        lambda: one_pass(volumes, name),
        lambda: label_every_level(volumes.maps[name], range(LEVELS - 1)),
        rival_rounds=2,
    )
    same = equals_twin(ours.result, volumes, name, step=50)
    row = row_of_race(2, f"{WHAT}, {name} map", ours.best, ("200 cropped cc3d passes", rival.best), 0.05, same=same)
    bars.add(row)
