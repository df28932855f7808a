from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

class _Text:
    def set_text(self, s: str) -> None: ...
    def set_in_layout(self, in_layout: bool) -> None: ...

class _Grid:
    """An object array of axes."""

    def __getitem__(self, place: tuple[int, int]) -> Axes: ...

class _Colorbar:
    def set_label(self, label: str) -> None: ...

class Figure:
    def __init__(
        self, *, figsize: tuple[float, float] = ..., layout: str = ..., facecolor: str = ..., dpi: float = ...
    ) -> None: ...
    def subplots(
        self,
        nrows: int,
        ncols: int,
        *,
        squeeze: bool = ...,
        sharex: bool = ...,
        sharey: bool = ...,
        width_ratios: Sequence[float] | None = ...,
        height_ratios: Sequence[float] | None = ...,
    ) -> _Grid: ...
    def suptitle(
        self, t: str, *, x: float = ..., ha: str = ..., fontsize: float = ..., fontweight: str = ...
    ) -> _Text: ...
    def supxlabel(self, t: str, *, fontsize: float = ...) -> object: ...
    def supylabel(self, t: str, *, fontsize: float = ...) -> object: ...
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
        handles: Sequence[Artist],
        loc: str = ...,
        ncols: int = ...,
        facecolor: str = ...,
        labelcolor: str = ...,
        framealpha: float = ...,
        handlelength: float = ...,
    ) -> object: ...
    def savefig(
        self,
        fname: Path | BytesIO,
        *,
        dpi: float | str = ...,
        format: str | None = ...,
        metadata: dict[str, None] | None = ...,
    ) -> None: ...
