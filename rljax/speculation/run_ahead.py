"""Run-ahead: idle slots decode the next step's requests, with the next step's noise, into drafts only.

In the long tail of a rollout most slots of a batch bucket are idle and computed all the same. SRT (section 3)
lets them generate prompts that come up soon. Here they decode the requests of the next step under the noise
that these will be sampled with: after one small update most of the same tokens are sampled again. They are
only drafts: the next step samples every token from its own policy, and nothing was learned from its noise
before.

Requests sampled ahead take idle slots of the present bucket. They are dropped when the batch shrinks or the
rollout ends, and no more are added once putting them into slots has taken `max_share` of the rollout.
"""

from collections.abc import Sequence

import numpy as np

from rljax.requests import Request
from rljax.response_lengths import ResponseLengths


class RunAhead:
    """Keeps the tokens that were sampled ahead, from one rollout to the next.

    Args:
      below: sample ahead once no more than this many responses are still running.
      max_share: share of the rollout's time that prefilling and inserting may take.

    Attributes:
      upcoming: requests that may be sampled ahead in the coming rollout, likely long ones first.
      lengths: lengths of the responses so far, by prompt.
    """

    def __init__(self, below: int, max_share: float) -> None:
        self.below = below
        self.max_share = max_share
        self.upcoming: Sequence[Request] = ()
        self._tokens: dict[bytes, np.ndarray] = {}
        self.lengths = ResponseLengths()

    def plan(self, requests: Sequence[Request]) -> None:
        """Sets the requests of the next step, which the coming rollout may sample ahead."""
        self.upcoming = sorted(requests, key=lambda request: -self.lengths.expected(request.prompt_ids))

    def keep(self, drafts: Sequence[tuple[Request, list[int]]]) -> None:
        """Replaces the drafts by these: requests, and the first tokens of their responses."""
        self.upcoming = ()
        self._tokens = {
            request.noise_key.tobytes(): np.asarray(tokens, np.int32) for request, tokens in drafts if tokens
        }

    def recall(self, noise_key: np.ndarray) -> np.ndarray | None:
        """The tokens that were sampled ahead for a request, int32 [n]; None if there are none."""
        return self._tokens.get(noise_key.tobytes())

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content."""
        tokens = list(self._tokens.values())
        keys = np.frombuffer(b"".join(self._tokens), np.uint32).reshape(-1, 2)
        return {
            "ahead_keys": keys,
            "ahead_lengths": np.asarray([len(draft) for draft in tokens], np.int32),
            "ahead_tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is run-ahead's, and returns the rest."""
        rest = dict(state)
        keys, lengths, tokens = (rest.pop(f"ahead_{name}", None) for name in ("keys", "lengths", "tokens"))
        self._tokens = {}
        if keys is not None and len(keys):
            parts = np.split(tokens, np.cumsum(lengths)[:-1])
            self._tokens = {key.tobytes(): part for key, part in zip(keys, parts, strict=True)}
        return rest
