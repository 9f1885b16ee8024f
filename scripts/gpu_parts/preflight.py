"""Part `preflight`: whether this machine runs our kernels at all: versions, one kernel, and on a GPU the
assembler.
"""

import os
import shutil
import subprocess
from pathlib import Path

import jax

from bench_kernels import op_cases
from gpu_parts.kernels import CHECKS, write_errors
from gpu_parts.part import Part, run


def measure(part: Part) -> None:
    """Names what there is, then compares one kernel with float64. Versions are in the file's header."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    gibibytes = stats.get("bytes_limit", 0) / 2**30
    part.note(f"{device.device_kind}, JAX {jax.__version__}, {gibibytes:.0f} GiB for JAX")
    if jax.default_backend() != "tpu":
        part.note(_ptxas())
    check = CHECKS[0]
    write_errors(part, check, op_cases(check.op, part.quick)[0 if part.quick else check.number])


def _ptxas() -> str:
    """Returns the assembler that Mosaic's kernels are given to, and its version."""
    root = os.environ.get("CUDA_ROOT", "/usr/local/cuda")
    path = shutil.which("ptxas", path=os.pathsep.join([str(Path(root) / "bin"), os.environ.get("PATH", "")]))
    if path is None:
        return f"no ptxas in {root}/bin or on the path: set CUDA_ROOT"
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return f"{path}: {said[-1] if said else 'no version'}"


if __name__ == "__main__":
    run("preflight", measure)
