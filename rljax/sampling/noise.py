"""The noise field: Gumbel noise as a pure function of (run seed, request, position, token).

Sampling is `argmax(logits / T + G)` with G standard Gumbel (Gumbel-max: an exact sample of the softmax).
Because G has no state that advances, the token at a position depends on the prefix and the policy alone: it
is the same alone or in a batch, in any slot, decoded in a plain step or verified as a draft. The engine is
built on this property (`docs/design.md`).

A request's key comes from Threefry-2x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011)
over its identity, and a position's key from the same cipher over the position. The bits of a token come from
two rounds of a 32-bit multiply-xorshift mixer under that key: a few instructions per vocabulary entry, where
a cipher would take a hundred. All functions take NumPy or JAX arrays of uint32 and give the same bits.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_NO_TOKEN = np.uint32(0xFFFFFFFF)


def _u32(value):
    return np.uint32(value)


def threefry2x32(key0, key1, x0, x1):
    """Encrypts two uint32 words of counter under two words of key by Threefry-2x32-20, elementwise."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << _u32(rotation)) | (x1 >> _u32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + _u32(group + 1)
    return x0, x1


def request_key(seed: int, *identity: int) -> np.ndarray:
    """Returns the key of a request, uint32 [2], on the host.

    Args:
      identity: numbers that identify the request in the run: purpose, step, prompt, sample. The step belongs
        to them, since sampling the same prompt in another step must not reuse the noise. Non-negative
        integers below 2^64.
    """
    if any(part < 0 for part in (seed, *identity)):
        raise ValueError(f"seed and identity must not be negative, got {(seed, *identity)}")
    with np.errstate(over="ignore"):
        key = (_u32(seed & 0xFFFFFFFF), _u32(seed >> 32 & 0xFFFFFFFF))
        for part in (len(identity), *identity):
            key = threefry2x32(*key, _u32(part & 0xFFFFFFFF), _u32(part >> 32 & 0xFFFFFFFF))
    return np.array(key, np.uint32)


def _mix(h):
    """Maps uint32 to uint32 by a bijection that avalanches (constants from a search: C. Wellons,
    "hash-prospector", 2018).
    """
    h = (h ^ (h >> _u32(16))) * _u32(0x7FEB352D)
    h = (h ^ (h >> _u32(15))) * _u32(0x846CA68B)
    return h ^ (h >> _u32(16))


def token_bits(keys, positions, tokens):
    """Returns uniform 32-bit words of the noise field.

    Args:
      keys: request keys, uint32 [..., 2].
      positions: positions of the tokens to be sampled, counted from the start of the prompt: integers [...].
      tokens: vocabulary entries, integers [..., K].

    Returns:
      uint32 [..., K].
    """
    key0, key1 = position_keys(keys, positions)
    return token_words(tokens.astype(np.uint32), key0[..., None], key1[..., None])


def position_keys(keys, positions):
    """Returns the keys of positions [...] under request keys uint32 [..., 2]: two words uint32 [...]."""
    positions = positions.astype(np.uint32)
    return threefry2x32(keys[..., 0], keys[..., 1], positions, positions ^ positions)


def token_words(tokens, key0, key1):
    """Returns words of vocabulary entries, uint32, under the words of a position's key, elementwise."""
    h = _mix(tokens * _u32(0x9E3779B9) + key0)
    return _mix(h ^ key1)


def uniform(keys: Array, positions: Array) -> Array:
    """Returns one number in [0, 1) per position, independent of the tokens' noise: float32 [...], for keys
    uint32 [..., 2] and positions integers [...].
    """
    bits = token_bits(keys, positions, jnp.full((*positions.shape, 1), _NO_TOKEN))[..., 0]
    return (bits >> _u32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def gumbel(keys: Array, positions: Array, tokens: Array) -> Array:
    """Returns standard Gumbel noise, float32 [..., K]; arguments as for `token_bits`.

    G = -log(E) with E exponential, computed as -log1p(-u): u keeps its relative precision near 0, from where
    the large values of G come, which win the argmax. G lies within [-2.9, 22.9].
    """
    return gumbel_of_words(token_bits(keys, positions, tokens))


def gumbel_of_words(words: Array, log1p: Callable[[Array], Array] = jnp.log1p) -> Array:
    """Returns `gumbel` of words of the noise field, elementwise.

    Args:
      words: uint32 [...].
      log1p: replacement in kernels for devices whose compiler lacks it.
    """
    # Convert through int32 (31 bits), since a CPU converts uint32 slowly; a quarter step keeps u above 0.
    steps = (words >> _u32(1)).astype(jnp.int32).astype(jnp.float32)
    u = steps * np.float32(2.0**-31) + np.float32(2.0**-33)
    u = jnp.minimum(u, np.float32(1.0 - 2.0**-24))
    return -jnp.log(-log1p(-u))


def gumbel_rows(keys: Array, positions: Array, vocab_size: int) -> Array:
    """Returns noise of the whole vocabulary, float32 [B, V], for keys uint32 [B, 2] and positions [B]."""
    return gumbel(keys, positions, jnp.arange(vocab_size, dtype=jnp.uint32)[None, :])
