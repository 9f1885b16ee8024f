"""Seconds of passes: a roofline over a model's shape and a device, or passes that were measured or planned.

    seconds = max(arithmetic of all rows, reading the weights) + reading the cache + what every pass takes

All but the reading of the cache depend on the number of rows alone, so that times between two events have a
closed form (`worker.py`). The cache is added, where a plan takes the longer one of all arithmetic and all
reading (`rljax/planning/roofline.py`): attention begins when the products before it end.
"""

import bisect
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rljax.errors import ConfigError, known_names
from rljax.planning.hardware import Hardware, Work

T = TypeVar("T")


class PassCosts(Protocol):
    """Seconds of a worker's passes.

    Attributes:
      cached: seconds by which a pass takes longer for every token in the cache of its slots.
    """

    cached: float

    def fixed(self, rows: int) -> float:
        """Returns the seconds of a pass over so many tokens with an empty cache."""

    def prefill(self, tokens: int) -> float:
        """Returns the seconds of prefilling so many tokens."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a policy decides about its speed.

    Attributes:
      params: number of parameters.
      layers: number of layers.
      kv_size: heads of keys times their size.
    """

    params: float
    layers: int
    kv_size: int


SHAPES = {
    "qwen2.5-0.5b": Shape(0.49e9, 24, 2 * 64),
    "qwen2.5-1.5b": Shape(1.54e9, 28, 2 * 128),
    "qwen2.5-7b": Shape(7.6e9, 28, 4 * 128),
    "qwen3-8b": Shape(8.2e9, 36, 8 * 128),
    "qwen3-14b": Shape(14.8e9, 40, 8 * 128),
    "qwen2.5-32b": Shape(32.8e9, 64, 8 * 128),
}


@dataclasses.dataclass(frozen=True)
class RooflineCosts:
    """See the module's docstring.

    Attributes:
      row: seconds of arithmetic of a row.
      weights: seconds of reading the weights.
      cached: seconds of reading a token of the cache.
      base: seconds that every pass takes besides.
    """

    row: float
    weights: float
    cached: float
    base: float

    def fixed(self, rows: int) -> float:
        return max(rows * self.row, self.weights) + self.base

    def prefill(self, tokens: int) -> float:
        return max(tokens * self.row, self.weights) + self.base if tokens else 0.0


def roofline_costs(shape: Shape, hardware: Hardware, base: float = 0.0) -> RooflineCosts:
    """Returns the costs of decoding in bfloat16 on a device, or on several as one (`Hardware.reaching`)."""

    def seconds(flops: float, size: float) -> float:
        return hardware.seconds(Work(flops, size), "bfloat16")

    cached = 4.0 * shape.layers * shape.kv_size  # bytes of a token's keys and values
    size = 2.0 * shape.params
    return RooflineCosts(seconds(size, 0.0), seconds(0.0, size), seconds(0.0, cached), base)


@dataclasses.dataclass(frozen=True)
class TableCosts:
    """Passes that were measured or planned; between two of them seconds are linear in the rows.

    Attributes:
      rows: ascending numbers of rows.
      seconds: of the pass with so many rows.
      prefill_token: seconds of a prefilled token.
      round_up: whether a number between two is computed as the larger one, as the engine's buckets do.
      cached: see `PassCosts`; 0, since the seconds are those at a mean length.
    """

    rows: Sequence[int]
    seconds: Sequence[float]
    prefill_token: float = 0.0
    round_up: bool = False
    cached: float = 0.0

    def fixed(self, rows: int) -> float:
        at = bisect.bisect_left(self.rows, rows)
        if at == len(self.rows):  # beyond the table, arithmetic rules
            return self.seconds[-1] * rows / self.rows[-1]
        if self.round_up or at == 0 or self.rows[at] == rows:
            return self.seconds[at]
        share = (rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1])

    def prefill(self, tokens: int) -> float:
        return tokens * self.prefill_token


def planned_costs(path: str) -> TableCosts:
    """Returns the decode passes of a plan that `scripts/plan.py --json FILE` wrote.

    Raises:
      ConfigError: the file cannot be read, or is none.
    """
    try:
        plan: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        passes = sorted((row["rows"], row["seconds"]) for row in plan["decoding"])
    except OSError as error:
        raise ConfigError(f"costs: {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"costs: {path} is no plan of `scripts/plan.py --json`") from error
    rows, seconds = zip(*passes, strict=True)
    return TableCosts(rows, seconds, round_up=True)


def named(key: str, name: str, known: Mapping[str, T]) -> T:
    """Returns what is known by a name.

    Raises:
      ConfigError: there is none of that name.
    """
    if name not in known:
        raise ConfigError(f"{key}: unknown {key} {name!r}; {known_names(name, list(known))}")
    return known[name]
