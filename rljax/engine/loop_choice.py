"""Which decode loop is faster, measured where the program runs: one that ends as soon as it may, or a fixed.

Before every step of the first, the host reads whether there is one. On a CPU that costs nothing; an
accelerator waits meanwhile for the kernels of the next step.
"""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from rljax import target
from rljax.durable_files import write_durably
from rljax.engine.engine import DecodeEngine
from rljax.engine.invariance import surroundings_digest
from rljax.engine.state import half_full
from rljax.models.transformer import Params
from rljax.timing import paired

_ROUNDS = 5


def is_measured(decode_loop: str, several_processes: bool) -> bool:
    """Whether a run's start times both loops, and its calls may then take either, by `engine.decode_loop`. On
    a CPU a loop that ends as soon as it may waits for nobody; several processes must run the same programs.
    """
    return decode_loop == "auto" and target.platform() != "cpu" and not several_processes


def choose_loop(
    engine: DecodeEngine, params: Params, batches: Sequence[int], positions: int, directory: str | None
) -> None:
    """Sets what the engine gains by a fixed loop: the least over these batches, all slots busy, in caches of
    so many positions or a call's; 0 where a fixed loop is not faster. The ratios are kept in `directory`,
    unless None, for the next process.

    Args:
      params: weights from `engine.load_params`.
    """
    buckets = engine.buckets
    length = buckets.cache_for(min(max(positions, 2 * engine.decode_steps_per_sync), buckets.cache[-1]))
    path = Path(os.devnull)
    if directory is not None:
        key = surroundings_digest(("decode loop", engine.program_key, batches, length))
        path = Path(directory) / "loops" / f"{key}.json"
    try:
        ratios = json.loads(path.read_bytes())
    except (OSError, ValueError):  # measured anew, whatever was wrong with the file
        ratios = [_ratio(engine, params, batch, length) for batch in batches]
        if directory is not None:
            with contextlib.suppress(OSError):  # a later process measures again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_durably(path, json.dumps(ratios).encode())
    gain = min(ratios)
    engine.fixed_gain = gain if gain > 1 else 0.0


def _ratio(engine: DecodeEngine, params: Params, batch: int, length: int) -> float:
    """Returns how many times as fast a call is with a fixed loop."""
    state = engine.init_state(batch, length)

    def decode(fixed: bool) -> None:
        nonlocal state
        engine.fixed_gain = math.inf if fixed else 0.0
        state, _ = engine.generate(params, half_full(state))

    return paired(lambda: decode(True), lambda: decode(False), _ROUNDS).ratio
