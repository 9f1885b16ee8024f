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

`RunAhead` is what remains between rollouts; `rljax/rollout/sources/sampling_ahead.py` fills the slots of one.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from drafters.aligned import AlignedDrafter
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths

_Place = tuple[bytes, int]
"""Digest of a prompt, and the number of the request among those with the same prompt: the sample."""

_PRIOR_REJECTED = 16  # tokens counted as sampled ahead and not accepted before anything is measured
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
        self._reported = 0, 0  # of the drafter's counts
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
        return self._accepted / (self._offered + _PRIOR_REJECTED)

    def count(self, offered: int, accepted: int) -> None:
        """Counts how many tokens sampled ahead a rollout could propose, and how many passes accepted."""
        self._offered = _KEPT * self._offered + offered
        self._accepted = _KEPT * self._accepted + accepted

    def report(self, statistics: DecodeStatistics) -> None:
        """Adds to a rollout's counts what the drafter has counted since the last call."""
        offered, accepted = self.drafter.tokens_offered, self.drafter.tokens_accepted
        statistics.ahead_offered += offered - self._reported[0]
        statistics.ahead_accepted += accepted - self._reported[1]
        self._reported = offered, accepted

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
