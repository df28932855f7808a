"""Peak memory of one map's ingest, in a fresh process (Linux).

memory.py STUDY LAKE METHOD

Everything is imported, compiled and used once on a phantom before. Prints by how many bytes the process then grew at
its peak while it measured and stored every table of one map.
"""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from expectations.store import PartStore
from ingest.measure import measure_task, warm_up
from ingest.phantom import write_phantom
from tests.benchmarks.tasks import forget_subject, plan_tasks


def memory(kind: str) -> int:
    """Bytes by the kernel's account: VmRSS is held now, VmHWM was held at the peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def main() -> None:
    """Measure one map."""
    study, lake, method = sys.argv[1:]
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        phantom, small = (
            write_phantom(Path(folder) / "study", validation=0, test=3, spacing_mm=6.0),
            Path(folder) / "lake",
        )
        for task in plan_tasks(phantom, small)[:2]:
            measure_task(task, PartStore(small))
    forget_subject()
    task = next(task for task in plan_tasks(Path(study), Path(lake)) if task.entry.method_id == method)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is forgotten
    before = memory("VmRSS")
    measure_task(task, PartStore(Path(lake)))
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main()
