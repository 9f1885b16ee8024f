"""What a rollout leaves for the report: bounded, right, and as JSON can hold it."""

import json
import math
import types

import numpy as np
import pytest

from rljax.errors import UserError
from rljax.requests import Completion
from rljax.rollout.collector import Group, outcomes
from rljax.rollout.metrics import mean_rewards, reward_spread
from rljax.rollout.summary import summarize_rollout
from rljax.tasks.base import Problem


def group(name, rewards, lengths=None, prompt=(1, 2)):
    completions = [
        Completion(np.full(length, 7, np.int32), np.zeros(length, np.float32), "eos")
        for length in lengths or [3] * len(rewards)
    ]
    problem = Problem(name, ({"role": "user", "content": "q"},), "a", 1)
    return Group(problem, prompt, completions, [{"reward": reward} for reward in rewards])


def spell(ids):
    return " ".join(map(str, ids))


TOKENIZER = types.SimpleNamespace(decode=lambda ids: "<s>" + spell(ids), response_text=spell)


def summarize(groups, samples=1, longest=384, running=()):
    return summarize_rollout(groups, running, longest, samples, TOKENIZER)


def shown(summary):
    """The problems and rewards of the examples."""
    pairs = lambda kind: [(each["problem"], each["rewards"]["reward"]) for each in summary[kind]]  # noqa: E731
    return {kind: pairs(kind) for kind in ("best", "worst")}


def test_best_and_worst_are_of_different_prompts_and_never_the_same_response():
    groups = [group("a", [0.5, 1.0]), group("b", [0.0, 0.5]), group("c", [1.0, 0.0])]
    found = shown(summarize(groups, samples=2))
    assert found == {"best": [("a", 1.0), ("c", 1.0)], "worst": [("b", 0.0), ("c", 0.0)]}
    alike = summarize([group("a", [1.0, 1.0])], samples=3)
    assert len(alike["best"]) == 1 and alike["worst"] == []
    assert summarize(groups, samples=0)["best"] == summarize(groups, samples=0)["worst"] == []


def test_a_sample_holds_the_whole_prompt_and_what_the_reward_saw():
    (best,) = summarize([group("a", [0.0, 1.0], [2, 4], prompt=(5, 6))])["best"]
    assert best == {
        "problem": "a",
        "prompt": "<s>5 6",
        "response": "7 7 7 7",
        "rewards": {"reward": 1.0},
        "tokens": 4,
        "finish_reason": "eos",
    }


def test_accepted_drafts_are_marked_in_the_text():
    completion = Completion(
        np.arange(6, dtype=np.int32), np.zeros(6, np.float32), "eos", accepted_spans=((1, 3), (4, 5))
    )
    problem = Problem("a", ({"role": "user", "content": "q"},), "a", 1)
    one = [Group(problem, (1,), [completion], [{"reward": 1.0}])]

    def best_in(letters):
        tokenizer = types.SimpleNamespace(decode=spell, response_text=letters)
        return summarize_rollout(one, (), 384, 1, tokenizer)["best"]

    (best,) = best_in(lambda ids: "".join("abcdef"[i] * 2 for i in ids))
    assert best["response"] == "aabbccddeeff" and best["drafted"] == [(2, 6), (8, 10)]
    # Tokens that share a character: their places are unknown.
    (best,) = best_in(lambda ids: "é" * (len(ids) // 2))
    assert "drafted" not in best
    # A long text loses its middle; what is marked stays what was marked.
    (best,) = best_in(lambda ids: "".join("abcdef"[i] * 500 for i in ids))
    marked = [best["response"][begin:end] for begin, end in best["drafted"]]
    assert marked == ["b" * 500 + "c" * 200, "e" * 100]


def test_every_bin_counts_its_responses():
    """384 tokens in 64 bins of 6: 6 is in the first one, 7 in the second, 384 in the last."""
    lengths = summarize([group("a", [0.0, 1.0, 0.0, 0.0], [1, 6, 7, 384])])["lengths"]
    assert lengths["bin"] == 6 and len(lengths["counts"]) == 64
    assert (lengths["counts"][0], lengths["counts"][1], lengths["counts"][63]) == (2, 1, 1)
    assert summarize([group("a", [0.0, 1.0], [1, 2])], longest=48)["lengths"] == {"bin": 1, "counts": [1, 1]}


def test_a_step_is_bounded_and_strict_json():
    """Long texts lose their middle; a reward that is no number is null; what is left out is no example."""
    groups = [group("a", [None, 1.0], [90_000, 90_000]), group("b", [math.inf, 0.0], [1, 1])]
    groups.append(group("c", [None, None]))
    running = [[(float(i), 3) for i in range(256)]]
    text = json.dumps(summarize(groups, samples=2, longest=100_000, running=running), allow_nan=False)
    assert len(text) < 20_000
    assert "characters left out" in text
    assert shown(json.loads(text)) == {"best": [("b", None), ("a", 1.0)], "worst": [("b", 0.0)]}


def test_the_standard_error_is_that_of_the_prompts_means():
    """Responses to one prompt are alike: eight that agree by prompt tell less than eight that do not."""
    groups = [group("a", [1.0] * 4), group("b", [0.0] * 4)]
    spread = reward_spread(groups)
    assert spread["reward/std"] == 0.5
    assert spread["reward/standard_error"] == pytest.approx(0.5)  # of (1, 0): std 0.7071 / sqrt(2)
    alone = reward_spread([group("a", [1.0, 0.0, 1.0, 0.0])])
    assert alone["reward/standard_error"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert reward_spread([group("a", [1.0])]) == {"reward/std": 0.0}


def test_what_is_left_out_is_in_no_mean_but_counted():
    groups = [group("a", [1.0, None, 0.0]), group("b", [None] * 3), group("c", [0.5, 0.5, 0.5])]
    assert mean_rewards(groups) == {"reward": 0.5, "declined": 4 / 9}
    spread = reward_spread(groups)
    assert spread == {"reward/std": pytest.approx(math.sqrt(0.5 / 5)), "reward/standard_error": 0.0}
    rewards = [outcome.reward for outcome in outcomes(groups)]
    assert rewards == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5]  # for drafters: their group's mean
    with pytest.raises(UserError, match="reward: all 3 responses are left out"):
        mean_rewards(groups[1:2])
