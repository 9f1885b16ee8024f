"""Runs that agents sample from: what they got is what the run trains on, whoever calls them, with drafts."""

import collections
import itertools
import json
import socket
import threading

import httpx
import numpy as np
import pytest

from rljax.config import load_config
from rljax.errors import ConfigError
from rljax.tasks.rewards import checkers
from rljax.training import loop
from rljax.training.session import run
from tests.agents import players
from tests.training.tiny_run import ONE_PASS, train, write_config

HERE = "tests.agents.players"
TINY = ("warm_start=null", "evaluation.problems=2", "rollout.prompts_per_step=2", "training.steps=2")
VOLATILE = ("time/", "rollout/tokens_per_second", "rollout/occupancy", "rollout/decode_steps")
VOLATILE += ("engine/", "speculation/", "agents/seconds")


@pytest.fixture
def learned(monkeypatch):
    """The groups of every step."""
    groups, learn = [], loop.learn
    monkeypatch.setattr(loop, "learn", lambda run, each: (groups.append(each), learn(run, each))[1])
    return groups


def replies(log):
    """By episode the (messages, token ids, text) of its replies, in order."""
    found = collections.defaultdict(list)
    for line in log.read_text().splitlines():
        name, *reply = json.loads(line)
        found[name].append(reply)
    return found


def agent(log):
    return f"agents={{agent: '{HERE}:twice', args: {{log: '{log}'}}, parallel: 2, time_limit: 60}}"


def sampled(sequence):
    return sequence.response_ids[sequence.sampled_mask].tolist()


def test_what_agents_got_is_what_is_trained(tmp_path, learned):
    log = tmp_path / "log"
    for line in train(tmp_path, *TINY, agent(log))[1:]:
        assert line["mismatch/logprob_abs_max"] == 0.0 and line["gradient_norm"] > 0
        assert line["agents/requests"] == 3.0 and line["agents/sequences"] == 2.0
        assert line["reward/errors"] == line["reward/timeouts"] == 0.0
        kept = 1.0 - line["update/skipped"]  # the others had no advantage
        assert line["update/tokens"] == pytest.approx(kept * line["rollout/tokens"])
    found = replies(log)
    assert len(found) == 2 * 2 * 4 + 2 * 2  # two steps and two evaluations
    for step, groups in enumerate(learned):
        for group in groups:
            assert group.episodes == tuple(np.repeat(range(4), 2))
            for sample in range(4):
                (name,) = (
                    name
                    for name in found
                    if name.startswith(f"{step}-train-{group.problem.id[6:]}-{sample}-")
                )
                first, second = (
                    each for each, own in zip(group.completions, group.places, strict=True) if own == sample
                )
                (_, one, _), (messages, two, _), (_, three, _) = found[name]
                assert sampled(first) == one + two and sampled(second) == three
                assert not first.sampled_mask.all() and second.sampled_mask.all()
                assert messages[-2]["role"] == "assistant"


@pytest.mark.long  # above, what they got; tests/rollout/test_environment_turns.py has drafts
def test_a_resumed_run_and_agents_that_ask_with_drafts_are_the_same_run(tmp_path, learned):
    """Agents that ask for problems themselves, a stream among their requests."""
    for name in ("called", "asking"):
        (tmp_path / name).mkdir()
    called = (tmp_path / "called", *TINY, agent(tmp_path / "called" / "log"))
    train(*called, "training.steps=1")
    called = train(*called)
    steps, learned[:] = list(learned), []
    over = threading.Event()
    address = "http://127.0.0.1:{}"

    def ask(port):
        with httpx.Client(timeout=60) as client:  # one: making it reads all certificates
            while not over.is_set():
                try:
                    answer = client.post(f"{address.format(port)}/v1/episodes")
                except httpx.HTTPError:
                    answer = None
                if answer is None or answer.status_code != 200:
                    over.wait(0.05)
                    continue
                episode = answer.json()
                reward = players.twice(
                    episode["base_url"], episode["model"], "none", episode["problem"], stream=True
                )
                client.post(f"{episode['base_url']}/reward", json={"reward": reward})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    threads = [threading.Thread(target=ask, args=(port,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        asking = train(
            tmp_path / "asking",
            *TINY,
            f"agents={{port: {port}, time_limit: 60}}",
            "speculation.drafter=suffix_decoding",
            "speculation.choice=fixed",  # drafts whether it pays or not
            "speculation.strategies=[{drafter: suffix_decoding, depth: 3, top_k: 1, nodes: 3}]",
            *ONE_PASS,
        )
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert sum(line["speculation/drafted"] for line in asking[1:]) > 0
    for line, other in zip(asking, called, strict=True):
        shared = [name for name in line if name in other and not name.startswith(VOLATILE)]
        assert {name: line[name] for name in shared} == {name: other[name] for name in shared}
    for groups, others in zip(learned, steps, strict=True):
        for group, other in zip(groups, others, strict=True):
            for one, same in itertools.zip_longest(group.completions, other.completions):
                np.testing.assert_array_equal(one.response_ids, same.response_ids)
                np.testing.assert_array_equal(one.logprobs, same.logprobs)


def test_agents_that_fail_are_left_out_and_the_run_goes_on(tmp_path, learned):
    section = f"agents={{agent: '{HERE}:unreliable', parallel: 4, time_limit: 6, failures: exclude}}"
    lines = train(
        tmp_path, *TINY, section, "training.steps=1", "evaluation.problems=0", "rollout.prompts_per_step=1"
    )
    assert lines[-1]["reward/errors"] == 0.5 and lines[-1]["reward/timeouts"] == 0.25
    assert lines[-1]["reward/mean"] == 1.0 and lines[-1]["reward/declined"] == 0.75  # one was well
    ((group,),) = learned
    assert group.episodes == (3,)


def test_a_mistake_is_one_line(tmp_path):
    for name, args, says in (
        ("no_address", {}, "agent: .*takes no keyword `base_url`"),
        ("absent", {}, "agent: .*has no absent"),
        ("twice", {"logs": 1}, "agent: .*cannot be called with"),
    ):
        with pytest.raises(ValueError, match=says):
            checkers.agent(f"{HERE}:{name}", args)
    for says, *overrides in (
        ("agents.agent: .*takes no keyword", f"agents={{agent: '{HERE}:no_address'}}"),
        ("task.name: guess_number is an env.*, which agents", "agents={}", "task={name: guess_number}"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(load_config(write_config(tmp_path), (*TINY, *overrides)))
