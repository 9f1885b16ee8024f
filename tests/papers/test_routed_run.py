"""The tiny run with every router: who decodes what, where, and how often changes no bit."""

import collections
import json

import pytest

from rljax.cluster.coordinator import Coordinator
from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.messages import Decode, Withdraw
from rljax.cluster.worker import RolloutWorker
from rljax.papers.rhymerl.histopipe import OutlierRule, RankedQueues
from rljax.papers.rhymerl.history import RolloutHistory
from rljax.papers.specactor.racing import Racing
from rljax.training import loop
from tests.cluster.same_run import differences, run
from tests.cluster.test_drafters import FEW
from tests.cluster.test_staleness import schedule_of, steps_of
from tests.cluster.turns import Turns, local_run


@pytest.fixture
def commands(monkeypatch):
    """Everything that coordinators want done."""
    every, honest = [], Coordinator.on

    def on(self, event, now):
        commands = honest(self, event, now)
        every.extend(commands)
        return commands

    monkeypatch.setattr(Coordinator, "on", on)
    return every


@pytest.fixture
def rankings(monkeypatch):
    """Of each training rollout that began: step, prompts of each ranking group, how long these were, and the
    workers of each.
    """
    every, honest = [], RankedQueues.begin

    def begin(self, requests):
        honest(self, requests)
        first = next(iter(requests.values()))
        if first.training:
            groups = {(group, requests[key].prompt_ids) for key, group in self.group_of.items()}
            workers = [self._groups.count(group) for group in range(len(self.longest))]
            every.append((first.step, sorted(groups), self.longest, workers))

    monkeypatch.setattr(RankedQueues, "begin", begin)
    return every


def test_ranking_groups_tiers_and_migration(world, stale_alone, monkeypatch, commands, rankings):
    """A prompt's lengths are known once a step has ended, and what is alone takes half of what is not. A
    run that is killed in the second step knows them as well when it goes on. Where a pass takes as long as it
    has rows, the longer prompt gets two of three workers; ranking groups of equal sizes would give it one.
    """
    by_rows = lambda self, max_batch: lambda running, cached: float(running)  # noqa: E731
    monkeypatch.setattr(RolloutHistory, "token_seconds", by_rows)
    no_time = property(lambda self: 0.0, lambda self, seconds: None)
    monkeypatch.setattr(RolloutHistory, "train_seconds", no_time)
    pipe = ("cluster.workers=3", "cluster.pipe=two_tiers", "cluster.pipe_groups=2")
    pipe += ("cluster.migration=true", "cluster.balance=2")
    clustered, _ = local_run(world, "piped", monkeypatch, "rollout.staleness=1", *pipe, steps=3)
    assert not differences(stale_alone, clustered)
    assert any(isinstance(command, Withdraw) for command in commands)
    assert sum(line.get("cluster/migrations", 0) for line in clustered.metrics) > 0
    # Weights came to the hosts of workers that still decoded with older ones.
    assert sum(line.get("cluster/prefetched", 0) for line in clustered.metrics) > 0

    undisturbed = list(rankings)
    assert [step for step, *_ in undisturbed] == [0, 1, 2]
    # None in the first epoch: the second step's rollout begins before the first one's has ended.
    assert [workers for *_, workers in undisturbed] == [[], [], [1, 2]]
    honest = loop.learn

    def learn(run, groups):
        if run.state.step == 1:
            raise RuntimeError("of a test")
        return honest(run, groups)

    monkeypatch.setattr(loop, "learn", learn)
    with pytest.raises(RuntimeError):
        local_run(world, "killed", monkeypatch, "rollout.staleness=1", *pipe, steps=3)
    monkeypatch.setattr(loop, "learn", honest)
    rankings.clear()
    resumed, _ = local_run(world, "killed", monkeypatch, "rollout.staleness=1", *pipe, resumes=True, steps=3)
    assert not differences(stale_alone, resumed)
    assert rankings[-1] == undisturbed[-1]
    assert rankings[-1][2] < [float("inf")] * 2  # they were known


RACE = (
    "speculation.drafter=srt",
    "speculation.others={prompt_lookup: {}}",
    "speculation.verify_buckets=[16]",
    "speculation.max_drafts=3",
)


def test_copies_race_with_any_drafter_and_stop_no_response(
    world, alone, monkeypatch, commands, verifies_always
):
    """With the first drafter, too: nobody knows which a straggler had, since its worker chooses before every
    pass. Whichever copy is ahead, all go on until one has ended; one behind goes on from the longest. One of
    the workers has a third of the turns, so that the other one soon races for what it has.
    """
    stopped, caught_up, taken = [], [], collections.Counter()
    honest_on, honest_begin, honest_turn = Coordinator.on, Racing.begin, RolloutWorker.turn

    def turn(self):
        taken[self.name] += 1
        return [] if self.name == "worker-0" and taken[self.name] % 3 else honest_turn(self)

    def on(self, event, now):
        held = {name: dict.fromkeys(worker.holds) for name, worker in self._workers.items()}
        commands = honest_on(self, event, now)
        for command in commands:
            if isinstance(command, Withdraw):
                entries = [self.ledger.entries.get(key) for key in command.keys]
                stopped.extend(each for each in entries if each is not None and each.ending is None)
            elif isinstance(command, Decode) and command.worker in held:
                caught_up.extend(key for key, *_ in command.work if key in held[command.worker])
        return commands

    def begin(self, requests):
        self.catch_up = 2  # tokens: responses are short
        honest_begin(self, requests)

    monkeypatch.setattr(Coordinator, "on", on)
    monkeypatch.setattr(Racing, "begin", begin)
    monkeypatch.setattr(RolloutWorker, "turn", turn)
    clustered, _ = local_run(world, "raced", monkeypatch, *RACE, "cluster.race=2")
    assert not differences(alone, clustered)
    assert caught_up and not stopped
    copies = [command for command in commands if isinstance(command, Decode) and command.drafter is not None]
    assert "srt" in {command.drafter for command in copies}
    assert any(partial.tokens for command in copies for _, _, partial in command.work)


def test_the_least_accepted_race_first(world, alone, monkeypatch, verifies_always):
    """Algorithm 3, line 5, by what workers say of responses that go on: those that get a copy are accepted no
    more than any that could have had it. Once all events of a turn are taken, the acceptance is that of the
    workers' own counts.
    """
    looks, compared, honest_moves, honest_tick = [], [], Racing.moves, Coordinator._tick
    turns, ticks = Turns(), []

    def tick(self, now):
        ticks.append(now)
        commands = honest_tick(self, now)
        ticks.pop()
        return commands

    def moves(self, state):
        seen = {key: state.acceptance(key) for key, holders in state.holders.items() if holders}
        for key in seen if ticks else ():
            workers = [turns.fabrics[-1].workers[name] for name in state.holders[key]]
            counted = [
                worker.loop.slots.drafts_of(worker._responses[key])
                for worker in workers
                if key in worker._responses and worker._responses[key].tokens
            ]
            if counted:
                accepted = max(accepted / max(drafted, 1) for drafted, accepted in counted)
                compared.append((seen[key], accepted))
        had = {key: set(copies) for key, copies in self._copies.items()}
        found = honest_moves(self, state)
        looks.append((seen, had, found))
        return found

    monkeypatch.setattr(Coordinator, "_tick", tick)
    monkeypatch.setattr(Racing, "moves", moves)
    clustered, _ = local_run(world, "least", monkeypatch, *RACE, "cluster.race=1", turns=turns)
    assert not differences(alone, clustered)
    assert all(seen == accepted for seen, accepted in compared)
    assert len({accepted for _, accepted in compared}) > 10
    could_differ = 0
    for seen, had, found in looks:
        for drafter in {move.drafter for move in found}:
            given = [seen[move.key] for move in found if move.drafter == drafter]
            keys = {move.key for move in found if move.drafter == drafter}
            others = [seen[key] for key in seen if drafter not in had.get(key, ()) and key not in keys]
            if others:
                assert max(given) <= min(others)
                could_differ += max(given) < max(others)
    assert could_differ


def test_drafters_ahead_the_ladder_and_races(world, alone, monkeypatch, commands, small_model):
    """What SpecActor uses together: decoupled drafting, the draft ladder, and copies on free workers."""
    keys = (
        "speculation.drafter=small_model",
        f"speculation.args={{path: {small_model}}}",
        "speculation.others={prompt_lookup: {}}",
        "speculation.choice=ladder",
        "speculation.decoupled={window: 2, devices: [0], modes: [decoupled]}",
        "cluster.race=2",
        *FEW,
    )
    clustered, _ = local_run(world, "ahead", monkeypatch, *keys)
    assert not differences(alone, clustered)
    copies = [each.drafter for each in commands if isinstance(each, Decode) and each.drafter]
    assert copies and set(copies) <= {"small_model", "prompt_lookup"}  # which, times decide
    assert sum(line.get("speculation/drafted", 0) for line in clustered.metrics) > 0


def test_outliers_go_on_in_the_next_step(world, monkeypatch):
    """Workers forget the responses of the first group at their fourth token, as long as the first step lasts,
    and these count as outliers. The third group takes their place; they go on in the next step, under its
    weights, and are in its batch. The schedule repeats it.
    """
    held, renewed = [], []
    honest_begin, honest_renew = ClusterDecoder.begin, ClusterDecoder.renew

    def begin(self, params, requests, version, *args, **more):
        begun = honest_begin(self, params, requests, version, *args, **more)
        if more.get("renewed") and not held:
            held.extend(begun.keys)
        return begun

    def renew(self, params, version):
        renewed.extend([version] if version else [])
        return honest_renew(self, params, version)

    def forget(fabric):
        for worker in () if renewed else fabric.workers.values():
            for key in held:
                response = worker._responses.get(key)
                if response is not None and response.ending is None and len(response.tokens) > 3:
                    worker.loop.cancel([worker._responses.pop(key)])

    def outliers(self, running, size, longest):
        return [] if renewed else [key for key in running if key in held]

    monkeypatch.setattr(ClusterDecoder, "begin", begin)
    monkeypatch.setattr(ClusterDecoder, "renew", renew)
    monkeypatch.setattr(OutlierRule, "outliers", outliers)
    lag = ("rollout.max_staleness=2", "cluster.into_next_step=true")
    parked, _ = local_run(world, "parked", monkeypatch, *lag, interfere=forget, steps=3, versions=4)
    assert [line["cluster/parked"] for line in steps_of(parked)] == [1, 0, 0]
    lines = [json.loads(line) for line in schedule_of(world, "parked").splitlines()]
    spans = lines[1]["groups"][0]["versions"]
    assert lines[1]["groups"][0]["created"] == 0
    assert (0, 1) in {tuple(version for _, version in each) for each in spans}

    alone = run(world, "parked_again", lag[0], f"cluster.replay={world}/parked/run", steps=3)
    assert not differences(parked, alone)
    assert schedule_of(world, "parked_again") == schedule_of(world, "parked")
