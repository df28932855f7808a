from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

class _Grid:
    """An object array of axes."""

    def __getitem__(self, place: tuple[int, int]) -> Axes: ...

class _Colorbar:
    def set_label(self, label: str) -> None: ...

class Figure:
    def __init__(
        self, *, figsize: tuple[float, float] = ..., layout: str = ..., facecolor: str = ..., dpi: float = ...
    ) -> None: ...
    def subplots(self, nrows: int, ncols: int, *, squeeze: bool = ...) -> _Grid: ...
    def suptitle(self, t: str, *, fontsize: float = ...) -> object: ...
    def colorbar(
        self,
        mappable: AxesImage,
        *,
        ax: _Grid,
        shrink: float = ...,
        aspect: float = ...,
        pad: float = ...,
        extend: str = ...,
    ) -> _Colorbar: ...
    def legend(
        self,
        *,
        handles: Sequence[Line2D],
        loc: str = ...,
        ncols: int = ...,
        facecolor: str = ...,
        labelcolor: str = ...,
        framealpha: float = ...,
    ) -> object: ...
    def savefig(self, fname: Path, *, dpi: float = ...) -> None: ...
