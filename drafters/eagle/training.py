"""One training function for every head of the family: (state, batch) -> (state, metrics), pure.

EAGLE (section 3.2), HASS (section 3.2), EAGLE-3 (section 3.1) and TLT (section 4.1, Figure 7) differ in the
features that are read, the loss, and the number of *training-time test* steps: how often the head's own
outputs are fed back into it, as in drafting.

The outputs of the steps come from `drafters/eagle/unrolling.py`; which losses and how many steps, from
`drafters/eagle/objective.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax

from drafters.eagle import losses
from drafters.eagle.model import Head, head_logits, policy_logits
from drafters.eagle.objective import HeadTraining
from drafters.eagle.unrolling import HeadBatch, delayed, shifted, unroll
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics, log_normalizer
from rljax.sampling.distribution import scaled_logits, transform_logits

Metrics = dict[str, Array]


@struct.dataclass
class _Policy:
    """The policy at N positions, over the tokens that the head can draft.

    Attributes:
      p: float32 [N, V'], log-probabilities at the sampling temperature, normalized over those tokens.
      sampled: float32 [N, V'], those of the sampling distribution.
      rest: float32 [N], the probability of all other tokens in it.
      likeliest: int32 [N], a token of the whole vocabulary.
      learnt: bool [N], the head can draft that.
      tokens: int32 [N], what was sampled, as an id of the head; -1 if it has none.
    """

    p: Array
    sampled: Array
    rest: Array
    likeliest: Array
    learnt: Array
    tokens: Array


@struct.dataclass
class _Compared:
    """A step of the head at N positions, float32 [N] each.

    Attributes:
      loss: what is learned from the step alone.
      agrees: 1 where the policy and the head have the same most likely token.
      accepted: the acceptance rate.
      coupled: log of the chance that the sampled token is drafted under shared noise, without a gradient.
      chains: log of the chances by which the losses of whole drafts are computed.
      counted: 1 where the loss counts.
    """

    loss: Array
    agrees: Array
    accepted: Array
    coupled: Array
    chains: tuple[Array, ...]
    counted: Array


def _sampled_logits(logits: Array, training: HeadTraining, numerics: Numerics) -> tuple[Array, Array]:
    """Returns logits divided by the temperature, and those of the sampling distribution."""
    sampling = training.sampling
    if sampling is None or sampling.greedy:
        return logits, logits
    return scaled_logits(logits, sampling), transform_logits(logits, sampling, numerics)


def _policy_at(head: Head, training: HeadTraining, hidden: Array, tokens: Array) -> _Policy:
    """Returns the policy with final hidden states [N, d], which sampled `tokens`, int32 [N]."""
    config, numerics = head.config, head.numerics
    logits = policy_logits(head, hidden)
    likeliest = jnp.argmax(logits, axis=-1)
    scaled, logits = _sampled_logits(logits, training, numerics)
    sampled = logits - log_normalizer(logits, numerics)
    learnt, rest = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.float32)
    if config.vocabulary is not None:
        ids = config.vocabulary.tokens
        own = np.full(config.policy.vocab_size, -1, np.int32)
        own[ids] = np.arange(len(ids))
        learnt, tokens = jnp.asarray(own)[likeliest] >= 0, jnp.asarray(own)[tokens]
        scaled, sampled = scaled[..., ids], sampled[..., ids]
        rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(sampled), axis=-1), 0.0)
    p = scaled - log_normalizer(scaled, numerics)
    return _Policy(p, sampled, rest, likeliest, learnt, tokens)


def _compare(
    head: Head, training: HeadTraining, policy: _Policy, outputs: Array, target: Array, mask: Array
) -> _Compared:
    """Compares outputs [N, d] of a step with the policy, whose hidden states are `target`.

    Positions outside the mask, which may hold any values, are computed on zeros. With a draft vocabulary, the
    losses of a step compare with the policy's distribution over its tokens alone, and do not count where the
    policy's likeliest token is outside of it (as in EAGLE-3's code); all else is as in drafting.
    """
    numerics, vocabulary = head.numerics, head.config.vocabulary
    outputs = jnp.where(mask[:, None], outputs, 0)
    logits = head_logits(head, outputs)
    drafted = jnp.argmax(logits, axis=-1)
    if vocabulary is not None:
        drafted = jnp.asarray(vocabulary.tokens)[drafted]
    scaled, logits = _sampled_logits(logits, training, numerics)
    p, q = policy.p, scaled - log_normalizer(scaled, numerics)
    offered = lax.stop_gradient(logits - log_normalizer(logits, numerics))
    loss = jnp.zeros(mask.shape, jnp.float32)
    if training.hidden_weight:
        loss += training.hidden_weight * losses.smooth_l1(outputs, jnp.where(mask[:, None], target, 0))
    if training.cross_entropy_weight:
        loss += training.cross_entropy_weight * losses.cross_entropy(p, q)
    if training.reverse_kl_weight:
        loss += training.reverse_kl_weight * losses.reverse_kl(p, q)
    if training.lk_weight:
        loss += training.lk_weight * losses.lk(p, q)
    if training.tv_weight:
        loss += training.tv_weight * (1.0 - losses.acceptance(p, q))
    chains = []
    if training.coupled_weight:
        chains.append(losses.coupled(policy.sampled, q, policy.rest))
    if training.sampled_weight:
        chains.append(losses.coupled_at(policy.sampled, q, policy.tokens, policy.rest))
    counted = mask & policy.learnt
    none, never = jnp.zeros(mask.shape, jnp.float32), jnp.full(mask.shape, -jnp.inf)
    return _Compared(
        loss=jnp.where(counted, loss, none),
        agrees=jnp.where(mask & (policy.likeliest == drafted), 1.0, none),
        accepted=jnp.where(mask, losses.acceptance(policy.sampled, offered), none),
        coupled=jnp.where(
            mask, losses.coupled_at(policy.sampled, offered, policy.tokens, policy.rest), never
        ),
        chains=tuple(jnp.where(mask, chain, never) for chain in chains),
        counted=counted.astype(jnp.float32),
    )


def _compare_all(
    head: Head, training: HeadTraining, batch: HeadBatch, outputs: list[Array]
) -> tuple[_Compared, Array]:
    """Compares every step with the policy, a chunk of the policy's positions at a time: its logits serve all
    steps. In every row the positions that count come first, and chunks without any are skipped.

    Args:
      outputs: of `unroll`.

    Returns:
      arrays [k, R, T] in the order of starts, and which of them count, bool [k, R, T].
    """
    rows, length = batch.tokens.shape
    counts = batch.response_mask & (batch.segment_ids > 0)
    order = jnp.argsort(~counts, axis=1, stable=True)
    size = min(length, -(-training.logit_chunk // rows))
    chunks = -(-length // size)

    def chunked(x: Array) -> Array:
        x = jnp.take_along_axis(x, order.reshape(rows, length, *(1,) * (x.ndim - 2)), axis=1)
        x = jnp.pad(x, [(0, 0), (0, chunks * size - length), *((0, 0) for _ in x.shape[2:])])
        x = x.reshape(rows, chunks, size, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(chunks, rows * size, *x.shape[3:])

    def in_order(x: Array) -> Array:
        x = x.swapaxes(0, 1).reshape(len(outputs), chunks, rows, size).swapaxes(1, 2)
        return jnp.take_along_axis(x.reshape(len(outputs), rows, -1)[..., :length], places[None], axis=2)

    places = jnp.argsort(order, axis=1)
    here = [delayed(batch.segment_ids, step + 1) == batch.segment_ids for step in range(len(outputs))]
    masks = [counts & inside for inside in here]
    final = batch.states[:, :, -1].astype(head.numerics.dtype)
    parts = (
        [chunked(delayed(output, step + 1)) for step, output in enumerate(outputs)],
        [chunked(mask) for mask in masks],
        chunked(jnp.where(counts[:, :, None], final, 0)),
        chunked(shifted(batch.tokens, 1)),
    )

    @jax.checkpoint
    def step(policy: _Policy, outputs: Array, target: Array, mask: Array) -> _Compared:
        return _compare(head, training, policy, outputs, target, mask)

    @jax.checkpoint
    def compare(part: tuple[list[Array], list[Array], Array, Array]) -> _Compared:
        outputs, masks, target, tokens = part
        policy = _policy_at(head, training, target, tokens)
        steps = [step(policy, each, target, mask) for each, mask in zip(outputs, masks, strict=True)]
        return jax.tree.map(lambda *each: jnp.stack(each), *steps)

    def compare_or_skip(part: tuple[list[Array], list[Array], Array, Array]) -> _Compared:
        shapes = jax.eval_shape(compare, part)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(jnp.any(jnp.stack(part[1])), compare, lambda part: nothing, part)

    compared = jax.tree.map(in_order, lax.map(compare_or_skip, parts))  # [k, R, T], by the policy's position
    mask = jnp.stack(masks)

    def by_start(x: Array) -> Array:
        return jnp.stack([shifted(each, step + 1) for step, each in enumerate(x)])

    return jax.tree.map(by_start, compared), by_start(mask)


def head_loss(head: Head, training: HeadTraining, batch: HeadBatch) -> tuple[Array, Metrics]:
    """Computes the loss of a batch, sum_j step_decay^j mean_s loss[j, s], and its metrics.

    A start s counts at step j if the policy predicts a response token at position s + j + 1. The losses of
    whole drafts (`coupled_weight`, `sampled_weight`) are means over starts.

    Returns:
      the loss [], and metrics []: for each step, J from 1, `loss/J`, `agreement/J` (the policy and the head
      have the same most likely token), `acceptance/J`, and `coupled/J` (under shared noise, the first J
      drafts are accepted); `accept_length`, the mean over starts of the tokens that a verifying pass over a
      chain of k would yield (`losses.expected_accept_length`), without tokens behind the response;
      `coupled_length`, the same under shared noise; `starts`, their number; with a draft vocabulary,
      `outside_vocabulary`, the number of starts whose likeliest token is outside of it, which have no part in
      the losses of steps.
    """
    if head.config.fused and training.hidden_weight:
        variant = head.config.variant
        raise ValueError(
            f"hidden_weight: {variant}'s outputs are not compared with hidden states; set it to 0"
        )
    head = head.replace(shared=lax.stop_gradient(head.shared))
    outputs = unroll(head, batch, training.steps)
    compared, mask = _compare_all(head, training, batch, outputs)
    starts = mask[0].astype(jnp.float32)
    number = jnp.sum(starts)

    def per_start(x: Array) -> Array:
        return jnp.sum(starts * x) / jnp.maximum(number, 1.0)

    total = jnp.float32(0.0)
    metrics: Metrics = {}
    coupled = jnp.exp(jnp.cumsum(jnp.where(mask, compared.coupled, -jnp.inf), axis=0))
    for step in range(training.steps):
        count = jnp.maximum(jnp.sum(mask[step].astype(jnp.float32)), 1.0)
        loss = jnp.sum(compared.loss[step]) / jnp.maximum(jnp.sum(compared.counted[step]), 1.0)
        total += training.step_decay**step * loss
        metrics[f"loss/{step + 1}"] = loss
        metrics[f"agreement/{step + 1}"] = jnp.sum(compared.agrees[step]) / count
        metrics[f"acceptance/{step + 1}"] = jnp.sum(compared.accepted[step]) / count
        metrics[f"coupled/{step + 1}"] = per_start(coupled[step])
    weights = [each for each in (training.coupled_weight, training.sampled_weight) if each]
    for weight, chain in zip(weights, compared.chains, strict=True):
        accepted = losses.accepted_drafts(jnp.where(mask, chain, -jnp.inf))
        total -= weight * per_start(jnp.log(jnp.where(accepted > 0, accepted, 1.0)))
    if head.config.vocabulary is not None:
        metrics["outside_vocabulary"] = number - jnp.sum(compared.counted[0])
    metrics["starts"] = number
    metrics["accept_length"] = per_start(losses.expected_accept_length(compared.accepted))
    metrics["coupled_length"] = 1.0 + per_start(jnp.sum(coupled, axis=0))
    return total, metrics


def train_step(
    state: TrainState,
    batch: HeadBatch,
    head: Head,
    training: HeadTraining,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """One update of the head. Pure; only the head's parameters are differentiated.

    Args:
      state: the head's, from `init_state`.
      batch: R packed rows.
      head: all of it but its weights, which are those of the state.
      training, optimizer: static.

    Returns:
      the new state, and the metrics of `head_loss` (before the update) with `loss` and `gradient_norm`.
    """

    def loss(params: Params) -> tuple[Array, Metrics]:
        return head_loss(head.replace(params=params), training, batch)

    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    state, norm = apply_gradients(state, gradients, optimizer)
    return state, metrics | {"loss": value, "gradient_norm": norm}


jitted_train_step = jax.jit(train_step, static_argnames=("training", "optimizer"), donate_argnames=("state",))


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first update. `params` is copied, since updates consume their state."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
