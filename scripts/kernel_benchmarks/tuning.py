"""Writes `rljax/kernels/tuned.json`, the default backends by device and sizes, from results of the benchmark.

An entry of the table holds for every number of rows, slots and nodes of a policy. So a kernel becomes the
default for some sizes if it is faster than plain JAX over all cases of these sizes (geometric mean), and
clearly slower in none. A case that it refuses counts as a ratio of 1, since plain JAX computes it.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rljax.durable_files import write_durably
from rljax.errors import UserError
from rljax.kernels.switch import IMPLEMENTATIONS

_LEAST_GAIN = 1.05  # over all cases together
_LEAST_RATIO = 0.95  # in every case
_LEFT_OPEN_ON_TPUS = ("tree_attention", "compaction")  # the one without the other copies the cache

Ratios = dict[str, dict[str, float]]
"""By case: by implementation how many times as fast as plain JAX."""


def tune(files: Sequence[Path], table: Path) -> list[str]:
    """Updates the table by the measurements of the files; other entries stay. Returns a line for every entry
    that was written or left out; raises a UserError for a file that says nothing of an accelerator.
    """
    by_device = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    measured: dict[tuple[str, str, tuple[int, ...]], Ratios] = defaultdict(lambda: defaultdict(dict))
    for file in files:
        device, rows = _read(file)
        for op, case, name, sizes, ratio in rows:
            measured[device, op, sizes][case][name] = ratio
    lines = []
    for (device, op, sizes), ratios in sorted(measured.items()):
        shape = " x ".join(map(str, sizes))
        if device.startswith("TPU") and op in _LEFT_OPEN_ON_TPUS:
            lines.append(
                f"{device}, {op}, {shape}: left out; name both of {_LEFT_OPEN_ON_TPUS} in the config"
            )
            continue
        implementations, gain = _choice(ratios)
        entries = by_device.setdefault(device, {}).setdefault(op, [])
        entry = {"sizes": list(sizes), "implementations": implementations, "ratio": round(gain, 3)}
        entries[:] = [other for other in entries if other["sizes"] != entry["sizes"]] + [entry]
        entries.sort(key=lambda entry: (math.prod(entry["sizes"]), entry["sizes"]))
        lines.append(f"{device}, {op}, {shape}: {', '.join(implementations)} ({gain:.2f} times plain JAX)")
    try:
        write_durably(table, (json.dumps(by_device, indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise UserError(f"{table}: cannot be written: {error.strerror}") from error
    return lines


def _choice(ratios: Ratios) -> tuple[list[str], float]:
    """Returns the default implementations, and their speed relative to plain JAX over all cases."""
    best, gain = ["xla"], 1.0
    for name in sorted({name for of_case in ratios.values() for name in of_case} - {"xla"}):
        of_cases = [of_case.get(name, 1.0) for of_case in ratios.values()]
        mean = math.exp(sum(map(math.log, of_cases)) / len(of_cases))
        if mean >= max(_LEAST_GAIN, gain) and min(of_cases) >= _LEAST_RATIO:
            best, gain = [name, "xla"], mean
    return best, gain


def _read(file: Path) -> tuple[str, list[tuple[str, str, str, tuple[int, ...], float]]]:
    """Returns the device, and operation, case, implementation, sizes and ratio of every row."""
    try:
        content, measured = json.loads(file.read_text(encoding="utf-8")), []
        accelerator = content["machine"]["accelerator"]
        for row in content["rows"]:
            op, _, rest = row["name"].partition("/")
            case, _, name = rest.rpartition("/")
            measured.append((op, case, name, tuple(row["sizes"]), float(row["ratio"])))
    except OSError as error:
        raise UserError(f"--tune {file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--tune {file}: no results of bench_kernels.py") from error
    if accelerator is None:
        raise UserError(f"--tune {file}: measured on a CPU, whose default is xla; measure on an accelerator")
    ours = [name for name in IMPLEMENTATIONS if not name.startswith("interpret")]
    return accelerator.partition(" x ")[2], [entry for entry in measured if entry[2] in ours]
