"""The default backend of each operation, by device and policy: from measurements, and `xla` without one.

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


def default(op: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Implementations to be tried for an operation on this process's devices: those of the last entry all of
    whose sizes the policy reaches.
    """
    kind = target.device().device_kind
    chosen: tuple[str, ...] = ("xla",)
    for (device, operation), entries in TUNED.items():
        if operation == op and kind.startswith(device):
            for smallest, implementations in entries:
                if all(size >= least for size, least in zip(sizes, smallest, strict=True)):
                    chosen = implementations
    return chosen


def is_tuned(op: str) -> bool:
    """Whether some measured entry for an operation is about this process's devices."""
    kind = target.device().device_kind
    return any(operation == op and kind.startswith(device) for device, operation in TUNED)
