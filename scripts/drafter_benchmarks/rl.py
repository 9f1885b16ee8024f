"""Drafters while the policy is trained, on held-out rollouts of the policy as it then is.

The policy in fewer bits: tokens per pass as the policy's entropy falls (EfficientRollout's block efficiency).
A head: the accuracy lost by an update of the policy, and regained by training on that step's rollouts (TLT,
Table 6 and Figure 16). Computed from hidden states: see `drafters/eagle/evaluation.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafter_benchmarks.heads import add_rollouts, by_position, train_head
from drafters.eagle import losses
from drafters.eagle.model import HeadConfig, shared_params
from drafters.eagle.states import StateReader, States
from drafters.quantized import QuantizedPolicy, default_format
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.training import loop
from rljax.training.drafter_warm_up import PolicyRollouts, WarmUp, make_trainer, measure
from rollout_benchmarks.variants import collect_step, open_run, with_keys

_BITS = (8, 4)
_LENGTHS, _LENGTH = (2, 5, 11), 5  # of chains; rows report the latter
_CHUNK = 1024  # positions whose logits exist at once


@dataclasses.dataclass(frozen=True)
class SelfDrafts:
    """Acceptance of a policy's self-drafter: tokens that a verifying pass yields on average, by drafts of a
    chain; and the entropy of the policy's distribution in nats per token.
    """

    by_length: dict[int, float]
    entropy: float


def rl_rows(config: ExperimentConfig, settings: WarmUp, rl_steps: int, slices: int) -> list[Row]:
    """Measures the self-drafter's block efficiency and a head's accuracy before every update of the policy,
    of which there are `rl_steps`; `slices` train the head in each.
    """
    rows: list[Row] = []
    config = with_keys(config, optimizer={"warmup_steps": 0}, training={"steps": rl_steps})
    with open_run(config) as (run, progress):
        head = HeadConfig(settings.variant, run.trainer.config)
        rollouts, trainer = PolicyRollouts(run, head), make_trainer(run, head, settings)
        train_head(trainer, settings, shared_params(run.state.params, head.policy), rollouts.training)
        frozen, quantized = trainer.params, {bits: QuantizedPolicy(default_format(bits)) for bits in _BITS}
        numerics = dataclasses.replace(run.numerics, row_invariant=False)
        shape = config.training.pack_length, config.training.rows_per_microbatch
        reader = StateReader(head, numerics, *shape)
        first: dict[str, SelfDrafts] = {}
        # Accept length of the frozen head at first, and of the other one before the last update.
        frozen_first = before = None
        progress.stage("rl", rl_steps)
        for step in range(rl_steps):
            groups, _, _ = collect_step(run, run.collector, step)
            shared, heldout = shared_params(run.state.params, head.policy), rollouts.heldout(settings.heldout)
            pairs = [(tokens[~response], tokens[response]) for tokens, _, response in heldout]
            target, drafts = list(reader.read(run.state.params, pairs)), {}
            for bits, drafter in quantized.items():
                drafted = list(reader.read(drafter.refresh(run.state.params), pairs))
                drafter.release()
                drafts[f"quantized W{bits}"] = self_drafts(shared, head.policy, target, drafted, _LENGTHS)
            first = first or drafts
            given = {"shared": shared, "heldout": heldout, "depth": settings.depth}
            worth = functools.partial(measure, run, head, **given)
            old, updated = worth(frozen), worth(trainer.params)
            add_rollouts(trainer, step, rollouts.read(groups))
            for _ in range(slices):
                trainer.slice(shared)
            trained = worth(trainer.params)
            reward = float(np.mean([group.reward for group in groups]))
            details: dict[str, Any] = {
                "reward": reward,
                "policy_learning_rate": config.optimizer.learning_rate,
                "entropy": next(iter(drafts.values())).entropy,  # of the policy, the same for all drafters
            }
            for name, measured in drafts.items():
                both = [each.by_length[_LENGTH] for each in (measured, first[name])]
                by_length = {str(length): tokens for length, tokens in measured.by_length.items()}
                more = {"block_efficiency_by_length": by_length}
                row = f"rl/step {step}/{name}, {_LENGTH} drafts"
                rows.append(counted_row(row, *both, "tokens a pass", "first step", **details, **more))
            details |= {"variant": settings.variant, "warm_up_slices": settings.steps}
            details["slices_per_step"] = slices
            for name, measured, against, baseline in (
                ("frozen head", old, "first step", frozen_first or old),
                ("head, policy just updated", updated, "before the update", before or updated),
                ("head, trained since", trained, "policy just updated", updated),
            ):
                value, base = (100 * side.agreement[0] for side in (measured, baseline))
                more = details | by_position(measured) | {"accept_length": measured.accept_length}
                ratio = value / max(base, 1e-6)
                rows.append(Row(f"rl/step {step}/{name}", value, "% right", against, base, ratio, more))
            frozen_first, before = frozen_first or old, trained
            loop.learn(run, groups)
            progress.step(step + 1, {"reward": reward})
    return rows


def self_drafts(
    shared: Params, policy: ModelConfig, target: Sequence[States], drafted: Sequence[States],
    lengths: Sequence[int],
) -> SelfDrafts:  # fmt: skip
    """Measures chains of these lengths at every token of the responses, without counting tokens after their
    ends, from the same sequences with the policy's and with the drafter's hidden states.
    """
    finals = [np.concatenate([states[:, -1] for _, states, _ in each]) for each in (target, drafted)]

    acceptance, entropy = jax.device_get(_compare(shared, policy, *finals))
    # The hidden state at a token predicts the next token.
    responses = [np.append(response[1:], False) for _, _, response in target]
    ends = np.cumsum([len(response) for response in responses])[:-1]
    by_response = [each[of] for each, of in zip(np.split(acceptance, ends), responses, strict=True)]
    by_length = {}
    for length in lengths:
        chains = [sliding(each, length) for each in by_response]
        by_length[length] = float(np.mean(losses.expected_accept_length(np.concatenate(chains, axis=1))))
    return SelfDrafts(by_length, float(entropy[np.concatenate(responses)].mean()))


def sliding(x: np.ndarray, length: int) -> np.ndarray:
    """Returns [length, n] from [n]: column i is x[i : i + length], with zeros after the end."""
    padded = np.pad(x, (0, length - 1))
    return np.stack([padded[i : i + len(x)] for i in range(length)])


@functools.partial(jax.jit, static_argnames="policy")
def _compare(shared: Params, policy: ModelConfig, target: Array, drafted: Array) -> tuple[Array, Array]:
    """Returns acceptance and the target's entropy, both float32 [P], from final hidden states [P, d]."""

    def of_position(states: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = (transformer.logits(shared, policy, each, Numerics(False)) for each in states)
        p, q = map(jax.nn.log_softmax, logits)
        return losses.acceptance(p, q), -jnp.sum(jnp.exp(p) * p, axis=-1)

    return jax.lax.map(of_position, (target, drafted), batch_size=_CHUNK)
