"""What the server of agents refuses, in OpenAI's form, and how problems are handed out."""

import pytest
from starlette.testclient import TestClient

from rljax.agents.app import AgentService
from rljax.agents.board import EpisodeBoard
from rljax.agents.episode import AgentEpisode
from rljax.agents.server import AgentServer
from rljax.config.agents import AgentsConfig
from rljax.errors import ConfigError
from rljax.models.tokenizer import Tokenizer
from rljax.sampling.distribution import SamplingParams
from rljax.tasks.base import Problem
from rljax.tasks.tokenizer_training import train_tokenizer

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["hello"], 300, directory)
    return Tokenizer.load(directory)


def episodes():
    asked = ({"role": "user", "content": "1+1"},)
    return [AgentEpisode(name, Problem(name, asked, "2", 0), (0, 0, 0, 0)) for name in ("a", "b")]


@pytest.fixture
def make(tokenizer):
    def make(hand_out=False, key=None, time_limit=60.0):
        board = EpisodeBoard(time_limit)
        service = AgentService(
            board, tokenizer, "policy", 0, SamplingParams(), (), 32, 64, most_requests=4, api_key=key
        )
        opened = episodes()
        board.open(opened, hand_out)
        return TestClient(service.app), board, opened

    return make


REFUSED = [
    ({"temperature": 0.5}, 400, "temperature: the run samples with 1"),
    ({"presence_penalty": 1.0}, 400, "presence_penalty: the run samples with 0"),
    ({"seed": 3}, 400, "seed: the noise follows from the episode"),
    ({"model": "gpt"}, 404, "model: there is no 'gpt' here"),
    ({"tools": []}, 400, "tools: this server does not know it"),
    ({"messages": [{"role": "user", "content": "hello" * 50}]}, 400, "rollout.max_prompt_length 32"),
    ({"temperature": 1.0}, 404, "no episode 'a' is open"),  # in order, but nothing decodes now
]


def test_a_request_that_cannot_be_trained_is_refused(make):
    client, _, _ = make()
    for changes, status, says in REFUSED:
        answer = client.post("/v1/episodes/a/chat/completions", json=HELLO | changes)
        assert answer.status_code == status and says in answer.json()["error"]["message"]


def test_rewards_are_numbers(make):
    client, _, (first, _) = make()
    for content in ({}, {"reward": "1"}, {"reward": True}, [1], {"reward": 1, "info": {"a": "b"}}):
        assert client.post("/v1/episodes/a/reward", json=content).status_code == 400
    assert client.post("/v1/episodes/a/reward", content='{"reward": NaN}').status_code == 400
    assert client.post("/v1/episodes/a/reward", json={"reward": 2, "info": {"n": 3}}).status_code == 200
    assert (first.reward, first.info, first.ended, first.failure) == (2.0, {"n": 3.0}, True, None)
    # Unknown and ended episodes take nothing.
    assert client.post("/v1/episodes/a/reward", json={"reward": 1}).status_code == 404
    assert client.post("/v1/episodes/c/chat/completions", json=HELLO).status_code == 404
    assert client.get("/v1/nothing").status_code == 404


def test_problems_are_handed_out_once_each(make):
    client, board, opened = make(hand_out=True)
    first, second, third = (client.post("/v1/episodes") for _ in range(3))
    asked = {"id": "a", "messages": [{"role": "user", "content": "1+1"}], "answer": "2", "data": {}}
    assert first.json()["problem"] == asked
    assert first.json()["base_url"] == "http://testserver/v1/episodes/a" and first.json()["model"] == "policy"
    assert second.json()["id"] == "b" and third.status_code == 204
    client.post("/v1/episodes/b/reward", json={"reward": 1})
    client.post("/v1/episodes/a/reward", json={"reward": 0})
    board.wait(0.01, lambda ended: None)
    assert all(episode.seconds >= 0 for episode in opened)


def test_an_agent_that_never_reports_times_out(make):
    client, board, (first, second) = make(hand_out=True, time_limit=0.05)
    client.post("/v1/episodes")
    client.post("/v1/episodes")
    client.post("/v1/episodes/b/reward", json={"reward": 1})
    board.wait(0.01, lambda ended: None)
    assert (first.failure, second.failure) == ("timeouts", None)


def test_a_key_is_asked_for(make):
    client, _, _ = make(key="secret")
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.post("/v1/episodes", headers=headers).status_code == 401
        assert client.post("/v1/episodes/a/reward", json={"reward": 1}, headers=headers).status_code == 401
    right = {"Authorization": "Bearer secret"}
    assert client.get("/v1/models", headers=right).json()["data"][0]["id"] == "policy"


def test_mistakes_of_the_section_are_one_line(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"agents.api_key: the environment variable NO_KEY is not set"):
        AgentServer(AgentsConfig(api_key="NO_KEY"))
    server = AgentServer(AgentsConfig())
    port = int(server.address.rsplit(":", 1)[1])
    server._listener.listen(1)
    with pytest.raises(ConfigError, match=rf"agents.port: cannot listen on 127.0.0.1:{port}"):
        AgentServer(AgentsConfig(port=port))
    server.close()
