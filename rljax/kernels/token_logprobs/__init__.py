"""Log-probabilities of given tokens, and entropy, without the logits (`docs/kernels/token_logprobs.md`)."""

from typing import TYPE_CHECKING

from jax import Array
from jax.sharding import Mesh

from rljax.kernels.switch import call
from rljax.numerics.kernel_choice import Implementation

if TYPE_CHECKING:  # these modules import this one
    from rljax.numerics.rows import Numerics
    from rljax.sampling.distribution import Responses, SamplingParams


def token_logprobs(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    sampling: "SamplingParams",
    numerics: "Numerics",
    chunk: int,
    mesh: Mesh | None = None,
    implementation: Implementation = None,
    responses: "Responses | None" = None,
    entropy_gradient: bool = False,
    used_rows: int | None = None,
) -> tuple[Array, Array]:
    """Returns logprobs of tokens under the sampling distribution, and its entropy.

        logprob = x[target] - log sum_v e^x[v],    entropy = -sum_v p[v] log p[v],    p = softmax(x)

    where x denotes the transformed logits of `lm_head @ hidden` (`sampling.without_padding`, then
    `penalized_logits`, then `transform_logits`). Log-probabilities are differentiable in `hidden` and
    `lm_head`; the entropy only with `entropy_gradient`.

    Args:
      hidden: final states, [R, T, d] in the compute dtype.
      lm_head: [V, d], any float dtype; multiplied in that of `hidden`.
      targets: int32 [R, T].
      numerics: numerics of sums over the vocabulary.
      chunk: number of tokens whose logits exist together; kernels never hold logits.
      mesh: devices that the R rows lie on; None for one.
      implementation: see `switch.KernelChoice`; the default depends on (V, d).
      responses: responses for penalties, if the sampling has any; not supported by kernels.
      entropy_gradient: whether to make the entropy differentiable, at the cost of its backward pass; not
        supported by kernels.
      used_rows: number of rows of the LM head that stand for tokens; the later ones have logits of
        -inf. None for all.

    Returns:
      logprobs float32 [R, T], -inf where a filter excludes the target, and entropies in nats, float32 [R, T].

    Raises:
      Refused: the implementation does not support the arguments.
    """
    arguments = (hidden, lm_head, targets, sampling, numerics, chunk, mesh, responses, entropy_gradient)
    used_rows = len(lm_head) if used_rows is None else used_rows
    return call("token_logprobs", implementation, lm_head.shape, *arguments, used_rows=used_rows)
