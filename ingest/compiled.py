"""The one way this project compiles numeric kernels."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel with numba: cached on disk, without the GIL, with IEEE division.

    Args:
        kernel: A function of scalars and arrays that numba compiles in nopython mode.

    Returns:
        The compiled function, under the kernel's own signature.
    """
    compile_kernel = cast(
        Callable[[Callable[P, R]], Callable[P, R]], numba.njit(cache=True, nogil=True, error_model="numpy")
    )
    return compile_kernel(kernel)
