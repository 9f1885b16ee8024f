"""Log-probabilities of packed sequences under the policy, without ever holding all their logits.

The same forward pass, logits transform and log-softmax as decoding (`rljax/engine/sampling.py`), so that the
trainer's logprobs can be compared with the rollout's number by number, and on a CPU bit by bit.

The logits of a row of 16k tokens with a vocabulary of 150k are 10 GB in float32, several times the model.
So the LM head is applied to a chunk of tokens at a time, and again in the backward pass (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174), where it costs a few per cent.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from rljax.engine.sampling import SamplingParams, entropy, token_logprobs, transform_logits
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.numerics import Numerics
from rljax.models.packed_attention import PackedAttention
from rljax.models.transformer import Params
from rljax.sharding import ShardedAttention, activation_sharding, constrain
from rljax.training.packing import PackedBatch


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
) -> tuple[Array, Array]:
    """How likely the targets of packed rows are under the sampling distribution, and its entropy.

    Args:
      params: the policy's weights.
      config: its architecture.
      batch: R rows of T tokens.
      rope: `rope_table(config, length)`, float32 [at least T, 2, D/2].
      numerics: shared with the engine.
      sampling: the distribution that the rollout samples from.
      remat: recompute the layers' activations in the backward pass.
      logprob_chunk: tokens, over all rows, whose logits exist at once (in effect at least R, and at least 2:
        a lone row would be multiplied by another kernel, with other bits).
      mesh: devices that the arrays lie on; None for one.

    Returns:
      logprobs of the targets, float32 [R, T]: -inf where a filter excludes the target; meaningless outside
      `batch.response_mask`. And the entropy in nats of the distribution at each position, float32 [R, T],
      which is not differentiated.
    """
    attention = PackedAttention(batch.segment_ids, numerics)
    if mesh is not None:
        attention = ShardedAttention(attention, config, mesh)
    hidden, _ = transformer.forward(
        params, config, batch.tokens, batch.positions, attention, rope, numerics, remat
    )
    if mesh is not None:
        hidden = constrain(hidden, activation_sharding(mesh))

    def score(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = transformer.logits(params, config, hidden)
        if mesh is not None:
            # The vocabulary whole: a chunk of logits is small, and its sums then need no communication.
            logits = constrain(logits, activation_sharding(mesh))
        transformed = transform_logits(logits, sampling, numerics)
        return token_logprobs(transformed, targets, numerics), entropy(transformed, numerics)

    rows, length = batch.tokens.shape
    # Chunks of columns, not of the flattened tokens: rows then stay on the devices that they are on.
    columns = max(logprob_chunk // rows, -(-2 // rows))
    chunks = -(-length // columns)
    if chunks == 1:
        return score(hidden, batch.targets)
    columns = -(-length // chunks)
    padding = chunks * columns - length

    def split(array: Array) -> Array:
        rest = array.shape[2:]
        array = jnp.pad(array, [(0, 0), (0, padding), *((0, 0) for _ in rest)])
        return array.reshape(rows, chunks, columns, *rest).swapaxes(0, 1)

    scored = lax.map(lambda chunk: jax.checkpoint(score)(*chunk), (split(hidden), split(batch.targets)))
    logprobs, entropies = (each.swapaxes(0, 1).reshape(rows, chunks * columns)[:, :length] for each in scored)
    return logprobs, entropies
