"""The policy's features for finished sequences, from one packed forward pass (TLT, section 4.1, step 3).

It is the same pass as that of training's logprobs (`rljax/training/scoring.py`). The features stay on the
host, so that training a head needs only the policy's embeddings and LM head.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from drafters.eagle.model import HeadConfig
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models import transformer
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics

States = tuple[np.ndarray, np.ndarray, np.ndarray]
"""tokens int32 [n], states [n, S, d] and response_mask bool [n], as `HeadTrainer.add` takes them."""


class StateReader:
    """Computes the features of prompts and responses, packed, in programs of one shape: residual streams
    behind the layers that the head reads, then the final hidden state.

    Args:
      head: the head that reads them.
      numerics: see `Numerics`.
      pack_length: tokens in a row; at least the longest sequence.
      rows: packed rows that are computed at once.
    """

    def __init__(self, head: HeadConfig, numerics: Numerics, pack_length: int, rows: int) -> None:
        self._pack_length, self._rows = pack_length, rows
        self._rope = jnp.asarray(rope_table(head.policy, pack_length))

        def policy_states(
            params: Params, *, tokens: Array, positions: Array, segment_ids: Array, rope: Array
        ) -> Array:
            attention = PackedAttention(segment_ids, numerics)
            final, _, residuals = transformer.forward_with_residuals(
                params, head.policy, tokens, positions, attention, rope, numerics, head.layers
            )
            return jnp.stack([*residuals, final], axis=2)

        self._states = jax.jit(policy_states)

    def read(self, params: Params, pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> Iterator[States]:
        """Yields the features of every (prompt_ids, response_ids), row after row of the packing.

        Args:
          params: the policy's weights.
          pairs: prompts and responses.

        Raises:
          UserError: a sequence is longer than a row.
        """
        sequences = [TrainingSequence(*pair, rollout_logprobs=None, advantage=0, weight=0) for pair in pairs]
        packing = pack_sequences([each.length for each in sequences], self._pack_length)
        for first in range(0, packing.num_rows, self._rows):
            batch = build_batch(sequences, packing, range(first, first + self._rows))
            states = self._states(
                params,
                tokens=batch.tokens,
                positions=batch.positions,
                segment_ids=batch.segment_ids,
                rope=self._rope,
            )
            states = np.asarray(states)
            rows = packing.row - first
            for i in np.flatnonzero((rows >= 0) & (rows < self._rows)):
                here = np.s_[rows[i], packing.start[i] : packing.start[i] + packing.lengths[i]]
                response = np.arange(packing.lengths[i]) >= len(sequences[i].prompt_ids)
                yield batch.tokens[here], states[here], response
