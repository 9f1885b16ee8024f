"""The responses of steps: epochs over a set of prompts, whose lengths come from a model or from a run.

A prompt has a length of its own, log-normal over prompts; the responses of its group scatter around it, and
from epoch to epoch it moves and grows. All is cut off at the longest response. The scenario's keys `mean`,
`longest`, `sigma`, `within`, `drift`, `growth`, `outliers` and `jump` say how far.
"""

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rljax.cluster.pipe import growth_factor
from rljax.errors import ConfigError
from rljax.planning.rollout import scale_to_mean
from rljax.simulation.cluster import Response
from rljax.simulation.drafting import LEVELS

if TYPE_CHECKING:
    from rljax.simulation.scenario import Scenario

Prompt = tuple[int, ...]


def epochs(scenario: "Scenario", prompts: int) -> Iterator[np.ndarray]:
    """Yields the lengths of one epoch after the other, int64 [prompts, samples]."""
    random, samples = np.random.default_rng(scenario.seed), scenario.samples
    between = scenario.sigma * np.sqrt(1 - scenario.within) * random.standard_normal(prompts)
    spread = scenario.sigma * np.sqrt(scenario.within)
    noise = np.random.default_rng(0).standard_normal((prompts, min(samples, 16)))
    scale = scale_to_mean(np.exp(between[:, None] + spread * noise), scenario.mean, scenario.longest)
    while True:
        noise = spread * random.standard_normal((prompts, samples))
        if scenario.outliers:
            beyond = random.random((prompts, samples)) < scenario.outliers
            noise += beyond * np.abs(scenario.jump * random.standard_normal((prompts, samples)))
        lengths = np.rint(scale * np.exp(between[:, None] + noise))
        yield np.clip(lengths, 1, scenario.longest).astype(np.int64)
        between = between + scenario.drift * random.standard_normal(prompts)
        scale *= scenario.growth


def recorded_lengths(path: str, seed: int = 0) -> list[np.ndarray]:
    """Returns the lengths of a run's steps, each in the bins of its `rollouts.jsonl`, spread evenly within.

    Raises:
      ConfigError: the file cannot be read, or is none.
    """
    random, steps = np.random.default_rng(seed), []
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            lengths = json.loads(line)["lengths"]
            width, counts = lengths["bin"], np.asarray(lengths["counts"])
            low = np.repeat(np.arange(len(counts)) * width, counts)
            steps.append(low + random.integers(1, width + 1, len(low)))
    except OSError as error:
        raise ConfigError(f"lengths: {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"lengths: {path} is no rollouts.jsonl of a run") from error
    if not steps:
        raise ConfigError(f"lengths: {path} has no step")
    return steps


class Workload:
    """Yields the responses of one step after the other.

    Attributes:
      history: lengths of each prompt's responses in the previous epoch.
      growth: 75th percentile of the growth of prompts' median lengths in the last epoch, at least 1.1.
    """

    def __init__(self, scenario: "Scenario") -> None:
        self._scenario, self._acceptance = scenario, scenario.drafters_of().values()
        self._recorded = recorded_lengths(scenario.rollouts, scenario.seed) if scenario.rollouts else None
        self.history: dict[Prompt, Sequence[int]] = {}
        self.growth = 1.1

    def steps(self) -> Iterator[list[Response]]:
        """Yields the responses of each step, those of a prompt together; those of a run are repeated."""
        scenario, random = self._scenario, np.random.default_rng(self._scenario.seed + 1)
        if self._recorded is not None:
            for number, lengths in enumerate(itertools.cycle(self._recorded)):
                count = max(len(lengths) // scenario.samples, 1)
                table = np.resize(lengths, (count, scenario.samples))
                yield self._responses(np.arange(count) + number * count, table, random)
        medians: dict[Prompt, float] = {}
        prompts, per_step = scenario.num_prompts, scenario.prompts_per_step
        for lengths in epochs(scenario, prompts):
            order = random.permutation(prompts)
            now: dict[Prompt, Sequence[int]] = {}
            for begin in range(0, prompts - per_step + 1, per_step):
                chosen = order[begin : begin + per_step]
                yield self._responses(chosen, lengths[chosen], random)
                now |= {(int(prompt),): lengths[prompt].tolist() for prompt in chosen}
            self.history = now
            before, medians = medians, {prompt: statistics.median(each) for prompt, each in now.items()}
            self.growth = growth_factor(before, medians)

    def _responses(
        self, prompts: np.ndarray, lengths: np.ndarray, random: np.random.Generator
    ) -> list[Response]:
        drawn = [
            np.clip(
                np.rint(LEVELS * (each.acceptance + each.spread * random.standard_normal(lengths.shape))),
                0,
                LEVELS - 1,
            ).astype(int)
            for each in self._acceptance
        ]
        levels = np.stack(drawn, -1).tolist() if drawn else None
        return [
            Response(
                prompt,
                self._scenario.prompt_tokens,
                length,
                () if levels is None else tuple(levels[row][column]),
            )
            for row, (prompt, group) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True))
            for column, length in enumerate(group)
        ]


def rank_shares(scenario: "Scenario", groups: int) -> tuple[float, float]:
    """Returns the share of responses that are in the ranking group which their prompt's history expects, or
    in a lower one, and the share that migrates: RhymeRL's table 2, over 2,048 prompts and six epochs.
    """
    lengths = list(itertools.islice(epochs(scenario, 2048), 7))
    shares = [_shares(previous, now, groups) for previous, now in itertools.pairwise(lengths)]
    below, migrated = np.mean(shares, axis=0)
    return below, migrated


def _shares(previous: np.ndarray, lengths: np.ndarray, groups: int) -> tuple[float, float]:
    medians = np.median(previous, axis=1)
    predicted = _ranks(medians, groups)
    higher = _ranks(lengths.ravel(), groups).reshape(lengths.shape) > predicted[:, None]
    beta = growth_factor(dict(enumerate(medians)), dict(enumerate(np.median(lengths, axis=1))))
    migrated = 0
    for group in range(groups):
        members = predicted == group
        own = lengths[members]
        last = own > np.quantile(own, 0.9)
        migrated += int((last & higher[members] & (own > beta * medians[members].max())).sum())
    return 1 - float(higher.mean()), migrated / lengths.size


def _ranks(lengths: np.ndarray, groups: int) -> np.ndarray:
    """Ranking group of each length."""
    found = np.empty(len(lengths), int)
    for group, members in enumerate(np.array_split(np.argsort(lengths, kind="stable"), groups)):
        found[members] = group
    return found
