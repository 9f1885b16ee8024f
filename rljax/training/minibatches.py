"""The mini-batches of a step: its responses shuffled into updates, packed, and cut into micro-batches."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rljax.config import TrainingConfig
from rljax.learning.packing import (
    PackedBatch,
    Packing,
    TrainingSequence,
    build_batch,
    pack_groups,
    pack_sequences,
    response_places,
)
from rljax.learning.prompt_sharing import copied_share
from rljax.requests import Completion
from rljax.rollout.collector import Group
from rljax.training.critic import ValueTargets

SMALLEST_COPIED_SHARE = 1 / 3
"""Share of copies among the tokens of a mini-batch from which `share_prompts: auto` shares prompts."""
SMALLEST_SHARING_MICROBATCH = 1024
"""Positions of a micro-batch from which `share_prompts: auto` shares prompts: in smaller ones, what is read
from elsewhere costs more than it saves.
"""


@dataclasses.dataclass
class Minibatch:
    """Responses of one update, packed and cut into micro-batches.

    Attributes:
      members: int [n], indices of its responses among the step's N.
      packing: position of each response in the packed rows.
      places: row and positions of each response's predictions.
      batches: the micro-batches, built with an advantage of 0 and a weight of 1 for the learner to replace.
      reference_logprobs: float32 [R, T] per micro-batch, if the algorithm has a KL penalty.
      old_logprobs: float32 [R, T] per micro-batch, if the algorithm corrects for the rollout.
      old_values: float32 [R, T] per micro-batch, if the algorithm has a critic.
      value_targets: targets per micro-batch, if the algorithm has a critic.
    """

    members: np.ndarray
    packing: Packing
    places: list[tuple[int, slice]]
    batches: list[PackedBatch]
    reference_logprobs: list[np.ndarray] | None = None
    old_logprobs: list[np.ndarray] | None = None
    old_values: list[np.ndarray] | None = None
    value_targets: list[ValueTargets] | None = None

    def collect_tokens(self, arrays: Sequence[np.ndarray], into: np.ndarray) -> None:
        """Copies members' predictions from arrays [R, T], one per micro-batch, to their rows in [N, L]."""
        rows = np.concatenate(arrays)
        for member, (row, positions) in zip(self.members, self.places, strict=True):
            values = rows[row, positions]
            into[member, : len(values)] = values

    def to_microbatches(self, values: np.ndarray) -> list[np.ndarray]:
        """The inverse of `collect_tokens`: places values [N, L] at the members' predictions in arrays [R, T],
        one per micro-batch, and 0 elsewhere.
        """
        sizes = [len(batch.tokens) for batch in self.batches]
        rows = np.zeros((sum(sizes), self.packing.pack_length), np.float32)
        for member, (row, positions) in zip(self.members, self.places, strict=True):
            rows[row, positions] = values[member, : positions.stop - positions.start]
        return np.split(rows, np.cumsum(sizes)[:-1])


def completions_of(groups: Sequence[Group]) -> list[Completion]:
    """Returns the N = P * G responses of a step, in the order of its groups."""
    return [completion for group in groups for completion in group.completions]


def make_minibatches(
    groups: Sequence[Group],
    training: TrainingConfig,
    seed: tuple[int, ...],
    row_multiple: int,
    share_prompts: str = "off",
) -> list[Minibatch]:
    """Shuffles a step's responses into mini-batches, packs each and cuts it into micro-batches.

    Args:
      training: minibatches_per_step, pack_length and rows_per_microbatch are read.
      seed: seed of the order, such as the run's seed and the step's number.
      row_multiple: see `Packing.microbatches`.
      share_prompts: "on": compute the prompt of a group once in a micro-batch; "auto": only if at least
        `SMALLEST_COPIED_SHARE` of the tokens are copies and a micro-batch has at least
        `SMALLEST_SHARING_MICROBATCH` positions; "off": compute every prompt.
    """
    count = sum(len(group.completions) for group in groups)
    order = np.random.default_rng(seed).permutation(count)
    parts = np.array_split(order, training.minibatches_per_step)
    return [pack_minibatch(groups, members, training, row_multiple, share_prompts) for members in parts]


def pack_minibatch(
    groups: Sequence[Group],
    members: np.ndarray,
    training: TrainingConfig,
    row_multiple: int,
    share_prompts: str = "off",
) -> Minibatch:
    """Packs some of a step's responses and cuts them into micro-batches. Arguments as in `make_minibatches`;
    `members` is int [n], indices among the step's N responses.
    """
    prompts = [group.prompt_of(completion) for group in groups for completion in group.completions]
    completions = completions_of(groups)
    sequences = [
        TrainingSequence(
            prompt, completion.response_ids, completion.logprobs, 0.0, 1.0, completion.sampled_mask
        )
        for prompt, completion in ((prompts[i], completions[i]) for i in members)
    ]
    lengths = [sequence.length for sequence in sequences]
    prompts = [prompts[i] for i in members]
    shares = shares_prompts(share_prompts, prompts, lengths, training)
    if shares:
        packing = pack_groups(lengths, prompts, training.pack_length, training.rows_per_microbatch)
    else:
        packing = pack_sequences(lengths, training.pack_length)
    # Rows without tokens cost little where padding is not computed, and another number of rows a program.
    multiple = training.rows_per_microbatch if shares else row_multiple
    ranges = packing.microbatches(training.rows_per_microbatch, multiple)
    batches = [build_batch(sequences, packing, rows, shares) for rows in ranges]
    return Minibatch(members, packing, response_places(sequences, packing), batches)


def shares_prompts(
    share_prompts: str, prompts: Sequence[ArrayLike], lengths: Sequence[int], training: TrainingConfig
) -> bool:
    """Returns whether prompts are shared; see `make_minibatches`.

    Args:
      share_prompts: "on", "auto" or "off".
      lengths: tokens of prompt and response of each sequence.
      training: pack_length and rows_per_microbatch are read.
    """
    if share_prompts != "auto":
        return share_prompts == "on"
    large = training.rows_per_microbatch * training.pack_length >= SMALLEST_SHARING_MICROBATCH
    return large and copied_share(prompts, lengths) >= SMALLEST_COPIED_SHARE


def padding_share(minibatches: Sequence[Minibatch]) -> float:
    """Returns the share of padding in what the micro-batches of a step compute."""
    tokens = positions = 0
    for minibatch in minibatches:
        tokens += int(minibatch.packing.lengths.sum()) - _num_copied(minibatch)
        for batch in minibatch.batches:
            positions += batch.tokens.size if batch.compact is None else batch.compact.size
    return 1.0 - tokens / positions


def shared_share(minibatches: Sequence[Minibatch]) -> float:
    """Returns the share of a step's tokens that are not computed again, since they are copies of prompts."""
    tokens = sum(int(minibatch.packing.lengths.sum()) for minibatch in minibatches)
    return sum(_num_copied(minibatch) for minibatch in minibatches) / tokens


def _num_copied(minibatch: Minibatch) -> int:
    compact = [batch for batch in minibatch.batches if batch.compact is not None]
    copies = sum(int(np.sum((batch.segment_ids > 0) & ~batch.compact.computed)) for batch in compact)
    return copies + int(np.sum(minibatch.packing.shared))


def members_with_gradient(minibatch: Minibatch, advantages: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the members of a mini-batch that have an advantage, int [m] in their order.

    At least one member is returned, the shortest if none has an advantage: an update without gradient still
    decays the optimizer's moments, and its metrics need tokens.

    Args:
      advantages: float [N, L], advantages of the step's responses.
      kept: bool [N, L], tokens to learn from.
    """
    members = minibatch.members
    learned = (kept[members] & (advantages[members] != 0.0)).any(axis=1)
    if not learned.any():
        learned[np.argmin(minibatch.packing.lengths)] = True
    return members[learned]
