"""The tiny run with every router: who decodes what, where, and how often changes no bit."""

import pytest

from rljax.cluster.coordinator import Coordinator
from rljax.cluster.histopipe import RankedQueues
from rljax.cluster.messages import Decode, Withdraw
from rljax.speculation.managers import expected as expected_manager
from rljax.training import loop
from tests.cluster.same_run import differences
from tests.cluster.turns import local_run


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
    """Of each training rollout that began: step, prompts of each ranking group, and how long these were."""
    every, honest = [], RankedQueues.begin

    def begin(self, requests):
        honest(self, requests)
        first = next(iter(requests.values()))
        if first.training:
            groups = {(group, requests[key].prompt_ids) for key, group in self.group_of.items()}
            every.append((first.step, sorted(groups), self.longest))

    monkeypatch.setattr(RankedQueues, "begin", begin)
    return every


def test_ranking_groups_tiers_and_migration(world, stale_alone, monkeypatch, commands, rankings):
    """A prompt's lengths are known from the second step on, and what is alone takes half of what is not. A
    run that is killed in the second step knows them as well when it goes on.
    """
    pipe = ("cluster.pipe=two_tiers", "cluster.pipe_groups=2", "cluster.migration=true", "cluster.balance=2")
    clustered, _ = local_run(world, "piped", monkeypatch, "rollout.staleness=1", *pipe, steps=3)
    assert not differences(stale_alone, clustered)
    assert any(isinstance(command, Withdraw) for command in commands)
    assert sum(line.get("cluster/migrations", 0) for line in clustered.metrics) > 0

    undisturbed = list(rankings)
    assert [step for step, _, _ in undisturbed] == [0, 1, 2]
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


def test_copies_race_with_other_drafters(world, alone, monkeypatch, commands):
    def verify_always(candidates, buckets, times, batch, length):
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return sizes[-1]

    monkeypatch.setattr(expected_manager, "best_rows", verify_always)
    race = (
        "speculation.drafter=srt",
        "speculation.others={prompt_lookup: {}}",
        "speculation.verify_buckets=[16]",
        "speculation.max_drafts=3",
    )
    clustered, _ = local_run(world, "raced", monkeypatch, *race, "cluster.race=2")
    assert not differences(alone, clustered)
    copies = [command for command in commands if isinstance(command, Decode) and command.drafter is not None]
    assert {command.drafter for command in copies} == {"prompt_lookup"}
    assert any(partial.tokens for command in copies for _, _, partial in command.work)
