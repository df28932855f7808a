"""The part of matplotlib that pictures and figures are drawn with."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

rcParams: dict[str, object]
colormaps: Mapping[str, Callable[[float], tuple[float, float, float, float]]]

def rc_context() -> AbstractContextManager[None]: ...
def rcdefaults() -> None: ...
