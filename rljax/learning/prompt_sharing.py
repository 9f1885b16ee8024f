"""Prompts that several sequences of a micro-batch share, computed once (`rljax/models/compact_tokens.py`).

A token's activations depend on the token and its prefix alone, so those of equal prompts are equal. The last
position of a prompt predicts the first response token, which differs between responses, and is computed for
each.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rljax.models.compact_tokens import COPY_BLOCK, CompactTokens

SHORTEST_SHARED = 32
"""Smallest number of positions that is worth a copy; responses that lie side by side share any prompt."""
_SMALLEST_SIZE = 128


def prompt_key(prompt_ids: ArrayLike) -> bytes:
    """Returns a key that is equal for equal prompts."""
    return np.asarray(prompt_ids, np.int64).tobytes()


def num_shareable(num_prompt: int) -> int:
    """Returns the number of positions of a prompt that a copy of it need not compute."""
    return num_prompt - 1 if num_prompt > SHORTEST_SHARED else 0


def copied_share(prompts: Sequence[ArrayLike], lengths: Sequence[int]) -> float:
    """Returns the share of tokens that are copies, if all sequences were in one micro-batch.

    Args:
      prompts: prompt of each sequence.
      lengths: tokens of prompt and response of each sequence.
    """
    distinct: set[bytes] = set()
    copied = 0
    for prompt in prompts:
        key = prompt_key(prompt)
        if key in distinct:
            copied += len(prompt) - 1
        distinct.add(key)
    return copied / max(sum(lengths), 1)


def padded_size(count: int) -> int:
    """Returns the array size for a number of tokens, one of few, so that few programs are
    compiled: a multiple of 128, and one of at most 4 sizes between powers of two.
    """
    step = max(_SMALLEST_SIZE, 1 << max(count.bit_length() - 3, 0))
    return max(-(-count // step), 1) * step


def compact_tokens(
    prompts: Iterable[tuple[int, ArrayLike]],
    bundles: np.ndarray,
    branches: np.ndarray,
    scored_mask: np.ndarray,
) -> CompactTokens:
    """Returns the tokens to compute of packed rows, as numpy arrays.

    Args:
      prompts: packed position (counted over all rows) of every prompt in the rows, and its tokens.
      bundles, branches: int32 [R, T], as in `CompactTokens`.
      scored_mask: bool [R, T], positions whose logits are needed; none of a prompt but its last.
    """
    computed = bundles > 0
    first_copies: dict[bytes, int] = {}
    copies: list[tuple[int, int, int]] = []
    for start, prompt in sorted(prompts, key=lambda entry: entry[0]):
        count = num_shareable(len(prompt))
        original = first_copies.setdefault(prompt_key(prompt), start)
        if count and original != start:
            copies.append((start, original, count))
            computed.reshape(-1)[start : start + count] = False
    scored = np.flatnonzero(scored_mask & computed)
    others = np.flatnonzero(computed & ~scored_mask)
    source = np.zeros(bundles.size, np.int32)
    padded_scored = _padded(scored, padded_size(len(scored)))
    source[scored] = np.arange(len(scored))
    source[others] = len(padded_scored) + np.arange(len(others))
    blocks = []
    for start, original, count in copies:
        source[start : start + count] = source[original : original + count]
        blocks += [
            (start + offset, source[original + offset], min(COPY_BLOCK, count - offset))
            for offset in range(0, count, COPY_BLOCK)
        ]
    # At most one block of a copy is not full, and a copy has at least SHORTEST_SHARED positions.
    most_blocks = bundles.size // COPY_BLOCK + bundles.size // SHORTEST_SHARED + 1
    return CompactTokens(
        scored=padded_scored,
        others=_padded(others, padded_size(len(others))),
        source=source.reshape(bundles.shape),
        computed=computed,
        bundles=bundles,
        branches=branches,
        copies=_padded(np.asarray(blocks, np.int32).reshape(-1, 3), most_blocks),
        counts=np.asarray([len(scored), len(others), len(blocks)], np.int32),
    )


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros((size, *values.shape[1:]), np.int32)
    padded[: len(values)] = values
    return padded
