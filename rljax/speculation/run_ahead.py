"""Run-ahead: idle slots decode the next step's requests, with the next step's noise, into drafts only.

In the long tail of a rollout most slots of a batch bucket are idle and computed all the same. SRT (section 3)
lets them generate prompts that come up soon. Here they decode the very requests of the next step under the
noise that these will be sampled with: after one small update most of their tokens come again. They are drafts
and nothing else: the next step samples every token from its own policy, its noise is fresh there, and nothing
was learned from it before.

What is sampled ahead takes slots that are idle in the present bucket, is dropped when the batch shrinks or
the rollout ends, and stops when putting requests into slots has taken more than `max_share` of the rollout.
"""

from collections.abc import Sequence

import numpy as np

from rljax.rollout.lengths import ResponseLengths
from rljax.rollout.records import Request


class RunAhead:
    """What is sampled ahead, from one rollout to the next.

    Args:
      below: sample ahead once no more than this many responses are still running.
      max_share: of the rollout's time that prefilling and inserting may take.

    Attributes:
      lengths: of the responses so far.
    """

    def __init__(self, below: int, max_share: float) -> None:
        self.below = below
        self.max_share = max_share
        self.upcoming: Sequence[Request] = ()
        self._tokens: dict[bytes, np.ndarray] = {}
        self.lengths = ResponseLengths()

    def plan(self, requests: Sequence[Request]) -> None:
        """`requests` will be sampled in the next step: the coming rollout may sample them ahead, those first
        that are likely to be long.
        """
        self.upcoming = sorted(requests, key=lambda request: -self.lengths.expected(request.prompt_ids))

    def keep(self, drafts: Sequence[tuple[Request, list[int]]]) -> None:
        """The beginnings of responses that were sampled ahead, in place of older ones."""
        self.upcoming = ()
        self._tokens = {
            request.noise_key.tobytes(): np.asarray(tokens, np.int32) for request, tokens in drafts if tokens
        }

    def recall(self, noise_key: np.ndarray) -> np.ndarray | None:
        """What was sampled ahead for a request, int32 [n]."""
        return self._tokens.get(noise_key.tobytes())

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        tokens = list(self._tokens.values())
        keys = np.frombuffer(b"".join(self._tokens), np.uint32).reshape(-1, 2)
        return {
            "ahead_keys": keys,
            "ahead_lengths": np.asarray([len(own) for own in tokens], np.int32),
            "ahead_tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes up its own part of what `state` returned, and returns the rest."""
        rest = dict(state)
        keys, lengths, tokens = (rest.pop(f"ahead_{name}", None) for name in ("keys", "lengths", "tokens"))
        self._tokens = {}
        if keys is not None and len(keys):
            parts = np.split(tokens, np.cumsum(lengths)[:-1])
            self._tokens = {key.tobytes(): part for key, part in zip(keys, parts, strict=True)}
        return rest
