"""A run whose problems take several turns: what it learns from, that it repeats, and what it reports."""

import pytest

from rljax.assembly.saved_policy import load_saved_policy
from rljax.commands.generate import main as generate
from rljax.config import load_config
from rljax.errors import ConfigError, UserError
from rljax.evaluation.evaluator import Evaluator
from rljax.evaluation.settings import evaluation_config
from rljax.progress import Progress
from rljax.reports import write_report_of_run
from rljax.run_directory import RunDirectory
from rljax.training.session import run
from tests.training.tiny_run import ONE_PASS, numbers, train, write_config

GUESS = (
    "task={name: guess_number, args: {numbers: 4}}",
    "environment={max_turns: 3}",
    "warm_start.steps=20",
)
HOW = ("rollout/occupancy", "rollout/decode_steps", "engine/", "speculation/", "environment/seconds")
HOW += ("environment/waiting",)


def test_a_run_of_episodes_and_its_report(tmp_path):
    for line in train(tmp_path, *GUESS)[1:]:
        assert 1.0 < line["environment/turns"] <= 3.0 and 0.0 <= line["environment/cut_off"] <= 1.0
        assert line["mismatch/logprob_abs_max"] == 0.0
        assert line["reward/solved"] == 1.0 - line["environment/cut_off"]
        assert line["environment/tokens"] > 0 and line["reward/timeouts"] == 0.0
    sample = RunDirectory(tmp_path / "run").read_rollouts()[-1]["best"][0]
    read = [sample["response"][begin:end] for begin, end in sample["read"]]
    assert all(text.endswith("<|im_start|>assistant\n") for text in read)
    assert len(sample["turn_rewards"]) - len(read) in (0, 1)  # 0 where a turn was cut off
    write_report_of_run(tmp_path / "run", lambda line: None)
    assert "reward of each turn: " in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long  # tests/rollout/test_environment_turns.py has drafts, test_loop.py has resuming
def test_it_repeats_exactly_resumed_and_with_drafts_and_is_evaluated_and_played(tmp_path, capsys):
    for name in ("plain", "drafted"):
        (tmp_path / name).mkdir()
    plain = train(tmp_path / "plain", *GUESS)
    drafting = ("speculation.drafter=srt", *ONE_PASS)
    train(tmp_path / "drafted", *GUESS, *drafting, "training.steps=1")
    drafted = train(tmp_path / "drafted", *GUESS, *drafting)
    assert drafted[-1]["speculation/accepted"] >= 0
    for line, other in zip(numbers(drafted, *HOW), numbers(plain, *HOW), strict=True):
        shared = line.keys() & other.keys()
        assert {"environment/turns", "loss/policy"} <= shared or line["step"] == 0
        assert {name: line[name] for name in shared} == {name: other[name] for name in shared}

    # A saved policy is evaluated with the numbers of the run.
    directory = tmp_path / "plain" / "run"
    config = evaluation_config(directory, None, [])
    with Progress() as progress:
        results = Evaluator(load_saved_policy(directory), config, "heldout", tmp_path / "e", progress).run()
    assert results["overall"]["reward"]["value"] == pytest.approx(plain[-1]["evaluation/reward"])

    # And plays an episode for whoever asks.
    capsys.readouterr()
    assert generate([str(directory), "--episode", "1"]) == 0
    printed, said = capsys.readouterr()
    assert "<|im_start|>user" in printed and "guess " in said and "of each turn " in said
    assert generate([str(directory), "12", "--episode", "1"]) == 2
    assert "--episode: the problem is the prompt" in capsys.readouterr().err


def test_what_does_not_go_with_an_environment_is_one_line(tmp_path):
    file = write_config(tmp_path)
    for override, says in (
        ("tools={names: [calculator]}", "tools: is not supported here, since guess_number is an environment"),
        ("rollout.presence_penalty=0.5", "rollout: is not supported here"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(load_config(file, (*GUESS, override)))


def test_a_demonstration_that_is_missing_is_one_line(tmp_path):
    walk = (
        "task={name: gymnasium, reward_workers: 1, args: {environment: 'tests.environments.stand_ins:Walk'}}"
    )
    with pytest.raises(UserError, match="warm_start: environment gymnasium demonstrates no episodes"):
        run(load_config(write_config(tmp_path), (walk,)))
