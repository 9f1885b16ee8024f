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


def prompt_key(prompt_ids: ArrayLike) -> bytes:
    """Returns a key that is equal for equal prompts."""
    return np.asarray(prompt_ids, np.int64).tobytes()


def num_shareable(num_prompt: int) -> int:
    """Returns the number of positions of a prompt that a copy of it need not compute."""
    return num_prompt - 1 if num_prompt > SHORTEST_SHARED else 0


def copied_share(prompts: Sequence[ArrayLike], lengths: Sequence[int]) -> float:
    """Returns the share of tokens that are copies, if all sequences were in one micro-batch.

    Args:
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


def compact_sizes(num_tokens: int, num_scored: int, positions: int) -> tuple[int, int]:
    """Returns the array sizes M and L for a number of tokens, `num_scored` of them with logits. Every pair is
    a program of its own, so there are few: M is half of the micro-batch's positions or all, L a quarter of M
    (long prompts), three quarters or all.
    """
    half = -(-positions // 2)
    size = half if num_tokens <= half else positions
    return size, next(part for part in (-(-size // 4), -(-3 * size // 4), size) if num_scored <= part)


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
    tokens = np.concatenate([scored, np.flatnonzero(computed & ~scored_mask)])
    source = np.zeros(bundles.size, np.int32)
    source[tokens] = np.arange(len(tokens))
    blocks = []
    for start, original, count in copies:
        source[start : start + count] = source[original : original + count]
        blocks += [
            (start + offset, source[original + offset], min(COPY_BLOCK, count - offset))
            for offset in range(0, count, COPY_BLOCK)
        ]
    # At most one block of a copy is not full, and a copy has at least SHORTEST_SHARED positions.
    most_blocks = bundles.size // COPY_BLOCK + bundles.size // SHORTEST_SHARED + 1
    size, num_logits = compact_sizes(len(tokens), len(scored), bundles.size)
    padded = _padded(tokens, size)
    return CompactTokens(
        scored=padded[:num_logits],
        others=padded[num_logits:],
        source=source.reshape(bundles.shape),
        computed=computed,
        bundles=bundles,
        branches=branches,
        copies=_padded(np.asarray(blocks, np.int32).reshape(-1, 3), most_blocks),
        counts=np.asarray([len(scored), len(tokens), len(blocks)], np.int32),
    )


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros((size, *values.shape[1:]), np.int32)
    padded[: len(values)] = values
    return padded
