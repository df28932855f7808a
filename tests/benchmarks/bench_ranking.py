"""Bar 3: AUROC and average precision in one ranking, against the two calls of scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from ingest.ranking import rank_voxels
from tests.benchmarks.bars import Bars, Benchmark, race, row_of_race
from tests.benchmarks.workload import MapName, Volumes


@pytest.mark.parametrize("name", ["sparse", "dense"])
def bench_ranking(benchmark: Benchmark, bars: Bars, volumes: Volumes, name: MapName) -> None:
    scores, positive = volumes.maps[name][volumes.brain], volumes.reference[volumes.brain]
    ours, rival = race(
        benchmark,
        lambda: rank_voxels(scores, positive),
        lambda: (roc_auc_score(positive, scores), average_precision_score(positive, scores)),
    )
    found = ours.result.auroc, ours.result.average_precision
    same = None not in found and np.allclose(np.array(found, np.float64), rival.result, rtol=0, atol=1e-12)
    what = f"AUROC and AP, {name} map, {scores.size / 1e6:.1f} M voxels"
    bars.add(row_of_race(3, what, ours.best, ("scikit-learn, two calls", rival.best), 0.3, same=same))
