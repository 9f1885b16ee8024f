"""The training data of heads: tokens and features (hidden states) from RL's own passes, kept on the host.

TLT, section 4.2 ("Spot Training with DataBuffer", "Sequence Packing"). A head is trained while a rollout is
still running, on the responses that have finished, which are the short ones. So the buffer is kept across
steps with a **one-step offset**: it also holds the sequences of the step before, and draws the *long* ones
first, since the current step has none yet. Older sequences are dropped, as they come from older policies.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from drafters.eagle.unrolling import HeadBatch
from rljax.learning.packing import Packing, pack_sequences


@dataclasses.dataclass(frozen=True)
class HeadSequence:
    """A sequence that a head learns from; NumPy arrays.

    Attributes:
      tokens: int32 [n], prompt and response.
      states: [n, S, d], the policy's features (`model.py`), in the buffer's dtype.
      response_mask: bool [n], True for tokens of the response.
      step: the RL step that sampled it.
      number: its number in the buffer, in order of arrival.
    """

    tokens: np.ndarray
    states: np.ndarray
    response_mask: np.ndarray
    step: int
    number: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + self.states.nbytes + self.response_mask.nbytes


class DataBuffer:
    """Sequences of the current step and the one before, within bounded host memory.

    Args:
      max_bytes: limit for tokens, features and masks. Beyond it, sequences of the step before are dropped
        first, then the shorter ones of the current step.
      state_shape: (S, d).
      dtype: dtype of the stored features: "float32", "bfloat16" or "float16".
      previous_share: share of the drawn tokens that comes from the step before, as long as both steps have
        sequences left.
    """

    def __init__(
        self,
        max_bytes: int,
        state_shape: tuple[int, int],
        dtype: str = "bfloat16",
        previous_share: float = 0.5,
    ) -> None:
        if not 0 <= previous_share <= 1:
            raise ValueError(f"previous_share: should be from 0 to 1, got {previous_share}")
        self.max_bytes = max_bytes
        self.previous_share = previous_share
        self._state_shape = tuple(state_shape)
        self._dtype = np.dtype(dtype)
        self._step = 0
        self._added = 0
        self._replace([])
        self._reserved = 0
        self.refused = 0
        """Number of sequences that were larger than the buffer."""
        self.dropped_finished = 0
        """Number of kept sequences that were dropped for memory, not because they had become old."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def bytes(self) -> int:
        """Bytes held now, at most `max_bytes` minus the reserved ones."""
        return self._bytes

    def _replace(self, sequences: list[HeadSequence]) -> None:
        self._sequences = sequences
        self._bytes = sum(sequence.bytes for sequence in sequences)  # kept: `reserve` comes with every pass

    def reserve(self, size: int) -> None:
        """Reserves `size` of the `max_bytes` for responses that are not finished yet."""
        self._reserved = size
        self._make_room()

    def begin_step(self, step: int) -> None:
        """Begins RL step `step`: sequences from before the previous step are dropped."""
        self._step = step
        self._replace([sequence for sequence in self._sequences if sequence.step >= step - 1])

    def add(self, tokens: np.ndarray, states: np.ndarray, response_mask: np.ndarray) -> None:
        """Keeps a finished sequence of the current step.

        Args:
          tokens: int [n].
          states: [n, S, d].
          response_mask: bool [n].
        """
        length = len(tokens)
        if states.shape != (length, *self._state_shape) or response_mask.shape != (length,):
            raise ValueError(
                f"states {states.shape} and response_mask {response_mask.shape} should be"
                f" {(length, *self._state_shape)} and {(length,)}"
            )
        sequence = HeadSequence(
            np.array(tokens, np.int32),
            np.array(states, self._dtype),
            np.array(response_mask, bool),
            self._step,
            self._added,
        )
        if sequence.bytes > self.max_bytes - self._reserved:
            self.refused += 1
            return
        self._added += 1
        self._sequences.append(sequence)
        self._bytes += sequence.bytes
        self._make_room()

    def _make_room(self) -> None:
        excess = self.bytes + self._reserved - self.max_bytes
        if excess <= 0:
            return
        # Drop sequences of the step before first, and shorter ones first: long ones are scarce.
        order = sorted(
            range(len(self)), key=lambda i: (self._sequences[i].step, self._sequences[i].length, i)
        )
        dropped = set()
        for index in order:
            if excess <= 0:
                break
            dropped.add(index)
            excess -= self._sequences[index].bytes
        self.dropped_finished += len(dropped)
        self._replace([each for index, each in enumerate(self._sequences) if index not in dropped])

    def draw(self, seed: int) -> list[HeadSequence]:
        """Returns all sequences in training order, a function of the buffer's content and the seed.

        Those of the step before by length, longest first; those of the current step shuffled; mixed so that
        `previous_share` of the tokens, as nearly as whole sequences allow, come from the step before.
        """
        previous = [each for each in self._sequences if each.step < self._step]
        current = [each for each in self._sequences if each.step == self._step]
        previous.sort(key=lambda sequence: -sequence.length)  # stable: equals in the order they came in
        order = np.random.default_rng((seed, self._step)).permutation(len(current))
        current = [current[i] for i in order]
        drawn: list[HeadSequence] = []
        tokens = {"previous": 0, "current": 0}
        while previous or current:
            due = tokens["previous"] * (1 - self.previous_share) <= tokens["current"] * self.previous_share
            from_previous = not current or (bool(previous) and due and self.previous_share > 0)
            sequence = (previous if from_previous else current).pop(0)
            tokens["previous" if from_previous else "current"] += sequence.length
            drawn.append(sequence)
        return drawn

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps: flat, features as unsigned integers of their width."""
        held = self._sequences
        states = [each.states.reshape(-1) for each in held]
        flat = np.concatenate(states) if held else np.zeros(0, self._dtype)
        return {
            "step": np.asarray(self._step, np.int64),
            "refused": np.asarray(self.refused, np.int64),
            "dropped_finished": np.asarray(self.dropped_finished, np.int64),
            "added": np.asarray(self._added, np.int64),
            "numbers": np.asarray([each.number for each in held], np.int64),
            "lengths": np.asarray([each.length for each in held], np.int64),
            "steps": np.asarray([each.step for each in held], np.int64),
            "tokens": np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in held)]),
            "response_mask": np.concatenate([np.zeros(0, bool), *(each.response_mask for each in held)]),
            "states": flat.view(f"u{self._dtype.itemsize}"),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores the arrays that `state` returned.

        Raises:
          ValueError: they belong to another policy, or have another dtype.
        """
        lengths = np.asarray(state["lengths"])
        size = int(np.prod(self._state_shape))
        stored = np.asarray(state["states"])
        if stored.dtype.itemsize != self._dtype.itemsize or len(stored) != int(lengths.sum()) * size:
            raise ValueError(
                f"states: {len(stored)} numbers of {stored.dtype.itemsize} bytes should be"
                f" {int(lengths.sum()) * size} of {self._dtype.itemsize}: they are of another policy"
            )
        states = stored.view(self._dtype).reshape(-1, *self._state_shape)
        self._step, self.refused = int(state["step"]), int(state["refused"])
        self._added = int(state["added"])
        self.dropped_finished = int(state.get("dropped_finished", 0))
        sequences = []
        start = 0
        each = (lengths.tolist(), np.asarray(state["steps"]).tolist(), np.asarray(state["numbers"]).tolist())
        for length, step, number in zip(*each, strict=True):
            here = slice(start, start + length)
            sequences.append(
                HeadSequence(
                    np.array(state["tokens"][here]),
                    np.array(states[here]),
                    np.array(state["response_mask"][here]),
                    step,
                    number,
                )
            )
            start += length
        self._replace(sequences)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Sequences laid out in rows.

    Attributes:
      sequences: the sequences.
      packing: row and start of each.
    """

    sequences: Sequence[HeadSequence]
    packing: Packing

    def batches(self, rows: int) -> Iterator[HeadBatch]:
        """Batches of one shape, `rows` rows each; the last is filled up with empty rows."""
        for first in range(0, self.packing.num_rows, rows):
            yield self._build(range(first, first + rows))

    def _build(self, rows: range) -> HeadBatch:
        shape = (len(rows), self.packing.pack_length)
        tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
        mask = np.zeros(shape, bool)
        states = np.zeros((*shape, *self.sequences[0].states.shape[1:]), self.sequences[0].states.dtype)
        filled = [0] * len(rows)
        for i in np.argsort(self.packing.start, kind="stable"):
            row = int(self.packing.row[i]) - rows.start
            if not 0 <= row < len(rows):
                continue
            sequence, start = self.sequences[i], int(self.packing.start[i])
            filled[row] += 1
            here = np.s_[row, start : start + sequence.length]
            tokens[here], states[here] = sequence.tokens, sequence.states
            positions[here], segments[here] = np.arange(sequence.length), filled[row]
            mask[row, start : start + sequence.length - 1] = sequence.response_mask[1:]
        return HeadBatch(tokens, positions, segments, mask, states)


def pack(sequences: Sequence[HeadSequence], pack_length: int) -> PackedRows:
    """Lays sequences out in rows of `pack_length` tokens, none across a row's end; the real masks come from
    the segment ids.

    Raises:
      UserError: a sequence is longer than a row.
    """
    # One chunk a row: the head does not need the decoder's bits, so sequences may lie anywhere.
    packing = pack_sequences([each.length for each in sequences], pack_length, chunk=pack_length)
    return PackedRows(sequences, packing)


def pack_next(sequences: Sequence[HeadSequence], pack_length: int, rows: int) -> PackedRows:
    """The next batch in a given order: each sequence goes into the tightest of `rows` rows that has room for
    it, and is left out where none has. The first always gets in, so what is left over comes first next time;
    short ones from further behind fill up what the long ones leave.
    """
    chosen: list[HeadSequence] = []
    places: list[tuple[int, int]] = []
    free = [pack_length] * rows
    for sequence in sequences:
        fitting = [row for row in range(rows) if free[row] >= sequence.length]
        if fitting:
            row = min(fitting, key=lambda row: free[row])
            places.append((row, pack_length - free[row]))
            chosen.append(sequence)
            free[row] -= sequence.length
    row, start = np.asarray(places, np.int64).reshape(-1, 2).T
    lengths = np.asarray([each.length for each in chosen], np.int64)
    return PackedRows(chosen, Packing(lengths, row, start, rows, pack_length))


def windows(length: int, pack_length: int, overlap: int) -> list[slice]:
    """Windows of about equal size, none longer than `pack_length`, that cover a sequence; each begins
    `overlap` tokens before the one in front of it ends.

    Equal ones: a short last window would hold starts that have seen next to nothing.
    """
    if length <= pack_length:
        return [slice(0, length)]
    if pack_length <= overlap:
        raise ValueError(f"pack_length: {pack_length} should be more than the {overlap} tokens of overlap")
    count = -(-(length - overlap) // (pack_length - overlap))
    size = -(-(length + (count - 1) * overlap) // count)
    starts = [index * (size - overlap) for index in range(count)]
    return [slice(start, min(start + size, length)) for start in starts]
