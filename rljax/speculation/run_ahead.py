"""Run-ahead: idle slots decode the next step's requests, with the next step's noise, into drafts only.

In the long tail of a rollout most slots of a batch bucket are idle and computed all the same. SRT (section 3)
lets them generate prompts that come up soon. Here they decode the requests of the next step under the noise
that these will be sampled with: after one small update most of the same tokens are sampled again. They are
only drafts: the next step samples every token from its own policy, and nothing was learned from its noise
before.

Requests sampled ahead take idle slots of the present bucket, and no more are added once putting them into
slots has taken `max_share` of the rollout. The batch shrinks later where that pays: where the tokens that a
wider pass samples ahead are expected to save more time than the wider pass costs (`RunAhead.batch`). Both
sides are measured: the times of passes, and the share of earlier tokens that were accepted as drafts. While
nothing is measured, only the bucket that the running responses need anyway is filled. What is sampled ahead
is dropped when the batch shrinks below it or the rollout ends.
"""

from collections.abc import Sequence

import numpy as np

from drafters.aligned import AlignedDrafter
from rljax.engine.buckets import Buckets
from rljax.requests import DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths
from rljax.speculation.pass_times import PassTimes

_DOUBTED = 16  # tokens counted as sampled ahead and not accepted before anything is measured
_KEPT = 0.5  # weight of earlier rollouts' counts, after each further one: acceptance depends on the updates


class RunAhead:
    """Keeps the tokens that were sampled ahead, from one rollout to the next.

    Args:
      below: sample ahead once no more than this many responses are still running.
      max_share: share of the rollout's time that prefilling and inserting may take.

    Attributes:
      upcoming: requests that may be sampled ahead in the coming rollout, likely long ones first.
      lengths: lengths of the responses so far, by prompt.
      drafter: proposes the tokens that were sampled ahead, and counts those that were accepted.
    """

    drafter: AlignedDrafter | None = None

    def __init__(self, below: int, max_share: float) -> None:
        self.below = below
        self.max_share = max_share
        self.upcoming: Sequence[Request] = ()
        self._tokens: dict[bytes, np.ndarray] = {}
        self.lengths = ResponseLengths()
        self._offered = self._accepted = 0.0  # tokens, decayed

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

    @property
    def accepted_share(self) -> float:
        """Share of tokens sampled ahead that later passes accepted as drafts; 0 before any is measured."""
        return self._accepted / (self._offered + _DOUBTED)

    def weight(self, seconds_per_token: float, statistics: DecodeStatistics) -> float:
        """The value of a token that is sampled ahead now, as a share of a current token's: its expected
        saving against the mean time of a token in this rollout.

        Args:
          seconds_per_token: that an accepted one saves; see `saved_per_token`.
          statistics: the rollout's so far.
        """
        spent = decoding_seconds(statistics)
        return self.accepted_share * seconds_per_token * statistics.tokens / spent if spent else 0.0

    def measure(self, seconds_per_token: float) -> float:
        """Counts what the rollout that has just ended accepted of the tokens sampled ahead for it.

        Args:
          seconds_per_token: that an accepted one saves; see `saved_per_token`.

        Returns:
          The estimated seconds that they saved.
        """
        offered, accepted = self.drafter.tokens_ahead, self.drafter.tokens_accepted
        if offered:
            self._offered = _KEPT * self._offered + offered
            self._accepted = _KEPT * self._accepted + accepted
        return accepted * seconds_per_token

    def batch(
        self,
        state: tuple[int, int],
        running: int,
        available: int,
        seconds_per_token: float,
        statistics: DecodeStatistics,
        buckets: Buckets,
        times: PassTimes,
    ) -> int:
        """Returns the batch bucket, no larger than the present one, whose idle slots pay the most.

        A bucket costs what its plain step takes longer than that of the smallest bucket for the running
        responses. It brings a token ahead for every idle slot that can be filled. A bucket whose passes have
        less room for drafts of the running responses than passes verified so far is left out.

        Args:
          state: batch and cache length of the decode state.
          running: responses of this rollout that are decoded.
          available: requests that are sampled ahead, or may be.
          seconds_per_token: that an accepted token saves; see `saved_per_token`.
          statistics: the rollout's so far.
          buckets: the buckets of the engine.
          times: measured times of passes.
        """
        present, length = state
        smallest = buckets.batch_for(max(running, 1))
        value = self.accepted_share * seconds_per_token
        verified = statistics.drafted / max(statistics.verified_slots, 1)
        needed = min(verified, _room(buckets, smallest, running))

        def gain(batch: int) -> float:
            cost = times.plain(batch, length) - times.plain(smallest, length)
            return value * min(batch - running, available) - max(cost, 0.0)

        fitting = [batch for batch in buckets.batch if smallest < batch <= present]
        fitting = [batch for batch in fitting if _room(buckets, batch, running) >= needed]
        return max([smallest, *fitting], key=gain)  # of equal ones the smallest

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content."""
        tokens = list(self._tokens.values())
        keys = np.frombuffer(b"".join(self._tokens), np.uint32).reshape(-1, 2)
        return {
            "ahead_accepted": np.asarray([self._offered, self._accepted]),
            "ahead_keys": keys,
            "ahead_lengths": np.asarray([len(draft) for draft in tokens], np.int32),
            "ahead_tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is run-ahead's, and returns the rest."""
        rest = dict(state)
        keys, lengths, tokens = (rest.pop(f"ahead_{name}", None) for name in ("keys", "lengths", "tokens"))
        self._offered, self._accepted = rest.pop("ahead_accepted", np.zeros(2)).tolist()
        self._tokens = {}
        if keys is not None and len(keys):
            parts = np.split(tokens, np.cumsum(lengths)[:-1])
            self._tokens = {key.tobytes(): part for key, part in zip(keys, parts, strict=True)}
        return rest


def saved_per_token(
    statistics: DecodeStatistics, length: int, buckets: Buckets, times: PassTimes, max_batch: int
) -> float:
    """Returns the estimated seconds that a token saves once it is accepted as a draft: the mean time of a
    token in this rollout, all drafts included, less the time of a row in the largest verifying pass.

    Args:
      statistics: the rollout's so far.
      length: cache length.
      buckets: the buckets of the engine.
      times: measured times of passes.
      max_batch: larger batches verify nothing.
    """
    batches = buckets.verified_batches(max_batch)
    if not batches or not statistics.tokens:
        return 0.0
    batch = batches[-1]
    rows, _ = buckets.passes(batch)[-1]
    row = (times.verify(batch, length, rows) - times.plain(batch, length)) / (rows - batch)
    return max(decoding_seconds(statistics) / statistics.tokens - max(row, 0.0), 0.0)


def decoding_seconds(statistics: DecodeStatistics) -> float:
    """Returns the time that a rollout has decoded, drafting and choosing included."""
    return statistics.host_seconds + statistics.device_seconds + statistics.draft_seconds


def _room(buckets: Buckets, batch: int, running: int) -> float:
    """Draft nodes that a pass over a full batch can have for each running response."""
    passes = buckets.passes(batch)
    return max((min(nodes, (rows - batch) / max(running, 1)) for rows, nodes in passes), default=0.0)
