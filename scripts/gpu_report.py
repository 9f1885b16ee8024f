"""Everything that only a GPU or a TPU can tell, on a GPU in eight minutes, on a bare machine: docs/gpu.md.

    python3 scripts/gpu_report.py                        # all parts, the most important evidence first
    python3 scripts/gpu_report.py --parts verify,update  # some of them
    python3 scripts/gpu_report.py --preflight            # whether the machine runs our kernels at all
    python3 scripts/gpu_report.py --quick                # a look on a CPU: tiny shapes

Each part is a process with a limit of its own, `scripts/gpu_parts/NAME.py`, and rewrites its file after every
row. So what a part that fails or is cut short has measured stays, and the others run all the same. This
process imports neither JAX nor the project: it stays alive whatever they do.
"""

import argparse
import contextlib
import dataclasses
import glob
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_LOG_BYTES = 8 * 2**20  # more is not kept: a part may print without an end
_TO_STOP = 3.0  # seconds between asking a process to end and ending it
_LEAST_SHARE = 0.5  # of the seconds in the table: with less, parts end before their first rows
_LEAST_MEMORY = 40  # GiB of the GPU that must be free: an update of 1.7B takes the most
_TPU_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")
_TPU_PLATFORMS = "tpu,cpu"  # float64, which a TPU has not, is computed by the processor beside it
_ASK_JAX = "import jax; print(jax.devices()[0].device_kind)"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One start of a part."""

    name: str = ""  # which the part is told; empty for the only one
    flags: str = ""  # added to `XLA_FLAGS`, for GPUs
    share: float = 1.0  # of the part's time, in relation to the other variants


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the report, or one of its native tests."""

    name: str  # of the module in `scripts/gpu_parts/`, and of the file
    seconds: float  # share of the budget; of the default budget about this many
    variants: tuple[Variant, ...] = (Variant(),)  # starts, one after another
    tests: bool = False  # whether it is `tests/kernels/test_NAME.py`


_TUNING = Variant("no autotuning", "--xla_gpu_autotune_level=0", 0.45), Variant("autotuning", "", 0.55)
_BUFFERS = Variant("command buffers", "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL", 0.4)
PARTS = (
    Part("ceilings", 20),
    Part("kernels", 60),
    Part("exactness", 75, _TUNING),
    Part("decode", 90, (Variant("", "", 0.6), _BUFFERS)),
    Part("verify", 45),
    Part("rollout", 110),
    Part("update", 70),
)
PREFLIGHT = (
    Part("preflight", 20),
    Part("tree_attention", 65, tests=True),
    Part("noisy_argmax", 65, tests=True),
)
BUDGETS = {"report": 480, "tpu": 1800, "quick": 240, "preflight": 150}

WHEELS = {
    "pydantic": "pydantic==2.14.4",
    "pydantic_core": "pydantic-core==2.50.5",  # the one that this pydantic wants
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "typing_extensions": "typing-extensions",
    "tensorboardX": "tensorboardX",
}
"""What an image with JAX and PyTorch may lack: modules, and the wheels to carry, 3 MB in all."""
PACKAGES = (
    *("jax", "flax", "optax", "orbax.checkpoint", "tensorstore", "numpy", "ml_dtypes", "packaging", "yaml"),
    *("rich", "tokenizers", "jinja2", "safetensors", "numba", "matplotlib"),
)


class Misuse(Exception):
    """Something that cannot work here, in one line."""


# -- before anything runs ----------------------------------------------------------------------------------


def check_packages(modules: Iterable[str]) -> None:
    """Raises `Misuse` with the command that fetches them if some modules are not installed."""
    missing = [module for module in modules if not _installed(module)]
    if not missing:
        return
    wheels = " ".join(WHEELS.get(module, module.split(".")[0].replace("_", "-")) for module in missing)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise Misuse(
        f"not installed: {', '.join(missing)}; where there is a network: python3 -m pip download --no-deps"
        f" --only-binary=:all: --python-version {version} --implementation cp --platform manylinux2014_x86_64"
        f" -d wheels {wheels}; here: python3 -m pip install --no-index --no-deps --target SITE wheels/*.whl,"
        " and PYTHONPATH=SITE (docs/gpu.md)"
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def gpu() -> str:
    """Returns the name of the first GPU; raises a `Misuse` without one, or with too little free memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, free = found.stdout.splitlines()[0].rsplit(",", 1)
        gibibytes = float(free) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stdout", None) or getattr(error, "stderr", None) or str(error)
        why = " ".join(said.split())[:200]
        raise Misuse(f"no GPU and no TPU ({why}); --quick has a look at tiny shapes on a CPU") from error
    if gibibytes < _LEAST_MEMORY:
        raise Misuse(f"{name}: {gibibytes:.0f} GiB are free, and {_LEAST_MEMORY} GiB are needed")
    return name


def tpu() -> str | None:
    """Returns the name of the first TPU; None without one, or beside a GPU. JAX is asked in a process of its
    own, which gives the TPU back: only one at a time can hold it. Raises a `Misuse` if JAX cannot use it.
    """
    if glob.glob("/dev/nvidia[0-9]*") or not any(glob.glob(nodes) for nodes in _TPU_NODES):
        return None
    command, environment = [sys.executable, "-c", _ASK_JAX], environment_of(_TPU_PLATFORMS)
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=180, check=True, env=environment
        ).stdout
        return said.splitlines()[-1]
    except (subprocess.SubprocessError, IndexError) as error:
        errors = (getattr(error, "stderr", None) or str(error)).strip()
        why = errors.splitlines()[-1][:300]
        raise Misuse(f"JAX cannot use the TPU ({why}); end what holds it, or restart the runtime") from error


# -- processes ---------------------------------------------------------------------------------------------


class Log:
    """Everything that is printed, on the screen and in a file of limited size."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        if self._file.tell() < _LOG_BYTES:
            self._file.write((text + "\n").encode()[:65_536])
            self._file.flush()


def run_process(command: Sequence[str], environment: dict[str, str], seconds: float, log: Log) -> str:
    """Runs a command in a process group of its own, and ends the group: "complete", or why it is not."""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    copy = lambda: [log(line.rstrip("\n")) for line in process.stdout]  # noqa: E731
    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    outcome = f"cut short after {seconds:.0f} s"
    try:
        status = process.wait(seconds)
        outcome = "complete" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end_group(process)
        reader.join(_TO_STOP)
    return outcome


def _end_group(process: subprocess.Popen[str]) -> None:
    def signal_group(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    if process.poll() is None:
        signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TO_STOP)
    signal_group(signal.SIGKILL)  # whatever is left of it
    process.wait()


def environment_of(platforms: str | None) -> dict[str, str]:
    """Returns the environment of parts. What the user has set stays, but for `JAX_PLATFORMS` if `platforms`
    are given.
    """
    paths = [str(_ROOT), str(_ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    cuda = Path("/usr/local/cuda")
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(_ROOT / "cache" / "gpu_report"),  # for a second start
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **({"CUDA_ROOT": str(cuda)} if cuda.is_dir() else {}),
    }
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return defaults | dict(os.environ) | own | ({"JAX_PLATFORMS": platforms} if platforms else {})


# -- the report --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report:
    """Runs parts within a budget. `platforms` are JAX's: "cpu" for a look at tiny shapes, None for a GPU."""

    output: Path
    platforms: str | None
    log: Log

    @property
    def quick(self) -> bool:
        """Whether tiny shapes are measured."""
        return self.platforms == "cpu"

    def run(self, parts: Sequence[Part], budget: float) -> bool:
        """Runs the parts, each within its share of the time that is left; whether all were complete."""
        end, outcomes = time.monotonic() + budget - _TO_STOP, {}
        try:
            for index, part in enumerate(parts):
                share = self._share([other.seconds for other in parts[index:]])
                outcomes[part.name] = self._run_part(part, share * (end - time.monotonic()))
        finally:
            self._summary(outcomes)
        return set(outcomes.values()) == {"complete"}

    def _share(self, seconds: Sequence[float]) -> float:
        """Returns what the first of these gets of the time that is left. A look may take what it takes."""
        return 1.0 if self.quick else seconds[0] / sum(seconds)

    def _run_part(self, part: Part, limit: float) -> str:
        start, path = time.monotonic(), self.output / f"{part.name}.json"
        path.unlink(missing_ok=True)
        outcomes = []
        variants = part.variants[:1] if self.quick else part.variants  # the others differ in flags for GPUs
        if self.platforms == _TPU_PLATFORMS and any(variant.flags for variant in variants):
            names = ", ".join(variant.name for variant in variants if variant.flags)
            self.log(f"== {part.name}: measured once on a TPU; left out, with flags of a GPU: {names}")
            variants = (Variant(),)
        for index, variant in enumerate(variants):
            share = self._share([other.share for other in variants[index:]])
            seconds = max(share * (start + limit - time.monotonic()), 0.0)
            command = [sys.executable, "-m", f"gpu_parts.{part.name}", "--output", str(path)]
            command += ["--seconds", f"{seconds:.1f}", *(["--quick"] if self.quick else [])]
            command += ["--variant", variant.name] if variant.name else []
            if part.tests:
                command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", "accelerator"]
                command.append(f"tests/kernels/test_{part.name}.py")
            label = f"{part.name} ({variant.name})" if variant.name else part.name
            self.log(f"== {label}, at most {seconds:.0f} s: {shlex.join(command)}")
            environment = environment_of(self.platforms)
            flags = [environment.get("XLA_FLAGS", ""), variant.flags]
            environment["XLA_FLAGS"] = " ".join(filter(None, flags))
            outcome = run_process(command, environment, seconds, self.log)
            self.log(f"== {label}: {outcome}")
            outcomes.append(f"{variant.name}: {outcome}" if variant.name else outcome)
        whole = all(outcome.endswith("complete") for outcome in outcomes)
        outcome = "complete" if whole else "; ".join(outcomes)
        # There is a file, whatever happened, and none of a process that was ended as it wrote.
        content = {"part": part.name, "rows": [], "notes": []} | read_json(path) | {"outcome": outcome}
        content |= {"seconds": round(time.monotonic() - start, 1), "limit": limit}
        for leftover in self.output.glob("*.tmp"):
            leftover.unlink()
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return outcome

    def _summary(self, outcomes: dict[str, str]) -> None:
        """Prints every row and every note, and how each part ended."""
        contents = {name: read_json(self.output / f"{name}.json") for name in outcomes}
        for name, content in contents.items():
            for row in content.get("rows", []):
                value = "nan" if row["value"] is None else f"{row['value']:.4g}"
                variant = f" ({row['variant']})" if row.get("variant") else ""
                self.log(f"{name}: {row['name']}{variant}: {value} {row['unit']}")
            for note in content.get("notes", []):
                self.log(f"{name}: {note}")
        for name, content in contents.items():
            rows, seconds = len(content.get("rows", [])), content.get("seconds", 0.0)
            self.log(f"{name:16} {rows:3} rows in {seconds:5.1f} s: {outcomes[name]}")
        self.log(f"written: {self.output}")


def read_json(path: Path) -> dict[str, Any]:
    """Returns what a part has written, which may be nothing."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 if all parts were complete, 1 if not, 2 for what cannot work here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    seconds = "seconds for everything (480; on a TPU 1800; --quick 240; --preflight 150)"
    known = [part.name for part in PARTS]
    parser.add_argument("--budget", type=float, help=seconds)
    parser.add_argument("--parts", metavar="NAMES", help=f"of {', '.join(known)}")
    parser.add_argument("--output", type=Path, help="folder of the results; default: by the device's name")
    for option, what in (
        ("--preflight", "versions, one kernel, two files of native tests"),
        ("--quick", "tiny shapes: a look on a CPU"),
    ):
        parser.add_argument(option, action="store_true", help=what)
    arguments = parser.parse_args(argv)
    try:
        if arguments.preflight and arguments.parts:
            raise Misuse("--parts: --preflight has parts of its own; leave one of the two out")
        names = arguments.parts.split(",") if arguments.parts else known
        for name in names:
            if name not in known:
                raise Misuse(f"--parts: {name!r} is no part; they are {', '.join(known)}")
        parts = PREFLIGHT if arguments.preflight else [part for part in PARTS if part.name in names]
        check_packages([*PACKAGES, *WHEELS, *(["pytest"] if arguments.preflight else [])])
        on_tpu = None if arguments.quick else tpu()
        device = "quick" if arguments.quick else on_tpu or gpu()
        kind = "quick" if arguments.quick else "tpu" if on_tpu else "report"
        kind = "preflight" if arguments.preflight else kind
        budget = BUDGETS[kind] if arguments.budget is None else arguments.budget
        if not budget >= (least := _LEAST_SHARE * sum(part.seconds for part in parts)):  # nor NaN
            raise Misuse(
                f"--budget: {budget:g} s is below the minimum of these parts, {least:g} s; give more, or"
                " fewer --parts"
            )
        if not arguments.quick and not on_tpu:
            check_packages(["jax_plugins"])
        folder = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
        folder = folder if on_tpu else f"gpu-{folder}"
        output = arguments.output or _ROOT / ("runs" if arguments.quick else "benchmarks/results") / folder
        output.mkdir(parents=True, exist_ok=True)
        log = Log(output / "log.txt")
    except (Misuse, OSError) as error:
        print(f"error: {'' if isinstance(error, Misuse) else '--output: '}{error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part in progress, too
    log(f"{device}: {budget:g} s for {', '.join(part.name for part in parts)}; {sys.executable}")
    platforms = "cpu" if arguments.quick else _TPU_PLATFORMS if on_tpu else None
    return 0 if Report(output, platforms, log).run(parts, budget) else 1


if __name__ == "__main__":
    sys.exit(main())
