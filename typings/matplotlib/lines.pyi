from collections.abc import Sequence

from matplotlib.artist import Artist

class Line2D(Artist):
    def __init__(
        self,
        xdata: Sequence[float],
        ydata: Sequence[float],
        *,
        color: str = ...,
        linewidth: float = ...,
        linestyle: str | tuple[int, tuple[float, float]] = ...,
        label: str = ...,
        marker: str = ...,
        markersize: float = ...,
        markerfacecolor: str = ...,
    ) -> None: ...
