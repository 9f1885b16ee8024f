"""Tokens that nobody samples, behind what a slot has: a tool's answer, in the middle of a response.

They are known, so they go through a pass as a verified path does, but all of them are committed and nothing
is sampled: their keys and values have the bits of decoding, and so of training. The last one stays
uncommitted, as the prompt's last token does: the next pass takes it as input.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from flax import struct
from jax import Array

from rljax.engine.draft_tree import NodeRows, empty_tree, pack_rows

WIDTH = 16
"""Tokens of a slot in one pass."""
ROWS = (16, 64)
"""Tokens of all slots in one pass; a program each."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How a slot goes on.

    Attributes:
      slot: which.
      length: committed tokens that count. The slot may have decoded further: that is forgotten.
      tokens: what stands behind these, at least two: first what the slot sampled last, not committed yet.
      max_response: response tokens it may still sample.
    """

    slot: int
    length: int
    tokens: Sequence[int]
    max_response: int


@struct.dataclass
class AppendedChunk:
    """What one pass appends to B slots, W tokens a slot.

    Attributes:
      tokens: int32 [B, W], to be committed.
      counts: int32 [B], how many of them; a slot with none stands still.
      lengths: int32 [B], committed tokens before.
      following: int32 [B], the token behind those of this chunk.
      remaining: int32 [B], response tokens the slot may sample then.
      complete: bool [B], nothing is left to append: the slot decodes again.
    """

    tokens: Array
    counts: Array
    lengths: Array
    following: Array
    remaining: Array
    complete: Array


def empty_chunk(batch: int) -> AppendedChunk:
    """Nothing for any slot, on the host, to be filled in."""
    return AppendedChunk(
        tokens=np.zeros((batch, WIDTH), np.int32),
        counts=np.zeros(batch, np.int32),
        lengths=np.zeros(batch, np.int32),
        following=np.zeros(batch, np.int32),
        remaining=np.zeros(batch, np.int32),
        complete=np.zeros(batch, bool),
    )


def chunks(batch: int, continuations: Sequence[Continuation]) -> Iterator[tuple[AppendedChunk, NodeRows]]:
    """The passes that it takes, on the host: as many slots in each as have room."""
    done = [0] * len(continuations)
    while any(done[i] + 1 < len(each.tokens) for i, each in enumerate(continuations)):
        chunk, room = empty_chunk(batch), ROWS[-1]
        for i, each in enumerate(continuations):
            begin = done[i]
            count = min(len(each.tokens) - 1 - begin, WIDTH, room)
            if count == 0:
                continue
            end = done[i] = begin + count
            room -= count
            chunk.tokens[each.slot, :count] = each.tokens[begin:end]
            chunk.counts[each.slot] = count
            chunk.lengths[each.slot] = each.length + begin
            chunk.following[each.slot] = each.tokens[end]
            chunk.remaining[each.slot] = each.max_response
            chunk.complete[each.slot] = end + 1 == len(each.tokens)
        yield chunk, node_rows(chunk, next(rows for rows in ROWS if rows >= ROWS[-1] - room))


def node_rows(chunk: AppendedChunk, rows: int) -> NodeRows:
    """Rows for the tokens of a chunk."""
    tree = empty_tree(len(chunk.counts), WIDTH - 1)
    tree.valid[:] = np.arange(1, WIDTH) < chunk.counts[:, None]
    return pack_rows(tree, np.flatnonzero(chunk.counts), rows)
