"""The responses of steps: epochs over a set of prompts, whose lengths come from a model or from a run."""

import itertools
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.cluster.pipe import growth_factor
from rljax.simulation.cluster import Response
from rljax.simulation.drafting import LEVELS
from rljax.simulation.lengths import LengthModel

Prompt = tuple[int, ...]


class Workload:
    """Yields the responses of one step after the other.

    Args:
      lengths: the model of lengths, or the lengths of a run's steps, which are repeated.
      prompts: prompts of an epoch; each step takes the next ones of the epoch's order.
      per_step: prompts of a step.
      samples: responses to a prompt.
      prompt_tokens: tokens of every prompt.
      acceptance: mean and standard deviation over requests of each drafter's acceptance.
      seed: of everything random.

    Attributes:
      history: lengths of each prompt's responses in the previous epoch.
      growth: 75th percentile of the growth of prompts' median lengths in the last epoch, at least 1.1.
      epoch: number of the present epoch, from 0.
    """

    def __init__(
        self,
        lengths: LengthModel | Sequence[np.ndarray],
        prompts: int,
        per_step: int,
        samples: int,
        prompt_tokens: int,
        acceptance: Sequence[tuple[float, float]] = (),
        seed: int = 0,
    ) -> None:
        self._lengths, self._prompts, self._per_step = lengths, prompts, per_step
        self._samples, self._prompt_tokens = samples, prompt_tokens
        self._acceptance, self._seed = acceptance, seed
        self.history: dict[Prompt, Sequence[int]] = {}
        self.growth, self.epoch = 1.1, 0

    def steps(self) -> Iterator[list[Response]]:
        """Yields the responses of each step, those of a prompt together."""
        if not isinstance(self._lengths, LengthModel):
            yield from self._recorded(self._lengths)
            return
        random = np.random.default_rng(self._seed + 1)
        medians: dict[Prompt, float] = {}
        for epoch, lengths in enumerate(self._lengths.epochs(self._prompts, self._samples, self._seed)):
            self.epoch = epoch
            order = random.permutation(self._prompts)
            now: dict[Prompt, Sequence[int]] = {}
            for begin in range(0, self._prompts - self._per_step + 1, self._per_step):
                prompts = order[begin : begin + self._per_step]
                yield self._responses(prompts, lengths[prompts], random)
                now |= {(int(prompt),): lengths[prompt].tolist() for prompt in prompts}
            self.history = now
            before, medians = medians, {prompt: statistics.median(each) for prompt, each in now.items()}
            self.growth = growth_factor(before, medians)

    def _recorded(self, steps: Sequence[np.ndarray]) -> Iterator[list[Response]]:
        random = np.random.default_rng(self._seed + 1)
        for number in itertools.count():
            lengths = steps[number % len(steps)]
            count = max(len(lengths) // self._samples, 1)
            prompts = np.arange(count) + number * count
            table = np.resize(lengths, (count, self._samples))
            yield self._responses(prompts, table, random)

    def _responses(
        self, prompts: np.ndarray, lengths: np.ndarray, random: np.random.Generator
    ) -> list[Response]:
        drawn = [
            np.clip(
                np.rint(LEVELS * (mean + spread * random.standard_normal(lengths.shape))), 0, LEVELS - 1
            ).astype(int)
            for mean, spread in self._acceptance
        ]
        levels = np.stack(drawn, -1).tolist() if drawn else None
        return [
            Response(
                prompt,
                self._prompt_tokens,
                length,
                () if levels is None else tuple(levels[row][column]),
            )
            for row, (prompt, group) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True))
            for column, length in enumerate(group)
        ]
