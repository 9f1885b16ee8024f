"""Names of groups of devices, such as v5e:2x4 or h100:8, and the devices to compile for.

TPUs are compiled for by libtpu and NVIDIA GPUs by the CUDA toolkit, neither of which needs the device:
`pip install -e '.[compilers]'`.
"""

import dataclasses
import importlib.util
import math
import os
import re
import shutil
from typing import Any

from rljax.errors import ConfigError, known_names
from rljax.planning.hardware import Hardware, known_hardware, measured_cpu

_DIMENSIONS = {"v5e": 2, "v6e": 2, "v5p": 3}
_SMALLEST = {"v5e": (2, 2), "v6e": (2, 2), "v5p": (2, 2, 1)}  # libtpu describes whole hosts


@dataclasses.dataclass(frozen=True)
class Topology:
    """A group of equal devices.

    Attributes:
      name: the name that the user gave.
      family: the part before the colon: "cpu", or a key of `known_hardware`.
      shape: extent along every dimension of the group.
    """

    name: str
    family: str
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def has_several_hosts(self) -> bool:
        """Whether there are more than one host can have: 4 chips of a v5p, or 8 devices of another family."""
        return self.num_devices > (4 if self.family == "v5p" else 8)


def parse_topology(name: str) -> Topology:
    """Parses a name: FAMILY:N, or FAMILY:AxB[xC] for TPUs.

    Raises:
      ConfigError: the family is unknown, or the shape is none of its shapes.
    """
    family, _, shape = name.partition(":")
    families = ["cpu", *known_hardware()]
    if family not in families:
        raise ConfigError(f"topology: unknown devices {family!r}; {known_names(family, families)}")
    wanted = _DIMENSIONS.get(family, 1)
    example = f"{family}:" + "x".join(["2", "4", "4"][:wanted] if wanted > 1 else ["8"])
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", shape):
        raise ConfigError(f"topology: {name!r} has no shape; write it as {example}")
    extents = tuple(map(int, shape.split("x")))
    if len(extents) != wanted:
        raise ConfigError(
            f"topology: {name!r} has {len(extents)} dimensions, but {family} has {wanted}; write it as"
            f" {example}"
        )
    if family in ("h100", "h200", "rtx4080") and extents[0] > 8 and extents[0] % 8:
        raise ConfigError(f"topology: {name!r} should have up to 8 devices, or a multiple of 8 (8 a host)")
    return Topology(name, family, extents)


def hardware_of(topology: Topology, compute_dtype: str) -> Hardware:
    """Returns the figures of one device; those of a CPU are measured."""
    if topology.family == "cpu":
        return measured_cpu(topology.num_devices, compute_dtype)
    return known_hardware()[topology.family]


def platform_of(topology: Topology) -> str:
    """Returns "cpu", "gpu" or "tpu"."""
    return "cpu" if topology.family == "cpu" else known_hardware()[topology.family].platform


def compile_devices(topology: Topology) -> list[Any]:
    """Returns the devices to compile for.

    Raises:
      ConfigError: the compiler is not installed, does not know the topology, or this process has fewer CPU
        devices.
    """
    platform, count = platform_of(topology), topology.num_devices
    if platform == "cpu":
        import jax

        devices = jax.devices("cpu")
        if len(devices) < count:
            raise ConfigError(
                f"topology: {topology.name} needs {count} CPU devices, but this process has {len(devices)};"
                f" set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            )
        return devices[:count]
    _require_compiler(topology, platform)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor a TPU to lock
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "none")
    os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")  # else libtpu prints that the type has none
    from jax.experimental import topologies

    try:
        if platform == "tpu":
            smallest = _SMALLEST[topology.family]
            shape = smallest if count < math.prod(smallest) else topology.shape
            name = f"{topology.family}:" + "x".join(map(str, shape))
            described = topologies.get_topology_desc(platform="tpu", topology_name=name)
        else:
            hosts = -(-count // 8)
            described = topologies.get_topology_desc(
                platform="cuda", topology=f"1x{hosts}x{min(count, 8)}", target_config=_gpu_config(topology)
            )
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"topology: {topology.name!r} is unknown to its compiler ({reason})") from error
    return list(described.devices)[:count]


def _require_compiler(topology: Topology, platform: str) -> None:
    package = "libtpu" if platform == "tpu" else "jax_cuda13_plugin"
    missing = "" if importlib.util.find_spec(package) else package
    if not missing and platform == "gpu" and not shutil.which("ptxas"):
        missing = "ptxas (of the CUDA 13 toolkit, on the path)"
    if missing:
        raise ConfigError(
            f"topology: {topology.name} cannot be compiled for, since {missing} is missing;"
            " pip install -e '.[compilers]'"
        )


# -- descriptions of GPUs as XLA reads them (xla/backends/gpu/target_config) --------------------------------

_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  threads_per_core_limit: {threads_per_core}
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind}"
"""

_HOPPER = {
    "shared_per_core": 233472,
    "threads_per_core": 2048,
    "cores": 132,
    "l2": 52428800,
    "clock": 1.98,
    "shared_optin": 232448,
    "major": 9,
    "minor": 0,
}
_ADA = {
    "shared_per_core": 102400,
    "threads_per_core": 1536,
    "cores": 76,
    "l2": 67108864,
    "clock": 2.505,
    "shared_optin": 101376,
    "major": 8,
    "minor": 9,
}


def _gpu_config(topology: Topology) -> str:
    hardware = known_hardware()[topology.family]
    figures = _ADA if topology.family == "rtx4080" else _HOPPER
    memory, bandwidth = int(hardware.memory), int(hardware.bandwidth)
    return _GPU_CONFIG.format(kind=hardware.kind, memory=memory, bandwidth=bandwidth, **figures)
