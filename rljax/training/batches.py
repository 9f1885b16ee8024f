"""The batches of a run: which problems a step learns from, and which weights sample its responses.

The version of the weights is a number: the steps that they have learned. A step's requests are created with
the newest version that there is when they are created. That is the step's own; with `rollout.staleness: 1` it
is the one before, so that workers decode them while the trainer updates (RhymeRL's off-policyness of 1). A
process without workers decodes the same requests with the same versions when it needs them: the same bits.

What a step needs of the one before it, and a checkpoint keeps: which problems were begun, and the weights
that sample them. The responses are decoded again. `arrival.py` has batches that are formed of the groups that
end first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rljax.assembly.checkpoint import SAMPLED_BY
from rljax.config import ExperimentConfig
from rljax.engine.engine import DecodeEngine
from rljax.errors import CheckpointError
from rljax.models.host_params import params_of, parts_of
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics
from rljax.rollout.collector import TRAINING, BegunGroups, Collector, Group, OnProgress, Timing, WantedGroups
from rljax.rollout.prompts import Prompts
from rljax.training.run_state import RunState


class Rollout(NamedTuple):
    """Rewarded responses of one step.

    Attributes:
      groups: the responses to learn from, by prompt.
      sampled: all groups sampled; more than `groups` where dynamic sampling dropped some.
      statistics: counts of decoding, over all rounds.
      timing: seconds of decoding and of rewarding, over all rounds.
    """

    groups: list[Group]
    sampled: list[Group]
    statistics: DecodeStatistics
    timing: Timing

    @property
    def responses(self) -> list[Completion]:
        """All responses sampled."""
        return [completion for group in self.sampled for completion in group.completions]


class Batches:
    """The batches of a run in the order of the problems.

    Args:
      state: the run's state; its position in the data, versions and begun rollouts are changed here.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        state: RunState,
        engine: DecodeEngine,
        prompts: Prompts,
        collector: Collector,
    ) -> None:
        self._config, self._state, self._engine = config, state, engine
        self._prompts, self._collector = prompts, collector
        self._round: BegunGroups | None = None  # the round that is decoded
        self._version = 0  # of the weights that sample this step's first round

    def begin(self, round_: int) -> None:
        """Begins a round of this step's rollout, from 0; the first one begins, with staleness, also the next
        step's rollout, unless an earlier step has begun it.
        """
        state = self._state
        if round_:
            self._round = self._begin_next(state.step, self._version)
            return
        self.retain_policy_version()
        last = min(state.step + self._config.rollout.staleness, self._config.training.steps - 1)
        for step in range(state.step, last + 1):
            if step not in state.begun:
                state.begun[step] = self._begin_next(step, state.step)
        self._round = state.begun.pop(state.step)
        self._version = self._round.wanted.version

    def finish(self, on_progress: OnProgress) -> tuple[list[Group], DecodeStatistics, Timing]:
        """Waits for the responses of the round, and rewards them; see `Collector.finish`."""
        begun, self._round = self._round, None  # it holds weights, whose memory an update needs
        return self._collector.finish(begun, on_progress)

    def retain_policy_version(self) -> None:
        """Keeps this step's weights under their number, and older ones as long as rollouts may need them."""
        state, lag = self._state, self._config.rollout.oldest_lag
        if state.step in state.versions:
            return
        state.versions = {v: held for v, held in state.versions.items() if v >= state.step - lag}
        # An update donates the trainer's arrays.
        state.versions[state.step] = self._engine.load_params(state.params, copy=lag > 0)

    def _begin_next(self, step: int, version: int) -> BegunGroups:
        """Begins the groups of the next problems; see `_begin_groups`."""
        return self._begin_groups(step, self.next_problems(self._config.rollout.prompts_per_step), version)

    def next_problems(self, count: int) -> list[int]:
        """Returns the indices of the next problems that are asked, and goes on behind them."""
        state, begin = self._state, self._state.data_position
        indices, state.data_position = self._prompts.next_problems("train", begin, count)
        state.skipped_problems += state.data_position - begin - count
        return indices

    def _begin_groups(self, step: int, indices: Sequence[int], version: int) -> BegunGroups:
        """Begins the groups of these problems with a step's noise, under these weights."""
        samples = self._config.rollout.samples_per_prompt
        wanted = WantedGroups("train", indices, samples, TRAINING, step, version=version)
        return self._collector.begin(self._state.versions[version], wanted)

    def sampled_by(self) -> Mapping[int, Params] | None:
        """Returns the weights by the versions that sampled the step's responses. None where they are those of
        the step, which are let go: an update needs the memory.
        """
        if self._config.rollout.oldest_lag:
            return self._state.versions
        self._state.versions.clear()
        return None

    # -- failures and checkpoints ----------------------------------------------------------------------------

    def place(self) -> Any:
        """Returns where the batches are, for `go_back` after a rollout that fails."""
        return self._state.data_position, dict(self._state.begun)

    def go_back(self, place: Any) -> None:
        """Goes back to where `place` was: the problems since then are asked again."""
        self._state.data_position, self._state.begun = place

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns what was begun for later steps as JSON values, and the weights that sample it as arrays."""
        needed = self._needed()
        begun = [
            {
                "step": step,
                "indices": [int(index) for index in each.wanted.indices],
                "version": each.wanted.version,
            }
            for step, each in self._state.begun.items()
        ]
        arrays, layouts = {}, {}
        for version in sorted(needed):
            parts = parts_of(self._state.versions[version])
            layouts[str(version)] = [[name, dtype, list(shape)] for name, dtype, shape, _ in parts]
            arrays |= {f"{SAMPLED_BY}{version}/{name}": data for name, _, _, data in parts}
        return {"begun": begun, "sampled_by": layouts} if needed else {}, arrays

    def _needed(self) -> set[int]:
        """The versions that sample what was begun."""
        return {each.wanted.version for each in self._state.begun.values()}

    def load_state(self, host_state: Mapping[str, Any], held: Mapping[str, np.ndarray]) -> None:
        """Begins again what was begun when a checkpoint was saved.

        Args:
          host_state: of the checkpoint.
          held: arrays of the checkpoint's older weights.

        Raises:
          CheckpointError: they are of another architecture.
        """
        if not self._config.rollout.oldest_lag:  # by --allow-changes: the problems begun are passed over
            return
        for version, layout in host_state.get("sampled_by", {}).items():
            begin = f"{SAMPLED_BY}{version}/"
            parts = [(name, dtype, tuple(shape), held[begin + name]) for name, dtype, shape in layout]
            params = params_of(parts, self._engine.config)
            if params is None:
                raise CheckpointError(f"checkpoint: version {version} of the weights is of another policy")
            self._state.versions[int(version)] = self._engine.load_params(params)
        for each in host_state.get("begun", []):
            step = each["step"]
            self._state.begun[step] = self._begin_groups(step, each["indices"], each["version"])
