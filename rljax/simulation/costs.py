"""Seconds of passes: a roofline over a model's shape and a device, or passes that were measured or planned.

    seconds = max(arithmetic of all rows, reading weights and logits) + reading the cache
              + what every pass takes besides

What is computed and read is counted as in a plan (`rljax/planning/passes.py`). All but the reading of the
cache depends on the number of rows alone, so that times between two events have a closed form (`worker.py`).
The cache is added, where a plan takes the longer one of all arithmetic and all reading: attention begins when
the products before it end. Its arithmetic is left out, as in decoding its reading takes longer.
"""

import bisect
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rljax.errors import ConfigError, known_names
from rljax.models.config import ModelConfig
from rljax.planning.hardware import Hardware, Work
from rljax.planning.passes import pass_work

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


def _policy(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head: int, mlp: int, tied: bool = False
) -> ModelConfig:
    return ModelConfig("", vocab, hidden, layers, heads, kv_heads, head, mlp, tie_embeddings=tied)


POLICIES = {
    "qwen2.5-0.5b": _policy(151_936, 896, 24, 14, 2, 64, 4864, tied=True),
    "qwen2.5-1.5b": _policy(151_936, 1536, 28, 12, 2, 128, 8960, tied=True),
    "qwen2.5-7b": _policy(152_064, 3584, 28, 28, 4, 128, 18_944),
    "qwen3-8b": _policy(151_936, 4096, 36, 32, 8, 128, 12_288),
    "qwen3-14b": _policy(151_936, 5120, 40, 40, 8, 128, 17_408),
    "qwen2.5-32b": _policy(152_064, 5120, 64, 40, 8, 128, 27_648),
    "llama-3.3-70b": _policy(128_256, 8192, 80, 64, 8, 128, 28_672),
}
"""Shapes of published policies, from their configs."""


@dataclasses.dataclass(frozen=True)
class RooflineCosts:
    """See the module's docstring.

    Attributes:
      row: seconds of arithmetic of a row.
      weights: seconds of reading the weights.
      cached: seconds of reading a token of the cache.
      base: seconds that every pass takes besides.
      logits: seconds of writing and reading the logits of a row.
    """

    row: float
    weights: float
    cached: float
    base: float
    logits: float = 0.0

    def fixed(self, rows: int) -> float:
        return max(rows * self.row, self.weights + rows * self.logits) + self.base

    def prefill(self, tokens: int) -> float:
        return max(tokens * self.row, self.weights) + self.base if tokens else 0.0


def roofline_costs(
    model: ModelConfig, hardware: Hardware, base: float = 0.0, latency: float = 0.0
) -> RooflineCosts:
    """Returns the costs of decoding in bfloat16 on a device, or on several as one (`Hardware.reaching`).

    Args:
      model: the policy.
      hardware: the device.
      base: seconds that every pass takes besides.
      latency: seconds of an all-reduce of few rows, of which every layer has two; 0 on a single device.
    """
    work = pass_work(model)

    def seconds(flops: float, size: float) -> float:
        return hardware.seconds(Work(flops, size), "bfloat16")

    return RooflineCosts(
        seconds(2.0 * work.products, 0.0),
        seconds(0.0, work.weights),
        seconds(0.0, work.cached),
        base + 2 * model.num_layers * latency,
        seconds(0.0, work.logits),
    )


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
