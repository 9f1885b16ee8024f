"""Code in a process of its own with several CPU devices: how many there are is decided when JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_devices(code: str, devices: int, *arguments: object, flags: str = "") -> Any:
    """Runs code as strictly as tests are, and returns what it prints last, as JSON after the word FOUND.

    Args:
      code: Python that ends with `print("FOUND" + json.dumps(...))`.
      devices: number of CPU devices.
      arguments: of the process, `sys.argv[1:]`.
      flags: further ones of XLA.
    """
    counted = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), counted, flags]),
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        cwd=Path(__file__).parents[1],  # so that `tests` is found
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("FOUND")[2])
