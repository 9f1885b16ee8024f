"""Inputs and results of the device: assignments of slots, and the one array that a host sync copies."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.engine.state import DecodeState
from rljax.sampling.distribution import SamplingParams


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Assigns a prefilled request to a slot.

    Attributes:
      row: row of the prompt in the `Prefix`.
      noise_key: uint32 [2], from `noise.request_key`.
      max_response: largest number of response tokens to sample.
      sampling: temperature and filters; None for the engine's.
    """

    row: int
    slot: int
    noise_key: np.ndarray
    max_response: int
    sampling: SamplingParams | None = None


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """The results of a host sync, copied off the device in one array.

    Attributes:
      tokens: int32 [B, T], -1 where a slot sampled nothing.
      logprobs: float32 [B, T], under the distribution really sampled.
      active: bool [B], whether the slot decodes on.
      lengths: int32 [B], committed tokens.
      steps: number of forward passes that sampled; T in plain decoding.
      rows: number of tokens that were computed, padding included, and steps after the end of a fixed loop.
      path: int32 [B, T], node of the draft tree that each of `tokens` was sampled after (0 is the last
        token); None in plain decoding.
      states: [B, T or more, S, d], features that each of `tokens` was sampled from, still on the device; None
        unless the engine hands them out.
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
    """Results that are still being computed.

    Attributes:
      packed: the array of `pack`; below the path after a verifying pass.
      columns: columns of its tokens. In plain decoding a step is a column, and the first `steps` are used.
      verified_rows: number of tokens that a verifying pass computes; None in plain decoding.
      states: see `DecodeResult`.
      fixed: in plain decoding, all columns were computed, however many steps were done.
      is_whole: in plain decoding, as many steps as columns could be done.
    """

    packed: Array
    columns: int
    verified_rows: int | None = None
    states: Array | None = None
    fixed: bool = False
    is_whole: bool = False

    def is_ready(self) -> bool:
        """Whether the device has finished."""
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
            rows=self.verified_rows or (self.columns if self.fixed else steps) * packed.shape[1],
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
