from collections.abc import Sequence

from numpy.typing import ArrayLike

class LineCollection:
    def __init__(
        self,
        segments: Sequence[ArrayLike],
        *,
        colors: str = ...,
        linestyles: str | tuple[int, tuple[float, float]] = ...,
        linewidths: float = ...,
    ) -> None: ...
