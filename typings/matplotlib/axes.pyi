from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike, NDArray

class _Spine:
    def set_visible(self, b: bool) -> None: ...

class Axes:
    xaxis: Axis
    yaxis: Axis
    spines: Mapping[str, _Spine]
    def imshow(
        self,
        X: NDArray[np.float32],
        *,
        cmap: str = ...,
        vmin: float = ...,
        vmax: float = ...,
        origin: str = ...,
        interpolation: str = ...,
        aspect: float = ...,
    ) -> AxesImage: ...
    def add_collection(self, collection: LineCollection) -> LineCollection: ...
    def annotate(
        self,
        text: str,
        xy: tuple[float, float],
        xytext: tuple[float, float] | None = ...,
        xycoords: str | tuple[str, str] = ...,
        textcoords: str | None = ...,
        *,
        color: str = ...,
        ha: str = ...,
        va: str = ...,
        fontsize: float = ...,
    ) -> object: ...
    def text(
        self,
        x: float,
        y: float,
        s: str,
        *,
        color: str = ...,
        ha: str = ...,
        va: str = ...,
        fontsize: float = ...,
        fontweight: str = ...,
    ) -> object: ...
    def plot(
        self,
        x: ArrayLike,
        y: ArrayLike,
        fmt: str = ...,
        *,
        color: str = ...,
        linewidth: float = ...,
        markersize: float = ...,
        markerfacecolor: str = ...,
        markeredgewidth: float = ...,
    ) -> object: ...
    def stairs(
        self,
        values: ArrayLike,
        edges: ArrayLike,
        *,
        baseline: float | None,
        fill: bool = ...,
        color: str = ...,
        linewidth: float = ...,
    ) -> object: ...
    def barh(
        self,
        y: ArrayLike,
        width: ArrayLike,
        height: float,
        left: ArrayLike = ...,
        *,
        color: str,
        edgecolor: str = ...,
        linewidth: float = ...,
    ) -> object: ...
    def hlines(self, y: ArrayLike, xmin: ArrayLike, xmax: ArrayLike, *, color: str, linewidth: float) -> object: ...
    def vlines(self, x: ArrayLike, ymin: ArrayLike, ymax: ArrayLike, *, color: str, linewidth: float) -> object: ...
    def axhline(self, y: float, *, color: str, linewidth: float, linestyle: str = ...) -> object: ...
    def axvline(self, x: float, *, color: str, linewidth: float, linestyle: str = ...) -> object: ...
    def grid(self, *, axis: str, color: str, linewidth: float) -> None: ...
    def set_axisbelow(self, b: bool) -> None: ...
    def set_axis_off(self) -> None: ...
    def tick_params(
        self, axis: str = ..., *, length: float = ..., labelleft: bool = ..., labelbottom: bool = ...
    ) -> None: ...
    def set_title(self, label: str, *, fontsize: float = ..., color: str = ...) -> object: ...
    def set_xlabel(self, xlabel: str, *, fontsize: float = ..., loc: str = ...) -> object: ...
    def set_ylabel(self, ylabel: str, *, fontsize: float = ..., labelpad: float = ...) -> object: ...
    def set_xlim(self, left: float = ..., right: float = ...) -> object: ...
    def set_ylim(self, bottom: float, top: float) -> object: ...
    def set_xscale(self, value: str) -> None: ...
    def set_yscale(self, value: str, *, linthresh: float = ..., linscale: float = ...) -> None: ...
    def set_xticks(self, ticks: Sequence[float], labels: Sequence[str] | None = ...) -> object: ...
    def set_yticks(
        self, ticks: Sequence[float] | NDArray[np.float64], labels: Sequence[str] | None = ..., *, fontsize: float = ...
    ) -> object: ...
