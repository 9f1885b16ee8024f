"""The sampled token and its log-probability; noise is computed in place (`docs/kernels/noisy_argmax.md`)."""

from typing import TYPE_CHECKING

from jax import Array

from rljax.kernels.switch import call
from rljax.numerics.kernel_choice import Implementation

if TYPE_CHECKING:  # these modules import this one
    from rljax.numerics.rows import Numerics
    from rljax.sampling.distribution import SamplingParams


def noisy_argmax(
    logits: Array,
    keys: Array,
    positions: Array,
    sampling: "SamplingParams",
    numerics: "Numerics",
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Returns the token at each position, and its log-probability under the distribution it was sampled from.

        token = argmax_v x[v] + G[key, position, v],    logprob = x[token] - log sum_v e^x[v]

    where x denotes the transformed logits (`transform_logits`) and G the noise field
    (`rljax/sampling/noise.py`). Of equal maxima the first wins. The token of a row with NaN is undefined, and
    its log-probability is NaN.

    Args:
      logits: float32 [B, V].
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, int32 [B].
      sampling: the distribution. Temperature 0 takes the first of the largest logits, whose log-probability
        is 0.
      numerics: numerics of sums over the vocabulary.
      implementation: see `switch.KernelChoice`; the default depends on (V,).

    Returns:
      tokens int32 [B], logprobs float32 [B].

    Raises:
      Refused: the implementation does not support the arguments.
    """
    return call("noisy_argmax", implementation, logits.shape[1:], logits, keys, positions, sampling, numerics)
