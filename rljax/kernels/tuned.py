"""The default backend of each operation, by device and policy: from measurements, and `xla` without one.

An entry is only taken up from a measurement (`scripts/bench_kernels.py`) on that device whose JSON is in
`benchmarks/results/`.

What an entry goes by are sizes of the policy, such as its vocabulary, and nothing that changes between two
passes over the same token: neither rows nor slots, nor nodes of a tree, nor the length of a cache. Backends
agree up to rounding only, so a verifying pass that took another one than decoding could sample another token.
"""

import jax

# By kind of device (the start of its name) and operation: entries (smallest sizes, implementations). The last
# entry holds all of whose numbers the policy reaches.
TUNED: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}


def default(op: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Implementations to be tried for an operation on this process's devices."""
    kind = jax.devices()[0].device_kind
    chosen: tuple[str, ...] = ("xla",)
    for (device, operation), entries in TUNED.items():
        if operation == op and kind.startswith(device):
            for smallest, implementations in entries:
                if all(size >= least for size, least in zip(sizes, smallest, strict=True)):
                    chosen = implementations
    return chosen
