"""A summary of a rollout for the report of a run: response lengths, running requests over time, and samples.

Its size does not grow with the step: at most 64 bins, 256 points and a few thousand characters a sample.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.models.tokenizer import Decode, Tokenizer
from rljax.rollout.collector import Group

_MOST_BINS = 64
_HEAD, _TAIL = 1200, 600  # characters of a text that are kept
_NOTE = "\n[... {:,} characters left out ...]\n"


def summarize_rollout(
    groups: Sequence[Group],
    running: Sequence[Sequence[tuple[float, float]]],
    max_response_length: int,
    samples: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Returns a summary of a step's rollout as JSON values.

    Args:
      running: number of running requests over time, per round (`RunningRequests.points`).
      max_response_length: largest number of tokens in a response; it makes the bins of all steps the same.
      samples: number of best and of worst responses to keep, all to different prompts.

    Returns:
      `lengths`: the width `bin` of the bins in tokens, from 1 token on, and their `counts` without trailing
      zeros. `running`. `best` and `worst`: samples, the most extreme first.
    """
    width = -(-max_response_length // _MOST_BINS)
    lengths = [len(completion.response_ids) for group in groups for completion in group.completions]
    counts = np.bincount([(length - 1) // width for length in lengths])
    best, worst = _extremes(groups, samples)
    return {
        "lengths": {"bin": width, "counts": counts.tolist()},
        "running": [[list(point) for point in points] for points in running],
        "best": [_sample(groups[row], column, tokenizer) for row, column in best],
        "worst": [_sample(groups[row], column, tokenizer) for row, column in worst],
    }


def _extremes(groups: Sequence[Group], samples: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (group, response) of the best and the worst, the first of equals; no response is in both, and
    none that is left out in either.
    """
    rewards = {row: group.reward for row, group in enumerate(groups) if not np.isnan(group.reward).all()}
    highest = sorted(rewards, key=lambda row: -np.nanmax(rewards[row]))
    best = [(row, int(np.nanargmax(rewards[row]))) for row in highest[:samples]]
    lowest = sorted(rewards, key=lambda row: np.nanmin(rewards[row]))
    worst = [(row, int(np.nanargmin(rewards[row]))) for row in lowest[:samples]]
    return best, [place for place in worst if place not in best]


def _sample(group: Group, column: int, tokenizer: Tokenizer) -> dict[str, Any]:
    completion = group.last_of(column)
    if completion is None:  # an agent that asked for nothing
        return {
            "problem": group.problem.id,
            "prompt": "",
            "response": "",
            "rewards": {name: _finite(value) for name, value in group.rewards[column].items()},
            "tokens": 0,
            "finish_reason": "nothing was sampled",
        }
    turns = completion.episode is not None or completion.prompt_ids is not None  # with their markers
    decode, read = tokenizer.decode if turns else tokenizer.response_text, []
    response = decode(completion.response_ids.tolist())
    if turns:
        read = _in_text(completion.response_ids, _runs(~completion.sampled_mask), response, decode)
    drafted = _in_text(completion.response_ids, completion.accepted_spans, response, decode)
    return {
        "problem": group.problem.id,
        "prompt": _shortened(tokenizer.decode(group.prompt_of(completion))),
        "response": _shortened(response),
        **({"drafted": _shortened_spans(drafted, len(response))} if drafted else {}),
        **({"read": _shortened_spans(read, len(response))} if read else {}),
        **({"turn_rewards": list(completion.episode.rewards)} if completion.episode is not None else {}),
        "rewards": {name: _finite(value) for name, value in group.rewards[column].items()},
        "tokens": len(completion.response_ids),
        "finish_reason": completion.finish_reason,
    }


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Returns (begin, end) of the runs of True in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _in_text(
    response_ids: np.ndarray, token_spans: Sequence[tuple[int, int]], text: str, decode: Decode
) -> list[tuple[int, int]]:
    """Returns (begin, end) of tokens as (begin, end) in their text; none where one ends within a character,
    whose place in the text is then unknown.
    """
    spans, at, length = [], 0, 0
    tokens, parts = response_ids.tolist(), []
    for begin, end in (*token_spans, (len(tokens), len(tokens))):
        parts += [decode(tokens[at:begin]), decode(tokens[begin:end])]
        begins = length + len(parts[-2])
        length = begins + len(parts[-1])
        spans.append((begins, length))
        at = end
    return spans[:-1] if "".join(parts) == text else []


def _shortened_spans(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Returns spans of a text of this length as spans of what `_shortened` leaves of it."""
    left_out = length - _HEAD - _TAIL
    if left_out <= 0:
        return list(spans)
    kept = [(begin, min(end, _HEAD)) for begin, end in spans if begin < _HEAD]
    shift = len(_NOTE.format(left_out)) - left_out
    tail = [(max(begin, length - _TAIL) + shift, end + shift) for begin, end in spans if end > length - _TAIL]
    return kept + tail


def _shortened(text: str) -> str:
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    return f"{text[:_HEAD]}{_NOTE.format(left_out)}{text[-_TAIL:]}"


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
