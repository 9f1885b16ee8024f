"""Six tiny runs before and after a change: the same tokens, logprobs, metrics and programs, or where not.

    python scripts/golden.py record cache/golden              # before the change
    python scripts/golden.py compare cache/golden             # after it
    python scripts/golden.py compare cache/golden tools stale # some of the runs

Whole runs of two steps and more, through the real loop: without drafts, with SRT's, with LoRA, with a tool,
with responses of one step ago, and with two workers that take turns in this process. What a clock decides is
decided without one, so a run repeats. Bits differ between processors and releases of JAX: what is recorded
is for the machine and the environment that recorded it. Compiled programs stay in DIR/programs.

`compare` names the first thing that differs in each run, and exits 1 if there is any.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "plain": (),
    "drafted": (
        "speculation.drafter=srt",
        "speculation.verify_buckets=[16]",
        "speculation.max_drafts=3",
        "engine.batch_buckets=[2, 4]",
    ),
    "lora": ("policy.lora={rank: 4, alpha: 8}", "optimizer.learning_rate=1e-2"),
    "tools": (
        "task={name: tool_arithmetic, args: {numbers: 2, digits: 1, demonstrated_calls: 1.0}}",
        "warm_start.steps=30",
        "tools={names: [calculator], opening: '>', closing: '<', answer_opening: '[', answer_closing: ']'}",
    ),
    "stale": ("rollout.staleness=1", "training.steps=3"),
    "workers": ("cluster.workers=2",),
}
# Times, and counts that follow from them: which slot a tool's answer or a worker finds.
_BY_CLOCK = ("time/", "cluster/", "tools/seconds", "tools/waiting_seconds", "rollout/tokens_per_second")
_BY_CLOCK += ("engine/compil", "engine/waited_for", "speculation/host_share", "speculation/idle_share")
_BY_ARRIVAL = ("rollout/occupancy", "rollout/decode_steps")


@contextlib.contextmanager
def without_clock() -> Iterator[None]:
    """Context in which every second pass verifies as many drafts as it can, whatever was measured."""
    from rljax.speculation import pass_choice
    from rljax.speculation.pass_times import PassTimes

    turns, chosen = itertools.cycle((True, False)), pass_choice.best_rows

    def choose(candidates: Any, buckets: Any, times: Any, batch: int, length: int) -> int:
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return sizes[-1] if sizes and next(turns) else 0

    with contextlib.ExitStack() as stack:
        for module in [each for each in sys.modules.values() if getattr(each, "best_rows", None) is chosen]:
            stack.enter_context(mock.patch.object(module, "best_rows", choose))
        stack.enter_context(mock.patch.object(PassTimes, "plain_is_old", lambda *_: False))
        yield


def run(name: str, programs: Path) -> dict[str, Any]:
    """Runs one of `RUNS` in a directory of its own, and returns what `compare` compares, as JSON has it."""
    from rljax.engine.executables import ExecutablePool
    from rljax.rollout.collector import Collector
    from rljax.tasks.tool_arithmetic import ToolArithmetic
    from rljax.training import session
    from tests.cluster import same_run
    from tests.cluster.turns import Turns

    responses: dict[str, Any] = {}
    compiled: set[str] = set()
    reward, compile_ = Collector.reward, ExecutablePool._compile

    def keep(collector: Any, problems: Any, requests: Any, completions: Any) -> Any:
        for request, completion in zip(requests, completions, strict=True):
            purpose = "train" if request.training else "evaluation"
            which = f"step {request.step}: {purpose} {request.noise_key.tobytes().hex()}"
            responses[which] = {
                "prompt": list(request.prompt_ids),
                "tokens": completion.response_ids.tolist(),
                "logprobs": completion.logprobs.tobytes().hex(),
                "finish_reason": completion.finish_reason,
                "versions": [list(pair) for pair in completion.versions],
            }
        return reward(collector, problems, requests, completions)

    def note(pool: Any, key: Any, *arguments: Any) -> Any:
        plain = [part for part in key if type(part).__module__ == "builtins"]  # without configs and functions
        compiled.add(repr(tuple(plain)))
        return compile_(pool, key, *arguments)

    def luck(task: Any, problem: Any, text: str) -> dict[str, float]:
        return {"reward": zlib.crc32(text.encode()) % 1000 / 1000}

    overrides = (f"engine.compilation_cache={programs}", *RUNS[name])
    steps = next((int(each.split("=")[1]) for each in overrides if each.startswith("training.steps=")), 2)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljax-golden-")))
        world = stack.enter_context(same_run.lucky_world(types.SimpleNamespace(mktemp=lambda _: scratch)))
        stack.enter_context(mock.patch.object(ToolArithmetic, "reward", luck))
        stack.enter_context(mock.patch.object(Collector, "reward", keep))
        stack.enter_context(mock.patch.object(ExecutablePool, "_compile", note))
        if name == "workers":
            stack.enter_context(mock.patch.object(session, "cluster_of", Turns().cluster_of))
        stack.enter_context(without_clock())
        ended = same_run.run(world, name, *overrides, steps=steps)
    volatile = _BY_CLOCK + (_BY_ARRIVAL if name in ("tools", "workers") else ())
    lines = [{key: line[key] for key in line if not key.startswith(volatile)} for line in ended.metrics]
    return {
        "responses": responses,
        "metrics": {f"step {line['step']}": line for line in lines},
        "state": {str(path): zlib.crc32(leaf.tobytes()) for path, leaf in ended.state},
        "programs": sorted(compiled),
    }


def first_difference(before: Any, after: Any, where: str = "") -> str | None:
    """Returns the path to the first thing that differs between two values as JSON has them, with both."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = (
            first_difference(before.get(key), after.get(key), f"{where}, {key}") for key in before | after
        )
        return next((each for each in found if each is not None), None)
    if repr(before) == repr(after):  # NaN is NaN
        return None
    if isinstance(before, list) and isinstance(after, list) and where.endswith("programs"):
        before, after = ([each for each in a if each not in b] for a, b in ((before, after), (after, before)))
    return f"{where.removeprefix(', ')}: {str(before)[:300]} before, {str(after)[:300]} now"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="name", help=f"runs, all without any: {', '.join(RUNS)}")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    programs = arguments.directory.resolve() / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    sys.path.insert(0, str(ROOT))
    import tests.conftest  # noqa: F401  (compiler settings of the tests, before JAX reads them)

    differ = False
    for name in arguments.names or RUNS:
        file = arguments.directory / f"{name}.json"
        now = json.loads(json.dumps(run(name, programs)))
        if arguments.command == "record":
            file.write_text(json.dumps(now))
            print(f"{name}: {len(now['responses'])} responses, {len(now['programs'])} programs", flush=True)
            continue
        difference = first_difference(json.loads(file.read_text()), now)
        print(f"{name}: {difference or 'the same'}", flush=True)
        differ |= difference is not None
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
