from collections.abc import Sequence

class Line2D:
    def __init__(
        self,
        xdata: Sequence[float],
        ydata: Sequence[float],
        *,
        color: str = ...,
        linewidth: float = ...,
        linestyle: str | tuple[int, tuple[float, float]] = ...,
        label: str = ...,
    ) -> None: ...
