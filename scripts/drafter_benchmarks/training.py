"""Training a new head on rollouts, as all sections do, and details of a row about one."""

from collections.abc import Callable, Iterable
from typing import Any

from drafters.eagle.evaluation import Acceptance
from drafters.eagle.spot_trainer import HeadTrainer
from drafters.eagle.states import States
from rljax.models.transformer import Params
from rljax.training.drafter_warm_up import WarmUp


def train_head(
    trainer: HeadTrainer, settings: WarmUp, shared: Params, rollouts: Callable[[int], Iterable[States]]
) -> None:
    """Trains all slices of a warm-up, each round on the rollouts of its number; `shared` is the policy's
    embeddings and LM head.
    """
    for done in range(settings.steps):
        if done % settings.slices_per_round == 0:
            step = done // settings.slices_per_round
            add_rollouts(trainer, step, rollouts(step))
        trainer.slice(shared)


def add_rollouts(trainer: HeadTrainer, step: int, rollouts: Iterable[States]) -> None:
    """Passes a step's rollouts to a trainer."""
    trainer.begin_step(step)
    for sequence in rollouts:
        trainer.add(*sequence)


def by_position(acceptance: Acceptance) -> dict[str, Any]:
    """Details of a row about a head."""
    return {
        "acceptance_by_position": list(acceptance.by_position),
        "agreement_by_position": list(acceptance.agreement),
        "starts": acceptance.starts,
    }
