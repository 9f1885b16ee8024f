"""What goes into a slot, and what a host sync copies off the device, in one array."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.engine.state import DecodeState


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One request's way into a slot.

    Attributes:
      row: its prompt's row in the `Prefix`.
      slot: where it goes.
      noise_key: uint32 [2], from `noise.request_key`.
      max_response: response tokens it may sample.
    """

    row: int
    slot: int
    noise_key: np.ndarray
    max_response: int


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """The results of a host sync, copied off the device in one array.

    Attributes:
      tokens: int32 [B, T], -1 where a slot sampled nothing.
      logprobs: float32 [B, T], under the distribution really sampled.
      active: bool [B], still decoding.
      lengths: int32 [B], committed tokens.
      steps: forward passes that ran; in plain decoding T.
      rows: tokens computed by them, padding included.
      path: int32 [B, T], after a verification the draft tree's node (0 is the last token) that each of
        `tokens` was sampled behind; None in plain decoding.
      states: [B, T or more, S, d], the policy's states that each of `tokens` was sampled from, still on the
        device; None unless the engine hands them out.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    active: np.ndarray
    lengths: np.ndarray
    steps: int
    rows: int
    path: np.ndarray | None = None
    states: Array | None = None


@dataclasses.dataclass(frozen=True)
class Pending:
    """The results of a host sync to come: programs run while the host goes on.

    Attributes:
      packed: from `pack`, behind the path of a verifying pass.
      columns: of its tokens; in plain decoding, where a step is a column, only the first `steps` are used.
      verified_rows: tokens that a verifying pass computes; None in plain decoding.
      states: see `DecodeResult`.
    """

    packed: Array
    columns: int
    verified_rows: int | None = None
    states: Array | None = None

    def is_ready(self) -> bool:
        """Whether the device is done."""
        return self.packed.is_ready()

    def result(self) -> DecodeResult:
        """Waits for the device."""
        packed, path = np.asarray(self.packed), None
        if self.verified_rows is not None:
            packed, path = packed[self.columns :], packed[: self.columns].T
        steps = int(packed[-1, 0])
        used = steps if path is None else self.columns
        return DecodeResult(
            tokens=packed[:used].T,
            logprobs=packed[self.columns : self.columns + used].view(np.float32).T,
            active=packed[2 * self.columns].astype(bool),
            lengths=packed[2 * self.columns + 1],
            steps=steps,
            rows=steps * packed.shape[1] if path is None else self.verified_rows,
            path=path,
            states=self.states,
        )


def pack(tokens: Array, logprobs: Array, state: DecodeState, steps: Array) -> Array:
    """Packs the results of a host sync into one array: tokens and logprobs are [columns, B]."""
    return jnp.concatenate(
        [
            tokens,
            lax.bitcast_convert_type(logprobs, jnp.int32),
            state.active.astype(jnp.int32)[None],
            state.lengths[None],
            jnp.broadcast_to(steps, (1, state.batch)),
        ]
    )
