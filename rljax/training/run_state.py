"""What changes in a run from step to step: data, which a checkpoint keeps (`saving.py`, `resuming.py`)."""

import dataclasses

from rljax.learning.accumulation import TrainState
from rljax.models.transformer import Params
from rljax.rollout.collector import BegunGroups


@dataclasses.dataclass
class RunState:
    """The state of a run between two steps.

    Attributes:
      trained: weights, optimizer state and critic.
      data_position: index of the next training problem.
      skipped_problems: problems that the curriculum has skipped since the step began.
      versions: weights of `engine.load_params`, of this step and of those before that rollouts still need, by
        version.
      begun: rollouts that have begun, by their step.
      evaluation_due: the evaluation due after the latest step failed; it runs when the run is resumed.
    """

    trained: TrainState
    step: int = 0
    data_position: int = 0
    skipped_problems: int = 0
    versions: dict[int, Params] = dataclasses.field(default_factory=dict)
    begun: dict[int, BegunGroups] = dataclasses.field(default_factory=dict)
    evaluation_due: bool = False

    @property
    def params(self) -> Params:
        """The policy's weights."""
        return self.trained.params
