"""Times one call of a peer. Runs in the peers' own environment, and imports nothing of this project.

    peers.py panoptica PREDICTED.npy REFERENCE.npy
    peers.py brats-evaluation PREDICTED.nii.gz REFERENCE.nii.gz

Prints one line of JSON: best times in seconds, the global Dice that it found, and versions.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

ROUNDS = 3
GROUP = "gtv"  # the one group of the bundled configuration for a single kind of tumour, label 1

warnings.simplefilter("ignore")


def panoptica_call(predicted: str, reference: str) -> Callable[[], float]:
    """Instances, one-to-one matching by IoU, and IoU and Dice of both, from arrays in memory."""
    panoptica: Any = import_module("panoptica")
    metric: Any = import_module("panoptica.metrics").Metric
    evaluator = panoptica.Panoptica_Evaluator(
        expected_input=panoptica.InputType.SEMANTIC,
        instance_approximator=panoptica.ConnectedComponentsInstanceApproximator(),
        instance_matcher=panoptica.MaxBipartiteMatching(matching_metric=metric.IOU, matching_threshold=0.1),
        instance_metrics=[metric.DSC, metric.IOU],
        global_metrics=[metric.DSC],
    )
    arrays = np.load(predicted), np.load(reference)
    return lambda: float(evaluator.evaluate(*arrays)["ungrouped"].to_dict()["global_bin_dsc"])


def brats_call(predicted: str, reference: str) -> Callable[[], float]:
    """The official evaluation of one exam, from files, as its documentation calls it."""
    brats: Any = import_module("brats_evaluation")
    evaluators: Any = import_module("panoptica").Panoptica_Evaluator
    evaluator = evaluators.load_from_config(str(brats.config_path("MenRT")))

    def call() -> float:
        found: Mapping[str, Mapping[str, float]] = brats.evaluate_single_exam(predicted, reference, "one", evaluator)
        return float(found[GROUP]["global_bin_dsc"])

    return call


def main() -> None:
    """Time the call named by the arguments."""
    peer, predicted, reference = sys.argv[1:]
    call = {"panoptica": panoptica_call, "brats-evaluation": brats_call}[peer](predicted, reference)
    dice = call()  # what is loaded or compiled at first use is loaded now
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    best = {"cpu_s": min(cpu for cpu, _ in times), "wall_s": min(wall for _, wall in times)}
    names = ("panoptica", "brats-evaluation", "numpy", "connected-components-3d")
    print(json.dumps(best | {"dice": dice, "versions": {name: version(name) for name in names}}))


if __name__ == "__main__":
    main()
