"""The policy's features of responses while they are decoded, on their way into a head's training buffer.

Every forward pass of the engine hands them out, so that training a head needs no forward pass of its own.
`HeadSlots` (`slots.py`) says what happens to the slots, and the drafter which tokens were kept.
"""

from collections.abc import Sequence

import numpy as np
from jax import Array

from drafters.base import DraftRequest, Sampled
from drafters.eagle.head_state import FrozenHead
from drafters.eagle.spot_trainer import HeadTrainer
from rljax.processes import to_host


class FeatureCollector:
    """Collects the features of running responses; the complete ones go to the trainer.

    Args:
      max_bytes: of running responses. Of more, the shortest are dropped.

    Attributes:
      trainer: takes complete responses; None before the first rollout.
      totals: metrics that count over the run: `absorbed_early`, host syncs whose features the head absorbed
        because there was no room for more unread ones; `lost_contexts`, the number of times that a slot was
        emptied since appended tokens have no features; `dropped_running`, running responses that are not
        trained on, since there was no room for them.
    """

    trainer: HeadTrainer | FrozenHead | None = None

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.totals = dict.fromkeys(("absorbed_early", "lost_contexts", "dropped_running"), 0)
        self.begin([], False)

    def begin(self, requests: Sequence[DraftRequest], trains: bool) -> None:
        """Begins with other requests. Nothing is collected unless a head `trains`."""
        self._trainable = [trains and request.trainable for request in requests]
        self._prompts = [request.prompt_ids for request in requests]
        self._requests: dict[int, int] = {}  # by slot
        self._states: dict[int, list[np.ndarray]] = {}  # features by request, of all tokens but the last
        self._sizes: dict[int, int] = {}  # their bytes; a prompt that a group shares counts for each request
        self._tokens: dict[int, list[int]] = {}
        if self.trainer is not None:
            self.trainer.reserve(0)

    @property
    def collects(self) -> bool:
        """Whether some request is trained on."""
        return any(self._trainable)

    def insert(
        self,
        states: np.ndarray | None,
        rows: Sequence[int],
        slots: Sequence[int],
        requests: Sequence[int],
    ) -> None:
        """Row rows[i] of a prefill, whose features are `states`, was inserted into slot slots[i] for a
        request; None where nothing is trained on.
        """
        for row, slot, request in zip(rows, slots, requests, strict=True):
            self._requests[slot] = request
            if self._trainable[request]:
                known = len(self._prompts[request]) - 1
                self._drop(request)
                self._keep(request, states[row, :known])
                self._tokens[request] = list(self._prompts[request])
        if self.collects:
            self._bound_memory()

    def advance(self, states: Array, counts: np.ndarray) -> None:
        """A pass has handed out features [B, T, S, d], of which slot i has sampled counts[i] tokens."""
        learnt = [(slot, self._requests.get(slot)) for slot in np.flatnonzero(counts).tolist()]
        learnt = [(slot, request) for slot, request in learnt if request in self._states]
        if not learnt:
            return
        states = to_host(states)  # all slots: selecting some would wait for the next program
        for slot, request in learnt:
            self._keep(request, states[slot, : counts[slot]].copy())
        self._bound_memory()

    def drop(self, slots: Sequence[int]) -> None:
        """Responses in `slots` are not trained on: features of some of their tokens are missing."""
        for slot in slots:
            self._drop(self._requests.get(slot))

    def compact(self, slots: Sequence[int]) -> None:
        """Only `slots` go on, in that order."""
        kept = dict(enumerate(slots))
        self._requests = {new: self._requests[old] for new, old in kept.items() if old in self._requests}

    def observe(self, sampled: Sampled) -> None:
        """Adds the tokens that were kept, and complete responses to the buffer."""
        for row, request in enumerate(sampled.requests.tolist()):
            if request not in self._tokens:
                continue
            self._tokens[request] += sampled.tokens[row, : sampled.counts[row]].tolist()
            if sampled.ended[row]:
                tokens, parts = self._tokens[request], self._states[request]
                self._drop(request)
                self._bound_memory()
                known = len(tokens) - 1  # without the last token, which the policy has not read
                states = np.concatenate(parts)[:known]  # a stop string may have cut the response
                if len(states) == known:  # else the head has not followed the slots to the end
                    response = np.arange(known) >= len(self._prompts[request])
                    self.trainer.add(np.asarray(tokens[:known], np.int32), states, response)

    def _keep(self, request: int, states: np.ndarray) -> None:
        self._states.setdefault(request, []).append(states)
        self._sizes[request] = self._sizes.get(request, 0) + states.nbytes

    def _drop(self, request: int | None) -> None:
        for kept in (self._states, self._sizes, self._tokens):
            kept.pop(request, None)

    def _bound_memory(self) -> None:
        running = sum(self._sizes.values())
        while running > self._max_bytes:
            shortest = min(self._sizes, key=self._sizes.__getitem__)
            running -= self._sizes[shortest]
            self._drop(shortest)
            self.totals["dropped_running"] += 1
        self.trainer.reserve(running)
