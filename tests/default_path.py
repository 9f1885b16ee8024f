"""The files through which a step of the default path goes, from the task to the gradient.

    python -m tests.default_path    # as JSON, in the order in which their functions first run

A tiny run decodes with the drafts of SRT and learns with GRPO. Of its second step, when there is something to
draft from, every function of ours is seen that runs from the call of `roll_out` to the end of the updates:

    path        files on the stack when a drafter proposes, a response is judged, or a program is fetched to
                run: the way from the step to the draft, the verifying pass, the reward and the gradient
    asked       all others on the host
    programs    those whose functions are traced into the programs that run, and run nowhere else

Left out are display and report.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import tests.conftest  # noqa: F401  (where the programs of tests are stored, before JAX reads it)

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / folder}/" for folder in ("rljax", "drafters"))
DRAFTED = ("speculation.drafter=srt", "speculation.verify_buckets=[16]", "speculation.max_drafts=3")
ENDS = {"SuffixDrafter.propose", "ChainArithmetic.reward", "ExecutablePool.get"}
"""Functions that the path leads to."""


def named(frame: FrameType) -> str | None:
    """The file of a function of ours; None of others, and of a module that is imported."""
    name = frame.f_code.co_filename
    is_ours = name.startswith(OURS) and frame.f_code.co_name != "<module>"
    return name.removeprefix(f"{ROOT}/") if is_ours else None


def seen(all_files: dict[str, None], path: dict[str, None], call: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, and adds the files of ours whose functions run meanwhile in this thread."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := named(frame)) is None:
            return
        all_files[name] = None
        if frame.f_code.co_qualname in ENDS:
            stack, caller = [], frame
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
    ):
        lines = train(Path(directory), *DRAFTED, "task.problems=2", "evaluation.problems=0")
    assert lines[-1]["speculation/drafted"] > 0
    return {
        "path": list(path),
        "asked": [name for name in host if name not in path],
        "programs": [name for name in programs if name not in host],
    }


if __name__ == "__main__":
    json.dump(default_path(), sys.stdout)
