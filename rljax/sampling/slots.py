"""Sampling settings that differ from slot to slot, in one program for any mix of them.

A compiled program has its distribution inside (`SamplingParams`); here the numbers are arrays, a slot each. A
slot's tokens and log-probabilities have the bits of a program with the same settings inside, so numbers that
such a program has as constants are computed on the host, rounded as its compiler rounds them.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from rljax.numerics.rows import Numerics, log_normalizer
from rljax.sampling.distribution import SamplingParams, running_sum

TEMPERATURES = (1e-4, 1e4)
"""The smallest and the largest temperature besides 0: logits times its inverse stay finite."""
LEAST_TOP_P = 1e-6


@struct.dataclass
class SlotSampling:
    """Temperature and filters of B slots.

    Attributes:
      factor: float32 [B], what logits are multiplied with, 1 / temperature; 1 where greedy.
      greedy: bool [B], whether the slot takes its most likely token.
      filtered: bool [B], whether one of the filters is on; False where greedy.
      top_k: int32 [B]; 0 keeps all.
      top_p: float32 [B]; infinity keeps all.
      log_min_p: float32 [B]; -infinity keeps all.
    """

    factor: Array
    greedy: Array
    filtered: Array
    top_k: Array
    top_p: Array
    log_min_p: Array

    @classmethod
    def of(cls, settings: Sequence[SamplingParams], vocab_size: int) -> "SlotSampling":
        """Returns the arrays of some settings, on the host. Penalties are not among them."""
        factor = [1.0 if each.greedy else 1.0 / each.temperature for each in settings]
        filtered = [not each.greedy and each.filters(vocab_size) for each in settings]
        return cls(
            factor=np.asarray(factor, np.float32),
            greedy=np.asarray([each.greedy for each in settings], bool),
            filtered=np.asarray(filtered, bool),
            top_k=np.asarray([each.top_k if each.top_k < vocab_size else 0 for each in settings], np.int32),
            top_p=np.asarray([each.top_p if each.top_p < 1.0 else np.inf for each in settings], np.float32),
            log_min_p=np.asarray([_log(each.min_p) for each in settings], np.float32),
        )

    def take(self, slots: Array) -> "SlotSampling":
        """Returns the settings of `slots`, int32 [N], in that order."""
        return jax.tree.map(lambda x: x[slots], self)

    def put(self, slots: Array, settings: "SlotSampling") -> "SlotSampling":
        """Replaces the settings of `slots`, int32 [N]; slots out of range are skipped."""
        return jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), self, settings)

    def among(self, active: Array) -> "SlotSampling":
        """Returns the same for `active` slots, bool [B]; what others have on is switched off, since filters
        are computed where a slot has one.
        """
        return self.replace(greedy=self.greedy & active, filtered=self.filtered & active)


def check_settings(settings: SamplingParams) -> None:
    """Raises a ValueError that begins with the name of a setting that no slot can have: numbers that are not
    finite in float32 would end all decoding.
    """
    smallest, largest = TEMPERATURES
    if not (settings.greedy or smallest <= settings.temperature <= largest):
        raise ValueError(f"temperature: {settings.temperature:g}, expected 0 or {smallest:g} to {largest:g}")
    if settings.top_p < LEAST_TOP_P:
        raise ValueError(f"top_p: {settings.top_p:g}, expected {LEAST_TOP_P:g} to 1")


def kept_from(scaled: Array, settings: SlotSampling, numerics: Numerics) -> Array:
    """As `distribution.kept_from`, with settings that differ from row to row: [B, V] -> [B, 1]."""
    some = ((settings.top_k > 0) | (settings.top_p < np.inf)).any()
    lowest = lax.cond(
        some,
        lambda: _kept_from_sorted(scaled, settings, numerics),
        lambda: jnp.full((scaled.shape[0], 1), -jnp.inf, scaled.dtype),
    )
    return jnp.maximum(lowest, least_likely(scaled, settings))


def _kept_from_sorted(scaled: Array, settings: SlotSampling, numerics: Numerics) -> Array:
    top_k, top_p = settings.top_k[:, None], settings.top_p[:, None]
    ordered = -jnp.sort(-scaled, axis=-1)
    kth = jnp.take_along_axis(ordered, jnp.maximum(top_k - 1, 0), axis=-1)
    lowest = jnp.where(top_k > 0, kth, -jnp.inf)
    left = jnp.where(ordered >= lowest, ordered, -jnp.inf)
    probs = jnp.exp(left - log_normalizer(left, numerics))
    before = running_sum(probs) - probs
    last_kept = jnp.min(jnp.where(before < top_p, left, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(top_p < np.inf, jnp.maximum(lowest, last_kept), lowest)


def least_likely(scaled: Array, settings: SlotSampling) -> Array:
    """Returns the smallest scaled logit that min-p keeps, [B, 1]: -inf where it is off, NaN in rows with NaN,
    of which nothing is kept.
    """
    log_min_p = settings.log_min_p[:, None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    least = jnp.min(jnp.where(scaled - top >= log_min_p, scaled, jnp.inf), axis=-1, keepdims=True)
    least = jnp.where(jnp.isinf(least), jnp.nan, least)
    return jnp.where(log_min_p > -np.inf, least, jnp.where(jnp.isnan(top), jnp.nan, -jnp.inf))


def _log(min_p: float) -> float:
    rounded = float(np.float32(min_p))
    return math.log(rounded) if rounded > 0 else -math.inf
