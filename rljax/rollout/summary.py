"""What a rollout leaves for the report of a run: lengths of its responses, when they ran, and a few of them.

Bounded, whatever the size of a step: at most 64 bins, 256 points and a few thousand characters a sample.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.rollout.collector import Group

_MOST_BINS = 64
_HEAD, _TAIL = 1200, 600  # characters of a text that are kept


def summarize_rollout(
    groups: Sequence[Group],
    running: Sequence[Sequence[tuple[float, float]]],
    max_response_length: int,
    samples: int,
    decode: Callable[..., str],
) -> dict[str, Any]:
    """A step's rollout as JSON can hold it.

    Args:
      groups: everything that was sampled.
      running: number of running requests over time, per round (`RunningRequests.points`).
      max_response_length: in tokens; it fixes the bins, so that those of all steps are the same.
      samples: number of best and of worst responses to keep, each to another prompt.
      decode: `Tokenizer.decode`.

    Returns:
      `lengths`: `bin` tokens wide each, from 1 token on, with `counts`, trailing zeros left out. `running`.
      `best` and `worst`: samples, the most telling first.
    """
    width = -(-max_response_length // _MOST_BINS)
    lengths = [len(completion.response_ids) for group in groups for completion in group.completions]
    counts = np.bincount([(length - 1) // width for length in lengths])
    best, worst = _extremes(groups, samples)
    return {
        "lengths": {"bin": width, "counts": counts.tolist()},
        "running": [[list(point) for point in each] for each in running],
        "best": [_sample(groups[row], column, decode) for row, column in best],
        "worst": [_sample(groups[row], column, decode) for row, column in worst],
    }


def _extremes(groups: Sequence[Group], samples: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(group, response) of the best and the worst; of equals the first, and none is in both."""
    rewards = [np.nan_to_num(group.reward, nan=-np.inf) for group in groups]
    highest = sorted(range(len(groups)), key=lambda row: -rewards[row].max())
    best = [(row, int(rewards[row].argmax())) for row in highest[:samples]]
    lowest = sorted(range(len(groups)), key=lambda row: rewards[row].min())
    worst = [(row, int(rewards[row].argmin())) for row in lowest[:samples]]
    return best, [each for each in worst if each not in best]


def _sample(group: Group, column: int, decode: Callable[..., str]) -> dict[str, Any]:
    completion = group.completions[column]
    return {
        "problem": group.problem.id,
        "prompt": _shortened(decode(group.prompt_ids, skip_special_tokens=False)),
        "response": _shortened(decode(completion.response_ids.tolist())),
        "rewards": {name: _finite(value) for name, value in group.rewards[column].items()},
        "tokens": len(completion.response_ids),
        "finish_reason": completion.finish_reason,
    }


def _shortened(text: str) -> str:
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    return f"{text[:_HEAD]}\n[... {left_out:,} characters left out ...]\n{text[-_TAIL:]}"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
