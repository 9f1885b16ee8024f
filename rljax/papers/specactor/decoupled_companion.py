"""A companion on devices of its own, which drafts the next window while the target verifies the last one.

SpecActor, section 4.1; `drafting_ahead.py` has the protocol. The tokens that it drafts from are known on the
host. The entries that drafting wrote behind a rejected draft are never read: the next window overwrites them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from rljax.engine.companion import Companion
from rljax.engine.draft_tree import DraftStrategy
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.engine.self_drafting import SelfDrafts, margin_log_probability
from rljax.engine.state import DecodeState
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.papers.specactor.drafting_ahead import DraftingAhead


class DecoupledCompanion(DraftingAhead, Companion):
    """A companion that drafts ahead.

    Args:
      target, config, params, numerics: see `Companion`.
      mesh: its devices.
      window: most tokens that it drafts at a time.
    """

    def __init__(
        self,
        target: DecodeEngine,
        config: ModelConfig,
        params: Params,
        numerics: Numerics,
        mesh: Mesh,
        window: int,
    ) -> None:
        chain = (DraftStrategy(window, 1, window),)
        Companion.__init__(self, target, config, params, numerics, mesh, chain)
        self._plan_ahead(window, self.engine.eos_token_ids)

    def begin(self, batch: int, length: int) -> None:
        super().begin(batch, length)
        self._begin_ahead(self.batch)

    def set_known_lengths(self, lengths: np.ndarray) -> None:
        super().set_known_lengths(lengths)
        self._limits = self._sizes + self._state.cache.length

    def insert(
        self, prefilled: Sequence[Sequence[int]], assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        super().insert(prefilled, assignments, requests)
        slots = [assignment.slot for assignment in assignments]
        keys = [assignment.noise_key for assignment in assignments]
        self.add_requests(slots, keys, [assignment.max_response for assignment in assignments])

    # -- drafting --------------------------------------------------------------------------------------------

    def draft_chains(self, target: DecodeState, steps: int, with_proposal: bool = False) -> SelfDrafts:
        """Compiles and times drafting: every slot's drafts are replaced by `steps` others at most."""
        self._apply_finished()
        self._drop(np.arange(self.batch))
        self.grow(target.cache.length)
        self._start(np.where(self._sizes > 0, steps, 0))
        return self._drafts

    def _draft_behind(self, room: np.ndarray) -> tuple[Array, Array]:
        self._catch_up()
        unanswered, rows = self.windows.unanswered, np.arange(self.batch)
        sizes = self._sizes + unanswered
        known = self._tokens[rows, np.maximum(self._sizes, 1) - 1]
        last = np.where(
            unanswered > 0, self.windows.chains[rows, np.maximum(unanswered, 1) - 1], known
        ).astype(np.int32)
        # What is left of the response also cuts a slot's chain to its room, behind which one more is sampled.
        remaining = np.minimum(self._limits - sizes, room + 1).astype(np.int32)
        state = DecodeState(
            cache=None,
            tokens=jnp.asarray(last),
            lengths=jnp.asarray(np.maximum(sizes - 1, 0).astype(np.int32)),
            remaining=jnp.asarray(remaining),
            active=jnp.asarray(room > 0),
            noise_keys=jnp.asarray(self._keys.copy()),
        )
        cache, self._drafts = self.engine.draft_for(
            self.params,
            self._state.cache,
            state,
            np.maximum(sizes, 1).astype(np.int32),
            int(room.max()),
            self.vocab_size,
        )
        self._state = self._state.replace(cache=cache)
        return self._drafts.tokens, self._drafts.margins

    def _scores(self, sure: np.ndarray) -> np.ndarray:
        return margin_log_probability(sure)

    def _grow(self, length: int) -> None:
        self.grow(length)

    # -- answers ---------------------------------------------------------------------------------------------

    def follow(self, slots: Sequence[int], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Notes an answer; it is taken over when the drafts that are in flight are needed."""
        self.answered(slots, tokens, counts)

    def _take_over(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        super().follow(slots, tokens, counts)

    def _answer(
        self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        unanswered = self.windows.unanswered[slots]
        return self._check(slots, tokens, counts), unanswered

    def _drop(self, slots: np.ndarray) -> None:
        self.windows.drop(slots)

    def _keep(self, slots: Sequence[int]) -> None:
        super()._keep(slots)
        self._keep_ahead(slots, self.batch)
