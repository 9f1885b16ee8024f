"""The default backend of each operation, by device and shape: from measurements, and `xla` without one.

`scripts/bench_kernels.py` measures, and says at its end which entries its figures amount to. An entry is only
taken up from a measurement on that device whose JSON is in `benchmarks/results/`.
"""

import jax

# By kind of device (the start of its name) and operation: entries (smallest shape, implementations). The last
# entry holds all of whose numbers the shape reaches.
TUNED: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}


def default(op: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Implementations to be tried for an operation on this process's devices."""
    kind = jax.devices()[0].device_kind
    chosen: tuple[str, ...] = ("xla",)
    for (device, operation), entries in TUNED.items():
        if operation == op and kind.startswith(device):
            for smallest, implementations in entries:
                if all(size >= least for size, least in zip(shape, smallest, strict=True)):
                    chosen = implementations
    return chosen
