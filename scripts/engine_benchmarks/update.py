"""Tokens per second through an update, against the same update in PyTorch."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.algorithms.losses import aggregation_weights
from rljax.benchmarking import Row, speed_row
from rljax.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import (
    PackedBatch,
    Packing,
    TrainingSequence,
    build_batch,
    pack_groups,
    pack_sequences,
)
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, num_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.timing import compare, interleave
from rljax.training.update import Recipe, Trainer
from workloads import PROMPT_TOKENS, SWITCH, config_of, import_reference, make_reference

if TYPE_CHECKING:
    import torch
    import transformers

GRPO = AlgorithmConfig(name="dapo")  # clip-higher, token mean, no KL term: one forward pass per side
OPTIMIZER = OptimizerConfig()
UPDATE = TrainingConfig(pack_length=768, rows_per_microbatch=4)
LONG_PROMPTS = TrainingConfig(pack_length=1536, rows_per_microbatch=4)
LONG_PROMPT_TOKENS = 512
GROUP_SIZE = 8
SMALL = ("2M", "25M")
"""Policies whose updates have 64 sequences, or 4 groups: those of others have 16, or one."""


def random_groups(
    rng: np.random.Generator, lengths: np.ndarray, prompt: int, vocab_size: int
) -> list[TrainingSequence]:
    """Returns groups of responses of random tokens, lengths [groups, responses], to a random prompt each.

    Logprobs are about those of random weights: ratios are on both sides of the clip range, near it with such
    weights, and far from it with trained ones.
    """
    weights = aggregation_weights(lengths.reshape(-1), GRPO.aggregation).reshape(lengths.shape)
    prompts = rng.integers(0, vocab_size, (len(lengths), prompt))
    return [
        TrainingSequence(
            prompt_ids=prompts[group],
            response_ids=rng.integers(0, vocab_size, length),
            rollout_logprobs=rng.normal(-np.log(vocab_size), 0.2, length),
            advantage=float(rng.normal()),
            weight=float(weights[group, number]),
        )
        for (group, number), length in np.ndenumerate(lengths)
    ]


def equal_batch(count: int, length: int, prompt: int, vocab_size: int, pack_length: int) -> PackedBatch:
    """Returns a micro-batch of sequences of one length, which begin with a prompt and fill its rows."""
    lengths = np.full((count, 1), length - prompt)
    sequences = random_groups(np.random.default_rng(0), lengths, prompt, vocab_size)
    packing = pack_sequences([length] * count, pack_length)
    return build_batch(sequences, packing, range(packing.num_rows))


def long_tailed_sequences(count: int, vocab_size: int) -> list[TrainingSequence]:
    """Returns random prompts and responses with log-normal lengths: the longest are several times the
    median.
    """
    rng = np.random.default_rng(0)
    longest = UPDATE.pack_length - PROMPT_TOKENS
    lengths = np.clip(rng.lognormal(np.log(longest / 7), 0.9, (count, 1)).astype(int), 8, longest)
    return random_groups(rng, lengths, PROMPT_TOKENS, vocab_size)


Update = Callable[[], tuple[float, float]]
"""One update: the loss, and the norm of its gradients before clipping."""


def packed_updates(
    config: ModelConfig,
    params: Params,
    sequences: Sequence[TrainingSequence],
    numerics: Numerics,
    training: TrainingConfig,
    share_prompts: bool = False,
) -> tuple[Update, float]:
    """Our side: packs the sequences and updates the policy at every call. Equal prompts may be computed once.
    Also returns the share of padding.
    """
    recipe = Recipe(SamplingParams(), GRPO, training, make_optimizer(OPTIMIZER, 1))
    trainer = Trainer(config, numerics, recipe, ExecutablePool(numerics.row_invariant))
    held, num_rows = [trainer.init(params)], training.rows_per_microbatch
    lengths, prompts = zip(*((each.length, each.prompt_ids) for each in sequences), strict=True)

    def pack() -> Packing:
        if share_prompts:
            return pack_groups(lengths, prompts, training.pack_length, num_rows)
        return pack_sequences(lengths, training.pack_length)

    def update() -> tuple[float, float]:
        packing = pack()
        ranges = packing.microbatches(num_rows)
        batches = [build_batch(sequences, packing, rows, share_prompts) for rows in ranges]
        held[0], metrics = trainer.update(held[0], batches)
        return metrics["loss/policy"], metrics["gradient_norm"]

    packing = pack()
    return update, packing.padding_fraction(packing.microbatches(num_rows)[-1].stop)


def padded_updates(
    model: "transformers.PreTrainedModel", sequences: Sequence[TrainingSequence], training: TrainingConfig
) -> tuple[Update, float]:
    """The other side, in the usual form: sorted by length, padded on the right, AdamW on autograd; and its
    share of padding. Micro-batches hold as many padded tokens as ours hold packed ones, so that is little.
    """
    import torch

    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )
    microbatches: list[list[TrainingSequence]] = []
    budget = training.rows_per_microbatch * training.pack_length
    for sequence in sorted(sequences, key=lambda sequence: -sequence.length):
        if not microbatches or (len(microbatches[-1]) + 1) * microbatches[-1][0].length > budget:
            microbatches.append([])
        microbatches[-1].append(sequence)

    def update() -> tuple[float, float]:
        total = 0.0
        for batch in microbatches:
            loss = _loss(model, batch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    padded = sum(len(batch) * batch[0].length for batch in microbatches)
    return update, 1.0 - sum(sequence.length for sequence in sequences) / padded


def _loss(model: "transformers.PreTrainedModel", batch: Sequence[TrainingSequence]) -> "torch.Tensor":
    import torch

    shape = (len(batch), batch[0].length)
    ids, attended = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    rollout_logprobs, advantages, weights = (torch.zeros(shape) for _ in range(3))
    for row, sequence in enumerate(batch):
        tokens = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        ids[row, : sequence.length] = torch.as_tensor(tokens)
        attended[row, : sequence.length] = 1
        response = slice(len(sequence.prompt_ids), sequence.length)
        rollout_logprobs[row, response] = torch.as_tensor(sequence.rollout_logprobs, dtype=torch.float32)
        advantages[row, response] = sequence.advantage
        weights[row, response] = sequence.weight  # 0 elsewhere, which masks
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    log_ratio = torch.where(weights[:, 1:] > 0, -nll.view(len(batch), -1) - rollout_logprobs[:, 1:], 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - GRPO.clip_low, 1 + GRPO.clip_high)
    surrogate = torch.minimum(ratio * advantages[:, 1:], clipped * advantages[:, 1:])
    return -(weights[:, 1:] * surrogate).sum()


def check_same_update(ours: tuple[float, float], reference: tuple[float, float], side: str) -> None:
    """Raises `UserError` unless (loss, gradient norm) agree to float32's accuracy."""
    if not np.allclose(ours, reference, rtol=1e-3, atol=1e-5):
        raise UserError(
            f"loss and gradient norm of the first update differ, {ours} ({side}) against "
            f"{reference} in PyTorch: not the same update, so nothing was timed"
        )


def timed_updates(ours: dict[str, Update], theirs: Update, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of every side's updates, once the first one is the same on all."""
    reference = theirs()
    for side, update in ours.items():
        check_same_update(update(), reference, side)
    return interleave({**ours, "PyTorch": theirs}, repeats, warmups=0)


def update_rows(name: str, repeats: int) -> list[Row]:
    """Measures tokens of prompt and response per second through an update with batching, against PyTorch."""
    import_reference()
    config, num_sequences = config_of(name), 64 if name in SMALL else 16
    model, params = make_reference(name)
    sequences = long_tailed_sequences(num_sequences, config.vocab_size)
    sides = {
        SWITCH[on]: packed_updates(config, params, sequences, Numerics(on, "float32"), UPDATE)
        for on in (True, False)
    }
    reference, baseline_padding = padded_updates(model, sequences, UPDATE)
    seconds = timed_updates({switch: update for switch, (update, _) in sides.items()}, reference, repeats)
    lengths, rows = [len(sequence.response_ids) for sequence in sequences], []
    details = _sizes(config, sequences) | {"baseline_padding": baseline_padding}
    details |= {"response_length_p75": float(np.percentile(lengths, 75)), "response_length_max": max(lengths)}
    for switch, (_, padding) in sides.items():
        row, timing = f"update/{name}/row_invariant {switch}", compare(seconds[switch], seconds["PyTorch"])
        more = details | {"padding": padding}
        rows.append(speed_row(row, details["tokens"], timing, "PyTorch, transformers", **more))
    return rows


def _sizes(config: ModelConfig, sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    tokens = sum(sequence.length for sequence in sequences)
    return {"params": num_params(config), "sequences": len(sequences), "tokens": tokens}


def shared_prompt_rows(name: str, repeats: int) -> list[Row]:
    """Measures updates on groups with a long prompt, which is computed once: against PyTorch, and against
    computing every copy.
    """
    import_reference()
    config = config_of(name)
    model, params = make_reference(name)
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 151, (4 if name in SMALL else 1, GROUP_SIZE))
    sequences = random_groups(rng, lengths, LONG_PROMPT_TOKENS, config.vocab_size)
    numerics, theirs = Numerics(True, "float32"), padded_updates(model, sequences, LONG_PROMPTS)[0]
    sides = {
        side: packed_updates(config, params, sequences, numerics, LONG_PROMPTS, share)[0]
        for side, share in (("shared", True), ("every", False))
    }
    seconds, rows = timed_updates(sides, theirs, repeats), []
    details = _sizes(config, sequences) | {"group_size": GROUP_SIZE, "prompt_tokens": LONG_PROMPT_TOKENS}
    for side, baseline in (("PyTorch", "PyTorch, transformers"), ("every", "every prompt computed")):
        row = f"update/{name}/shared prompts, against {side}"
        timing = compare(seconds["shared"], seconds[side])
        rows.append(speed_row(row, details["tokens"], timing, baseline, **details))
    return rows
