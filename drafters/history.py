"""The responses of earlier rollouts, by prompt: the memory of the history drafters.

Responses are kept as token arrays, the cheapest form (2 bytes a token where the vocabulary allows it). The
automata that drafts come from are built from them when their prompt is sampled again, and dropped after the
rollout. Beyond `max_tokens`, the least recently used prompts are evicted: to files in `spill_dir`, from which
`recall` loads them, or for good without one.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from drafters.base import Outcome
from drafters.spilled_history import SpilledHistory

HISTORY = "history"
"""The name of the history in checkpoints, which all drafters with a history share."""

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PastRollout:
    """The responses to one prompt in one rollout.

    Attributes:
      tokens: uint16 or int32, all responses, one after the other.
      lengths: int32 [G].
      rewards: float32 [G].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray


class RolloutHistory:
    """Past rollouts by prompt.

    Args:
      rollouts: number of newest rollouts of each prompt to keep.
      max_tokens: the largest number of response tokens in memory.
      spill_dir: directory for evicted prompts; None forgets them.

    Attributes:
      num_tokens: response tokens in memory.
      spilled: the prompts on disk; None without a directory.
    """

    def __init__(self, rollouts: int, max_tokens: int, spill_dir: str | None = None) -> None:
        if rollouts < 1:
            raise ValueError(f"rollouts: {rollouts}, expected at least 1")
        self._rollouts = rollouts
        self._max_tokens = max_tokens
        self.spilled = None if spill_dir is None else SpilledHistory(spill_dir)
        self._past: collections.OrderedDict[Prompt, list[PastRollout]] = collections.OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        """Prompts in memory."""
        return len(self._past)

    def __contains__(self, prompt: Prompt) -> bool:
        """Whether a prompt is in memory."""
        return prompt in self._past

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        arrays = sum(
            past.tokens.nbytes + past.lengths.nbytes + past.rewards.nbytes
            for rollouts in self._past.values()
            for past in rollouts
        )
        return arrays + sum(4 * len(prompt) for prompt in self._past)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Adds the responses of one rollout."""
        by_prompt: dict[Prompt, list[Outcome]] = {}
        for outcome in outcomes:
            by_prompt.setdefault(outcome.prompt_ids, []).append(outcome)
        for prompt, responses in by_prompt.items():
            tokens = np.concatenate([np.asarray(outcome.response_ids, np.int32) for outcome in responses])
            past = PastRollout(
                _narrowed(tokens),
                np.asarray([len(outcome.response_ids) for outcome in responses], np.int32),
                np.asarray([outcome.reward for outcome in responses], np.float32),
            )
            rollouts = [*self.recall(prompt), past]
            dropped, rollouts = rollouts[: -self._rollouts], rollouts[-self._rollouts :]
            self._past[prompt] = rollouts
            self._past.move_to_end(prompt)
            self.num_tokens += len(past.tokens) - sum(len(old.tokens) for old in dropped)
            self._evict()

    def recall(self, prompt: Prompt) -> list[PastRollout]:
        """Returns the past rollouts of a prompt, oldest first; the prompt counts as used."""
        if prompt not in self._past and not self._load(prompt):
            return []
        self._past.move_to_end(prompt)
        return self._past[prompt]

    def prompts(self) -> list[Prompt]:
        """Returns the prompts in memory, the least recently used first."""
        return list(self._past)

    def _evict(self) -> None:
        while self.num_tokens > self._max_tokens and len(self._past) > 1:
            prompt, rollouts = self._past.popitem(last=False)
            self.num_tokens -= sum(len(past.tokens) for past in rollouts)
            if self.spilled is not None:
                self.spilled.write(prompt, _flatten([(prompt, rollouts)]))

    # -- arrays for checkpoints and files --------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """Returns the rollouts in memory as flat arrays, and the names of the files of those on disk."""
        return _flatten(list(self._past.items())) | ({} if self.spilled is None else self.spilled.state())

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Replaces the rollouts in memory and on disk by those of `state`."""
        if self.spilled is not None:
            self.spilled.load_state(state)
        self._past = collections.OrderedDict(_unflatten(state))
        self.num_tokens = sum(len(past.tokens) for rollouts in self._past.values() for past in rollouts)
        self._evict()

    def metrics(self) -> dict[str, float]:
        """Returns the history's size, and what went to disk."""
        metrics = {"history_bytes": self.nbytes, "history_tokens": self.num_tokens}
        if self.spilled is not None:
            metrics |= {"history_spilled": len(self.spilled), "history_damaged": self.spilled.damaged}
        return metrics

    def _load(self, prompt: Prompt) -> bool:
        """Loads a spilled prompt; returns whether there was one. A damaged file counts as none."""
        arrays = None if self.spilled is None else self.spilled.read(prompt)
        if arrays is None:
            return False
        try:
            ((owner, rollouts),) = _unflatten(arrays)
            if owner != prompt:
                raise ValueError("it belongs to another prompt")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self.spilled.refuse(prompt, error)
            return False
        self._past[prompt] = rollouts
        self.num_tokens += sum(len(past.tokens) for past in rollouts)
        self._evict()
        return True


def _narrowed(tokens: np.ndarray) -> np.ndarray:
    """Returns tokens in 2 bytes each where that is enough."""
    return tokens.astype(np.uint16) if tokens.max(initial=0) < 2**16 else tokens


def _flatten(items: list[tuple[Prompt, list[PastRollout]]]) -> dict[str, np.ndarray]:
    rollouts = [past for _, kept in items for past in kept]

    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)

    return {
        "prompt_tokens": joined([np.asarray(prompt, np.int32) for prompt, _ in items], np.int32),
        "prompt_lengths": np.asarray([len(prompt) for prompt, _ in items], np.int32),
        "prompt_rollouts": np.asarray([len(kept) for _, kept in items], np.int32),
        "rollout_responses": np.asarray([len(past.lengths) for past in rollouts], np.int32),
        "tokens": joined([past.tokens for past in rollouts], np.int32),
        "lengths": joined([past.lengths for past in rollouts], np.int32),
        "rewards": joined([past.rewards for past in rollouts], np.float32),
    }


def _unflatten(state: dict[str, np.ndarray]) -> list[tuple[Prompt, list[PastRollout]]]:
    def split(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        if (lengths < 0).any() or lengths.sum() != len(array):
            raise ValueError("arrays of a history that do not fit together")
        return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []

    lengths = split(state["lengths"], state["rollout_responses"])
    rewards = split(state["rewards"], state["rollout_responses"])
    tokens = split(state["tokens"], np.asarray([sizes.sum() for sizes in lengths], np.int64))
    past = [
        PastRollout(_narrowed(each), size, reward)
        for each, size, reward in zip(tokens, lengths, rewards, strict=True)
    ]
    prompts = split(state["prompt_tokens"], state["prompt_lengths"])
    last = np.cumsum(state["prompt_rollouts"])
    return [
        (tuple(prompt.tolist()), past[end - count : end])
        for prompt, count, end in zip(prompts, state["prompt_rollouts"], last, strict=True)
    ]
