"""Kernels of other projects, if they are installed: cuDNN's attention through JAX, and Tokamax.

Tokamax (github.com/openxla/tokamax) is not a dependency, since it pins versions that conflict with others:
for a comparison, `pip install tokamax` into a separate environment.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import jax
from jax import Array

from rljax.numerics.kernel_choice import Refused


def cudnn_attention(queries: Array, keys: Array, values: Array, lengths: Array, mask: Array | None) -> Array:
    """Attention through JAX over a cache [B, S, Hk, D]: of `lengths` [B] entries, or of those in `mask`.

    Args:
      queries: [B, T, H, D].
      mask: bool [B, 1, T, S], or None for decoding.

    Raises:
      Refused: no NVIDIA GPU, or a shape that cuDNN cannot take.
    """
    if jax.default_backend() != "gpu":
        raise Refused("it needs an NVIDIA GPU")
    lengths = lengths if mask is None else None
    return _asked(
        lambda: jax.nn.dot_product_attention(
            queries, keys, values, mask=mask, key_value_seq_lengths=lengths, implementation="cudnn"
        )
    )


def tokamax_attention(
    queries: Array, keys: Array, values: Array, lengths: Array, mask: Array | None
) -> Array:
    """As `cudnn_attention`, but by Tokamax, in the implementation that it chooses for the device."""
    attention = _tokamax().dot_product_attention
    lengths = lengths if mask is None else None
    return _asked(lambda: attention(queries, keys, values, mask=mask, key_value_seq_lengths=lengths))


def tokamax_cross_entropy(hidden: Array, targets: Array, lm_head: Array) -> Array:
    """Sum of -log p of `targets` [T] from `hidden` [T, d] and `lm_head` [d, V], by Tokamax."""
    loss = _tokamax().linear_softmax_cross_entropy_loss
    return _asked(lambda: loss(hidden, targets, lm_head, reduction="sum"))


def _tokamax() -> ModuleType:
    try:
        return importlib.import_module("tokamax")
    except ImportError as error:
        raise Refused(f"Tokamax cannot be imported ({error})") from error


def _asked(compute: Callable[[], Array]) -> Array:
    """Returns the result of `compute`; raises `Refused` where the peer does not support the case."""
    try:
        return compute()
    except (NotImplementedError, RuntimeError, ValueError, ExceptionGroup) as error:
        raise Refused((str(error).splitlines() or [repr(error)])[0]) from error
