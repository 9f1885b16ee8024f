"""Keeps freed memory of the process for the next program, where JAX computes on the CPU.

A program's buffers are allocated when it begins and freed when it ends. By default the C library gives large
ones back to the system, which hands out new, zeroed pages at the next program: tens of megabytes for a
verifying pass, and a third of its time (`docs/engine.md`).

The buffers of a rollout are no use to an update, nor the other way round, and of a large policy they are
gigabytes: `give_back` is for the moments in between.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST_KEPT = 1 << 30  # bytes; larger buffers are weights and moments, which are allocated once
_MUCH = 256 << 20  # bytes of freed memory that are worth the new pages
_keeps = False  # whether this process keeps freed memory
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed buffers of up to a gigabyte, and at most two gigabytes at a time.

    A thread other than the first keeps those below 64 MB only, since its arena consists of such pieces. With
    one arena for all threads there is no such limit, but compiling takes a quarter longer: its threads wait
    for one another at every allocation (`docs/engine.md`).

    Returns:
      Whether it did: not without glibc, where an accelerator may be used, or where the environment sets
      glibc's options.
    """
    if not sys.platform.startswith("linux") or not _computes_on_cpu():
        return False
    if any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: _LARGEST_KEPT, _TRIM_THRESHOLD: 2**31 - 1}
    global _keeps
    _keeps = sum(mallopt(option, value) for option, value in settings.items()) == len(settings)
    return _keeps


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def give_back() -> int:
    """Gives memory that was kept back to the system, if it is much.

    Returns:
      Bytes that were free, those given back before among them; 0 where they stay, because they are few, or
      because nothing is kept here.
    """
    if not _keeps:
        return 0
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return 0
    library.mallinfo2.restype = _Mallinfo
    free = int(library.mallinfo2().fordblks)
    if free < _MUCH:
        return 0
    library.malloc_trim(ctypes.c_size_t(0))
    return free


def _computes_on_cpu() -> bool:
    """Whether JAX will compute on the CPU, as far as it can be known before it looks for devices."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
