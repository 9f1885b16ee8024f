"""Run-ahead: idle slots decode the next step's requests, with the next step's noise, into drafts only.

In the long tail of a rollout most slots of a batch bucket are idle and computed all the same. SRT (section 3)
lets them generate prompts that come up soon. Here they decode the requests of the next step under the noise
that these will be sampled with: after one small update most of the same tokens are sampled again. They are
only drafts: the next step samples every token from its own policy, and nothing was learned from its noise
before.

Under dynamic sampling the next prompts are sampled either in a further round of this step or in the next
step. `RunAhead.expects_round` tells which is likelier, by how often a round was followed by another one so
far. In a further round weights and noise are the same: a response that was sampled to its end is taken over,
and the beginning of one is a draft that is accepted whole. Where the other case occurs, the noise differs,
and the tokens are found by prompt and sample. They are drafts as well: the policy is nearly the same.

Requests sampled ahead take idle slots of the present bucket, and no more are added once putting them into
slots has taken `max_share` of the rollout. The batch shrinks later where that pays: where the tokens that a
wider pass samples ahead are expected to save more time than the wider pass costs (`RunAhead.batch`). Both
sides are measured: the times of passes, and the share of earlier tokens that were accepted as drafts. While
nothing is measured, only the bucket that the running responses need anyway is filled. What is sampled ahead
is dropped when the batch shrinks below it or the rollout ends.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from drafters.aligned import AlignedDrafter
from rljax.engine.buckets import Buckets
from rljax.processes import agree
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths
from rljax.speculation.pass_times import PassTimes

_Place = tuple[bytes, int]
"""Digest of a prompt, and the number of the request among those with the same prompt: the sample."""

_DOUBTED = 16  # tokens counted as sampled ahead and not accepted before anything is measured
_KEPT = 0.5  # weight of earlier rollouts' counts, after each further one: acceptance depends on the updates


@dataclasses.dataclass(frozen=True)
class AheadSample:
    """The beginning of a response that was sampled ahead.

    Attributes:
      noise_key: uint32 [2], the key of the noise that it was sampled with.
      tokens: int32 [n].
      completion: the whole response, if it was sampled to its end with weights that have not changed since.
    """

    noise_key: np.ndarray
    tokens: np.ndarray
    completion: Completion | None = None


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
        self._samples: dict[_Place, AheadSample] = {}
        self._by_key: dict[bytes, AheadSample] = {}
        self.lengths = ResponseLengths()
        self._offered = self._accepted = 0.0  # tokens, decayed
        self._rounds = np.zeros((0, 2))  # by round: rounds followed by another one, and all of them, decayed

    def plan(self, requests: Sequence[Request]) -> None:
        """Sets the requests that follow, which the coming rollout may sample ahead."""
        self.upcoming = sorted(requests, key=lambda request: -self.lengths.expected(request.prompt_ids))

    def keep(self, samples: Sequence[tuple[Request, Sequence[int], Completion | None]]) -> None:
        """Replaces the samples by these: requests, the first tokens of their responses, and the response if
        it is complete and still is what the policy samples. Requests with the same prompt are in the order
        in which they will be requested.
        """
        self.upcoming = ()
        places = _places([request for request, *_ in samples])
        self._replace(
            {
                place: AheadSample(request.noise_key, np.asarray(tokens, np.int32), completion)
                for place, (request, tokens, completion) in zip(places, samples, strict=True)
                if tokens
            }
        )

    def match(self, requests: Sequence[Request]) -> None:
        """Finds what was sampled ahead for the requests of a rollout: with a request's noise, or else for the
        same prompt and sample.
        """
        for request, place in zip(requests, _places(requests), strict=True):
            if place in self._samples:
                self._by_key.setdefault(request.noise_key.tobytes(), self._samples[place])

    def recall(self, noise_key: np.ndarray) -> np.ndarray | None:
        """Returns the tokens that were sampled ahead for a request, int32 [n]; None if there are none."""
        sample = self._by_key.get(noise_key.tobytes())
        return None if sample is None else sample.tokens

    def completion(self, request: Request) -> Completion | None:
        """Returns the response to a request if it has been sampled to its end, with the request's noise and
        the present weights; else None.
        """
        sample = self._by_key.get(request.noise_key.tobytes())
        if sample is None or not np.array_equal(sample.noise_key, request.noise_key):
            return None
        return sample.completion

    def weights_change(self) -> None:
        """Makes drafts of complete responses: the policy may sample other tokens now."""
        self._replace(
            {place: dataclasses.replace(sample, completion=None) for place, sample in self._samples.items()}
        )

    def expects_round(self, round_: int) -> bool:
        """Returns whether a further round of dynamic sampling is likelier than not after this one, counted
        from 0; False before any is measured.
        """
        if round_ >= len(self._rounds):
            return False
        followed, rounds = self._rounds[round_]
        return bool(2 * followed > rounds)

    def count_round(self, round_: int, followed: bool) -> None:
        """Counts whether this round of dynamic sampling, from 0, was followed by another one."""
        missing = round_ + 1 - len(self._rounds)
        if missing > 0:
            self._rounds = np.concatenate([self._rounds, np.zeros((missing, 2))])
        self._rounds[round_] = _KEPT * self._rounds[round_] + (followed, 1)

    def _replace(self, samples: dict[_Place, AheadSample]) -> None:
        self._samples = samples
        self._by_key = {sample.noise_key.tobytes(): sample for sample in samples.values()}

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

    def measure(self, seconds_per_token: float, statistics: DecodeStatistics) -> float:
        """Counts what the rollout that has just ended had of the tokens sampled ahead for it.

        Args:
          seconds_per_token: that an accepted one saves; see `saved_per_token`.
          statistics: the rollout's; the tokens offered and accepted as drafts are added.

        Returns:
          The estimated seconds saved, those of responses that were taken over included.
        """
        offered, accepted = self.drafter.tokens_ahead, self.drafter.tokens_accepted
        statistics.ahead_offered += offered
        statistics.ahead_accepted += accepted
        final = statistics.ahead_final
        if offered + final:
            self._offered = _KEPT * self._offered + offered + final
            self._accepted = _KEPT * self._accepted + accepted + final
        decoded = max(statistics.tokens - final, 1)
        return accepted * seconds_per_token + final * decoding_seconds(statistics) / decoded

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
        """Checkpoint content. Complete responses become drafts: a checkpoint follows an update."""
        samples = list(self._samples.values())
        prompts = b"".join(prompt for prompt, _ in self._samples)
        keys = b"".join(sample.noise_key.tobytes() for sample in samples)
        return {
            "ahead_accepted": np.asarray([self._offered, self._accepted]),
            "ahead_rounds": self._rounds.copy(),
            "ahead_keys": np.frombuffer(keys, np.uint32).reshape(-1, 2),
            "ahead_prompts": np.frombuffer(prompts, np.uint32).reshape(-1, 2),
            "ahead_samples": np.asarray([number for _, number in self._samples], np.int32),
            "ahead_lengths": np.asarray([len(sample.tokens) for sample in samples], np.int32),
            "ahead_tokens": np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)]),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is run-ahead's, and returns the rest."""
        rest = dict(state)
        self._offered, self._accepted = rest.pop("ahead_accepted", np.zeros(2)).tolist()
        self._rounds = np.array(rest.pop("ahead_rounds", np.zeros((0, 2))))
        names = ("keys", "prompts", "samples", "lengths", "tokens")
        keys, prompts, numbers, lengths, tokens = (rest.pop(f"ahead_{name}", None) for name in names)
        samples = {}
        if keys is not None and len(keys):
            if prompts is None:  # an earlier checkpoint: found by their noise alone
                prompts, numbers = keys, np.full(len(keys), -1)
            parts = np.split(tokens, np.cumsum(lengths)[:-1])
            for key, prompt, number, part in zip(keys, prompts, numbers, parts, strict=True):
                samples[prompt.tobytes(), int(number)] = AheadSample(key, part)
        self._replace(samples)
        return rest


def _places(requests: Iterable[Request]) -> list[_Place]:
    """Returns prompt and sample of each request."""
    digests: dict[tuple[int, ...], bytes] = {}
    counts: dict[tuple[int, ...], int] = {}
    places = []
    for request in requests:
        prompt = request.prompt_ids
        if prompt not in digests:
            data = np.asarray(prompt, np.int64).tobytes()
            digests[prompt] = hashlib.blake2b(data, digest_size=8).digest()
        places.append((digests[prompt], counts.get(prompt, 0)))
        counts[prompt] = places[-1][1] + 1
    return places


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
    (seconds,) = agree(statistics.host_seconds + statistics.device_seconds + statistics.draft_seconds)
    return seconds


def _room(buckets: Buckets, batch: int, running: int) -> float:
    """Draft nodes that a pass over a full batch can have for each running response."""
    passes = buckets.passes(batch)
    return max((min(nodes, (rows - batch) / max(running, 1)) for rows, nodes in passes), default=0.0)
