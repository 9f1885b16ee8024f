"""The files through which a step of the default path goes, from the task to the gradient.

    python -m tests.default_path           # the section of the README
    python -m tests.default_path --json    # the files

A tiny run decodes with the drafts of SRT and learns with GRPO. Of its second step, when there is something to
draft from, every function of ours is seen that runs from the call of `roll_out` to the end of the updates:

    path        files on the stack when the drafter proposes, or a program is about to run: the way from the
                step to the prefill, the draft, the verifying pass and the gradient
    asked       all others on the host
    programs    those whose functions are traced into the programs that run, and run nowhere else

Left out are display and report.
"""

import ast
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numba

import tests.conftest  # noqa: F401  (where the programs of tests are stored, before JAX reads it)

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / folder}/" for folder in ("rljax", "drafters"))
DRAFTED = ("speculation.drafter=srt", "speculation.verify_buckets=[16]", "speculation.max_drafts=3")
ENDS = {"SuffixDrafter.propose": 1, "ExecutablePool.get": 0}
"""Functions that the path leads to: whether their own file is part of it."""


def named(frame: FrameType) -> str | None:
    """The file of a function of ours; None of others, and of a module that is imported."""
    name = frame.f_code.co_filename
    is_ours = name.startswith(OURS) and frame.f_code.co_name != "<module>"
    return name.removeprefix(f"{ROOT}/") if is_ours else None


def seen(found: dict[str, None], path: dict[str, None], call: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, and adds the files of ours whose functions run meanwhile in this thread."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := named(frame)) is None:
            return
        found[name] = None
        if frame.f_code.co_qualname in ENDS:
            stack, caller = [], frame if ENDS[frame.f_code.co_qualname] else frame.f_back
            while caller.f_code is not seen.__code__:
                stack.append(named(caller))
                caller = caller.f_back
            path.update(dict.fromkeys(filter(None, reversed(stack))))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return call(*args)
    finally:
        sys.setprofile(before)


def default_path() -> dict[str, list[str]]:
    """Returns the files by what they are: path, asked, programs."""
    import jax

    from rljax.engine.executables import ExecutablePool
    from rljax.speculation.managers import expected
    from rljax.training import loop, reporting
    from tests.training.tiny_run import train

    host: dict[str, None] = {}
    path: dict[str, None] = {}
    programs: dict[str, None] = {}
    traced: set[Any] = set()
    turns = itertools.cycle((True, False))
    get, roll_out, learn = ExecutablePool.get, loop.roll_out, loop.learn

    def trace(pool: Any, key: Any, function: Any, args: Any, *others: Any, **options: Any) -> Any:
        if sys.getprofile() is not None and key not in traced:
            if not traced:
                jax.clear_caches()  # what was traced before would not run again
            traced.add(key)
            seen(programs, {}, jax.eval_shape, function, *args)
        return get(pool, key, function, args, *others, **options)

    def verify_every_second_time(candidates: Any, buckets: Any, times: Any, batch: int, length: int) -> int:
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return sizes[-1] if sizes and next(turns) else 0

    def of_second_step(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run_stage(run: Any, *args: Any) -> Any:
            return seen(host, path, stage, run, *args) if run.state.step == 1 else stage(run, *args)

        return run_stage

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(loop, "roll_out", of_second_step(roll_out)),
        mock.patch.object(loop, "learn", of_second_step(learn)),
        mock.patch.object(reporting, "show_rollout", lambda *_: None),
        mock.patch.object(reporting, "show_update", lambda *_: None),
        mock.patch.object(ExecutablePool, "get", trace),
        mock.patch.object(expected, "best_rows", verify_every_second_time),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        lines = train(Path(directory), *DRAFTED, "task.problems=2", "evaluation.problems=0")
    assert lines[-1]["speculation/drafted"] > 0
    return {
        "path": list(path),
        "asked": [name for name in host if name not in path],
        "programs": [name for name in programs if name not in host],
    }


def lines_of(name: str) -> int:
    """The lines of a file."""
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


def totals(names: Sequence[str]) -> str:
    """Files and lines in words."""
    return f"{len(names)} files and {sum(map(lines_of, names)):,} lines"


def table(found: dict[str, list[str]]) -> str:
    """The section of the README."""
    rows = []
    for name in found["path"]:
        doc = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
        about = " ".join(doc.split()).partition(". ")[0].rstrip(".")
        rows.append(f"| `{name}` | {lines_of(name)} | {about} |")
    others = []
    for kind in ("asked", "programs"):
        by_folder: dict[str, list[str]] = {}
        for name in found[kind]:
            by_folder.setdefault(str(Path(name).parent), []).append(f"`{Path(name).name}` {lines_of(name)}")
        cells = [f"`{folder}/` {', '.join(files)}" for folder, files in sorted(by_folder.items())]
        others.append("; ".join(cells))
    return "\n".join(
        [
            "## The default path",
            "",
            "On its way from the task to the draft, the verifying pass and the gradient, a step goes through",
            f"**{totals(found['path'])}** on the host, in this order:",
            "",
            "| file | lines | |",
            "| --- | ---: | --- |",
            *rows,
            "",
            f"On the way they ask {totals(found['asked'])}: {others[0]}.",
            "",
            f"In the compiled programs alone are {totals(found['programs'])}: {others[1]}.",
            "",
            "`python -m tests.default_path` traces a tiny run and prints this section, and a test holds it.",
        ]
    )


if __name__ == "__main__":
    numba.config.DISABLE_JIT = True  # from Python 3.12 on no profiler sees compiled functions
    files = default_path()
    print(json.dumps(files) if "--json" in sys.argv else table(files))
