"""Compilation of the drafters' host loops."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with numba, without the GIL, and caches it on disk where that is possible.

    Numba refuses `cache=True` where neither the package's directory nor the user's cache directory is
    writable; there the function is compiled anew in every process. The cache depends only on the file of the
    function: after an edit of compiled functions that other files call, delete `__pycache__/*.nbi`.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(nogil=True)(function)
