"""What devices can do: memory, bandwidth, arithmetic and links. The only table of such figures, and the
roofline (Williams et al., CACM 2009) by which plans and simulations turn work into seconds.

TPUs: Austin et al., "How to Scale Your Model" (2025), chapter 2 (HBM, FLOP/s, and the bandwidth of one axis
of the torus in both directions). A program may use a little less than the HBM: the capacity that XLA's
out-of-memory errors print. GPUs: NVIDIA's data sheets of H20, H100 SXM, H200 SXM and GeForce RTX 4080 (dense
tensor-core FLOP/s; NVLink in one direction; between hosts one 400 Gb/s port a GPU). JAX takes 75 % of a GPU's
memory unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise (JAX documentation, "GPU memory allocation").
"""

import dataclasses
import os
import time
from pathlib import Path

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device.

    Attributes:
      flops: FLOPs of matrix products.
      bytes: bytes that are read from and written to memory.
      tensor_bytes: bytes of this device's collectives over `mesh.tensor`.
      batch_bytes: bytes of this device's collectives over `mesh.data` and `mesh.fsdp`.
    """

    flops: float
    bytes: float
    tensor_bytes: float = 0.0
    batch_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Figures of one device.

    Attributes:
      kind: name for the user.
      platform: "cpu", "gpu" or "tpu".
      memory: bytes that programs may use.
      bandwidth: bytes/s between memory and arithmetic units.
      flops: FLOP/s of matrix products by compute dtype.
      link: bytes/s of a collective between devices of a host or slice.
      network: bytes/s of a collective between hosts.
      host_devices: devices joined by `link`.
    """

    kind: str
    platform: str
    memory: float
    bandwidth: float
    flops: dict[str, float]
    link: float
    network: float
    host_devices: int

    def reaching(self, arithmetic: float, memory: float, devices: int) -> "Hardware":
        """Returns so many devices as one, which reaches these shares of its arithmetic and bandwidth."""
        flops = {dtype: each * arithmetic * devices for dtype, each in self.flops.items()}
        return dataclasses.replace(self, flops=flops, bandwidth=self.bandwidth * memory * devices)

    def seconds(self, work: Work, compute_dtype: str, tensor: int = 1, devices: int = 1) -> float:
        """Returns the time of some work on each of `devices` devices, of which `tensor` share a layer.

        It is the longer one of arithmetic and memory, and after that the collectives, which are assumed not
        to overlap. Latencies are not counted: of small passes over several devices the real time is longer.
        """

        def collective(size: float, over: int) -> float:
            return size / (self.link if over <= self.host_devices else self.network)

        computing = max(work.flops / self.flops[compute_dtype], work.bytes / self.bandwidth)
        return computing + collective(work.tensor_bytes, tensor) + collective(work.batch_bytes, devices)


def _tpu(kind: str, memory: float, bandwidth: float, bfloat16: float, link: float) -> Hardware:
    # Products of float32 at the highest precision are six passes of bfloat16 (jax.lax.Precision).
    flops = {"bfloat16": bfloat16, "float32": bfloat16 / 6}
    return Hardware(kind, "tpu", memory, bandwidth, flops, link, link, 2**20)


def _gpu(
    kind: str, memory: float, bandwidth: float, bfloat16: float, float32: float, link: float, network: float
) -> Hardware:
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
    flops = {"bfloat16": bfloat16, "float32": float32}
    return Hardware(kind, "gpu", memory * fraction, bandwidth, flops, link, network, 8)


def known_hardware() -> dict[str, Hardware]:
    """Returns the devices that a plan can be made for, by their name in a topology."""
    return {
        "v5e": _tpu("TPU v5e", 15.75 * GIB, 8.1e11, 1.97e14, 9e10),
        "v5p": _tpu("TPU v5p", 95.74 * GIB, 2.8e12, 4.59e14, 1.8e11),
        "v6e": _tpu("TPU v6e", 31.25 * GIB, 1.6e12, 9.2e14, 1.8e11),
        "h20": _gpu("NVIDIA H20", 95.6 * GIB, 4.0e12, 1.48e14, 4.4e13, 4.5e11, 5e10),
        "h100": _gpu("NVIDIA H100 80GB HBM3", 79.1 * GIB, 3.35e12, 9.89e14, 6.7e13, 4.5e11, 5e10),
        "h200": _gpu("NVIDIA H200", 139.8 * GIB, 4.8e12, 9.89e14, 6.7e13, 4.5e11, 5e10),
        "rtx4080": _gpu("NVIDIA GeForce RTX 4080", 15.7 * GIB, 7.2e11, 9.75e13, 4.87e13, 1.6e10, 3e9),
    }


def host_memory() -> float:
    """Returns the memory of this machine in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return 1024.0 * int(line.split()[1])
    raise OSError("/proc/meminfo does not tell MemTotal")


def measured_cpu(devices: int, compute_dtype: str) -> Hardware:
    """Returns this machine, measured in about a second and shared evenly by `devices` forced devices.

    Bandwidth is that of a matrix-vector product over 256 MiB, arithmetic that of a product
    [1024, 1024] x [1024, 4096]: both as the engine computes them (rows [R, in] by weights [out, in]).
    """
    import jax
    import jax.numpy as jnp

    from rljax.numerics.products import dot

    def fastest(rows: int, inputs: int, outputs: int) -> float:
        product = jax.jit(dot)
        dtype = jnp.dtype(compute_dtype)
        args = jnp.ones((rows, inputs), dtype), jnp.ones((outputs, inputs), dtype)
        product(*args).block_until_ready()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            product(*args).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    rows, inputs, outputs = 1024, 1024, 4096
    flops = 2.0 * rows * inputs * outputs / fastest(rows, inputs, outputs)
    inputs, outputs = 4096, 2**26 // 4096
    read = float(jnp.dtype(compute_dtype).itemsize * inputs * outputs)
    bandwidth = read / fastest(2, inputs, outputs)
    return Hardware(
        "this CPU",
        "cpu",
        host_memory() / devices,
        bandwidth / devices,
        {compute_dtype: flops / devices},
        bandwidth / devices,
        bandwidth / devices,
        2**20,
    )
