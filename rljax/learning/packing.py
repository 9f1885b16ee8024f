"""Variable-length sequences packed into rows of one length, so that little of an update is spent on padding.

Sequences (prompt and response) are segments of a row that do not attend to each other. Attention restricts
where they may start (`rljax/numerics/attention.py`): it adds values in chunks of `chunk` keys, counted from
the start of the row. The decoder's cache starts every sequence at 0, so a packed sequence has the decoder's
sums, and with them its logprobs bit for bit, only if its chunks end where the decoder's do:

- a sequence of at most `chunk` tokens lies within one chunk (the other keys of the chunk add exact zeros);
- a longer one starts at a chunk boundary; the rest of its last chunk may hold short ones.

Sequences with the same prompt may be laid out side by side, behind one copy of it (`pack_groups`). Their
prompt is then read where the first of them has it, and their other tokens lie in the chunk in which it ends,
as they do in the decoder's cache; the tokens of the others, in between, add exact zeros.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import flax.struct
import jax
import numpy as np
from numpy.typing import ArrayLike

from rljax import target
from rljax.errors import UserError
from rljax.learning.prompt_sharing import compact_tokens, prompt_key
from rljax.models.compact_tokens import CompactTokens
from rljax.numerics.rows import KEY_CHUNK


@dataclasses.dataclass(frozen=True)
class Packing:
    """Positions of N sequences in packed rows.

    Attributes:
      lengths: int64 [N], tokens of each sequence.
      row: int64 [N], row of each sequence, from 0 to num_rows - 1.
      start: int64 [N], position in its row of the first token of each sequence that is its own.
      num_rows: number of rows in use.
      pack_length: tokens in a row, T.
      shared: int64 [N], leading tokens that a sequence does not have in its row: it lies after others of the
        same prompt and reads the prompt of the first of them. 0: none does.
    """

    lengths: np.ndarray
    row: np.ndarray
    start: np.ndarray
    num_rows: int
    pack_length: int
    shared: np.ndarray | int = 0

    def microbatches(self, rows_per_microbatch: int, row_multiple: int = 1) -> list[range]:
        """Returns the rows of each micro-batch: as many full ones as possible, then smaller ones.

        The sizes are those of `microbatch_sizes`: 10 rows by 4 are 4 + 4 + 2 on a CPU, 4 + 4 + 1 + 1 on an
        accelerator. Ranges may reach past `num_rows`, to empty rows.

        Args:
          rows_per_microbatch: the largest size.
          row_multiple: divisor of every size and of rows_per_microbatch: the number of devices that share the
            rows of a batch. With rows_per_microbatch itself all micro-batches have the same size.
        """
        sizes = microbatch_sizes(rows_per_microbatch, row_multiple)
        batches: list[range] = []
        first = 0
        while first < self.num_rows:
            rest = self.num_rows - first
            size = next((size for size in sizes if size <= rest), sizes[-1])
            batches.append(range(first, first + size))
            first += size
        return batches

    def padding_fraction(self, num_rows: int | None = None) -> float:
        """Returns the share of positions without a token.

        Args:
          num_rows: number of rows to count, such as the stop of the last micro-batch; None for those in use.
        """
        positions = (self.num_rows if num_rows is None else num_rows) * self.pack_length
        return 1.0 - int((self.lengths - self.shared).sum()) / positions if positions else 0.0


def microbatch_sizes(rows_per_microbatch: int, row_multiple: int = 1) -> list[int]:
    """Returns the numbers of rows of micro-batches, descending, each of which is a program of its own:
    `rows_per_microbatch` and its halves, so that hardly any row is empty. On an accelerator, where a program
    takes long to compile and rows little time, only every other one of them. Arguments as in
    `Packing.microbatches`.
    """
    if rows_per_microbatch % row_multiple:
        raise ValueError(
            f"rows_per_microbatch: {rows_per_microbatch} is not a multiple of row_multiple {row_multiple}"
        )
    units, sizes, step = rows_per_microbatch // row_multiple, [], 2 if target.platform() == "cpu" else 4
    while units:
        sizes.append(units * row_multiple)
        units //= step
    return sizes


def pack_sequences(lengths: ArrayLike, pack_length: int, chunk: int = KEY_CHUNK) -> Packing:
    """Packs sequences by best-fit-decreasing, under the chunk rule of this module.

    Args:
      lengths: int [N], each at least 1.
      pack_length: tokens in a row.
      chunk: tokens in a chunk of attention's sums.

    Raises:
      UserError: a sequence is longer than a row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.ndim != 1 or np.any(lengths < 1):
        raise ValueError("lengths: expected [N], each at least 1")
    if lengths.size and lengths.max() > pack_length:
        raise UserError(
            f"training.pack_length: {pack_length} is less than a sequence of {lengths.max()} tokens (prompt"
            " and response); raise it, or lower rollout.max_prompt_length or rollout.max_response_length"
        )
    row = np.zeros(lengths.shape, np.int64)
    start = np.zeros(lengths.shape, np.int64)
    num_rows = 0
    # Free space, sorted as (tokens, row, start): the first entry with enough tokens is the tightest fit.
    # Sequences longer than a chunk are placed first, at the left end of `tails`. Then the tails are cut into
    # `gaps` for short sequences.
    tails: list[tuple[int, int, int]] = []
    gaps: list[tuple[int, int, int]] = []

    def chunk_gaps(tail: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        _, tail_row, first = tail
        return [(min(chunk, pack_length - s), tail_row, s) for s in range(first, pack_length, chunk)]

    def tightest(free: list[tuple[int, int, int]], length: int) -> tuple[int, int, int] | None:
        index = bisect.bisect_left(free, (length, -1, -1))
        return free.pop(index) if index < len(free) else None

    order = np.argsort(-lengths, kind="stable")
    num_long = int(np.sum(lengths > chunk))
    for i in order[:num_long]:
        length = int(lengths[i])
        place = tightest(tails, length)
        if place is None:
            place, num_rows = (pack_length, num_rows, 0), num_rows + 1
        _, row[i], start[i] = place
        end = int(start[i]) + length
        boundary = min(-(-end // chunk) * chunk, pack_length)
        if boundary > end:
            bisect.insort(gaps, (boundary - end, int(row[i]), end))
        if pack_length > boundary:
            bisect.insort(tails, (pack_length - boundary, int(row[i]), boundary))
    gaps = sorted(gaps + [gap for tail in tails for gap in chunk_gaps(tail)])
    for i in order[num_long:]:
        length = int(lengths[i])
        place = tightest(gaps, length)
        if place is None:
            gaps = sorted(gaps + chunk_gaps((pack_length, num_rows, 0)))
            num_rows += 1
            place = tightest(gaps, length)
        free, row[i], start[i] = place
        if free > length:
            bisect.insort(gaps, (free - length, int(row[i]), int(start[i]) + length))
    return Packing(lengths, row, start, num_rows, pack_length)


def pack_groups(
    lengths: ArrayLike,
    prompts: Sequence[ArrayLike],
    pack_length: int,
    rows_per_microbatch: int,
    chunk: int = KEY_CHUNK,
) -> Packing:
    """Packs sequences as `pack_sequences` does, but those of one prompt side by side after one copy of it,
    as many as a chunk holds, and into one micro-batch if they fit.

    Groups are added to a micro-batch, in order, until one does not fit. The rows that are left then stay
    empty: they cost little where padding is not computed (`rljax/learning/prompt_sharing.py`).

    Args and errors as of `pack_sequences`, lengths with their prompts', and:
      rows_per_microbatch: the largest size of `Packing.microbatches`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt_key(prompt), []).append(index)
    parts: list[tuple[list[list[int]], Packing]] = []
    shared = np.zeros_like(lengths)

    def pack(bundles: list[list[int]]) -> Packing:
        sizes = [int((lengths - shared)[bundle].sum()) for bundle in bundles]
        return pack_sequences(sizes, pack_length, chunk)

    for members in groups.values():
        common = max(len(prompts[members[0]]) - 1, 0)
        added = _bundles(members, lengths, common, pack_length, chunk)
        for bundle in added:
            shared[bundle[1:]] = common
        if parts:
            last, _ = parts[-1]
            joined = pack(last + added)
            if joined.num_rows <= rows_per_microbatch:
                parts[-1] = last + added, joined
                continue
        parts.append((added, pack(added)))
    row, start = np.zeros_like(lengths), np.zeros_like(lengths)
    first_row = num_rows = 0
    for bundles, packing in parts:
        for bundle, bundle_row, bundle_start in zip(bundles, packing.row, packing.start, strict=True):
            row[bundle] = bundle_row + first_row
            own = (lengths - shared)[bundle]
            start[bundle] = bundle_start + np.cumsum(own) - own
        num_rows = first_row + packing.num_rows
        first_row += -(-packing.num_rows // rows_per_microbatch) * rows_per_microbatch
    return Packing(lengths, row, start, num_rows, pack_length, shared)


def _bundles(
    members: Sequence[int], lengths: np.ndarray, common: int, pack_length: int, chunk: int
) -> list[list[int]]:
    """Divides sequences of one prompt into bundles to lay out side by side after one copy of its `common`
    first tokens: the rest of each lies in the chunk in which they end (first-fit decreasing).
    """
    begun = common - common % chunk
    free_tokens = min(begun + chunk, pack_length) - common
    bundles: list[tuple[int, list[int]]] = []  # tokens that fit, members
    for member in sorted(members, key=lambda member: -lengths[member]):
        own = int(lengths[member]) - common
        number = next((n for n, (free, _) in enumerate(bundles) if free >= own), None)
        if number is None:
            bundles.append((free_tokens - own, [member]))
        else:
            free, bundle = bundles[number]
            bundles[number] = free - own, [*bundle, member]
    return [bundle for _, bundle in bundles]


@dataclasses.dataclass(frozen=True)
class TrainingSequence:
    """A prompt and a response to learn from.

    Attributes:
      prompt_ids: int [at least 1].
      response_ids: int [L], the end-of-sequence token included if it was sampled.
      rollout_logprobs: float [L], logprobs of the response under the distribution it was sampled from; None
        (zeros) if it was not sampled, as in the warm start.
      advantage: advantage of every token of the response.
      weight: weight of every token of the response in the loss (`aggregation_weights`).
      sampled_mask: bool [L], True for tokens of the response that the policy sampled; the others (a tool's
        answer) are read, not learned. None: the policy sampled every token.
    """

    prompt_ids: ArrayLike
    response_ids: ArrayLike
    rollout_logprobs: ArrayLike | None
    advantage: float
    weight: float
    sampled_mask: ArrayLike | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@flax.struct.dataclass
class PackedBatch:
    """R packed rows of T tokens.

    The logits at a position predict its target. The fields below `targets` belong to the prediction: they are
    stored at the position *before* their response token, and are 0 where no response token is predicted.

    Attributes:
      tokens: int32 [R, T].
      positions: int32 [R, T], positions from 0 in every segment.
      segment_ids: int32 [R, T], ids from 1 in every row; 0 is padding.
      targets: int32 [R, T], the next token of the segment; 0 at its last position.
      response_mask: bool [R, T], True where the target is a response token that the policy sampled.
      rollout_logprobs: float32 [R, T].
      advantages: float32 [R, T].
      weights: float32 [R, T].
      old_logprobs: float32 [R, T], logprobs of the targets under the training pass before the step's first
        update; None where the rollout's logprobs are used instead (`rljax/algorithms/rollout_correction.py`).
      compact: the tokens to compute, if copies of prompts and padding are left out; None to compute every
        position.
      span: the most chunks of attention that a sequence lies in, one of `spans`; None on a CPU, whose
        programs do not depend on it.
    """

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    segment_ids: jax.Array | np.ndarray
    targets: jax.Array | np.ndarray
    response_mask: jax.Array | np.ndarray
    rollout_logprobs: jax.Array | np.ndarray
    advantages: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    old_logprobs: jax.Array | np.ndarray | None = None
    compact: CompactTokens | None = None
    span: int | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all arrays, and the span, for the keys of compiled programs."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(self))
        return shapes if self.span is None else (*shapes, (self.span,))


def empty_batches(sizes: Iterable[int], pack_length: int) -> Iterator[PackedBatch]:
    """Yields a batch without sequences for every program of an update: each number of rows and each span."""
    nothing = pack_sequences([], pack_length)
    for rows, span in itertools.product(sizes, spans(pack_length)):
        yield build_batch([], nothing, range(rows)).replace(span=span)


def spans(pack_length: int) -> list[int | None]:
    """Returns what `PackedBatch.span` may be, ascending: on an accelerator powers of 4 up to the chunks of a
    row, each of which is a program of its own.
    """
    if target.platform() == "cpu":
        return [None]
    chunks, found = -(-pack_length // KEY_CHUNK), [1]
    while found[-1] < chunks:
        found.append(min(4 * found[-1], chunks))
    return found


def _span(bundles: np.ndarray) -> int | None:
    """Returns the span of rows whose sequences have ids [R, T], contiguous; 0 is padding."""
    allowed = spans(bundles.shape[1])
    if allowed == [None]:
        return None
    chunks = np.arange(bundles.shape[1]) // KEY_CHUNK
    longest = max(
        (int(np.ptp(chunks[row == each])) for row in bundles for each in np.unique(row) if each), default=0
    )
    return next(span for span in allowed if span > longest)


def response_places(sequences: Sequence[TrainingSequence], packing: Packing) -> list[tuple[int, slice]]:
    """Returns the row and the positions of each response's predictions."""
    return [
        (int(row), slice(int(start) + len(sequence.prompt_ids) - 1, int(start) + sequence.length - 1))
        for sequence, row, start in zip(sequences, packing.row, packing.start - packing.shared, strict=True)
    ]


def build_batch(
    sequences: Sequence[TrainingSequence], packing: Packing, rows: Sequence[int], share_prompts: bool = False
) -> PackedBatch:
    """Lays sequences out in some of a packing's rows, as numpy arrays.

    Args:
      sequences: the N sequences whose lengths were packed.
      rows: the R rows to build, in the order of the batch, such as one of `packing.microbatches(...)`. Rows
        from `packing.num_rows` on are empty.
      share_prompts: whether equal prompts in these rows are computed once, and padding not at all. Must be
        True for a packing of `pack_groups`.
    """
    if len(sequences) != len(packing.lengths):
        raise ValueError(f"{len(sequences)} sequences, but the packing has {len(packing.lengths)}")
    shape = (len(rows), packing.pack_length)
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids", "targets")}
    floats = {name: np.zeros(shape, np.float32) for name in ("rollout_logprobs", "advantages", "weights")}
    response_mask = np.zeros(shape, np.bool_)
    batch_row = {int(row): index for index, row in enumerate(rows)}
    bundles, branches = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments, last_bundle = [0] * len(rows), [0] * len(rows)
    all_shared = np.broadcast_to(packing.shared, packing.lengths.shape)
    prompts: list[tuple[int, ArrayLike]] = []
    for i in np.argsort(packing.start, kind="stable"):
        r = batch_row.get(int(packing.row[i]))
        if r is None:
            continue
        sequence, length, shared = sequences[i], int(packing.lengths[i]), int(all_shared[i])
        num_prompt, num_response = len(sequence.prompt_ids), len(sequence.response_ids)
        if num_prompt + num_response != length:
            raise ValueError(
                f"sequence {i}: {num_prompt + num_response} tokens, but it was packed with {length}"
            )
        if num_prompt == 0:
            raise ValueError(
                f"sequence {i}: the prompt is empty, so nothing predicts the first response token"
            )
        segments[r] += 1
        if not shared:
            last_bundle[r] = segments[r]
            prompts.append((r * packing.pack_length + int(packing.start[i]), sequence.prompt_ids))
        ids = np.concatenate([np.asarray(sequence.prompt_ids), np.asarray(sequence.response_ids)])
        start, end = int(packing.start[i]), int(packing.start[i]) + length - shared
        own = np.s_[r, start:end]
        ints["tokens"][own] = ids[shared:]
        ints["positions"][own] = np.arange(shared, length)
        ints["segment_ids"][own] = segments[r]
        ints["targets"][r, start : end - 1] = ids[shared + 1 :]
        bundles[own] = last_bundle[r]
        branches[r, end - num_response - 1 : end] = segments[r]
        predicting = np.s_[r, end - num_response - 1 : end - 1]
        response_mask[predicting] = True
        if sequence.rollout_logprobs is not None:
            if len(sequence.rollout_logprobs) != num_response:
                raise ValueError(
                    f"sequence {i}: {len(sequence.rollout_logprobs)} rollout_logprobs"
                    f" for {num_response} response tokens"
                )
            floats["rollout_logprobs"][predicting] = sequence.rollout_logprobs
        floats["advantages"][predicting] = sequence.advantage
        floats["weights"][predicting] = sequence.weight
        if sequence.sampled_mask is not None:
            if len(sequence.sampled_mask) != num_response:
                raise ValueError(
                    f"sequence {i}: sampled_mask has {len(sequence.sampled_mask)} entries"
                    f" for {num_response} response tokens"
                )
            response_mask[predicting] = sequence.sampled_mask
            for values in floats.values():
                values[predicting] = np.where(sequence.sampled_mask, values[predicting], 0.0)
    compact = None
    if share_prompts:
        compact = compact_tokens(prompts, bundles, branches, response_mask)
    span = _span(bundles)
    return PackedBatch(**ints, response_mask=response_mask, **floats, compact=compact, span=span)
