"""Heads that are trained on a policy's rollouts, and what they are worth on held-out ones.

`training`: objectives after equal numbers of slices, and the cost of a slice (TLT, Tables 7 and 8). `losses`:
the chance that the token that was sampled is drafted under the request's noise, multiplied along the response
(`losses.coupled_at`), where heads differ in the loss alone. `packing`: packed against padded batches on the
lengths of real rollouts (TLT, Figure 17b).
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.data import DataBuffer, HeadSequence, PackedRows, pack
from drafters.eagle.evaluation import Acceptance
from drafters.eagle.model import BlockShape, Head, HeadConfig, init_head, shared_params
from drafters.eagle.objective import HeadTraining, Variant, published_training
from drafters.eagle.spot_trainer import HeadTrainer, head_optimizer
from drafters.eagle.states import States
from drafters.eagle.training import init_state, jitted_train_step
from drafters.eagle.unrolling import HeadBatch
from rljax.benchmarking import Row, counted_row, speed_row, timed_row
from rljax.config import ExperimentConfig
from rljax.errors import UserError, known_names
from rljax.learning.packing import Packing
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.timing import compare, interleave
from rljax.training.drafter_warm_up import PolicyRollouts, WarmUp, make_trainer, measure, with_vocabulary
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.variants import collect_step, open_run, with_keys

# --- training --------------------------------------------------------------------------------------------


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


_EAGLE = {"hidden_weight": 1.0, "cross_entropy_weight": 0.1}
_EAGLE3 = {"steps": 7, "step_decay": 0.8}
OBJECTIVES: dict[str, tuple[Variant, HeadTraining]] = {
    "EAGLE": ("eagle", HeadTraining(**_EAGLE)),
    "EAGLE, reverse KL": ("eagle", HeadTraining(**_EAGLE, reverse_kl_weight=0.1)),
    "HASS": ("hass", HeadTraining(steps=3, **_EAGLE)),
    "EAGLE-3": ("eagle3", HeadTraining(**_EAGLE3)),
    "EAGLE-3, reverse KL": ("eagle3", HeadTraining(**_EAGLE3, reverse_kl_weight=1.0)),
    "EAGLE-3, LK": ("eagle3", HeadTraining(**_EAGLE3, lk_weight=1.0)),
}
"""Published losses and steps; the others add theirs with the weight of the cross entropy."""


def objective_rows(
    config: ExperimentConfig, settings: WarmUp, repeats: int, names: Sequence[str] = tuple(OBJECTIVES)
) -> list[Row]:
    """Measures accept lengths on held-out rollouts and seconds per slice, against the first of `names`."""
    with open_run(config) as (run, progress):
        rounds = -(-settings.steps // settings.slices_per_round)
        groups = [collect_step(run, run.collector, step)[0] for step in range(rounds)]
        shared, trainers, worth = shared_params(run.state.params, run.trainer.config), {}, {}
        progress.stage("bench", len(names))
        for number, name in enumerate(names, 1):
            variant, training = OBJECTIVES[name]
            head = HeadConfig(variant, run.trainer.config)
            rollouts = PolicyRollouts(run, head)
            of_trainer = dataclasses.replace(settings, variant=variant, training=training)
            trainer = trainers[name] = make_trainer(run, head, of_trainer)
            given = {"shared": shared, "heldout": rollouts.heldout(settings.heldout), "depth": settings.depth}
            value = functools.partial(measure, run, head, **given)
            before = value(trainer.params)
            train_head(trainer, settings, shared, lambda step, of=rollouts: of.read(groups[step]))
            worth[name] = before, value(trainer.params)
            progress.step(number, {"accept_length": worth[name][1].accept_length})
        actions = {name: functools.partial(trainer.slice, shared) for name, trainer in trainers.items()}
        seconds = interleave(actions, repeats)
    rows, first = [], names[0]
    for name in names:
        before, after = worth[name]
        details = {
            "steps_unrolled": OBJECTIVES[name][1].steps,
            "slices": settings.steps,
            "learning_rate": settings.learning_rate,
            "untrained": before.accept_length,
            **by_position(after),
        }
        lengths = after.accept_length, worth[first][1].accept_length
        rows.append(
            counted_row(f"training/{name}/accept length", *lengths, "tokens a pass", first, **details)
        )
        tokens = trainers[name].rows * trainers[name].pack_length
        timing = compare(seconds[name], seconds[first])
        rows.append(timed_row(f"training/{name}/slice", timing, first, tokens=tokens))
    return rows


# --- losses ----------------------------------------------------------------------------------------------

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
    """Measures drafts that are accepted, by some of `LOSSES`. An EAGLE-3 head is `unrolled` so many times in
    training, a block has `settings.depth` positions. Rollouts, and what each head is worth, are kept in
    `work`: what is there is not computed again. Raises a UserError for an unknown name.
    """
    for name in names:
        if name not in LOSSES:
            raise UserError(f"--losses: {name!r} is not one; {known_names(name, LOSSES)}")
    work.mkdir(parents=True, exist_ok=True)
    steps = {name: settings.depth if LOSSES[name][0] == "block" else unrolled for name in names}
    with open_run(with_keys(config, rollout={"temperature": 1.0})) as (run, progress):
        head = HeadConfig("eagle3", run.trainer.config)
        rounds = -(-settings.steps // settings.slices_per_round)
        heldout, *sampled = (_kept(run, head, settings, work, step) for step in range(-1, rounds))
        if settings.draft_vocabulary is not None:
            every = [each for step in sampled for each in step]
            head = with_vocabulary(run, head, settings.draft_vocabulary, every)
        shared = shared_params(run.state.params, head.policy)
        progress.stage("bench", len(names))
        worth: dict[str, Acceptance] = {}
        for number, name in enumerate(names, 1):
            file = work / f"{name}.json"
            if not file.exists():
                variant, loss = LOSSES[name]
                block = BlockShape(settings.depth) if variant == "block" else None
                head = HeadConfig(variant, head.policy, vocabulary=head.vocabulary, block=block)
                training = HeadTraining(steps=steps[name], **_EACH | {loss: 1.0})
                trainer = make_trainer(run, head, dataclasses.replace(settings, training=training))
                train_head(trainer, settings, shared, sampled.__getitem__)
                acceptance = measure(run, head, trainer.params, shared, heldout, settings.depth)
                file.write_text(json.dumps(dataclasses.asdict(acceptance)), encoding="utf-8")
            worth[name] = Acceptance(**json.loads(file.read_text(encoding="utf-8")))
            progress.step(number, {"accept_length": worth[name].coupled_length})
    rows, first = [], names[0]
    for name in names:
        acceptance = worth[name]
        details = {
            "coupled_by_position": list(acceptance.coupled),
            "rejection_sampling": acceptance.accept_length,
            "agreement_by_position": list(acceptance.agreement),
            "starts": acceptance.starts,
            "variant": LOSSES[name][0],
            "steps_unrolled": steps[name],
            "slices": settings.steps,
            "slice_tokens": config.training.pack_length * config.training.rows_per_microbatch,
            "draft_vocabulary": settings.draft_vocabulary,
            "learning_rate": settings.learning_rate,
            "responses": [len(step) for step in sampled],
        }
        lengths = acceptance.coupled_length, worth[first].coupled_length
        rows.append(counted_row(f"losses/{name}", *lengths, "tokens a pass", first, **details))
    return rows


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


# --- packing ---------------------------------------------------------------------------------------------

_ROWS = 4  # packed rows in a batch; padded ones hold about as many positions
_ROUNDED_TO = 64  # lengths of padded batches, so that few programs are compiled


def packing_rows(config: ExperimentConfig, settings: WarmUp, repeats: int) -> list[Row]:
    """Measures tokens per second of an EAGLE head's updates over the rollouts of one step."""
    length = config.training.pack_length
    with open_run(config) as (run, _):
        head = HeadConfig("eagle", run.trainer.config)
        sequences = [HeadSequence(*each, step=0) for each in PolicyRollouts(run, head).training(0)]
        order = np.random.default_rng(config.seed).permutation(len(sequences))  # rows come out by length
        sequences = [sequences[i] for i in order]
        lengths = np.asarray([each.length for each in sequences])
        longest = int(lengths.max())
        count = _ROWS * length // longest
        batches = {
            "packed": list(pack(sequences, length).batches(_ROWS)),
            "padded to the longest": list(padded(sequences, count, longest)),
            "padded to the longest of each batch": list(padded(sequences, count)),
        }
        optimizer = head_optimizer(settings.learning_rate)
        numerics = dataclasses.replace(run.numerics, row_invariant=False)
        shared = shared_params(run.state.params, head.policy)
        rope = jnp.asarray(rope_table(head.policy, length))
        held = [init_state(init_head(head, run.state.params, config.seed), optimizer)]
        fixed = Head(None, shared, rope, head, numerics), published_training("eagle"), optimizer

        def sweep(side: Sequence[HeadBatch]) -> None:
            for batch in side:
                held[0], metrics = jitted_train_step(held[0], jax.tree.map(jnp.asarray, batch), *fixed)
            metrics["loss"].block_until_ready()

        sides = {name: functools.partial(sweep, side) for name, side in batches.items()}
        seconds = interleave(sides, repeats)
    positions = {name: sum(batch.tokens.size for batch in side) for name, side in batches.items()}
    details = {
        "sequences": len(sequences),
        "tokens": int(lengths.sum()),
        "length_mean": float(lengths.mean()),
    }
    details |= {"length_max": longest, "positions": positions.pop("packed")}
    rows = []
    for name, baseline_positions in positions.items():
        timing = compare(seconds["packed"], seconds[name])
        more = details | {"baseline_positions": baseline_positions}
        rows.append(speed_row(f"packing/against {name}", details["tokens"], timing, name, **more))
    return rows


def padded(sequences: Sequence[HeadSequence], count: int, length: int | None = None) -> Iterator[HeadBatch]:
    """Yields batches of `count` sequences, one per row, padded to the batch's longest or to `length`."""
    for first in range(0, len(sequences), count):
        batch = sequences[first : first + count]
        lengths = np.asarray([sequence.length for sequence in batch], np.int64)
        width = length or -(-int(lengths.max()) // _ROUNDED_TO) * _ROUNDED_TO
        rows = np.arange(len(batch))
        packing = Packing(lengths, rows, np.zeros_like(rows), len(batch), width)
        yield from PackedRows(batch, packing).batches(count)
