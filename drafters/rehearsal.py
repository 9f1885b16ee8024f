"""Compiles the host loops of drafters before the first rollout, by drafting in a small artificial one.

Compiling SRT's loops takes some 15 s; numba keeps the result on disk, beside the files, where it can.
"""

import numpy as np

from drafters.base import Drafter, DraftRequest, Outcome, Queries, Sampled

_PROMPT = (1, 2, 3, 1, 2)
_RESPONSE = (3, 1, 2, 4, 1, 2, 3)


def rehearse(drafter: Drafter, nodes: int) -> None:
    """Drafts for two requests in two rollouts, up to `nodes` at a time. Discard the drafter afterwards."""
    both = np.arange(2, dtype=np.int32)
    none, ended = np.zeros(2, np.int32), np.zeros(2, bool)
    for _ in range(2):  # the second one has a history
        drafter.begin([DraftRequest(_PROMPT, np.full(2, i, np.uint32)) for i in range(2)])
        for known, token in enumerate(_RESPONSE):
            positions = np.full(2, len(_PROMPT) + known, np.int32)
            drafter.propose(Queries(both, positions, np.full(2, nodes, np.int32), nodes))
            tokens = np.full((2, 3), token, np.int32)
            drafter.observe(Sampled(both, tokens, np.ones(2, np.int32), none, none, ended))
        response = np.asarray(_RESPONSE, np.int32)
        drafter.learn([Outcome(_PROMPT, response, float(i)) for i in range(2)])
