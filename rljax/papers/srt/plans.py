"""Which requests run-ahead samples: those of the step, or of the round, that comes next."""

from collections.abc import Iterator

from rljax.papers.srt.run_ahead import RunAhead
from rljax.rollout.collector import TRAINING, WantedGroups
from rljax.training.extras import Extra
from rljax.training.training_run import TrainingRun


class PlansAhead(Extra):
    """Plans which prompts a rollout may sample ahead, and with which noise: that of a further round of this
    step where dynamic sampling is likely to need one after this round, else that of the next step.

    Args:
      run: the run, whose speculator runs ahead.
    """

    def __init__(self, run: TrainingRun, run_ahead: RunAhead) -> None:
        self._run, self._run_ahead = run, run_ahead

    def before_round(self, round_: int) -> None:
        config, state = self._run.config, self._run.state
        rounds = config.algorithm.dynamic_sampling_max_rounds if config.algorithm.dynamic_sampling else 1
        further = round_ + 1 < rounds and self._run_ahead.expects_round(round_)
        step = state.step if further else state.step + 1
        while self._run.cluster is not None and step in state.begun:  # workers decode all of it
            step += 1
        if step in state.begun:  # with staleness
            self._run_ahead.plan(state.begun[step].requests)
        elif step < config.training.steps:
            count, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
            following, _ = self._run.prompts.next_problems("train", state.data_position, count)
            wanted = WantedGroups("train", following, samples, TRAINING, step)
            self._run_ahead.plan(self._run.collector.requests(wanted))

    def after_round(self, round_: int, followed: bool) -> None:
        self._run_ahead.count_round(round_, followed=followed)

    def before_update(self) -> None:
        self._run_ahead.weights_change()


def make_extras(run: TrainingRun) -> Iterator[Extra]:
    """Yields the part that run-ahead takes in the steps of a run. See `Mechanism.extras`."""
    idle = run.speculator.idle
    if isinstance(idle, RunAhead):
        yield PlansAhead(run, idle)
