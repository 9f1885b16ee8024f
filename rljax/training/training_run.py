"""The parts of a training run, as data: `building.py` makes them, and `loop.train` advances them."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljax.assembly.checkpoint import RunCheckpoints
from rljax.config import ExperimentConfig
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.invariance import Invariance
from rljax.numerics.rows import Numerics
from rljax.progress import Progress
from rljax.rollout.collector import Collector, Scheduler
from rljax.rollout.prompts import Prompts
from rljax.run_directory import RunDirectory
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.speculator import Speculator
from rljax.tasks.curriculum import Curriculum
from rljax.tracking import Trackers
from rljax.training.batches import Batches
from rljax.training.extras import Compilation, Extra
from rljax.training.interruption import StopRequest
from rljax.training.learner import Learner
from rljax.training.run_state import RunState
from rljax.training.update import Trainer

if TYPE_CHECKING:
    from rljax.agents.collector import AgentCollector
    from rljax.cluster.decoder import ClusterDecoder


@dataclasses.dataclass
class TrainingRun:
    """The parts of a run.

    Attributes:
      progress: shows messages and steps to the user.
      trackers: get the metrics of every step.
      stop: requests by signals to stop.
      start: `time.perf_counter()` when the process began to work on the run; `time/elapsed` counts from it.
      state: all that changes from step to step.
      prompts: the task's prompts in tokens.
      heldout: indices of the held-out problems that evaluations ask.
      curriculum: pass rates of the training problems; None without a curriculum.
      data_digests: digest of each data set of the task; resuming compares them.
      tokenizer_directory: directory of the tokenizer's files.
      invariance: the measured row-invariance of the policy, or None where it is not measured.
      base_digest: under LoRA the name of the weights that the adapter is merged with; else None.
      cluster: decodes in workers; None decodes here.
      agents: the collector where agents sample; else None.
      evaluation_sampling: the distribution that evaluations sample from; None for that of rollouts.
      batches: which problems a step learns from, and the weights that sample them.
      extras: what takes part in the steps besides the loop; `compilation` among them.
    """

    config: ExperimentConfig
    directory: RunDirectory
    checkpoints: RunCheckpoints
    progress: Progress
    trackers: Trackers
    stop: StopRequest
    start: float
    state: RunState
    prompts: Prompts
    heldout: Sequence[int]
    curriculum: Curriculum | None
    data_digests: dict[str, str]
    tokenizer_directory: str
    pool: ExecutablePool
    numerics: Numerics
    invariance: Invariance | None
    base_digest: str | None
    scheduler: Scheduler
    cluster: "ClusterDecoder | None"
    agents: "AgentCollector | None"
    collector: Collector
    evaluation_sampling: SamplingParams | None
    trainer: Trainer
    learner: Learner
    batches: Batches
    extras: Sequence[Extra]
    compilation: Compilation

    @property
    def engine(self) -> DecodeEngine:
        """The decode engine of this process."""
        return self.scheduler.engine

    @property
    def speculator(self) -> Speculator:
        """What drafts in this process."""
        return self.scheduler.speculator

    def close(self) -> None:
        """Ends what goes on in the background."""
        if self.agents is not None:
            self.agents.close()
        self.engine.close()
        self.speculator.close()
