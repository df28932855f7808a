from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

def get(
    dsk: Mapping[int, tuple[Any, ...]],
    keys: Sequence[int],
    *,
    pool: Executor,
    chunksize: int,
    optimize_graph: bool,
) -> object: ...
