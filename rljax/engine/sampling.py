"""Logits of the policy in decoding, and a token sampled from each row of them.

On a mesh with a tensor axis, the vocabulary of the logits is split over it, and no logits travel
(`rljax/sampling/split.py`). On one device the kernel that the config names samples.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.sharding import GatheredWeights
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling import slots, split
from rljax.sampling.distribution import SamplingParams, without_padding
from rljax.sampling.slots import SlotSampling
from rljax.sharding import constrain, logits_sharding, splits_vocab


def decode_logits(
    params: Params,
    config: ModelConfig,
    hidden: Array,
    numerics: Numerics,
    mesh: Mesh | None,
    gathered: GatheredWeights | None = None,
) -> Array:
    """Returns logits of hidden states [R, d] under weights in the layout of decoding: float32 [R, V], -inf
    where a row of the embedding stands for no token. On a mesh V is split, and rounded up to
    `padded_vocab_size`, also with -inf. `gathered` as in `transformer.forward`.
    """
    if gathered is not None:
        params, hidden = gathered.head(params, hidden)
    logits = transformer.logits(params, config, hidden, numerics)
    if splits_vocab(mesh):
        logits = constrain(logits, logits_sharding(mesh))
    return without_padding(logits, config.used_rows)


def whole_logits(logits: Array, config: ModelConfig, mesh: Mesh | None) -> Array:
    """Gathers logits of `decode_logits`, or their log-softmax, for readers of whole rows: [R, V]."""
    if not splits_vocab(mesh):
        return logits
    return constrain(logits[:, : config.vocab_size], logits_sharding(mesh, whole=True))


def sample(
    logits: Array,
    keys: Array,
    positions: Array,
    params: SamplingParams,
    numerics: Numerics,
    mesh: Mesh | None = None,
    settings: SlotSampling | None = None,
) -> tuple[Array, Array]:
    """Samples a token at each position.

    Args:
      logits: float32 [B, V].
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, int32 [B].
      mesh: devices over whose tensor axis V is split; None for one.
      settings: temperature and filters of each row, in place of those of `params`; None for these.

    Returns:
      tokens: int32 [B].
      logprobs: float32 [B], under the distribution that the tokens were sampled from.
    """
    if settings is not None:
        return _sample_by_row(logits, keys, positions, settings, numerics, mesh)
    if splits_vocab(mesh):
        return split.noisy_argmax(logits, keys, positions, params, numerics)
    return noisy_argmax(logits, keys, positions, params, numerics, numerics.kernels.noisy_argmax)


def _sample_by_row(
    logits: Array,
    keys: Array,
    positions: Array,
    settings: SlotSampling,
    numerics: Numerics,
    mesh: Mesh | None,
) -> tuple[Array, Array]:
    """`sample` with the settings of each row.

    Every row is first sampled without filters; then rows with filters, and greedy ones, are sampled again, if
    there are any. A row so has the operations, and with them the bits, of a program with its settings inside:
    a compiler may round the product with the temperature and the sum with the noise once, and does not where
    a filter stands between them.
    """
    factor = settings.factor[:, None]
    without = SamplingParams()

    def drawn(logits: Array, params: SamplingParams = without) -> tuple[Array, Array]:
        return sample(logits, keys, positions, params, numerics, mesh)

    def filtered() -> tuple[Array, Array]:
        kept_from = split.kept_from_of_slots if splits_vocab(mesh) else slots.kept_from
        # From the logits: scaled ones would be kept for this, and rounded before the noise is added above.
        scaled = logits * factor
        return drawn(jnp.where(scaled >= kept_from(scaled, settings, numerics), scaled, -jnp.inf))

    results = drawn(logits * factor)
    results = _redrawn(results, settings.filtered, filtered)
    return _redrawn(results, settings.greedy, lambda: drawn(logits, SamplingParams(temperature=0.0)))


def _redrawn(
    results: tuple[Array, Array], chosen: Array, draw: Callable[[], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Replaces the results of `chosen` rows, bool [B], by those of `draw`, which runs if there are any."""

    def replaced() -> tuple[Array, Array]:
        (tokens, logprobs), (new_tokens, new_logprobs) = results, draw()
        return jnp.where(chosen, new_tokens, tokens), jnp.where(chosen, new_logprobs, logprobs)

    return lax.cond(chosen.any(), replaced, lambda: results)
