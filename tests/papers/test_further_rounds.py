"""Run-ahead under dynamic sampling: a further round takes over what the round before has sampled."""

import itertools
import zlib

import pytest

from rljax.papers.srt.plans import PlansAhead
from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.training.tiny_run import train


@pytest.mark.long
def test_run_ahead_in_a_further_round_changes_no_number(tmp_path, monkeypatch):
    """Every second group is informative, so that every step takes two rounds: from the second step on, and
    from the first one after a stop, the first round samples ahead for the second one.
    """
    keys = ["algorithm.dynamic_sampling=true", "evaluation.problems=0", "training.steps=4"]
    keys += ["engine.max_slots=16", "engine.batch_buckets=[16]"]  # idle slots from the beginning
    ahead = ["speculation.drafter=srt", "speculation.run_ahead_below=16", "speculation.verify_buckets=[32]"]
    plan_ahead, plans = PlansAhead.before_round, []

    def plan_without_limit(plan, round_):
        plan._run_ahead.max_share = 1e9  # however long inserting takes
        plan_ahead(plan, round_)
        plans.append((plan._run.state.step, round_, {request.step for request in plan._run_ahead.upcoming}))

    monkeypatch.setattr(PlansAhead, "before_round", plan_without_limit)
    runs = {}
    for name, overrides in {"plain": [], "whole": ahead, "resumed": ahead}.items():
        calls = itertools.count()

        def reward(self, problem, text, calls=calls):
            group, sample = divmod(next(calls), 4)
            return {"reward": float(group % 2 == 1 and sample == 0), "text": zlib.crc32(text.encode()) % 1000}

        monkeypatch.setattr(ChainArithmetic, "reward", reward)
        directory = tmp_path / name
        directory.mkdir()
        if name == "resumed":
            train(directory, *keys, *overrides, "training.steps=2")
        runs[name] = train(directory, *keys, *overrides)[1:]
    same = ("reward/", "rollout/tokens", "rollout/groups_sampled", "response_length/", "loss/")
    for name in ("whole", "resumed"):
        for line, expected in zip(runs[name], runs["plain"], strict=True):
            keys = [key for key in expected if key.startswith(same) and not key.endswith("per_second")]
            assert {key: line[key] for key in keys} == {key: expected[key] for key in keys}
        final = [line["speculation/run_ahead_final"] for line in runs[name]]
        accepted = [line["speculation/run_ahead_accepted"] for line in runs[name]]
        assert final[0] == 0 and sum(final) > 0  # where responses end before their rollout does
        assert all(tokens + drafts > 0 for tokens, drafts in zip(final[1:], accepted[1:], strict=True))
    # Nothing is known in the first step; then the first round is for the second one, and that for the next.
    first, second = [(0, 0, {1}), (0, 1, {1})], [(1, 0, {1}), (1, 1, {2})]
    last = [(2, 0, {2}), (2, 1, {3}), (3, 0, {3}), (3, 1, set())]
    stopped = [(1, 0, {1}), (1, 1, set())]
    assert plans == [*first, *second, *last, *first, *stopped, *last]
    assert [line["rollout/groups_sampled"] for line in runs["plain"]] == [4] * 4
