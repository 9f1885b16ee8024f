"""Reward that depends on a response's length: DAPO's soft overlong punishment.

Yu et al., arXiv 2503.14476, section 3.4.
"""

import numpy as np
from numpy.typing import ArrayLike


def soft_overlong_punishment(
    response_lengths: ArrayLike, max_length: int, buffer: int, penalty: float = 1.0
) -> np.ndarray:
    """Returns the punishment of responses near or at the length limit, to be added to rewards (DAPO Eq. 13).

        0                                       |y| <= max_length - buffer
        penalty ((max_length - buffer) - |y|) / buffer      in between
        -penalty                                |y| >= max_length

    A cut-off response is not wrong reasoning, only unfinished: a punishment that grows over the buffer says
    "shorter" without contradicting the reward of a right but long answer at one arbitrary token.

    Args:
      response_lengths: int [N].
      max_length: the longest response that the rollout allows, buffer included.
      buffer: tokens over which the punishment grows; at least 1.
      penalty: punishment at max_length; the paper's is 1.

    Returns:
      float32 [N], from -penalty to 0.
    """
    lengths = np.asarray(response_lengths)
    if lengths.ndim != 1:
        raise ValueError(f"response_lengths: shape {lengths.shape}, expected [N]")
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer: {buffer}, expected 1 to max_length {max_length}")
    expected = max_length - buffer
    share = np.clip((lengths - expected) / buffer, 0.0, 1.0)
    return np.where(share > 0, -penalty * share, 0.0).astype(np.float32)
