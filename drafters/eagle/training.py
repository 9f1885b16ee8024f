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
from jax import Array, lax

from drafters.eagle import losses
from drafters.eagle.model import HeadConfig, head_logits, policy_logits
from drafters.eagle.objective import HeadTraining
from drafters.eagle.unrolling import HeadBatch, shifted, unroll
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics, log_normalizer

Metrics = dict[str, Array]


def _compare(
    params: Params,
    config: HeadConfig,
    training: HeadTraining,
    shared: Params,
    outputs: Array,
    target: Array,
    mask: Array,
    numerics: Numerics,
) -> tuple[Array, Array, Array, Array]:
    """Returns loss, top-1 agreement, acceptance, and where the loss counts [P], from outputs and target
    hidden states [P, d].

    Positions outside the mask, which may hold any values, are computed on zeros. With a draft vocabulary, the
    loss compares with the policy's distribution over its tokens alone, and does not count where the policy's
    likeliest token is outside of it (as in EAGLE-3's code); agreement and acceptance are those of drafting.
    """
    outputs = jnp.where(mask[:, None], outputs, 0)
    target = jnp.where(mask[:, None], target, 0)
    target_logits = policy_logits(shared, config, target, numerics)
    logits = head_logits(params, config, shared, outputs, numerics)
    p = p_all = target_logits - log_normalizer(target_logits, numerics)
    q = logits - log_normalizer(logits, numerics)
    likeliest, drafted, counted = jnp.argmax(p, axis=-1), jnp.argmax(q, axis=-1), mask
    if config.vocabulary is not None:
        tokens = jnp.asarray(config.vocabulary.tokens)
        drafted = tokens[drafted]
        known = np.zeros(config.policy.vocab_size, bool)
        known[config.vocabulary.tokens] = True
        counted = mask & jnp.asarray(known)[likeliest]
        p_all, target_logits = p[..., tokens], target_logits[..., tokens]
        p = target_logits - log_normalizer(target_logits, numerics)
    agrees = likeliest == drafted
    loss = jnp.zeros(mask.shape, jnp.float32)
    if training.hidden_weight:
        loss += training.hidden_weight * losses.smooth_l1(outputs, target)
    if training.cross_entropy_weight:
        loss += training.cross_entropy_weight * losses.cross_entropy(p, q)
    if training.reverse_kl_weight:
        loss += training.reverse_kl_weight * losses.reverse_kl(p, q)
    if training.lk_weight:
        loss += training.lk_weight * losses.lk(p, q)
    accepted = lax.stop_gradient(losses.acceptance(p_all, q))
    zero = jnp.zeros_like(accepted)
    return (
        jnp.where(counted, loss, zero),
        jnp.where(mask & agrees, 1.0, zero),
        jnp.where(mask, accepted, zero),
        counted.astype(jnp.float32),
    )


def head_loss(
    params: Params,
    config: HeadConfig,
    training: HeadTraining,
    shared: Params,
    batch: HeadBatch,
    rope: Array,
    numerics: Numerics,
) -> tuple[Array, Metrics]:
    """Computes the loss of a batch, sum_j step_decay^j mean_s loss[j, s], and its metrics.

    A start s counts at step j if the policy predicts a response token at position s + j + 1.

    Returns:
      the loss [], and metrics []: for each step, J from 1, `loss/J`, `agreement/J` (the policy and the head
      have the same most likely token) and `acceptance/J`; `accept_length`, the mean over starts of the tokens
      that a verifying pass over a chain of k would yield (`losses.expected_accept_length`), without tokens
      behind the response; `starts`, their number; with a draft vocabulary, `outside_vocabulary`, the number
      of starts whose likeliest token is outside of it, which have no part in the loss.
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
    def compare(part: tuple[Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        return _compare(params, config, training, shared, *part, numerics)

    total = jnp.float32(0.0)
    metrics: Metrics = {}
    acceptances = []
    for step, output in enumerate(outputs):
        inside = (shifted(batch.segment_ids, step + 1) == batch.segment_ids) & (batch.segment_ids > 0)
        mask = inside & shifted(batch.response_mask, step + 1)
        parts = (chunked(output), chunked(shifted(final, step + 1)), chunked(mask))
        loss, agrees, accepted, counted = lax.map(compare, parts)
        count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
        learnt = jnp.maximum(jnp.sum(counted), 1.0)
        total += training.step_decay**step * jnp.sum(loss) / learnt
        metrics[f"loss/{step + 1}"] = jnp.sum(loss) / learnt
        metrics[f"agreement/{step + 1}"] = jnp.sum(agrees) / count
        metrics[f"acceptance/{step + 1}"] = jnp.sum(accepted) / count
        acceptances.append(accepted)
        if step == 0:
            starts = chunked(mask).astype(jnp.float32)
            if config.vocabulary is not None:
                metrics["outside_vocabulary"] = jnp.sum(starts) - jnp.sum(counted)
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
    """Returns the state before the first update. `params` is copied, since updates consume their state."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
