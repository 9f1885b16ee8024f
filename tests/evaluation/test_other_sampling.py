"""Evaluations that sample otherwise than training: greedy beside a run's own sampling, in one program."""

import json

import pytest

from rljax.assembly.decoding import evaluation_sampling
from rljax.config import load_config
from rljax.errors import ConfigError
from tests.evaluation.test_evaluate import evaluate, results
from tests.training.tiny_run import numbers, train, write_config

TRAINING = ("training.steps=1", "evaluation.samples=2")
GREEDY = ("evaluation.temperature=0",)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training, evaluated as it samples and greedily: directories and metrics."""
    directories = [tmp_path_factory.mktemp(name) for name in ("sampling", "greedy")]
    return [
        (directory / "run", train(directory, *TRAINING, *more))
        for directory, more in zip(directories, ((), GREEDY), strict=True)
    ]


def test_training_has_the_samenumbers(runs):
    learned = [
        [{name: value for name, value in line.items() if "evaluation" not in name} for line in lines]
        for _, lines in runs
    ]
    assert numbers(learned[0]) == numbers(learned[1])
    assert "loss/policy" in learned[0][1] and learned[0][1]["mismatch/logprob_abs_max"] == 0.0
    tokens = [[line["evaluation/tokens"] for line in lines] for _, lines in runs]
    assert tokens[0] != tokens[1]


def test_a_checkpoint_gives_the_numbers_of_the_greedy_evaluation_inside_the_run(runs, tmp_path, capsys):
    run, lines = runs[1]
    assert evaluate(run, "--output", tmp_path) == 0
    evaluated = results(tmp_path)
    assert evaluated["overall"]["reward"]["value"] == pytest.approx(lines[-1]["evaluation/reward"], abs=1e-12)
    assert evaluated["overall"]["mean@2"]["value"] == lines[-1]["evaluation/mean@2"]
    assert evaluated["settings"]["evaluation.temperature"] == 0
    responses = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert sum(len(each["tokens"]) for each in responses) == lines[-1]["evaluation/tokens"]
    assert all(each["logprob"] == 0.0 for each in responses)
    by_problem = {}
    for each in responses:
        by_problem.setdefault(each["problem"], set()).add(each["text"])
    assert all(len(texts) == 1 for texts in by_problem.values()) and len(by_problem) > 1
    # Other settings do not go on with it, and of the others only those that are set are its identity.
    for override in ("evaluation.temperature=0.5", "rollout.temperature=0.7", "seed=1"):
        assert evaluate(run, "--output", tmp_path, override) == 2
        assert f"{override.replace('=', ': is ')}, but the evaluation in" in capsys.readouterr().err
    names = [name for name in evaluated["settings"] if name.startswith("evaluation.")]
    assert names == ["evaluation.temperature"]


def test_settings_that_rollouts_alone_can_have_are_one_clear_line(tmp_path):
    overrides = ["rollout.temperature=1e-6", "evaluation.top_p=0.9"]
    with pytest.raises(ConfigError, match=r"^evaluation\.temperature: 1e-06, expected 0 or 0\.0001 to"):
        evaluation_sampling(load_config(write_config(tmp_path), overrides))
    assert evaluation_sampling(load_config(write_config(tmp_path), ["evaluation.top_k=0"])) is None
    with pytest.raises(ConfigError, match=r"evaluation\.top_k: needs .*coupled"):
        load_config(write_config(tmp_path), ["evaluation.top_k=5", "engine.verification=target_only"])
