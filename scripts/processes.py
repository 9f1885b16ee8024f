"""Processes that benchmarks start, and their memory as Linux counts it."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.errors import UserError

TRAIN = Path(__file__).parent / "train.py"


def memory_kilobytes(key: str, process: int | str = "self") -> int | None:
    """Returns a value from Linux's status of a process, such as VmRSS, the resident size, and VmHWM, its
    peak; None on other systems, and once it has ended.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{key}:")), None)


def needs_linux(section: str) -> None:
    """Raises a UserError where no peaks are counted."""
    if memory_kilobytes("VmHWM") is None:
        raise UserError(f"{section}: needs Linux's count of peak memory (VmHWM); leave it out of --only")


def forget_peak() -> None:
    """Lets the kernel count the peak of this process anew: what compiling took is not the update's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def run_process(command: Sequence[str | Path], name: str) -> int:
    """Runs a command; returns the peak of its resident memory in bytes, 0 where none is counted. Raises a
    UserError with its last words if it fails.
    """
    peak = 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        process = subprocess.Popen([str(part) for part in command], stdout=said, stderr=said)
        while process.poll() is None:
            peak = max(peak, memory_kilobytes("VmHWM", process.pid) or 0)
            time.sleep(0.1)
        said.seek(0)
        if process.returncode:
            words = " / ".join(said.read().strip().splitlines()[-3:])
            raise UserError(f"{name} ended with status {process.returncode}: {words}")
    return 1024 * peak


def train(config: str | Path, run_dir: Path, *keys: str) -> tuple[list[dict[str, Any]], int]:
    """Trains in a process of its own; returns the lines of its metrics, and its peak of memory in bytes."""
    peak = run_process([sys.executable, TRAIN, "--config", config, *keys, f"run_dir={run_dir}"], "train.py")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], peak
