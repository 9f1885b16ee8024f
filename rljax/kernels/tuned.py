"""The default backend of each operation, by device and policy: from measurements, and without one the kernels
for Mosaic GPU on Hopper (for packed rows Triton's), `xla` elsewhere.

`tuned.json` has entries by kind of device (the start of its name) and operation: the smallest sizes that an
entry applies to, and its backends. `python scripts/bench_kernels.py --tune RESULTS` writes it from
measurements of the same script.

Entries are chosen by sizes of the policy, such as its vocabulary, and not by sizes that change between passes
over the same token: rows, slots, nodes of a tree, the length of a cache. Backends agree up to rounding only,
so a verifying pass with another backend than decoding could sample another token.
"""

import json
from pathlib import Path

from rljax import target

TABLE = Path(__file__).with_name("tuned.json")

Tuned = dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[str, ...]]]]


def load(path: Path) -> Tuned:
    """Reads entries (smallest sizes, implementations) by device and operation."""
    by_device = json.loads(path.read_text(encoding="utf-8"))
    return {
        (device, op): [(tuple(entry["sizes"]), tuple(entry["implementations"])) for entry in entries]
        for device, by_op in by_device.items()
        for op, entries in by_op.items()
    }


TUNED = load(TABLE)
_ON_HOPPER = ("mosaic_gpu", "xla")
_PACKED_ON_HOPPER = ("triton", "xla")
_LEFT_TO_XLA = ("compaction",)
"""XLA's scatter changes the cache in place next to Mosaic GPU's attention, and moves only an accepted path,
where Mosaic GPU's compaction moves the blocks that it reaches.
"""


def default(op: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Implementations to be tried for an operation on this process's devices: those of the last entry all of
    whose sizes the policy reaches. A kernel refuses what it was not made for, and the next one is tried.
    """
    kind = target.device().device_kind
    chosen: tuple[str, ...] = ("xla",)
    if target.is_hopper() and op not in _LEFT_TO_XLA:
        chosen = _PACKED_ON_HOPPER if op == "packed_attention" else _ON_HOPPER
    for (device, operation), entries in TUNED.items():
        if operation == op and kind.startswith(device):
            for smallest, implementations in entries:
                if all(size >= least for size, least in zip(sizes, smallest, strict=True)):
                    chosen = implementations
    return chosen


def has_kernel(op: str) -> bool:
    """Whether an operation has a default other than `xla` for some sizes on this process's devices."""
    kind = target.device().device_kind
    measured = any(operation == op and kind.startswith(device) for device, operation in TUNED)
    return measured or (target.is_hopper() and op not in _LEFT_TO_XLA)
