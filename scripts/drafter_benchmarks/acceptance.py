"""Compares the losses of a head by the drafts that are accepted under shared noise, all else being equal.

Every head begins with the same weights and is trained by as many slices, on the same rollouts in the same
order, at temperature 1. What its drafts are worth is computed on held-out rollouts: the chance that the token
that was sampled is drafted under the request's noise, multiplied along the response (`losses.coupled_at`).
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drafter_benchmarks.training import train_head
from drafters.eagle.data import DataBuffer
from drafters.eagle.evaluation import Acceptance
from drafters.eagle.model import BlockShape, HeadConfig, shared_params
from drafters.eagle.objective import HeadTraining
from drafters.eagle.states import States
from drafters.eagle.variant import Variant
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.errors import UserError, known_names
from rljax.training.drafter_warm_up import PolicyRollouts, WarmUp, make_trainer, measure, with_vocabulary
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.variants import open_run, with_keys

_CHUNK = 128  # positions whose logits are computed at once: about half of a slice is prompts
_EACH = {"cross_entropy_weight": 0.0, "step_decay": 0.8, "logit_chunk": _CHUNK}
LOSSES: dict[str, tuple[Variant, str]] = {
    "LK": ("eagle3", "lk_weight"),
    "coupled": ("eagle3", "coupled_weight"),
    "sampled": ("eagle3", "sampled_weight"),
    "cross entropy": ("eagle3", "cross_entropy_weight"),
    "TV": ("eagle3", "tv_weight"),
    "reverse KL": ("eagle3", "reverse_kl_weight"),
    "block LK": ("block", "lk_weight"),
    "block sampled": ("block", "sampled_weight"),
}
"""Head and loss, by name; the first is the baseline. Steps decay as EAGLE-3's; coupled and sampled multiply
them instead.
"""


def acceptance_rows(
    config: ExperimentConfig, settings: WarmUp, unrolled: int, names: Sequence[str], work: Path
) -> list[Row]:
    """Measures drafts that are accepted, by loss.

    Args:
      settings: of the heads; `variant` and `training` are ignored. A block has `depth` positions.
      unrolled: times that an EAGLE-3 head is applied in training.
      names: some of `LOSSES`.
      work: directory for the rollouts and what each head is worth: what is there is not computed again.

    Raises:
      UserError: an unknown name.
    """
    for name in names:
        if name not in LOSSES:
            raise UserError(f"--losses: {name!r} is not one; {known_names(name, LOSSES)}")
    work.mkdir(parents=True, exist_ok=True)
    with open_run(with_keys(config, rollout={"temperature": 1.0})) as (run, progress):
        head = HeadConfig("eagle3", run.trainer.config)
        rounds = -(-settings.steps // settings.slices_per_round)
        heldout, *sampled = (_kept(run, head, settings, work, step) for step in range(-1, rounds))
        if settings.draft_vocabulary is not None:
            head = with_vocabulary(
                run, head, settings.draft_vocabulary, [each for step in sampled for each in step]
            )
        shared = shared_params(run.state.params, head.policy)
        progress.stage("bench", len(names))
        worth: dict[str, Acceptance] = {}
        for number, name in enumerate(names, 1):
            file = work / f"{name}.json"
            if not file.exists():
                variant, loss = LOSSES[name]
                steps, block = unrolled, None
                if variant == "block":
                    steps, block = settings.depth, BlockShape(settings.depth)
                head = HeadConfig(variant, head.policy, vocabulary=head.vocabulary, block=block)
                training = HeadTraining(steps=steps, **_EACH | {loss: 1.0})
                trainer = make_trainer(run, head, dataclasses.replace(settings, training=training))
                train_head(trainer, settings, shared, sampled.__getitem__)
                acceptance = measure(run, head, trainer.params, shared, heldout, settings.depth)
                file.write_text(json.dumps(dataclasses.asdict(acceptance)), encoding="utf-8")
            worth[name] = Acceptance(**json.loads(file.read_text(encoding="utf-8")))
            progress.step(number, {"accept_length": worth[name].coupled_length})
    return [
        counted_row(
            f"losses/{name}",
            worth[name].coupled_length,
            worth[names[0]].coupled_length,
            "tokens a pass",
            names[0],
            coupled_by_position=list(worth[name].coupled),
            rejection_sampling=worth[name].accept_length,
            agreement_by_position=list(worth[name].agreement),
            starts=worth[name].starts,
            variant=LOSSES[name][0],
            steps_unrolled=unrolled if LOSSES[name][0] == "eagle3" else settings.depth,
            slices=settings.steps,
            slice_tokens=config.training.pack_length * config.training.rows_per_microbatch,
            draft_vocabulary=settings.draft_vocabulary,
            learning_rate=settings.learning_rate,
            responses=[len(step) for step in sampled],
        )
        for name in names
    ]


def _kept(run: TrainingRun, head: HeadConfig, settings: WarmUp, work: Path, step: int) -> list[States]:
    """Returns the rollouts of a step with their features, or the held-out ones for -1; samples them once."""
    file = work / ("heldout.npz" if step < 0 else f"step {step}.npz")
    buffer = DataBuffer(1 << 40, (head.states, head.policy.hidden_size))
    if file.exists():
        with np.load(file) as arrays:
            buffer.load_state(dict(arrays))
    else:
        rollouts = PolicyRollouts(run, head)
        for each in rollouts.heldout(settings.heldout) if step < 0 else rollouts.training(step):
            buffer.add(*each)
        np.savez(file, **buffer.state())
    return [(each.tokens, each.states, each.response_mask) for each in buffer.draw(0)]
