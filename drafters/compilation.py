"""How the host loops of the drafters are compiled."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles with numba: without the GIL, and cached on disk where a cache can be written.

    Numba refuses `cache=True` outright where neither the package's directory nor the user's is writable;
    there the function is compiled anew in every process. The cache looks at the file of the function alone:
    after an edit of compiled functions that other files call, delete `__pycache__/*.nbi`.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(nogil=True)(function)
