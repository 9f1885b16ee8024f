"""HistoPipe as the cluster asks for it: its queues from the keys of a run, and what they go by."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.cluster.messages import Key
from rljax.cluster.router import Router
from rljax.cluster.routing import Routing
from rljax.config.speculation import SpeculationConfig
from rljax.papers.rhymerl import RhymeKeys
from rljax.papers.rhymerl.histopipe import Migrating, OutlierRule, RankedQueues, equal_groups, rank
from rljax.papers.rhymerl.history import RolloutHistory
from rljax.papers.rhymerl.two_tiers import tier_sizes
from rljax.requests import Completion, DecodeStatistics, Request


class HistoPipe(Routing):
    """See the module's docstring.

    Attributes:
      history: what rollouts were like. It learns wherever there are workers, so that a run may go on with
        other keys.
    """

    def __init__(self, config: RhymeKeys) -> None:
        self._config, self.history = config, RolloutHistory()
        self.parks = config.into_next_step

    def queues(self, speculation: SpeculationConfig, slots: int) -> Router | None:
        config, history = self._config, self.history
        if config.pipe == "off":
            return None

        def sizes(groups: Sequence[Sequence[int]]) -> list[int]:
            outliers = OutlierRule().last if config.migration else 0.0
            prompt = statistics.fmean(map(len, history.lengths))
            of_token = history.token_seconds(speculation.max_batch if speculation.kinds else 0)

            def seconds(running: int, tokens: float) -> float:
                return of_token(running, tokens + running * prompt)

            workers, fewest, most = config.workers, config.pipe_min_workers, config.pipe_max_workers
            return tier_sizes(groups, workers, slots, seconds, history.train_seconds, fewest, most, outliers)

        two_tiers = sizes if config.pipe == "two_tiers" else None
        ranked = RankedQueues(config.workers, lambda: history.lengths, two_tiers, config.pipe_groups)
        return Migrating(ranked, lambda: OutlierRule(beyond=history.growth)) if config.migration else ranked

    def trained(self, seconds: float) -> None:
        self.history.train_seconds = seconds

    def learn(
        self,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        by_worker: Mapping[str, tuple[DecodeStatistics, float]],
    ) -> None:
        self.history.learn(requests, completions)
        self.history.measure(by_worker)

    def outliers(
        self,
        prompts: Sequence[tuple[int, ...]],
        running: Sequence[Mapping[Key, int]],
        sizes: Sequence[int],
        workers: int,
    ) -> list[int]:
        """Returns the places of groups that wait for outliers alone (`OutlierRule`). They are ranked into as
        many ranking groups as there should be workers.
        """
        lengths, rule, found = self.history.lengths, OutlierRule(beyond=self.history.growth), []
        for members in equal_groups(rank(prompts, lengths), workers):
            known = [statistics.median(lengths[prompts[i]]) for i in members if prompts[i] in lengths]
            together = {key: tokens for i in members for key, tokens in running[i].items()}
            size = sum(sizes[i] for i in members)
            beyond = set(rule.outliers(together, size, max(known, default=math.inf)))
            found += [i for i in members if running[i] and running[i].keys() <= beyond]
        return found

    def state(self) -> dict[str, np.ndarray]:
        return self.history.state()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.history.load_state(state)
