"""What every part of the report on a GPU or TPU shares: its limit of time, its rows and its file.

A part is a module `gpu_parts/NAME.py` that ends with

    if __name__ == "__main__":
        run("NAME", measure)

Its file is rewritten after every row, so what was measured before a part is cut short is there. A part that
needs several sets of XLA's flags is started once for each (its variants in `scripts/gpu_report.py`), and each
start adds to the same file.
"""

import time

_START = time.monotonic()  # before JAX is imported: that time counts too

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402

from rljax.engine.executables import free_bytes  # noqa: E402
from rljax.errors import UserError  # noqa: E402
from rljax.provenance import source_digest, write_figures  # noqa: E402

_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "libtpu", "flax", "optax", "numpy", "torch", "triton")


class Part:
    """One start of one part; `variant` says which, if it has several, and `quick` that only tiny shapes are
    wanted: a look at a CPU, where kernels are interpreted.
    """

    def __init__(self, name: str, output: Path, seconds: float, quick: bool, variant: str) -> None:
        self.name, self.quick, self.variant = name, quick, variant
        self._output, self._end = output, _START + seconds
        kept: dict[str, Any] = json.loads(output.read_bytes()) if output.exists() else {}
        self._rows: list[dict[str, Any]] = kept.get("rows", [])
        self._notes: list[str] = kept.get("notes", [])

    def left(self) -> float:
        """Seconds until the limit of this start."""
        return self._end - time.monotonic()

    def row(
        self,
        name: str,
        value: float,
        unit: str,
        compile_seconds: float | None = None,
        repeats: int | None = None,
        **details: Any,
    ) -> None:
        """Adds a figure to the file, at once.

        `value` may be NaN, which becomes null; `compile_seconds` and `repeats` say how long its program took
        to compile and how often it was timed, if at all; details are neither arrays nor NumPy's numbers.
        """
        row = {
            "name": name,
            "value": value,
            "unit": unit,
            "variant": self.variant,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "compile_seconds": compile_seconds,
            "repeats": repeats,
        }
        if clash := row.keys() & details.keys():
            raise ValueError(f"{name}: details repeat {sorted(clash)}")
        self._rows.append(json.loads(json.dumps(row | details), parse_constant=lambda _: None))
        in_variant = f" ({self.variant})" if self.variant else ""
        more = "".join(f", {key} {_short(entry)}" for key, entry in details.items())
        print(f"{self.name}: {name}{in_variant}: {_short(value)} {unit}{more}", flush=True)
        self._write()

    def note(self, text: str) -> None:
        """Prints a line and adds it to the file: what was left out, and why."""
        self._notes.append(f"{self.variant}: {text}" if self.variant else text)
        print(f"{self.name}: {text}", flush=True)
        self._write()

    def has_time(self, name: str, seconds: float) -> bool:
        """Whether so many seconds are left; notes what is left out if not. A look may take what it takes."""
        if self.quick or self.left() >= seconds:
            return True
        self.note(f"{name} left out: {self.left():.0f} s are left")
        return False

    def has_room(self, name: str, needed: float) -> bool:
        """Whether the device has so many bytes free, and an eighth more for what programs take beside; notes
        what is left out if not. A device that does not tell has room.
        """
        free = free_bytes()
        if free is None or 1.125 * needed <= free:
            return True
        self.note(f"{name} left out: it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        return False

    def _write(self) -> None:
        figures = {"part": self.name, "quick": self.quick, "source": source_digest()}
        figures |= {"rows": self._rows, "notes": self._notes}
        write_figures(self._output, figures, f"scripts/gpu_report.py --parts {self.name}", _PACKAGES)


def run(name: str, measure: Callable[[Part], None], argv: Sequence[str] | None = None) -> None:
    """Runs a part as its module's command, and ends the process: status 1 if `measure` raised an error."""
    parser = argparse.ArgumentParser(prog=f"gpu_parts.{name}")
    parser.add_argument("--output", type=Path, required=True, help="the part's JSON file")
    parser.add_argument("--seconds", type=float, required=True, help="limit of this start")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a look at a CPU")
    parser.add_argument("--variant", default="", help="which of the part's variants XLA_FLAGS are of")
    arguments = parser.parse_args(argv)
    part = Part(name, arguments.output, arguments.seconds, arguments.quick, arguments.variant)
    jax.config.update("jax_default_prng_impl", "rbg")  # which compiles in a fifth of the time
    try:
        if not part.quick and jax.default_backend() not in ("gpu", "tpu"):
            raise UserError(f"JAX runs on {jax.default_backend()}, not on a GPU or TPU")
        measure(part)
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        part.note(f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        sys.exit(1)
    sys.exit(0)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
