"""Compiles for devices that are not there: a TPU through libtpu, Hopper through the CUDA toolkit.

    compiled = compile_for("v5e", function, *shapes)

Devices are v5e, v6e and `HOPPER`; one whose compiler is missing skips the test and says what to install:
`pip install -e '.[compilers]'`, and for Hopper the CUDA 13 toolkit (`ptxas` on the path). A compiler that is
installed and does not work fails the test.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax import target

HOPPER = "hopper"

# Of an H200, as XLA's own compiler wants to know them (xla/backends/gpu/target_config).
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@functools.cache
def _devices(name: str) -> Any:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # there is no TPU to fight over
    if name == HOPPER:
        return topologies.get_topology_desc(platform="cuda", topology="1x1x4", target_config=_H200).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:2x2").devices


def _missing(name: str) -> str:
    """What there is not of a device's compiler, or nothing."""
    package = "jax_cuda13_plugin" if name == HOPPER else "libtpu"
    if not importlib.util.find_spec(package):
        return package
    return "ptxas" if name == HOPPER and not shutil.which("ptxas") else ""


def _require_compiler(device: str) -> None:
    if missing := _missing(device):
        pytest.skip(f"no compiler for {device}: {missing} is missing; see tests/kernels/compilation.py")


@contextlib.contextmanager
def absent_mesh(device: str) -> Iterator[Mesh]:
    """Context in which programs are traced for a mesh of 4 devices (data 2, tensor 2), which it yields."""
    _require_compiler(device)
    devices = np.array(_devices(device)[:4])
    axes = ("data", "fsdp", "tensor")
    with target.tracing_for(devices[0], 4, "gpu" if device == HOPPER else "tpu"):
        yield Mesh(devices.reshape(2, 1, 2), axes, axis_types=(AxisType.Auto,) * 3)


def compile_for(device: str, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Any:
    """The program of `function` on one `device`, compiled to machine code.

    Args:
      device: v5e, v6e or `HOPPER`.
      function: pure.
      shapes: its arguments, pytrees of `jax.ShapeDtypeStruct` or arrays.
      donate: arguments that are given up.
    """
    _require_compiler(device)
    devices = _devices(device)
    mesh = Mesh(np.array(devices[:1]), ("one",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )
    with jax.sharding.set_mesh(mesh) if hasattr(jax.sharding, "set_mesh") else contextlib.nullcontext():
        return jax.jit(function, donate_argnums=donate).lower(*placed).compile()
