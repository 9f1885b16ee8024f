"""Code in a process of its own with several CPU devices: how many there are is decided when JAX starts."""

import json
import os
from typing import Any

from tests.fork_server import output_of


def run_on_devices(code: str, devices: int, *arguments: object, flags: str = "") -> Any:
    """Runs code as strictly as tests are, and returns what it prints last, as JSON after the word FOUND.

    Args:
      code: Python that ends with `print("FOUND" + json.dumps(...))`.
      devices: number of CPU devices.
      arguments: of the process, `sys.argv[1:]`.
      flags: further ones of XLA.
    """
    counted = f"--xla_force_host_platform_device_count={devices}"
    given = " ".join([os.environ.get("XLA_FLAGS", ""), counted, flags])
    return json.loads(output_of(code, *arguments, XLA_FLAGS=given).rpartition("FOUND")[2])
