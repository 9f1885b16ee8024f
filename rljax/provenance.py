"""Provenance of figures: the machine, the commit and the command that made them."""

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.errors import UserError

_PACKAGES = ("rljax", "drafters")
_REPOSITORY = Path(__file__).resolve().parent.parent


@functools.cache
def source_digest() -> str:
    """Returns a digest of the source of `rljax` and `drafters`, as this process has it."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        root = _REPOSITORY / package
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(_REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_info(key: str) -> str | None:
    """The first value of a key in what Linux says of the processor; None elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The processor's instruction sets by Linux's names, such as avx2; empty elsewhere."""
    return frozenset((_cpu_info("flags") or "").split())


def vectors() -> str | None:
    """The widest vector instructions, by which libraries choose their kernels; None if unknown."""
    names = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in names.items() if flag in cpu_flags()), None)


def machine_facts(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Processor, its vector instructions, cores, accelerator (None on a CPU) and versions.

    Args:
      packages: further distributions whose versions matter to the results; those not installed are left out.
    """
    import jax  # here, so that who reads run directories does not wait for it

    devices = jax.devices()
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "vectors": vectors(),
        "cores": num_cores(),
        "accelerator": None if devices[0].platform == "cpu" else f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def git_commit(directory: str | os.PathLike[str] = _REPOSITORY) -> str | None:
    """The commit checked out in `directory`; None where that is no git checkout, as for an installed wheel.

    It ends in "-dirty" if tracked files differ from it, results and pages aside: measuring twice changes no
    code.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", os.fspath(directory), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    if not (Path(directory) / ".git").exists():  # git would find the checkout of whoever has installed it
        return None
    try:
        code = (".", ":!benchmarks/results", ":!docs")
        changed = git("status", "--short", "--untracked-files=no", "--", *code)
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command that runs this script again, from the repository's root where it is one of its scripts."""
    script, *arguments = sys.argv if argv is None else argv
    path = Path(script).resolve()
    if path.stem == "rljax":  # the console command
        return shlex.join(["rljax", *arguments])
    if path == Path(__file__).with_name("__main__.py").resolve():
        return shlex.join(["python", "-m", "rljax", *arguments])
    name = path.relative_to(_REPOSITORY).as_posix() if path.is_relative_to(_REPOSITORY) else path.name
    return shlex.join(["python", name, *arguments])


def write_figures(
    path: str | os.PathLike[str], figures: Mapping[str, Any], command: str, packages: Sequence[str] = ()
) -> None:
    """Writes figures as JSON after the command, commit, date and machine that made them.

    The file is replaced in one step.

    Args:
      path: the JSON file; its directory is made if need be.
      figures: what was measured, planned or simulated; without NaN.
      command: from `command_line`.
      packages: see `machine_facts`.

    Raises:
      UserError: the file cannot be written.
    """
    content = {
        "command": command,
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(packages),
        **figures,
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
