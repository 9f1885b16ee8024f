"""Log-probabilities of packed sequences under the policy, without holding all their logits at once.

Scoring uses the forward pass, logits transform and log-softmax of decoding
(`rljax/sampling/distribution.py`), so that the trainer's logprobs can be compared with the rollout's number
by number, and on a CPU bit by bit.

The LM head and the log-softmax are one operation (`rljax/kernels/token_logprobs`).
"""

from jax import Array
from jax.sharding import Mesh

from rljax.kernels.token_logprobs import token_logprobs
from rljax.learning.packing import PackedBatch
from rljax.models import transformer
from rljax.models.compact_tokens import CompactAttention, spread, spread_scores
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.sharding import ShardedAttention
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import Responses, SamplingParams
from rljax.sharding import activation_sharding, constrain


def score_packed(
    params: Params,
    config: ModelConfig,
    batch: PackedBatch,
    rope: Array,
    numerics: Numerics,
    sampling: SamplingParams,
    remat: bool = False,
    logprob_chunk: int = 1024,
    mesh: Mesh | None = None,
    entropy_gradient: bool = False,
) -> tuple[Array, Array]:
    """Returns the logprobs of the targets of packed rows, and the entropy of the sampling distribution.

    Args:
      params: weights of the policy.
      batch: R rows of T tokens.
      rope: `rope_table(config, length)`, float32 [at least T, 2, D/2].
      numerics: numerics of the engine.
      remat: whether the backward pass recomputes the layers' activations.
      logprob_chunk: number of tokens, over all rows, whose logits exist at once. At least R and at least 2
        are used, because a single row would be multiplied by another kernel, with other bits.
      mesh: devices of the arrays; None for one.
      entropy_gradient: whether the entropy is differentiable.

    Returns:
      logprobs: float32 [R, T], logprobs of the targets; -inf where a filter excludes the target, undefined
        outside `batch.response_mask`.
      entropy: float32 [R, T], entropy in nats of the distribution at each position; not differentiated unless
        `entropy_gradient`.
    """
    lm_head = transformer.lm_head(params, config)
    choice = numerics.kernels.token_logprobs
    if batch.compact is not None and not sampling.penalizes:
        compact = batch.compact
        hidden = _compact_hidden(params, config, batch, rope, numerics, remat)[:, : len(compact.scored)]
        targets = compact.collect(batch.targets)[:, : len(compact.scored)]
        arguments = (targets, sampling, numerics, logprob_chunk, mesh, choice, None, entropy_gradient)
        scores = token_logprobs(hidden, lm_head, *arguments, config.used_rows)
        return tuple(spread_scores(score[0], compact) for score in scores)
    hidden = packed_hidden(params, config, batch, rope, numerics, remat, mesh)
    responses = Responses(batch.segment_ids, batch.response_mask) if sampling.penalizes else None
    arguments = (batch.targets, sampling, numerics, logprob_chunk, mesh, choice, responses, entropy_gradient)
    return token_logprobs(hidden, lm_head, *arguments, config.used_rows)


def packed_hidden(
    params: Params,
    config: ModelConfig,
    batch: PackedBatch,
    rope: Array,
    numerics: Numerics,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Array:
    """Returns features of packed rows after the final norm, [R, T, d]. Arguments as in `score_packed`."""
    if batch.compact is not None:
        return spread(_compact_hidden(params, config, batch, rope, numerics, remat)[0], batch.compact)
    attention = PackedAttention(batch.segment_ids, numerics, span=batch.span)
    if mesh is not None:
        attention = ShardedAttention(attention, config, mesh)
    hidden, _ = transformer.forward(
        params, config, batch.tokens, batch.positions, attention, rope, numerics, remat
    )
    return hidden if mesh is None else constrain(hidden, activation_sharding(mesh))


def _compact_hidden(
    params: Params, config: ModelConfig, batch: PackedBatch, rope: Array, numerics: Numerics, remat: bool
) -> Array:
    """Returns features of the compact tokens of packed rows, [1, M, d]."""
    attention = CompactAttention(batch.compact, numerics, batch.span)
    tokens, positions = batch.compact.collect(batch.tokens), batch.compact.collect(batch.positions)
    hidden, _ = transformer.forward(params, config, tokens, positions, attention, rope, numerics, remat)
    return hidden
