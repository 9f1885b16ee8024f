"""The router of a run, from its config, and what it learns from rollouts."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.assembly.checkpoint import ROUTING
from rljax.cluster.histopipe import Migrating, OutlierRule, RankedQueues, growth_factor
from rljax.cluster.racing import Racing
from rljax.cluster.router import Balancing, Router, SharedQueue
from rljax.cluster.two_tiers import tier_sizes
from rljax.config.cluster import ClusterConfig
from rljax.requests import Completion, DecodeStatistics, Request

_MOST_PROMPTS = 100_000  # those decoded last are remembered
_MOST_PASSES = 64  # measurements, the latest

Prompt = tuple[int, ...]


@dataclasses.dataclass
class RolloutHistory:
    """What rollouts were like: lengths of each prompt's last group, and times. A checkpoint keeps it, so that
    a run that is resumed routes as if nothing had been.

    Attributes:
      lengths: of the responses to each prompt when it was last trained on.
      train_seconds: from the end of the last rollout to the beginning of the next one.
    """

    lengths: dict[Prompt, list[int]] = dataclasses.field(default_factory=dict)
    train_seconds: float = 0.0
    _growth: dict[Prompt, tuple[float, float]] = dataclasses.field(default_factory=dict)
    _passes: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)

    def learn(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Takes the responses of a training rollout."""
        now: dict[Prompt, list[int]] = {}
        for request, completion in zip(requests, completions, strict=True):
            if request.training:
                now.setdefault(request.prompt_ids, []).append(len(completion.response_ids))
        for prompt, lengths in now.items():
            before = self.lengths.pop(prompt, None)
            self.lengths[prompt] = lengths
            if before is not None:
                self._growth.pop(prompt, None)
                self._growth[prompt] = statistics.median(before), statistics.median(lengths)
        for table in (self.lengths, self._growth):
            while len(table) > _MOST_PROMPTS:
                del table[next(iter(table))]  # type: ignore[attr-defined]

    def measure(self, by_worker: Mapping[str, tuple[DecodeStatistics, float]]) -> None:
        """Takes what workers counted in a rollout: passes, rows, and seconds in which they were busy."""
        self._passes += [
            (counts.steps, counts.rows, busy) for counts, busy in by_worker.values() if counts.steps
        ]
        del self._passes[:-_MOST_PASSES]

    @property
    def growth(self) -> float:
        """beta of the rule of outliers."""
        before = {prompt: pair[0] for prompt, pair in self._growth.items()}
        return growth_factor(before, {prompt: pair[1] for prompt, pair in self._growth.items()})

    def pass_seconds(self, running: int, tokens: float) -> float:
        """Seconds of a token of so many responses: affine in the rows, fitted to what workers measured."""
        if not self._passes:
            return 1.0
        steps, rows, busy = np.asarray(self._passes).T
        (each, row), *_ = np.linalg.lstsq(np.stack([steps, rows], 1), busy, rcond=None)
        if each <= 0 or row < 0:  # rollouts that are all alike tell the mean alone
            each, row = float(busy.sum() / steps.sum()), 0.0
        return float(each + row * running)

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps: `ROUTING` begins their names."""
        prompts = list(self.lengths)
        growth = [self._growth.get(prompt, (np.nan, np.nan)) for prompt in prompts]
        arrays = {
            "prompts": np.asarray([token for prompt in prompts for token in prompt], np.int32),
            "prompt_sizes": np.asarray([len(prompt) for prompt in prompts], np.int64),
            "lengths": np.asarray([each for lengths in self.lengths.values() for each in lengths], np.int64),
            "group_sizes": np.asarray([len(lengths) for lengths in self.lengths.values()], np.int64),
            "growth": np.asarray(growth, np.float64).reshape(-1, 2),
            "passes": np.asarray(self._passes, np.float64).reshape(-1, 3),
            "train_seconds": np.asarray(self.train_seconds, np.float64),
        }
        return {ROUTING + name: array for name, array in arrays.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what `state` returned; nothing of it is that of a run without workers."""
        if ROUTING + "prompts" not in state:
            return
        arrays = {name.removeprefix(ROUTING): array for name, array in state.items()}
        prompts = [tuple(each) for each in _cut(arrays["prompts"], arrays["prompt_sizes"])]
        lengths = _cut(arrays["lengths"], arrays["group_sizes"])
        self.lengths = dict(zip(prompts, lengths, strict=True))
        growth = zip(prompts, arrays["growth"].tolist(), strict=True)
        self._growth = {prompt: (before, now) for prompt, (before, now) in growth if before == before}
        self._passes = [(steps, rows, busy) for steps, rows, busy in arrays["passes"].tolist()]
        self.train_seconds = float(arrays["train_seconds"])


def _cut(flat: np.ndarray, sizes: np.ndarray) -> list[list[int]]:
    """Returns the lists of these sizes that were joined to an array."""
    ends = np.cumsum(sizes).tolist()
    return [flat[begin:end].tolist() for begin, end in zip([0, *ends[:-1]], ends, strict=False)]


def make_router(
    config: ClusterConfig, drafters: Sequence[str], slots: int, history: RolloutHistory
) -> Router:
    """Returns the router that the keys of a run ask for.

    Args:
      config: keys of the cluster.
      drafters: names of the run's drafters.
      slots: responses that a worker decodes at a time.
      history: what rollouts were like, read whenever a rollout begins.
    """
    router: Router = SharedQueue()
    if config.pipe != "off":

        def sizes(groups: Sequence[Sequence[int]]) -> list[int]:
            outliers = OutlierRule().last if config.migration else 0.0
            seconds, update = history.pass_seconds, history.train_seconds
            return tier_sizes(groups, config.workers, slots, seconds, update, outliers=outliers)

        two_tiers = sizes if config.pipe == "two_tiers" else None
        router = RankedQueues(config.workers, lambda: history.lengths, two_tiers, config.pipe_groups)
        if config.migration:
            router = Migrating(router, lambda: OutlierRule(beyond=history.growth))
    if config.balance:
        router = Balancing(router, config.balance)
    if config.race:
        router = Racing(router, drafters, config.race)
    return router
