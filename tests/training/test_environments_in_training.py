"""A run whose problems take several turns: what it learns from and reports, and how its policy plays."""

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
from tests.training.tiny_run import train, write_config

GUESS = (
    "task={name: guess_number, args: {numbers: 4}}",
    "environment={max_turns: 3}",
    "warm_start.steps=20",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The run directory and its metrics."""
    directory = tmp_path_factory.mktemp("played")
    lines = train(directory, *GUESS)
    return directory / "run", lines


def test_a_run_of_episodes_and_its_report(played):
    """`tests/rollout/test_environment_turns.py` has drafts, `test_loop.py` has resuming."""
    directory, lines = played
    for line in lines[1:]:
        assert 1.0 < line["environment/turns"] <= 3.0 and 0.0 <= line["environment/cut_off"] <= 1.0
        assert line["mismatch/logprob_abs_max"] == 0.0
        assert line["reward/solved"] == 1.0 - line["environment/cut_off"]
        assert line["environment/tokens"] > 0 and line["reward/timeouts"] == 0.0
    sample = RunDirectory(directory).read_rollouts()[-1]["best"][0]
    read = [sample["response"][begin:end] for begin, end in sample["read"]]
    assert all(text.endswith("<|im_start|>assistant\n") for text in read)
    assert len(sample["turn_rewards"]) - len(read) in (0, 1)  # 0 where a turn was cut off
    write_report_of_run(directory, lambda line: None)
    assert "reward of each turn: " in (directory / "report.html").read_text()


@pytest.mark.long  # tests/evaluation has evaluations without turns
def test_a_saved_policy_is_evaluated_as_in_its_run_and_plays_for_whoever_asks(played, tmp_path, capsys):
    directory, lines = played
    config = evaluation_config(directory, None, [])
    with Progress() as progress:
        results = Evaluator(load_saved_policy(directory), config, "heldout", tmp_path, progress).run()
    assert results["overall"]["reward"]["value"] == pytest.approx(lines[-1]["evaluation/reward"])
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
