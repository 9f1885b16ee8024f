"""The clipped loss of a critic, as in the implementations of PPO (Andrychowicz et al., arXiv 2006.05990)."""

import jax
import jax.numpy as jnp
from jax import Array


def value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, weights: Array, clip: float
) -> tuple[Array, dict[str, Array]]:
    """Returns the squared error of the values, clipped so that updates gain only near the old values.

        V'[t] = clip(V[t], V_old[t] - clip, V_old[t] + clip)
        loss = 1/2 sum_t w[t] max((V[t] - return[t])^2, (V'[t] - return[t])^2)

    All arrays have one shape [...].

    Args:
      values: values of the critic in training; the only argument to differentiate.
      old_values: values of the critic before the step, from which advantages were estimated.
      returns: old value plus advantage.
      mask: bool, True at response tokens; entries outside it have no effect.
      weights: from `aggregation_weights`, laid out by token.
      clip: largest distance of a value from its old one.

    Returns:
      The loss [], and metrics [] that add over micro-batches: `clip_fraction`, the weighted share of tokens
      without gradient.
    """
    arrays = {
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "mask": mask,
        "weights": weights,
    }
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"value_loss needs arrays of one shape, got {shapes}")
    values, old_values, returns, weights = (
        jnp.where(mask, entries, 0.0) for entries in (values, old_values, returns, weights)
    )
    clipped = old_values + jnp.clip(values - old_values, -clip, clip)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * jnp.sum(weights * jnp.maximum(error, clipped_error))
    held = jnp.where(clipped_error > error, weights, 0.0)
    return loss, {"clip_fraction": jax.lax.stop_gradient(jnp.sum(held))}
