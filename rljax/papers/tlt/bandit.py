"""TLT's manager: the strategy that has brought the most tokens per second of late.

TLT, section 5.2, Algorithm 1 (BEG-MAB): a multi-armed bandit for every batch bucket. With probability epsilon
any of its arms is tried, else the one with the largest median reward over its last `window` uses. The median
ignores a step that something else held up; the window forgets rewards from before policy and drafters moved
on. The reward is tokens per second (line 9). The choice changes no token, only how long it takes.

Where it differs from the paper, or that says nothing (docs/paper-managers.md has the reasons): a reward is
the tokens per second of one response, multiplied by the present batch; every arm is tried until it has three
rewards; the plain step is an arm; an unavailable drafter, such as a head before it is trained, is not.

Measured with three drafters on two cores (docs/benchmarks.md): 1.52 times plain decoding in the second epoch,
where the default manager reaches 2.09, since it tries every strategy of every batch bucket three times before
any median counts.
"""

import bisect
import collections
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rljax.engine.state import DecodeState
from rljax.papers.tlt import TltKeys
from rljax.papers.tlt.arms import arms_by_batch, arms_by_threshold, default_strategies, room_per_slot
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.drafting import draft, strategies_of
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.mixing import Mixer, check_one_tree, proposer_of
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.strategies import Arm, Strategy, arm_name

_FIRST_TRIES = 3  # the fewest rewards whose median survives one outlier


class Selection(NamedTuple):
    """A choice, for the log.

    Attributes:
      strategy: the chosen arm; None is a plain step.
      reason: a sentence that says why.
      medians: tokens per second of all responses expected of each available arm; arms that were never used
        are missing.
    """

    strategy: Arm
    reason: str
    medians: dict[Arm, float]


class BegMab:
    """Chooses among the arms of every batch bucket.

    Args:
      arms: arms by batch bucket, the plain step (None) among them; see `arms_by_batch` and
        `arms_by_threshold`.
      epsilon: probability of trying any arm (`speculation.epsilon`).
      window: rewards of an arm that are kept (`speculation.window`).
      seed: seed of the exploration. A choice depends on it, on the number of earlier draws, and on the
        rewards.

    Raises:
      ValueError: a bucket without the plain step.
    """

    def __init__(self, arms: Mapping[int, Sequence[Arm]], epsilon: float, window: int, seed: int) -> None:
        for batch, bucket_arms in arms.items():
            if None not in bucket_arms:
                raise ValueError(f"batch {batch}: the plain step is not among its arms")
        self._epsilon = epsilon
        self._tries = min(_FIRST_TRIES, window)
        self._seed = seed
        self._draws = 0
        self._batches = sorted(arms)
        # Rewards: tokens per second of one response.
        self._rates = {
            batch: {arm: collections.deque[float](maxlen=window) for arm in arms[batch]}
            for batch in self._batches
        }
        self._unavailable: set[str] = set()
        self._decisions: dict[int, Selection] = {}

    def set_available(self, drafter: str, available: bool) -> None:
        """Sets whether a drafter can be chosen, for example not before it is trained. All can by default."""
        if available:
            self._unavailable.discard(drafter)
        else:
            self._unavailable.add(drafter)

    def choose(self, batch: int, responses: int | None = None) -> Arm:
        """The strategy of the next step of a batch, which is rounded up to a bucket; None is a plain step.

        Args:
          batch: slots of the decode state.
          responses: responses that take part; None for the whole batch. It changes what is expected
            of arms, not the choice.
        """
        bucket = self._bucket(batch)
        responses = batch if responses is None else responses
        rates = self._rates[bucket]
        candidates = [arm for arm in rates if arm is None or self._unavailable.isdisjoint(arm.drafters)]
        medians = {arm: responses * statistics.median(rates[arm]) for arm in candidates if rates[arm]}
        chosen, reason = self._select(candidates, rates, medians)
        missing = sorted({name for arm in rates if arm for name in arm.drafters} & self._unavailable)
        if missing:
            reason += f"; not available: {', '.join(missing)}"
        self._decisions[bucket] = Selection(chosen, reason, medians)
        return chosen

    def _select(
        self,
        candidates: Sequence[Arm],
        rates: Mapping[Arm, collections.deque[float]],
        medians: Mapping[Arm, float],
    ) -> tuple[Arm, str]:
        """Lines 13 to 19 of Algorithm 1: an arm, and a sentence that says why."""
        if len(candidates) == 1:
            return candidates[0], "there is nothing else"
        newest = min(candidates, key=lambda arm: len(rates[arm]))
        if len(rates[newest]) < self._tries:
            return newest, f"try {len(rates[newest]) + 1} of {self._tries} before any median counts"
        generator = np.random.default_rng((self._seed, self._draws))
        self._draws += 1
        if generator.random() < self._epsilon:
            return candidates[generator.integers(len(candidates))], f"explores (epsilon {self._epsilon:g})"
        best = max(candidates, key=lambda arm: medians[arm])
        reason = f"the largest median, {medians[best]:.4g} tokens/s"
        if best is not None:
            reason += f" against {medians[None]:.4g} plain"
        return best, reason

    def record(
        self, batch: int, strategy: Arm, tokens: int, seconds: float, responses: int | None = None
    ) -> None:
        """Adds the reward of a choice.

        Every choice with a known time should be recorded, also one that had nothing to verify: an arm without
        rewards stays the next one to be tried.

        Args:
          batch: the batch of that `choose`.
          strategy: the arm that `choose` returned.
          tokens: tokens of all responses: the accepted drafts and one more of each response, for every pass.
          seconds: time taken, drafting included.
          responses: the responses of that `choose`.

        Raises:
          ValueError: an arm that the bucket does not have, or numbers out of range.
        """
        rates = self._rates[self._bucket(batch)]
        responses = batch if responses is None else responses
        if strategy not in rates:
            raise ValueError(f"{arm_name(strategy)} is no arm of a batch of {batch}")
        if not (seconds > 0 and tokens >= 0 and responses > 0):
            raise ValueError(f"{tokens} tokens of {responses} responses in {seconds} seconds")
        rates[strategy].append(tokens / responses / seconds)

    def explain(self, batch: int) -> Selection:
        """The last choice for a batch in this bucket; raises a ValueError if there was none."""
        bucket = self._bucket(batch)
        if bucket not in self._decisions:
            raise ValueError(f"nothing was chosen for a batch of {batch} yet")
        return self._decisions[bucket]

    def _bucket(self, batch: int) -> int:
        if not 1 <= batch <= self._batches[-1]:
            raise ValueError(f"a batch of {batch} is in no bucket; the largest is {self._batches[-1]}")
        return self._batches[bisect.bisect_left(self._batches, batch)]

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content: the rewards, arm by arm, and the number of draws."""
        arms = [(batch, arm, rates) for batch, by_arm in self._rates.items() for arm, rates in by_arm.items()]
        numbers = [(0, 0, 0) if arm is None else (arm.depth, arm.top_k, arm.nodes) for _, arm, _ in arms]
        return {
            "bandit_batches": np.asarray([batch for batch, _, _ in arms], np.int32),
            "bandit_drafters": np.asarray(
                ["" if arm is None else arm.drafter for _, arm, _ in arms], np.str_
            ),
            "bandit_numbers": np.asarray(numbers, np.int32).reshape(-1, 3),
            "bandit_counts": np.asarray([len(rates) for _, _, rates in arms], np.int32),
            "bandit_rates": np.asarray([rate for _, _, rates in arms for rate in rates], np.float64),
            "bandit_draws": np.asarray(self._draws, np.int64),
        }

    def load_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is the bandit's, and returns the rest.

        Arms that no longer exist are dropped; new ones have no rewards.
        """
        rest = dict(state)
        names = ("batches", "drafters", "numbers", "counts", "rates", "draws")
        parts = [rest.pop(f"bandit_{name}", None) for name in names]
        if any(part is None for part in parts):
            return rest
        batches, drafters, numbers, counts, rates, draws = parts
        for by_arm in self._rates.values():
            for old in by_arm.values():
                old.clear()
        ends = np.cumsum(counts)
        for batch, drafter, shape, end, count in zip(batches, drafters, numbers, ends, counts, strict=True):
            arm = Strategy(*map(int, shape), str(drafter)) if drafter else None
            kept = self._rates.get(int(batch), {}).get(arm)
            if kept is not None:
                kept.extend(rates[end - count : end].tolist())
        self._draws = int(draws)
        return rest


class BanditManager(Manager):
    """Chooses by `BegMab`.

    Args:
      setup: drafters and sizes.
      config: the keys. Without strategies, a few sizes of every drafter are the arms, with `mix` also of
      mixed
        trees. With thresholds the bandit's batch is the number of running responses, as in the paper, not the
        batch bucket.
    """

    def __init__(self, setup: Setup, config: TltKeys) -> None:
        proposers, self._buckets = setup.proposers, setup.buckets
        if config.mix:
            check_one_tree(proposers)
        strategies: Sequence[Strategy] = strategies_of(setup, config)
        room = room_per_slot(self._buckets, self._buckets.batch[0])
        if not strategies and room:
            strategies = default_strategies(proposers, room, config.mix)
        self._mixer = Mixer(proposers, self._buckets.max_drafts)
        self._proposers = {
            strategy.drafter: proposer_of(strategy, proposers, self._mixer) for strategy in strategies
        }
        self._range_of: dict[Strategy, int] = {}  # with thresholds: each has one range
        if config.batch_thresholds:
            arms = arms_by_threshold(strategies, config.batch_thresholds, self._buckets, setup.max_batch)
            self._range_of = {arm: last for last, group in arms.items() for arm in group if arm is not None}
        else:
            arms = arms_by_batch(strategies, self._buckets, setup.max_batch)
        self._bandit = BegMab(arms, config.epsilon, config.window, setup.seed)
        self._trained = [proposer for proposer in proposers if proposer.drafter.training is not None]

    def begin(self, training: bool, step: int) -> None:
        self._mixer.forget()  # the bandit's window forgets by itself

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        # A drafter that is not trained yet is not an arm.
        for proposer in self._trained:
            self._bandit.set_available(proposer.name, proposer.drafter.training.trained)
        # Those standing by wait for this pass, too, so they share its rate.
        responses = len(active.slots) + active.inactive
        batch = responses if self._range_of else state.batch
        arm = self._bandit.choose(batch, responses)
        _, reason, medians = self._bandit.explain(batch)
        rates = {"expected_rate": medians.get(arm, 0.0), "plain_rate": medians.get(None, 0.0)}
        if arm is None:
            return state, Choice.plain(reason, **rates)
        # Draft as the arm says; if nothing comes of it, a plain step counts as the arm's.
        proposer = self._proposers[arm.drafter]
        state, drafted = draft(proposer, arm, state, active, statistics, self._buckets)
        rates |= {"arm": arm, "draft_seconds": drafted.seconds}
        if not drafted.rows:
            return state, Choice.plain(f"{arm.drafter} had nothing to verify ({reason})", **rates)
        return state, Choice.verify(drafted.proposal, drafted.candidates, drafted.rows, reason, **rates)

    def record(self, record: PassRecord) -> None:
        seconds = record.choice.draft_seconds + record.seconds
        arm, batch = record.choice.arm, record.batch
        if self._range_of:  # a strategy's own range: fewer may run by now than when it was chosen
            batch = record.waiting if arm is None else self._range_of[arm]
        self._bandit.record(batch, arm, record.tokens, seconds, record.waiting)

    def state(self) -> dict[str, np.ndarray]:
        return self._bandit.state() | self._mixer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._mixer.load_state(self._bandit.load_state(state))
