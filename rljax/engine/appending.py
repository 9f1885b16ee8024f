"""Appends tokens that were not sampled to a response: the answer of a tool.

The tokens go through a pass as an accepted path does, but nothing is sampled and all are committed, so their
keys and values have the bits of decoding, and of training. The last token stays uncommitted, like the last
token of a prompt: it is the input of the next pass.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from flax import struct
from jax import Array

from rljax.engine.draft_tree import NodeRows, empty_tree, pack_rows

WIDTH = 16
"""Largest number of tokens of a slot in one pass."""
ROWS = (16, 64)
"""Numbers of tokens of all slots in one pass; one program each."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Tokens to append to a slot.

    Attributes:
      length: number of committed tokens to keep. Tokens that the slot has decoded beyond them are discarded.
      tokens: tokens after these, at least two; the first is the last sampled one, which is not committed
        yet.
      max_response: number of response tokens that the slot may still sample.
    """

    slot: int
    length: int
    tokens: Sequence[int]
    max_response: int


@struct.dataclass
class AppendedChunk:
    """Tokens that one pass appends to B slots, up to W per slot.

    Attributes:
      tokens: int32 [B, W], tokens to commit.
      counts: int32 [B], number of them; a slot without any does not change.
      lengths: int32 [B], number of tokens committed before.
      following: int32 [B], token after those of this chunk.
      remaining: int32 [B], number of response tokens that the slot may sample afterwards.
      complete: bool [B], whether nothing is left to append, so that the slot decodes again.
    """

    tokens: Array
    counts: Array
    lengths: Array
    following: Array
    remaining: Array
    complete: Array


def empty_chunk(batch: int) -> AppendedChunk:
    """Returns a chunk without tokens, on the host, to be filled in."""
    return AppendedChunk(
        tokens=np.zeros((batch, WIDTH), np.int32),
        counts=np.zeros(batch, np.int32),
        lengths=np.zeros(batch, np.int32),
        following=np.zeros(batch, np.int32),
        remaining=np.zeros(batch, np.int32),
        complete=np.zeros(batch, bool),
    )


def chunks(batch: int, continuations: Sequence[Continuation]) -> Iterator[tuple[AppendedChunk, NodeRows]]:
    """Yields chunk and rows of each pass; a pass takes as many slots as have room."""
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
    """Returns rows for the tokens of a chunk."""
    tree = empty_tree(len(chunk.counts), WIDTH - 1)
    tree.valid[:] = np.arange(1, WIDTH) < chunk.counts[:, None]
    return pack_rows(tree, np.flatnonzero(chunk.counts), rows)
