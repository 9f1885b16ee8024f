"""Two tiers, one store of compiled programs, and strict JAX: no silent rank or dtype promotion.

`pytest` runs every mechanism; `pytest --all` adds the tests marked `long`. Most of the time is compiling, and
many tests compile the same programs, in this process or in others: JAX keeps them in `cache/tests`, where the
next run of the tests finds them, too. Tiny runs and most engines keep theirs there and find them without
tracing (`tests/training/tiny_run.py`, `tests/engines.py`), and those of one process share what it has loaded
(`_make_once`). To begin without any, delete the directory.

XLA's quicker ways to compile for a CPU (`_QUICK`) shorten it, on JAX 0.10 by half. Tests pass with either
code: `XLA_FLAGS= pytest` compiles as users do, and so does `.ci/run`.
"""

import atexit
import fnmatch
import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rljax.accelerators import skip_absent

_PROGRAMS = Path(__file__).parent.parent / "cache" / "tests"
_MOST_BYTES = 4 << 30
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # else somebody has chosen one
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_PROGRAMS)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # small ones are many

# Else JAX puts the directory's path into the key of every program, and notebooks reach it by another path.
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

if "RLJAX_TESTS_WARM_STARTS" not in os.environ:  # the first process makes it, for its workers, too
    os.environ["RLJAX_TESTS_WARM_STARTS"] = tempfile.mkdtemp(prefix="rljax-warm-starts-")
    atexit.register(shutil.rmtree, os.environ["RLJAX_TESTS_WARM_STARTS"], ignore_errors=True)

# LLVM gets a program in one piece: the other processes keep its threads busy.
_QUICK = "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
if version("jax") < "0.11":  # later ones have no other emitter
    _QUICK += " --xla_cpu_use_fusion_emitters=false"
skip_absent()
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", _QUICK)

# XLA's threads: with one a core, callbacks of the interpreter of GPU kernels (JAX 0.10) can hold both of two
# and wait for a third one for ever.
os.environ.setdefault("NPROC", "8")
os.environ["HF_HUB_OFFLINE"] = "1"  # a mistyped directory is no question to the network

import jax  # noqa: E402  (it reads these variables)
import pytest  # noqa: E402

from rljax.engine.executables import ExecutablePool  # noqa: E402
from tests.configs import MINIMAL  # noqa: E402

# What is traced or collected stays: looking for garbage as often as usual takes a tenth of the time.
gc.set_threshold(20_000, 10, 10)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run what is long by nature")


def pytest_xdist_auto_num_workers():
    """One more than cores, since some wait for processes; beyond eight, each compiles what others compile. An
    accelerator has room for one.
    """
    return min(len(os.sched_getaffinity(0)) + 1, 8) if jax.default_backend() == "cpu" else 0


def pytest_unconfigure(config):
    """Deletes the programs that were used longest ago, in the process that started the workers."""
    if hasattr(config, "workerinput"):
        return
    left = _MOST_BYTES
    facts = ((path, path.stat()) for path in _PROGRAMS.rglob("*") if path.is_file())
    for path, fact in sorted(facts, key=lambda pair: -max(pair[1].st_atime, pair[1].st_mtime)):
        left -= fact.st_size
        if left < 0:
            path.unlink(missing_ok=True)


def _mark_other_cases(config, items):
    """Marks as long the cases of a table that its test's `default_cases` does not name. A name that fits none
    of them is an error, where all are collected.
    """
    unmatched: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("default_cases")
        if mark is None:
            continue
        fits = {name for name in mark.args if fnmatch.fnmatchcase(item.callspec.id, name)}
        if not fits:
            item.add_marker(pytest.mark.long)
        test = item.nodeid.split("[")[0]
        unmatched.setdefault(test, set(mark.args)).difference_update(fits)
    missing = [f"{test}: no case {name}" for test, names in unmatched.items() for name in sorted(names)]
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("; ".join(missing))


def pytest_collection_modifyitems(config, items):
    """Leaves out what is `long` without `--all`, begins with what is `first`, and skips what needs an
    accelerator where there is none.
    """
    _mark_other_cases(config, items)
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    if not config.option.all:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    if jax.default_backend() in ("gpu", "tpu"):
        return
    skip = pytest.mark.skip(reason="needs a GPU or TPU")
    for item in items:
        if any(mark.kwargs.get("needed", True) for mark in item.iter_markers("accelerator")):
            item.add_marker(skip)


def pytest_collection_finish():
    """Modules and items stay to the end: no collection of garbage needs to look at them again."""
    gc.freeze()


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


_STORED = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
_made: dict[Path, Callable[..., Any]] = {}  # the programs of this process, by the file that one is stored in


def _make_once(make):
    """What a pool compiles or loads where tests store their programs, the next one of this process gets."""

    def make_or_share(pool, key, function, args, donate_argnums):
        stored = pool._stored
        path = None if stored is None else stored._path(key, args, (pool._options, donate_argnums))
        if path is None or not path.is_relative_to(_STORED):
            return make(pool, key, function, args, donate_argnums)
        program = _made.get(path)
        if program is None:
            program = _made[path] = make(pool, key, function, args, donate_argnums)
        else:
            pool.loaded += 1
        return program

    return make_or_share


ExecutablePool._make = _make_once(ExecutablePool._make)

_MANY_MAPPINGS = 32_000  # of 65,530 that Linux allows a process; beyond them, loading a program crashes


def _many_mappings():
    mappings = Path("/proc/self/maps")
    return mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS


@pytest.fixture
def config_file(tmp_path):
    """A file with the smallest config."""
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture(autouse=True, scope="module")
def _free_programs(request):
    """Every compiled program takes some memory mappings, and a whole suite's are too many."""
    yield
    for value in vars(request.module).values():  # the module's functions whose cached results hold engines
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    if _many_mappings():
        _made.clear()
        gc.collect()  # takes long, so not behind every module
        if _many_mappings():
            jax.clear_caches()
            gc.collect()
