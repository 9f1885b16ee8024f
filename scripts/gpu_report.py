"""Everything that only a GPU can tell, in eight minutes, on a bare machine: docs/gpu.md.

    python3 scripts/gpu_report.py | tee report.txt       # all parts, the most important evidence first
    python3 scripts/gpu_report.py --parts verify,update  # some of them
    python3 scripts/gpu_report.py --quick                # a look on a CPU: tiny shapes

Each part is a process with a limit of its own, `scripts/gpu_parts/NAME.py`, and rewrites its file after every
row. So what a part that fails or is cut short has measured stays, and the others run all the same. This
process imports neither JAX nor the project: it stays alive whatever they do.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_BUDGET, _QUICK_BUDGET = 480.0, 240.0  # seconds for everything
_TO_STOP = 3.0  # seconds between asking a process to end and ending it
_LEAST_SHARE = 0.5  # of the seconds in the table: with less, parts end before their first rows
_LEAST_MEMORY = 40  # GiB of the GPU that must be free: an update of 1.7B takes the most


@dataclasses.dataclass(frozen=True)
class Variant:
    """One start of a part.

    Attributes:
      name: its name, which the part is told; empty for the only one.
      flags: added to `XLA_FLAGS`.
      share: of the part's time, in relation to the other variants.
    """

    name: str = ""
    flags: str = ""
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the report.

    Attributes:
      name: of the module in `scripts/gpu_parts/`, and of the file.
      seconds: share of the budget; of the default budget about this many.
      variants: starts, one after another.
    """

    name: str
    seconds: float
    variants: tuple[Variant, ...] = (Variant(),)


PARTS = (
    Part("ceilings", 20),
    Part("kernels", 60),
    Part(
        "exactness",
        75,
        (Variant("no autotuning", "--xla_gpu_autotune_level=0", 0.45), Variant("autotuning", "", 0.55)),
    ),
    Part(
        "decode",
        90,
        (
            Variant("", "", 0.6),
            Variant("command buffers", "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL", 0.4),
        ),
    ),
    Part("verify", 45),
    Part("rollout", 110),
    Part("update", 70),
)


class Misuse(Exception):
    """Something that cannot work here, in one line."""


# -- before anything runs ----------------------------------------------------------------------------------


def gpu() -> str:
    """Returns the name of the first GPU.

    Raises:
      Misuse: there is none, or it has too little free memory.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, free = found.stdout.splitlines()[0].rsplit(",", 1)
        gibibytes = float(free) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stdout", None) or getattr(error, "stderr", None) or str(error)
        why = " ".join(said.split())[:200]
        raise Misuse(f"no GPU ({why}); --quick has a look at tiny shapes on a CPU") from error
    if gibibytes < _LEAST_MEMORY:
        raise Misuse(f"{name}: {gibibytes:.0f} GiB are free, and {_LEAST_MEMORY} GiB are needed")
    return name


def chosen_parts(names: str | None) -> tuple[Part, ...]:
    """Returns the parts of these names, separated by commas, in the order of the report; None for all."""
    if names is None:
        return PARTS
    known = [part.name for part in PARTS]
    for name in names.split(","):
        if name not in known:
            raise Misuse(f"--parts: {name!r} is no part; they are {', '.join(known)}")
    return tuple(part for part in PARTS if part.name in names.split(","))


def check_budget(parts: Sequence[Part], budget: float) -> None:
    """Raises `Misuse` if there is too little time for the parts."""
    least = _LEAST_SHARE * sum(part.seconds for part in parts)
    if not budget >= least:  # nor NaN
        raise Misuse(
            f"--budget: {budget:g} s is below the minimum of these parts, {least:g} s; give more, or fewer"
            " --parts"
        )


# -- processes ---------------------------------------------------------------------------------------------


def run_process(command: Sequence[str], environment: dict[str, str], seconds: float) -> str:
    """Runs a command in a process group of its own, and ends all of the group.

    Returns:
      "complete", or why it is not.
    """
    process = subprocess.Popen(
        command, cwd=_ROOT, env=environment, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        status = process.wait(seconds)
        return "complete" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        return f"cut short after {seconds:.0f} s"
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TO_STOP)
    _signal_group(process, signal.SIGKILL)  # whatever is left of it
    process.wait()


def _signal_group(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def environment_of(quick: bool) -> dict[str, str]:
    """Returns the environment of parts. What the user has set stays."""
    paths = [str(_ROOT), str(_ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    cuda = Path("/usr/local/cuda")
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(_ROOT / "cache" / "gpu_report"),  # for a second start
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **({"JAX_PLATFORMS": "cpu"} if quick else {}),
        **({"CUDA_ROOT": str(cuda)} if cuda.is_dir() else {}),
    }
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return defaults | dict(os.environ) | own


# -- the report --------------------------------------------------------------------------------------------


def run_parts(parts: Sequence[Part], budget: float, output: Path, quick: bool) -> bool:
    """Runs parts, each within its share of the time that is left; whether all were complete."""
    end, lines, whole = time.monotonic() + budget - _TO_STOP, [], True
    try:
        for index, part in enumerate(parts):
            share = _share([other.seconds for other in parts[index:]], quick)
            content = run_part(part, share * (end - time.monotonic()), output, quick)
            whole &= content["outcome"] == "complete"
            rows, seconds, outcome = (content[name] for name in ("rows", "seconds", "outcome"))
            lines.append(f"{part.name:16} {len(rows):3} rows in {seconds:5.1f} s: {outcome}")
    finally:
        say(*lines, f"written: {output}")
    return whole


def run_part(part: Part, limit: float, output: Path, quick: bool) -> dict[str, Any]:
    """Runs a part, and returns its file, to which it adds how the part ended. There is a file, whatever
    happened.
    """
    start, path = time.monotonic(), output / f"{part.name}.json"
    path.unlink(missing_ok=True)
    outcomes = []
    variants = part.variants[:1] if quick else part.variants  # the others differ in flags for GPUs
    for index, variant in enumerate(variants):
        share = _share([other.share for other in variants[index:]], quick)
        seconds = max(share * (start + limit - time.monotonic()), 0.0)
        command = [sys.executable, "-m", f"gpu_parts.{part.name}", "--output", str(path)]
        command += ["--seconds", f"{seconds:.1f}", *(["--quick"] if quick else [])]
        command += ["--variant", variant.name] if variant.name else []
        label = f"{part.name} ({variant.name})" if variant.name else part.name
        say(f"== {label}, at most {seconds:.0f} s: {shlex.join(command)}")
        environment = environment_of(quick)
        flags = [environment.get("XLA_FLAGS", ""), variant.flags]
        environment["XLA_FLAGS"] = " ".join(filter(None, flags))
        outcome = run_process(command, environment, seconds)
        say(f"== {label}: {outcome}")
        outcomes.append(f"{variant.name}: {outcome}" if variant.name else outcome)
    for leftover in output.glob("*.tmp"):  # of a process that was ended as it wrote
        leftover.unlink()
    whole = all(outcome.endswith("complete") for outcome in outcomes)
    content = read_json(path) or {"part": part.name, "rows": [], "notes": []}
    content["outcome"] = "complete" if whole else "; ".join(outcomes)
    content |= {"seconds": round(time.monotonic() - start, 1), "limit": limit}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def _share(seconds: Sequence[float], quick: bool) -> float:
    """Returns what the first of these gets of the time that is left. A look may take what it takes."""
    return 1.0 if quick else seconds[0] / sum(seconds)


def say(*lines: str) -> None:
    """Prints lines at once, among those of the parts."""
    print(*lines, sep="\n", flush=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns what a part has written; None if that is nothing."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 if all parts were complete, 1 if not, 2 for what cannot work here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, help="seconds for everything (480; --quick 240)")
    parser.add_argument("--parts", metavar="NAMES", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--output", type=Path, help="folder of the results; default: by the device's name")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a look on a CPU")
    arguments = parser.parse_args(argv)
    usual = _QUICK_BUDGET if arguments.quick else _BUDGET
    budget = usual if arguments.budget is None else arguments.budget
    try:
        parts = chosen_parts(arguments.parts)
        check_budget(parts, budget)
        device = "quick" if arguments.quick else gpu()
        folder = f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}"
        output = arguments.output or _ROOT / ("runs" if arguments.quick else "benchmarks/results") / folder
        output.mkdir(parents=True, exist_ok=True)
    except Misuse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --output: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part in progress, too
    say(f"{device}: {budget:g} s for {', '.join(part.name for part in parts)}; {sys.executable}")
    return 0 if run_parts(parts, budget, output, arguments.quick) else 1


if __name__ == "__main__":
    sys.exit(main())
