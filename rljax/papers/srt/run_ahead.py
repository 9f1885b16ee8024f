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

`RunAhead` is what remains between rollouts. `SamplingAhead` fills the idle slots of one: those of the present
batch bucket, until putting requests into them has taken `max_share` of the rollout. The batch shrinks later
where that pays: where the tokens that a wider pass samples ahead are expected to save more time than the
wider pass costs. Both sides are measured: the times of passes, and the share of earlier tokens that were
accepted as drafts. While nothing is measured, only the bucket that the running responses need anyway is
filled. What is sampled ahead is dropped when the batch shrinks below it or the rollout ends.
"""

import collections
import dataclasses
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from drafters.base import Drafter
from rljax.engine.buckets import Buckets
from rljax.papers.srt import SrtKeys
from rljax.papers.srt.aligned import AlignedDrafter
from rljax.processes import agree
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.slots import Slots
from rljax.rollout.sources.idle import IdleSlots
from rljax.speculation.idle_requests import IdleRequests
from rljax.speculation.speculator import Speculator

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


class RunAhead(IdleRequests):
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
    late_inserts = True

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

    def drafting(self, drafters: Mapping[str, Drafter], lengths: ResponseLengths) -> dict[str, Drafter]:
        """The first drafter on the host proposes what was sampled ahead, too."""
        self.lengths = lengths
        name = next(name for name, drafter in drafters.items() if drafter.on_host)
        self.drafter = AlignedDrafter(drafters[name])
        return {**drafters, name: self.drafter}

    def in_slots(self, speculator: Speculator, takes_over: bool) -> "SamplingAhead":
        return SamplingAhead(self, speculator, takes_over)

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

    def metrics(self, statistics: DecodeStatistics, waited: float) -> dict[str, float]:
        return {
            "run_ahead_tokens": statistics.ahead_tokens,
            "run_ahead_final": statistics.ahead_final,
            "run_ahead_offered": statistics.ahead_offered,
            "run_ahead_accepted": statistics.ahead_accepted,
            "run_ahead_share": statistics.ahead_seconds / max(waited, 1e-9),
            "run_ahead_seconds": statistics.ahead_seconds + statistics.ahead_pass_seconds,
            "run_ahead_saved": statistics.ahead_saved_seconds,
        }

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

    def load_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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


class SamplingAhead(IdleSlots):
    """Decodes what is upcoming in the idle slots of one rollout.

    Args:
      run_ahead: what is upcoming, and what was sampled before.
      speculator: its speculator, whose passes are timed.
      takes_over: whether a further round with the same weights may take over complete responses, in which
        neither stop strings nor calls of tools are looked for.
    """

    def __init__(self, run_ahead: RunAhead, speculator: Speculator, takes_over: bool) -> None:
        self._run_ahead, self._speculator, self._takes_over = run_ahead, speculator, takes_over
        self._times = speculator.decoder.times
        self.responses = [LiveResponse(request, yields=True) for request in run_ahead.upcoming]
        self._waiting = collections.deque(self.responses)

    def begin(self, slots: Slots, requests: Sequence[Request]) -> Mapping[int, Completion]:
        """Returns the responses that were sampled ahead to their end with the present weights. Only an engine
        with row-invariant numerics samples the same bits in any batch.
        """
        self._run_ahead.match(requests)
        if not slots.engine.numerics.row_invariant:
            return {}
        found = {place: self._run_ahead.completion(request) for place, request in enumerate(requests)}
        completions = {place: completion for place, completion in found.items() if completion is not None}
        slots.statistics.ahead_final += sum(len(each.response_ids) for each in completions.values())
        return completions

    def fill(self, slots: Slots) -> None:
        """Puts upcoming requests into idle slots, once few others are left."""
        free = slots.idle
        if not free or not self._may_fill(slots):
            return
        start = time.perf_counter()
        prompt = self._waiting[0].request.prompt_ids
        if len(prompt) < slots.length:
            prefilled, rows = slots.prefill([prompt]), []
            while free and self._waiting and self._waiting[0].request.prompt_ids == prompt:
                rows.append((0, free.pop(0), self._waiting.popleft()))
            slots.insert(prefilled, rows)
        slots.statistics.ahead_seconds += time.perf_counter() - start

    def _may_fill(self, slots: Slots) -> bool:
        ahead, statistics = self._run_ahead, slots.statistics
        if not self._waiting or len(slots.running) > ahead.below:
            return False
        spent, decoding = agree(statistics.ahead_seconds, statistics.host_seconds + statistics.device_seconds)
        return spent <= ahead.max_share * decoding

    def batch(self, slots: Slots, smallest: int) -> int:
        """Returns the batch bucket, no larger than the present one, whose idle slots pay the most.

        A bucket costs what its plain step takes longer than that of the smallest bucket for the running
        responses. It brings a token ahead for every idle slot that can be filled. A bucket whose passes have
        less room for drafts of the running responses than passes verified so far is left out.
        """
        if smallest >= slots.batch:
            return smallest
        buckets, statistics, running = slots.engine.buckets, slots.statistics, len(slots.running)
        available = len(slots.yielding) + (len(self._waiting) if self._may_fill(slots) else 0)
        value = self._run_ahead.accepted_share * self._saved_per_token(slots)
        verified = statistics.drafted / max(statistics.verified_slots, 1)
        needed = min(verified, _free_nodes(buckets, smallest, running))

        def gain(batch: int) -> float:
            return value * min(batch - running, available) - self._longer(slots, batch, smallest)

        fitting = [batch for batch in buckets.batch if smallest < batch <= slots.batch]
        fitting = [batch for batch in fitting if _free_nodes(buckets, batch, running) >= needed]
        return max([smallest, *fitting], key=gain)  # of equal ones the smallest

    def weight(self, slots: Slots) -> float:
        """The value of a token that is sampled ahead now, as a share of a current token's: its expected
        saving against the mean time of a token in this rollout.
        """
        spent = _decoding_seconds(slots.statistics) if slots.yielding else 0.0
        if not spent:
            return 0.0
        saving = self._run_ahead.accepted_share * self._saved_per_token(slots)
        return saving * slots.statistics.tokens / spent

    def passed(self, slots: Slots, steps: int) -> None:
        """Adds the time by which so many passes took longer, because the batch is wide for sampling ahead."""
        smallest = slots.engine.buckets.batch_for(max(len(slots.running), 1))
        if smallest < slots.batch and slots.yielding:
            slots.statistics.ahead_pass_seconds += steps * self._longer(slots, slots.batch, smallest)

    def _longer(self, slots: Slots, batch: int, smallest: int) -> float:
        """Returns the seconds by which a plain step of a batch takes longer than that of the smallest."""
        seconds = self._times.plain(batch, slots.length) - self._times.plain(smallest, slots.length)
        return max(seconds, 0.0)

    def end(self, slots: Slots, requests: Sequence[Request]) -> None:
        """Counts what the rollout had of the tokens that were sampled ahead for it, and keeps those that were
        sampled in it.
        """
        statistics = slots.statistics
        offered, accepted, final = statistics.ahead_offered, statistics.ahead_accepted, statistics.ahead_final
        statistics.ahead_tokens += sum(len(response.tokens) for response in self.responses)
        if offered + final:
            self._run_ahead.count(offered + final, accepted + final)
        seconds = accepted * self._saved_per_token(slots)
        seconds += final * _decoding_seconds(statistics) / max(statistics.tokens - final, 1)
        statistics.ahead_saved_seconds += seconds
        if self.responses:
            steps = {request.step for request in requests}
            self._run_ahead.keep([self._kept(response, steps) for response in self.responses])

    def _kept(self, response: LiveResponse, steps: set[int]) -> tuple[Request, list[int], Completion | None]:
        """Returns a sample in the form of `RunAhead.keep`. One of this rollout's step may be taken over by a
        further round once it is complete.
        """
        ended = response.ending == "eos" or not response.remaining
        final = self._takes_over and ended and response.request.step in steps
        return response.request, response.tokens, response.completion(False) if final else None

    def _saved_per_token(self, slots: Slots) -> float:
        """Returns the estimated seconds that a token saves once it is accepted as a draft: the mean time of a
        token in this rollout, all drafts included, less the time of a row in the largest verifying pass.
        """
        buckets, statistics = slots.engine.buckets, slots.statistics
        batches = buckets.verified_batches(self._speculator.max_batch)
        if not batches or not statistics.tokens:
            return 0.0
        batch, length = batches[-1], slots.length or buckets.cache[0]
        rows, _ = buckets.passes(batch)[-1]
        row = (self._times.verify(batch, length, rows) - self._times.plain(batch, length)) / (rows - batch)
        return max(_decoding_seconds(statistics) / statistics.tokens - max(row, 0.0), 0.0)


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


def _decoding_seconds(statistics: DecodeStatistics) -> float:
    """Returns the time that a rollout has decoded, drafting and choosing included."""
    (seconds,) = agree(statistics.host_seconds + statistics.device_seconds + statistics.draft_seconds)
    return seconds


def _free_nodes(buckets: Buckets, batch: int, running: int) -> float:
    """Draft nodes that a pass over a full batch can have for each running response."""
    passes = buckets.passes(batch)
    return max((min(nodes, (rows - batch) / max(running, 1)) for rows, nodes in passes), default=0.0)


def make_run_ahead(config: SrtKeys) -> RunAhead | None:
    """Returns the run-ahead that the keys ask for. See `make_idle_requests`."""
    below = config.run_ahead_below
    return RunAhead(below, config.run_ahead_share) if below else None
