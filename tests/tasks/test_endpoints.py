"""Rewards by a server: scores, what is kept, what is tried again, and what is one line."""

import contextlib

import pytest

from rljax.config import RewardConfig, TaskConfig
from rljax.errors import ConfigError, UserError
from rljax.tasks.base import Problem
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.rewards.combined import RewardedTask
from tests.tasks.reward_server import reward_server

pytest.importorskip("httpx", reason="the endpoints extra is not installed")
PROBLEM = Problem("train/0", ({"role": "user", "content": "1+1=?"},), "2", 0)


@pytest.fixture
def server():
    with reward_server() as server:
        yield server


@pytest.fixture
def made():
    with contextlib.ExitStack() as stack:

        def make(name, args, **section):
            rewards = [RewardConfig(name=name, args=args)]
            config = TaskConfig(name="chain_arithmetic", rewards=rewards, **section)
            task = RewardedTask(ChainArithmetic(seed=0), config, lambda line: None)
            stack.callback(task.close)
            return task

        yield make


def judge(server, **args):
    return {"url": f"{server.url}/v1", "model": "grand-judge", **args}


def test_a_judges_last_score_is_scaled_and_asked_for_once(made, server, tmp_path):
    task = made("judge", judge(server, scale=[5, 10], cache=str(tmp_path / "kept" / "scores.jsonl")))
    for _ in range(2):
        assert task.reward(PROBLEM, "two {answer}")["judge"] == pytest.approx(0.4)
    ((path, content, key),) = server.asked
    assert path == "/v1/chat/completions" and key is None and content["temperature"] == 0
    asked = content["messages"][0]["content"]
    assert "1+1=?" in asked and "two {answer}" in asked and "from 5 to 10" in asked
    # A second run reads the file, and a line that a kill cut off does not matter.
    with (tmp_path / "kept" / "scores.jsonl").open("a") as file:
        file.write('["half')
    again = made("judge", judge(server, scale=[5, 10], cache=str(tmp_path / "kept" / "scores.jsonl")))
    assert again.reward(PROBLEM, "two {answer}")["judge"] == pytest.approx(0.4)
    assert len(server.asked) == 1


def test_a_reward_model_gets_the_conversation(made, server, monkeypatch):
    monkeypatch.setenv("RM_KEY", "secret")
    args = {"url": f"{server.url}/score", "value": "data.0.data.-1", "api_key": "RM_KEY"}
    task = made("reward_model", args)
    judged = task.rewards([(PROBLEM, "x" * length) for length in (4, 8)])
    assert [parts["reward"] for parts in judged] == [0.5, 1.0]
    _, content, key = server.asked[-1]
    assert key == "Bearer secret" and [m["role"] for m in content["messages"]] == ["user", "assistant"]


def test_a_busy_server_is_asked_again_and_a_slow_one_counts_as_zero(made, server):
    patient = made("judge", judge(server), reward_timeout=60.0, reward_errors="zero")
    assert patient.reward(PROBLEM, "busy")["judge"] == pytest.approx(0.7) and len(server.asked) == 3
    assert [patient.reward(PROBLEM, each)["errors"] for each in ("silent", "refuse")] == [1.0, 1.0]
    hasty = made("judge", judge(server), reward_timeout=0.5, reward_errors="zero")
    judged = hasty.rewards([(PROBLEM, f"slow {i}") for i in range(8)])
    assert all(parts["timeouts"] == 1.0 and parts["judge"] == 0.0 for parts in judged)
    assert server.most_slow > 1  # they are asked beside each other


def test_what_a_server_refuses_stops_the_run_with_its_words(made, server):
    task = made("judge", judge(server))
    with pytest.raises(UserError, match=r"answered 400: .*too long.*; problem train/0") as caught:
        task.reward(PROBLEM, "refuse")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("judge", {"model": "grand-juge"}, "serves no model 'grand-juge'; .*grand-judge"),
        ("judge", {"url": "http://127.0.0.1:9/v1"}, r"task.rewards.0.args.url: .* cannot be reached"),
        ("judge", {"url": "localhost"}, r"args.url: should begin with http"),
        ("judge", {"prompt": "good?"}, r"args.prompt: should hold \{response\}"),
        ("judge", {"scale": [3, 1]}, r"args.scale: should be \[lowest, highest\]"),
        ("judge", {"api_key": "NOT_THERE"}, "args.api_key: there is no environment variable 'NOT_THERE'"),
        ("judge", {"parallel": 0}, "args.parallel"),
        ("reward_model", {"value": "data.0.score"}, r"no value 'data.0.score' \(args.value\)"),
    ],
)
def test_what_cannot_judge_is_said_before_anything_is_sampled(made, server, name, args, says):
    args = (judge(server) if name == "judge" else {"url": f"{server.url}/score"}) | args
    with pytest.raises(ConfigError, match=says) as caught:
        made(name, args, reward_timeout=0.5)
    assert "\n" not in str(caught.value)
