"""The noise field on the host, for single candidates: the same bits as `rljax.sampling.noise`.

Sampling is `argmax(log p + G)` with G known beforehand, so a drafter that ranks its candidates by
`log q + G` offers those that win under the noise that will really be used. Drafters need G at a few tokens of
a position; numpy would take longer over the call than over the arithmetic.
"""

import math

import numpy as np

from drafters.compilation import compiled

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@compiled
def position_key(key0, key1, position):
    """Key of one position, two uint32: Threefry-2x32 of (position, 0) under the request's key."""
    k0, k1 = np.uint32(key0), np.uint32(key1)
    keys = (k0, k1, np.uint32(k0 ^ k1 ^ np.uint32(0x1BD11BDA)))
    # Numba widens sums of uint32 to 64 bits: every one is cut back.
    x0, x1 = np.uint32(np.uint32(position) + keys[0]), keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = np.uint32(x0 + x1)
            x1 = np.uint32(np.uint32(x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation)))
            x1 = np.uint32(x1 ^ x0)
        x0 = np.uint32(x0 + keys[(group + 1) % 3])
        x1 = np.uint32(x1 + keys[(group + 2) % 3] + np.uint32(group + 1))
    return x0, x1


@compiled
def _mix(h):
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


@compiled
def bits_at(key0, key1, token):
    """The uint32 of a token under the key of its position."""
    h = _mix(np.uint32(np.uint32(np.uint32(token) * np.uint32(0x9E3779B9)) + key0))
    return _mix(np.uint32(h ^ key1))


@compiled
def gumbel_at(key0, key1, token):
    """Gumbel noise of a token under the key of its position, float64 of the device's float32 argument."""
    steps = np.float32(bits_at(key0, key1, token) >> np.uint32(1))
    u = np.float32(steps * np.float32(2.0**-31)) + np.float32(2.0**-33)
    u = min(np.float32(u), np.float32(1.0 - 2.0**-24))
    return -math.log(-math.log1p(-np.float64(u)))


@compiled
def _token_bits(keys, positions, tokens, out):
    for row in range(tokens.shape[0]):
        key0, key1 = position_key(keys[row, 0], keys[row, 1], positions[row])
        for column in range(tokens.shape[1]):
            out[row, column] = bits_at(key0, key1, tokens[row, column])


@compiled
def _gumbel(keys, positions, tokens, out):
    for row in range(tokens.shape[0]):
        key0, key1 = position_key(keys[row, 0], keys[row, 1], positions[row])
        for column in range(tokens.shape[1]):
            out[row, column] = gumbel_at(key0, key1, tokens[row, column])


def _arrays(
    keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of the types that the loops are compiled for: any other, or read-only ones, would compile."""
    return np.array(keys, np.uint32), np.array(positions, np.int32), np.array(tokens, np.int32)


def token_bits(keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Uniform words of the noise field, as `rljax.sampling.noise.token_bits`.

    Args:
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, counted from the start of the prompt, int32 [B].
      tokens: vocabulary entries, int32 [B, K].

    Returns:
      uint32 [B, K].
    """
    out = np.empty(tokens.shape, np.uint32)
    _token_bits(*_arrays(keys, positions, tokens), out)
    return out


def gumbel(keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float32 [B, K]; arguments as for `token_bits`.

    Equal to the device's up to the rounding of its two logarithms.
    """
    out = np.empty(tokens.shape, np.float32)
    _gumbel(*_arrays(keys, positions, tokens), out)
    return out
