"""Strict JAX for every test: no silent rank or dtype promotion. And no process with too many programs.

Many tests compile the same programs, in this process or in others: JAX keeps them in one directory as long as
the tests run, which then take half the time. Tiny runs keep theirs there, too, and find them without tracing
(`tests/training/tiny_run.py`).
"""

import gc
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

_COMPILED = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # else ours is a worker, or somebody has one already
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED = tempfile.mkdtemp(prefix="rljax-tests-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # small ones are many

import jax  # noqa: E402  (it reads these variables)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_unconfigure():
    if _COMPILED is not None:
        shutil.rmtree(_COMPILED, ignore_errors=True)


def pytest_collection_modifyitems(items):
    """Tests marked `accelerator` skip where there is none, but for those that do not need it."""
    if jax.default_backend() in ("gpu", "tpu"):
        return
    skip = pytest.mark.skip(reason="needs a GPU or TPU")
    for item in items:
        if any(mark.kwargs.get("needed", True) for mark in item.iter_markers("accelerator")):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter, config):
    """With `--durations`, also what each folder took; the files of tests/ itself stand for themselves."""
    if config.option.durations is None:
        return
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):  # a warning has none
                file = report.nodeid.split("::")[0]
                seconds["/".join(file.split("/")[:2])] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.line(f"{spent:9.1f}s {folder}")


_MANY_MAPPINGS = 20_000  # of 65,530 that Linux allows a process; beyond them, loading a program crashes


@pytest.fixture(autouse=True, scope="module")
def _free_programs(request):
    """Every compiled program takes some memory mappings, and a whole suite's are too many."""
    yield
    for value in vars(request.module).values():  # the module's functions whose cached results hold engines
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    gc.collect()
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()
