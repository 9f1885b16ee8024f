"""The optimiser of policy and warm start: clipping by global norm, then AdamW on a schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from rljax.config import OptimizerConfig
from rljax.errors import ConfigError


def learning_rate_schedule(
    settings: OptimizerConfig, total_updates: int, section: str = "optimizer"
) -> optax.Schedule:
    """Returns the learning rate as a function of the update n = 0, 1, ...

    Over the first `warmup_steps` updates the rate rises linearly to `learning_rate`. It begins above 0, since
    an update at rate 0 is wasted. Then it stays constant ("constant"), or falls to 0 at `total_updates` along
    a line ("linear") or half a cosine ("cosine"). Errors name keys of the config's `section`.
    """
    warmup_steps, schedule = settings.warmup_steps, settings.schedule
    if schedule != "constant" and warmup_steps >= total_updates:
        raise ConfigError(
            f"{section}.warmup_steps: {warmup_steps} must be less than the {total_updates} updates of the"
            f" run; the {schedule} schedule falls after warm-up"
        )

    def rate(count: ArrayLike) -> Array:
        update = jnp.asarray(count).astype(jnp.float32)
        rise = jnp.minimum((update + 1.0) / (warmup_steps + 1), 1.0)
        progress = jnp.clip((update - warmup_steps) / max(total_updates - warmup_steps, 1), 0.0, 1.0)
        return settings.learning_rate * rise * _FALL[schedule](progress)

    return rate


_LEAST_NORM = 1e-30  # of gradients that are all 0

# The fraction of the rate that remains after a fraction of the updates after warm-up.
_FALL = {
    "constant": jnp.ones_like,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}


def make_optimizer(
    settings: OptimizerConfig, total_updates: int, section: str = "optimizer"
) -> optax.GradientTransformation:
    """Returns clipping by global norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101) on a schedule.

    Weight decay applies to matrices only: norms and biases set scales that have no reason to be near 0.

    Args:
      settings: the keys of the config.
      total_updates: optimiser updates in the whole run, where falling schedules end.
      section: section of the config that has the keys, for errors.

    Raises:
      ConfigError: the schedule falls after more updates than there are.
    """
    rate = learning_rate_schedule(settings, total_updates, section)
    betas = {"b1": settings.beta1, "b2": settings.beta2, "eps": settings.epsilon}
    inner = optax.chain(
        _clip_by_global_norm(settings.clip_norm),
        optax.adamw(rate, **betas, weight_decay=settings.weight_decay, mask=_is_matrix),
    )

    def update(gradients, state, params=None):
        # Optax raises floats to integer powers, which strict dtype promotion (in the tests) refuses.
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(gradients, state, params)

    falls = "" if settings.schedule == "constant" else f", falling within {total_updates}"
    return optax.GradientTransformation(
        _Function(f"init of {settings!r}", inner.init), _Function(f"update of {settings!r}{falls}", update)
    )


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function of an optimizer that is told by its settings: programs are looked up by the optimizer, in
    this process and, stored, in others.
    """

    name: str
    function: Callable[..., Any] = dataclasses.field(compare=False, repr=False)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def _clip_by_global_norm(clip_norm: float) -> optax.GradientTransformation:
    """As `optax.clip_by_global_norm`, with one factor for all gradients. Optax divides every entry, which the
    compiler does once and keeps: the update of a policy then takes memory for its weights once more.
    """

    def update(gradients, state, params=None):
        del params
        factor = jnp.minimum(1.0, clip_norm / jnp.maximum(optax.tree.norm(gradients), _LEAST_NORM))
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
