"""Rotary position embeddings (Su et al., 2021), with Llama-3 frequency scaling.

Angles come from a table that is computed on the host, so that a position has the same bits in every program.
The float32 arithmetic is that of Hugging Face's implementations, whose checkpoints are loaded.
"""

import functools

import numpy as np

from rljax.models.config import ModelConfig, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Returns the angle per position for each pair of channels: float32 [head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Powers in float32 differ between math libraries, and their last bit changes the cosine of position
    # 30,000 by 1e-3.
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1.0) / power
    if scaling is None:
        return inverse
    wavelength = 2 * np.pi / inverse
    low_wavelength = scaling.original_max_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = np.where(wavelength > low_wavelength, inverse / scaling.factor, between)
    return np.where(wavelength < high_wavelength, inverse, scaled).astype(np.float32)


@functools.lru_cache(maxsize=16)
def rope_table(config: ModelConfig, length: int) -> np.ndarray:
    """Returns cosines and sines of positions 0 .. length-1: float32 [length, 2, head_dim / 2]; with local
    layers [length, 4, head_dim / 2], theirs last.
    """
    bases = [(config.rope_theta, config.rope_scaling)]
    if config.gemma is not None:
        bases.append((config.gemma.local_rope_theta, None))
    rows = []
    for base in bases:
        inverse = inverse_frequencies(config.head_dim, *base)
        angles = np.arange(length, dtype=np.float32)[:, None] * inverse[None, :]
        rows += [np.cos(angles), np.sin(angles)]
    return np.stack(rows, axis=1).astype(np.float32)
