"""One training function for every head of the family: (state, batch) -> (state, metrics), pure.

EAGLE (section 3.2), HASS (section 3.2), EAGLE-3 (section 3.1) and TLT (section 4.1, Figure 7) differ in the
states that are read, the loss, and the number of *training-time test* steps: how often the head's own outputs
are fed back into it, as in drafting.

**Unrolling.** At start s, the head drafts behind the verified pairs 0 .. s. Step j computes pair s + j (see
`model.py`): the token is the real one, the hidden state the head's own output of step j - 1 at the same s,
and the pair sees what it would see while drafting:

    keys of step 0 at pairs 0 .. s        (verified states; causal inside the segment)
    keys of steps 1 .. j at s itself      (its own outputs: a diagonal band, one key a step)

Everything is indexed by the start s, so step 0 is ordinary causal attention over packed rows, and a step
costs one more key, not one more row. Step j's output stands against the policy at position s + j + 1: same
distribution, and for EAGLE and HASS the same hidden state.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from drafters.eagle import losses
from drafters.eagle.model import HeadConfig, Variant, apply_head, head_logits, hidden_inputs
from rljax.errors import ConfigError
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.models import transformer
from rljax.models.packed_attention import PackedAttention
from rljax.models.transformer import Params
from rljax.numerics.attention import MASKED, scale_queries
from rljax.numerics.rows import Numerics, log_normalizer, row_max

Metrics = dict[str, Array]

_QUERY_BLOCK = 256
"""Starts whose scores exist at once in an unrolled step."""


@dataclasses.dataclass(frozen=True)
class HeadTraining:
    """How a head is trained.

    Attributes:
      steps: times the head is applied, k: 1 is EAGLE, 3 HASS, 7 EAGLE-3.
      step_decay: step j weighs step_decay^j (EAGLE-3's code: 0.8).
      hidden_weight: of the smooth L1 between hidden states; not for eagle3, whose outputs are no hidden
        states of the policy.
      cross_entropy_weight, reverse_kl_weight, lk_weight: see `losses.py`.
      logit_chunk: positions, over all rows, whose logits exist at once.
    """

    steps: int = 1
    step_decay: float = 1.0
    hidden_weight: float = 0.0
    cross_entropy_weight: float = 1.0
    reverse_kl_weight: float = 0.0
    lk_weight: float = 0.0
    logit_chunk: int = 1024


def published_training(variant: Variant) -> HeadTraining:
    """The losses and steps of TLT's Figure 7, weighted as in the authors' code."""
    if variant == "eagle3":
        return HeadTraining(steps=7, step_decay=0.8)
    return HeadTraining(steps=3 if variant == "hass" else 1, hidden_weight=1.0, cross_entropy_weight=0.1)


def head_training(
    variant: Variant,
    unrolled_steps: int | None = None,
    hidden_weight: float | None = None,
    cross_entropy_weight: float | None = None,
    reverse_kl_weight: float | None = None,
    lk_weight: float | None = None,
) -> HeadTraining:
    """`published_training` of a variant, with what is given in the place of its own.

    Args:
      variant: of the head.
      unrolled_steps: `HeadTraining.steps`.
      hidden_weight, cross_entropy_weight, reverse_kl_weight, lk_weight: as of `HeadTraining`.

    Raises:
      ConfigError: a number that cannot be, hidden states that the variant does not predict, or nothing to
        learn from; the message begins with the argument.
    """
    weights = {
        "hidden_weight": hidden_weight,
        "cross_entropy_weight": cross_entropy_weight,
        "reverse_kl_weight": reverse_kl_weight,
        "lk_weight": lk_weight,
    }
    given = {name: weight for name, weight in weights.items() if weight is not None}
    for name, weight in given.items():
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"{name}: should be a finite number and not negative, got {weight}")
    if unrolled_steps is not None:
        if unrolled_steps < 1:
            raise ConfigError(f"unrolled_steps: should be at least 1, got {unrolled_steps}")
        given["steps"] = unrolled_steps
    training = dataclasses.replace(published_training(variant), **given)
    if variant == "eagle3" and training.hidden_weight:
        raise ConfigError("hidden_weight: eagle3's outputs are no hidden states of the policy; leave it at 0")
    if not any(getattr(training, name) for name in weights):
        raise ConfigError("cross_entropy_weight: it and all other weights are 0, so nothing would be learned")
    return training


@flax.struct.dataclass
class HeadBatch:
    """R packed rows of T tokens with the policy's states.

    Attributes:
      tokens: int32 [R, T].
      positions: int32 [R, T], from 0 in every segment.
      segment_ids: int32 [R, T], from 1 in every row; 0 is padding.
      response_mask: bool [R, T], the token *behind* this one is a response token (as in `PackedBatch`).
      states: [R, T, S, d], see `model.py`.
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    response_mask: Array
    states: Array


def _ahead(x: Array, distance: int) -> Array:
    """x [R, T, ...] moved forward: what stands `distance` later in the row, zeros behind its end."""
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, distance:], [(0, 0), (0, min(distance, x.shape[1])), *rest])


@dataclasses.dataclass(frozen=True)
class _BandAttention:
    """Attention of an unrolled step: step 0's pairs up to the start, and the own outputs since.

    Attributes:
      segment_ids: int32 [R, T].
      steps: keys and values [R, T, Hk, D] of every step before, the first causal, the others seen by their
        own start only.
      numerics: see `Numerics`.
    """

    segment_ids: Array
    steps: tuple[tuple[Array, Array], ...]
    numerics: Numerics

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        """q [R, T, H, D], k and v [R, T, Hk, D] -> ([R, T, H, D], (k, v))."""
        del layer
        rows, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        queries = scale_queries(q).reshape(rows, length, kv_heads, heads // kv_heads, dim)
        float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
        (first_keys, first_values), *own = jax.tree.map(float32, self.steps)
        own_keys = jnp.stack([*(keys for keys, _ in own), float32(k)], axis=2)  # [R, T, j, Hk, D]
        own_values = jnp.stack([*(values for _, values in own), float32(v)], axis=2)
        block = min(_QUERY_BLOCK, length)
        blocks = -(-length // block)
        padding = blocks * block - length

        def split(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])])
            return x.reshape(rows, blocks, block, *x.shape[2:]).swapaxes(0, 1)

        starts = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        order = jnp.arange(length, dtype=jnp.int32)[None, None]

        @jax.checkpoint
        def attend(part: tuple[Array, ...]) -> Array:
            queries, own_keys, own_values, starts, segments = part
            scores = jnp.einsum("nqhgd,nshd->nhgqs", queries, first_keys)
            visible = (segments[:, :, None] == self.segment_ids[:, None]) & (order <= starts[:, :, None])
            scores = jnp.where(visible[:, None, None], scores, MASKED)
            own_scores = jnp.einsum("nqhgd,nqjhd->nhgqj", queries, own_keys)
            both = jnp.concatenate([scores, own_scores], axis=-1)
            terms = jnp.exp(both - row_max(both))
            shares = terms / jnp.sum(terms, axis=-1, keepdims=True)
            out = jnp.einsum("nhgqs,nshd->nqhgd", shares[..., :length], first_values)
            return out + jnp.einsum("nhgqj,nqjhd->nqhgd", shares[..., length:], own_values)

        parts = tuple(split(x) for x in (queries, own_keys, own_values, starts, self.segment_ids))
        out = lax.map(attend, parts)  # [blocks, R, block, Hk, g, D]
        out = out.swapaxes(0, 1).reshape(rows, blocks * block, heads, dim)[:, :length]
        return out.astype(q.dtype), (k, v)


def unroll(
    params: Params,
    config: HeadConfig,
    shared: Params,
    batch: HeadBatch,
    rope: Array,
    numerics: Numerics,
    steps: int,
) -> list[Array]:
    """The head's outputs at every start and step.

    Args:
      params: the head's.
      config: its shape.
      shared: the policy's embeddings and LM head.
      batch: R rows of T tokens.
      rope: `rope_table(config.policy, length)`, float32 [at least T + steps - 1, 2, D/2].
      numerics: see `Numerics`.
      steps: k.

    Returns:
      [R, T, d] a step; entry [r, s] of step j is of pair s + j, and means nothing where token s + j + 1 is
      not in the segment of s.
    """
    kept: list[tuple[Array, Array]] = []
    outputs: list[Array] = []
    hidden = hidden_inputs(params, config, batch.states.astype(numerics.dtype), numerics)
    for step in range(steps):
        inside = _ahead(batch.segment_ids, step + 1) == batch.segment_ids
        tokens = jnp.where(inside, _ahead(batch.tokens, step + 1), 0)
        if step == 0:
            attention = PackedAttention(batch.segment_ids, numerics, keep_kv=True)
        else:
            attention = _BandAttention(batch.segment_ids, tuple(kept), numerics)
        angles = rope[batch.positions + step]
        hidden, keys_values = apply_head(params, config, shared, hidden, tokens, angles, attention, numerics)
        kept.append(keys_values)
        outputs.append(hidden)
    return outputs


def _compare(
    params: Params,
    config: HeadConfig,
    training: HeadTraining,
    shared: Params,
    outputs: Array,
    target: Array,
    mask: Array,
    numerics: Numerics,
) -> tuple[Array, Array, Array]:
    """Loss, top-1 agreement and acceptance at positions [P]: outputs and target hidden states [P, d].

    Positions outside the mask are computed on zeros: what lies there may be anything.
    """
    outputs = jnp.where(mask[:, None], outputs, 0)
    target = jnp.where(mask[:, None], target, 0)
    target_logits = transformer.logits(shared, config.policy, target, numerics)
    logits = head_logits(params, config, shared, outputs, numerics)
    p = target_logits - log_normalizer(target_logits, numerics)
    q = logits - log_normalizer(logits, numerics)
    loss = jnp.zeros(mask.shape, jnp.float32)
    if training.hidden_weight:
        loss += training.hidden_weight * losses.smooth_l1(outputs, target)
    if training.cross_entropy_weight:
        loss += training.cross_entropy_weight * losses.cross_entropy(p, q)
    if training.reverse_kl_weight:
        loss += training.reverse_kl_weight * losses.reverse_kl(p, q)
    if training.lk_weight:
        loss += training.lk_weight * losses.lk(p, q)
    agrees = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    accepted = lax.stop_gradient(losses.acceptance(p, q))
    zero = jnp.zeros_like(accepted)
    return jnp.where(mask, loss, zero), jnp.where(mask & agrees, 1.0, zero), jnp.where(mask, accepted, zero)


def head_loss(
    params: Params,
    config: HeadConfig,
    training: HeadTraining,
    shared: Params,
    batch: HeadBatch,
    rope: Array,
    numerics: Numerics,
) -> tuple[Array, Metrics]:
    """The loss of a batch, sum_j step_decay^j mean_s loss[j, s], and its metrics.

    A start counts at step j where the policy's prediction at position s + j + 1 is of a response token.

    Returns:
      the loss [], and metrics []: `loss/J`, `agreement/J` (the policy's most likely token is the head's, too)
      and `acceptance/J` a step, J from 1; `accept_length`: the mean over starts of the tokens that a
      verifying pass of a chain of k would yield (`losses.expected_accept_length`), no token behind the
      response counted; `starts`.
    """
    if config.fused and training.hidden_weight:
        raise ValueError("hidden_weight: eagle3's outputs are not compared with hidden states; set it to 0")
    rows, length = batch.tokens.shape
    shared = lax.stop_gradient(shared)
    outputs = unroll(params, config, shared, batch, rope, numerics, training.steps)
    final = batch.states[:, :, -1].astype(numerics.dtype)
    chunks = max(1, -(-rows * length // training.logit_chunk))
    size = -(-rows * length // chunks)

    def chunked(x: Array) -> Array:
        x = x.reshape(rows * length, *x.shape[2:])
        x = jnp.pad(x, [(0, chunks * size - rows * length), *((0, 0) for _ in x.shape[1:])])
        return x.reshape(chunks, size, *x.shape[1:])

    @jax.checkpoint
    def compare(part: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return _compare(params, config, training, shared, *part, numerics)

    total = jnp.float32(0.0)
    metrics: Metrics = {}
    acceptances = []
    for step, output in enumerate(outputs):
        inside = (_ahead(batch.segment_ids, step + 1) == batch.segment_ids) & (batch.segment_ids > 0)
        mask = inside & _ahead(batch.response_mask, step + 1)
        parts = (chunked(output), chunked(_ahead(final, step + 1)), chunked(mask))
        loss, agrees, accepted = lax.map(compare, parts)
        count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
        total += training.step_decay**step * jnp.sum(loss) / count
        metrics[f"loss/{step + 1}"] = jnp.sum(loss) / count
        metrics[f"agreement/{step + 1}"] = jnp.sum(agrees) / count
        metrics[f"acceptance/{step + 1}"] = jnp.sum(accepted) / count
        acceptances.append(accepted)
        if step == 0:
            starts = chunked(mask).astype(jnp.float32)
    lengths = losses.expected_accept_length(jnp.stack(acceptances))
    metrics["starts"] = jnp.sum(starts)
    metrics["accept_length"] = jnp.sum(starts * lengths) / jnp.maximum(metrics["starts"], 1.0)
    return total, metrics


def train_step(
    state: TrainState,
    batch: HeadBatch,
    shared: Params,
    rope: Array,
    config: HeadConfig,
    training: HeadTraining,
    optimizer: optax.GradientTransformation,
    numerics: Numerics,
) -> tuple[TrainState, Metrics]:
    """One update of the head. Pure; only the head's parameters are differentiated.

    Args:
      state: the head's, from `init_state`.
      batch: R packed rows.
      shared: the policy's embeddings and LM head, read only.
      rope: see `unroll`.
      config, training, optimizer, numerics: static.

    Returns:
      the new state, and the metrics of `head_loss` (before the update) with `loss` and `gradient_norm`.
    """

    def loss(params: Params) -> tuple[Array, Metrics]:
        return head_loss(params, config, training, shared, batch, rope, numerics)

    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    state, norm = apply_gradients(state, gradients, optimizer)
    return state, metrics | {"loss": value, "gradient_norm": norm}


jitted_train_step = jax.jit(
    train_step, static_argnames=("config", "training", "optimizer", "numerics"), donate_argnames=("state",)
)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of the first update. The params are copied, and stay valid: updates consume their state."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
