"""A worker of which only times are computed.

Requests of one level of acceptance advance together, by the same number of tokens a pass. So a worker keeps
for each level how far it has come and a heap of the points at which its requests end; the next end is the
least over the levels, and the time until then has a closed form: with n requests, whose cache has K tokens
and grows by A tokens a pass, p passes take

    p f + c (K p + A p^2 / 2)    seconds, f of a pass without reading the cache and c a token of it.

Nothing happens token by token.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math

from rljax.cluster.messages import Key
from rljax.simulation.costs import PassCosts
from rljax.simulation.drafting import NO_DRAFTS, Drafting

_REFILL_SHARE = 8  # as decode loops have it
_MARGIN = 1e-6  # tokens: rounding


@dataclasses.dataclass(slots=True)
class Job:
    """A request as a worker has it.

    Attributes:
      key: the request.
      rollout: number of the rollout that it belongs to.
      total: tokens of the response.
      begin: tokens that it had when it came.
      prompt: tokens of its prompt.
      group: its prompt.
      levels: level of acceptance of each drafter's drafts.
      end: point of its level at which it ends.
      level: under the present drafter.
      sent: tokens that were reported.
    """

    key: Key
    rollout: int
    total: int
    begin: int
    prompt: int
    group: int
    levels: tuple[int, ...]
    end: float = 0.0
    level: int = 0
    sent: int = 0


class _Level:
    """Requests of a level of acceptance."""

    __slots__ = ("count", "ends", "point")

    def __init__(self) -> None:
        self.point, self.count = 0.0, 0
        self.ends: list[tuple[float, Key]] = []


class SimulatedWorker:
    """See the module's docstring.

    Args:
      name: the worker's.
      slots: requests that it decodes at a time.
      costs: seconds of passes.
      drafting: windows.
      sync: passes after which the host looks for ends while requests wait for slots, if an eighth of the
        slots has not come free before (`rljax.rollout.decode_loop`); 0 looks at every end.
      moved: seconds of a token of a response that goes on here, or races here; None prefills it as any other.

    Attributes:
      busy: seconds in which it decoded.
      passes: number of passes.
      generation: changes with every change of what it decodes: an end that was computed before is void.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        costs: PassCosts,
        drafting: Drafting | None = None,
        sync: int = 0,
        moved: float | None = None,
    ) -> None:
        self.name, self.slots, self._sync, self._moved = name, slots, sync, moved
        self._costs = costs
        self._drafting = Drafting(costs) if drafting is None else drafting
        self._names = self._drafting.names
        self._drafter = self._names[0] if self._names else NO_DRAFTS
        self.busy = self.passes = 0.0
        self.generation = 0
        self.jobs: dict[Key, Job] = {}  # in slots
        self.waiting: collections.deque[Job] = collections.deque()
        self._levels: dict[int, _Level] = {}
        self._cache = 0.0
        self._since = 0.0
        self._paused = 0.0  # until then it prefills
        self._rates: list[tuple[_Level, float]] = []
        self._fixed = self._growth = 0.0
        self._slow = 1.0
        self._looked = 0.0  # passes at the last look

    def __len__(self) -> int:
        return len(self.jobs) + len(self.waiting)

    # -- what it decodes -------------------------------------------------------------------------------------

    def add(self, jobs: list[Job], now: float) -> None:
        """Takes requests."""
        self.advance(now)
        self.waiting.extend(jobs)
        self._start(now)

    def remove(self, keys: list[Key], now: float) -> list[Job]:
        """Decodes requests no longer. Returns those that it had, with `begin` where they are."""
        self.advance(now)
        gone = []
        for key in keys:
            job = self.jobs.pop(key, None)
            if job is None:
                waiting = next((each for each in self.waiting if each.key == key), None)
                if waiting is not None:
                    self.waiting.remove(waiting)
                    gone.append(waiting)
                continue
            self._leave(job)
            gone.append(job)
        if gone:
            self._start(now)
        return gone

    def pause(self, until: float) -> None:
        """Does something else until then."""
        self._paused = max(self._paused, until)

    def use(self, drafter: str, now: float) -> None:
        """Uses another drafter from now on."""
        if drafter == self._drafter or drafter not in self._names:
            return
        self.advance(now)
        jobs, self.jobs = list(self.jobs.values()), {}
        for job in jobs:
            self._leave(job)
        self._drafter = drafter
        for job in jobs:
            self._enter(job)
        self._plan()

    def use_first(self, now: float) -> None:
        """From now on uses the drafter that it began with."""
        self.use(self._names[0] if self._names else NO_DRAFTS, now)

    def slow(self, factor: float, now: float) -> None:
        """All takes so many times as long from now on as it would alone."""
        self.advance(now)
        more = max(self._paused - now, 0.0) * (factor / self._slow - 1)
        self._paused += more
        self.busy += more
        self._slow = factor
        self.generation += 1

    def tokens(self, job: Job) -> int:
        """Tokens that a request in a slot has, as of the last `advance`."""
        done = job.total - (job.end - self._levels[job.level].point)
        return min(max(int(done + _MARGIN), job.begin), job.total)

    def _start(self, now: float) -> None:
        """Fills slots, and prefills what comes into them."""
        tokens, moved, prompts = 0, 0, set()
        while self.waiting and len(self.jobs) < self.slots:
            job = self.waiting.popleft()
            self._enter(job)
            if job.begin and self._moved is not None:
                moved += job.prompt + job.begin
                continue
            # Requests of one prompt share its prefill; what one has sampled elsewhere is its own.
            tokens += job.begin + (0 if job.group in prompts else job.prompt)
            prompts.add(job.group)
        if tokens or moved:
            seconds = (self._costs.prefill(tokens) + moved * (self._moved or 0.0)) * self._slow
            self._paused = max(self._paused, now) + seconds
            self.busy += seconds
        self._plan()

    def _enter(self, job: Job) -> None:
        job.level = job.levels[self._names.index(self._drafter)] if self._drafter else 0
        level = self._levels.get(job.level)
        if level is None:
            level = self._levels[job.level] = _Level()
        job.end = level.point + job.total - job.begin
        level.count += 1
        heapq.heappush(level.ends, (job.end, job.key))
        self.jobs[job.key] = job
        self._cache += job.prompt + job.begin

    def _leave(self, job: Job) -> None:
        job.begin = self.tokens(job)
        self._levels[job.level].count -= 1
        self._cache -= job.prompt + job.begin

    def _plan(self) -> None:
        """What a pass takes and brings from now on."""
        self.generation += 1
        running = len(self.jobs)
        if not running:
            self._rates, self._levels, self._cache = [], {}, 0.0
            return
        drafting, milliseconds = self._drafting, int(1000 * self._costs.cached * self._cache)
        way = drafting.way(running, self._drafter, milliseconds)
        self._fixed = drafting.seconds(running, self._drafter, way, milliseconds)
        self._rates = [
            (level, drafting.tokens(number, way)) for number, level in self._levels.items() if level.count
        ]
        self._growth = sum(rate * level.count for level, rate in self._rates)

    # -- time ------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Decodes up to a time."""
        begin, self._since = max(self._since, self._paused), now
        seconds = now - begin
        if seconds <= 0 or not self._rates:
            return
        linear = self._slow * (self._fixed + self._costs.cached * self._cache)
        square = self._slow * self._costs.cached * self._growth / 2
        if square * seconds < 1e-9 * linear * linear:
            passes = seconds / linear
        else:
            passes = (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        for level, rate in self._rates:
            level.point += rate * passes
        self._cache += self._growth * passes
        self.busy += seconds
        self.passes += passes

    def next_end(self) -> float:
        """Returns the time at which the host sees the next response end; infinity if none does."""
        passes = math.inf
        for level, rate in self._rates:
            ends = level.ends
            while ends and ((job := self.jobs.get(ends[0][1])) is None or job.end != ends[0][0]):
                heapq.heappop(ends)  # it was withdrawn
            if ends:
                passes = min(passes, (ends[0][0] - level.point) / rate)
        if passes == math.inf:
            return passes
        passes = max(passes, 0.0)
        if self._sync and self.waiting:
            passes = self._until_look(passes)
        linear = self._slow * (self._fixed + self._costs.cached * self._cache)
        square = self._slow * self._costs.cached * self._growth / 2
        return max(self._since, self._paused) + passes * (linear + square * passes)

    def _until_look(self, first: float) -> float:
        """Returns the passes until the host looks, of which `first` are those until a response ends."""
        left = (
            (job.end - level.point) / rate
            for level, rate in self._rates
            for end, key in level.ends
            if (job := self.jobs.get(key)) is not None and job.end == end
        )
        enough = max(1, self.slots // _REFILL_SHARE)
        refill = heapq.nsmallest(enough, left)[-1] if len(self.jobs) >= enough else first
        since = self.passes - self._looked
        regular = math.ceil((since + first) / self._sync - _MARGIN) * self._sync - since
        return max(first, min(refill, regular))

    def ended(self, now: float) -> list[Job]:
        """Advances, takes out the responses that have ended, and fills their slots."""
        self.advance(now)
        done = []
        for level, rate in self._rates:
            ends, least = level.ends, level.point + _MARGIN + 1e-9 * rate
            while ends and ends[0][0] <= least:
                end, key = heapq.heappop(ends)
                job = self.jobs.get(key)
                if job is None or job.end != end:
                    continue
                del self.jobs[key]
                level.count -= 1
                self._cache -= job.prompt + job.total
                done.append(job)
        if done:
            self._looked = self.passes
            self._start(now)
        return done
