"""The smallest drafter: one method, from the tokens of one request to draft tokens.

    class Repeat:
        def propose(self, tokens, limit):
            return [tokens[-1]] * limit

`SimpleDrafterAdapter` makes a `Drafter` of it: it keeps the tokens of every request, and asks request by
request.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from drafters.base import Drafter, DraftRequest, Drafts, Queries, Sampled
from drafters.validation import ProtocolError

_ACCEPTANCE = 0.8  # of a draft token; the speculator's calibration corrects it from what is accepted


class SimpleDrafter(Protocol):
    """A drafter of one method."""

    def propose(self, tokens: np.ndarray, limit: int) -> Sequence[int]:
        """Returns draft tokens that may follow `tokens`.

        Args:
          tokens: int32 [n], prompt and response so far, read-only.
          limit: at most this many draft tokens are used.
        """


class SimpleDrafterAdapter(Drafter):
    """A `SimpleDrafter` as a `Drafter`: its draft tokens are chains."""

    def __init__(self, drafter: SimpleDrafter) -> None:
        self._drafter = drafter

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._tokens = [np.asarray(request.prompt_ids, np.int32) for request in requests]
        self._sizes = [len(tokens) for tokens in self._tokens]

    def observe(self, sampled: Sampled) -> None:
        for request, tokens, count in zip(sampled.requests, sampled.tokens, sampled.counts, strict=True):
            size = self._sizes[request] + int(count)
            if size > len(self._tokens[request]):  # doubling: each token is copied a constant number of times
                larger = np.empty(2 * size, np.int32)
                larger[: self._sizes[request]] = self._tokens[request][: self._sizes[request]]
                self._tokens[request] = larger
            self._tokens[request][self._sizes[request] : size] = tokens[:count]
            self._sizes[request] = size

    def propose(self, queries: Queries) -> Drafts:
        shape = (len(queries.requests), queries.nodes)
        order = np.arange(queries.nodes)
        tokens, counts = np.zeros(shape, np.int64), np.zeros(shape[0], np.int32)
        for row, (request, budget) in enumerate(zip(queries.requests, queries.budgets, strict=True)):
            known = self._tokens[request][: self._sizes[request]]
            known.flags.writeable = False
            chain = _chain(self._drafter.propose(known, int(budget)))[:budget]
            tokens[row, : len(chain)], counts[row] = chain, len(chain)
        parents = np.broadcast_to(order - 1, shape).astype(np.int32)
        log_probability = np.broadcast_to((order + 1) * np.log(_ACCEPTANCE), shape).astype(np.float32)
        return Drafts(tokens, parents, log_probability, counts)


def _chain(tokens: Sequence[int]) -> np.ndarray:
    """Returns the tokens as integers [n]; raises a ProtocolError where they are not."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise ProtocolError(f"{type(tokens).__name__}, expected a list of tokens") from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        text = " ".join(repr(tokens).split())[:80]
        raise ProtocolError(f"{type(tokens).__name__} {text}, expected a list of tokens")
    return array
