"""Datasets, mixtures and rewards of a config, through whole runs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.config import load_config
from rljax.errors import UserError
from rljax.rollout.collector import Group
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.training import loop
from rljax.training.session import run
from tests.tasks.reward_server import reward_server
from tests.training.tiny_run import numbers, train, write_config


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 2} for i in range(24)]
    for row in rows[::3]:
        row["prompt"] = row["prompt"].rjust(200, "0")  # more tokens than a prompt may have
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task(problems, judge=None, **section):
    """A mixture: sums from a file, judged by three rewards, and the quickstart's task with its own, and
    with that of a judge where one serves.
    """
    rewards = [
        {"name": "numeric", "weight": 2.0},
        {"name": "length", "weight": 0.5, "args": {"target": 0, "limit": 200}},
        {"name": "tests.tasks.reward_functions:brevity", "args": {"scale": 1}},
    ]
    parts = [
        {"name": "dataset", "args": {"path": str(problems), "difficulty": "level"}, "rewards": rewards},
        {"name": "chain_arithmetic", "args": {"max_terms": 3}},
    ]
    if judge is not None:
        asked = {"name": "judge", "args": {"url": f"{judge.url}/v1", "model": "grand-judge"}}
        parts[1]["rewards"] = [{"name": "task"}, asked]
    return "task=" + json.dumps({"name": "mixture", "mixture": parts, **section})


COMMON = (
    "warm_start=null",
    "evaluation.every=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
)


@pytest.fixture
def judge():
    pytest.importorskip("httpx", reason="the endpoints extra is not installed")
    with reward_server() as server:
        yield server


def test_responses_end_with_a_special_token_that_is_a_stop_string(tmp_path, monkeypatch):
    """A fresh policy samples every token now and then; rewards see the text with it."""
    stop, judged = "<|im_start|>", []
    reward = lambda self, problem, text: judged.append(text) or {"reward": 0.0}  # noqa: E731
    monkeypatch.setattr(ChainArithmetic, "reward", reward)
    keys = ("warm_start=null", "evaluation.problems=0", "rollout.prompts_per_step=12")
    lines = train(tmp_path, *keys, f"rollout.stop=['{stop}']")
    ended = [text for text in judged if text.endswith(stop)]
    assert 0 < len(ended) < len(judged) == 96
    assert all(text.count(stop) == 1 for text in ended) and sum(stop in text for text in judged) == len(ended)
    assert lines[-1]["response_length/truncated"] < 1.0


def test_a_mixture_trains_and_resumes_exactly(tmp_path, problems, judge, capsys):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = train(tmp_path / "whole", task(problems, judge), *COMMON)
    train(tmp_path / "parts", task(problems, judge), *COMMON, "training.steps=1")
    resumed = train(tmp_path / "parts", task(problems, judge), *COMMON)
    assert numbers(resumed) == numbers(whole)
    assert "8 of 24 prompts are longer" in capsys.readouterr().out  # and the runs ended well
    for line in whole[1:]:
        assert 0 < line["reward/length"] <= 1 and line["reward/brevity"] > 0
        assert line["reward/errors"] == 0 and 0 <= line["reward/task/format"] <= 1
        assert line["reward/judge"] == pytest.approx(0.7) and judge.asked
        assert line["evaluation/length"] > 0
    assert whole[1]["reward/length"] != whole[2]["reward/length"]


def test_verls_files_and_a_reward_that_declines_is_asynchronous_and_returns_parts(tmp_path, capsys):
    """Parquet as verl lays it out, read by its column names; with dynamic sampling by a part of the reward. A
    reward that looks for tags which nothing asks for is said to find none.
    """
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, sums in (("train", range(24)), ("test", range(24, 32))):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{i}+1="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": f"{i + 1}"},
                "extra_info": {"split": name, "index": i},
            }
            for i in sums
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    files = {"path": str(tmp_path / "train.parquet"), "heldout_path": str(tmp_path / "test.parquet")}
    section = {
        "name": "dataset",
        "args": {**files, "answer": "reward_model.ground_truth"},
        "rewards": [
            {"name": "tests.tasks.reward_functions:from_the_text_later", "label": "luck"},
            {"name": "exact", "weight": 0.0, "args": {"answer_in": "tag"}},
        ],
    }
    sampling = "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_part=luck/acc"
    lines = train(tmp_path, f"task={json.dumps(section)}", *COMMON, *sampling, "rollout.samples_per_prompt=4",
                  "algorithm.mask_truncated=true", "evaluation.samples=4")  # fmt: skip
    for line in lines[1:]:
        assert 0 < line["reward/declined"] < 1 and 0 < line["evaluation/declined"] < 1
        assert 0 < line["reward/luck/acc"] < 1 and 0 < line["reward/luck/style"] < 1
        assert line["reward/mean"] == line["reward/luck"]
        assert line["reward/mean"] == pytest.approx(0.1 + 2 * line["reward/luck/style"])  # of the scored ones
        assert line["reward/exact/answer_found"] == 0 == line["reward/errors"]
        assert 0 <= line["evaluation/mean@4"] <= line["evaluation/pass@2"] <= 1
    said = capsys.readouterr().out
    assert "exact found an answer in none of the first step's responses" in " ".join(said.split())
    steps = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert all(each["rewards"]["reward"] is not None for each in json.loads(steps[0])["best"])


def test_dynamic_sampling_decides_by_the_part_that_is_named():
    """The format alone differs in the first group, in which a reward has declined, too."""
    rewards = [
        [{"reward": 0.1, "acc": 0.0}, {"reward": 0.0, "acc": 0.0}, {"reward": None, "acc": 1.0}],
        [{"reward": 1.0, "acc": 1.0}, {"reward": 0.1, "acc": 0.0}, {"reward": 0.0, "acc": 0.0}],
    ]
    groups = [Group(None, (1,), [], each) for each in rewards]

    def decided(part, success=None):
        algorithm = SimpleNamespace(dynamic_sampling_part=part)
        evaluation = SimpleNamespace(success=success)
        config = SimpleNamespace(algorithm=algorithm, evaluation=evaluation)
        return loop.sampling_rewards(config, groups)

    values, passed = decided("acc")
    np.testing.assert_array_equal(values, [[0, 0, np.nan], [1, 0, 0]])
    np.testing.assert_array_equal(passed[:, :2], [[False, False], [True, False]])
    values, passed = decided(None)
    np.testing.assert_array_equal(values, [[0.1, 0, np.nan], [1, 0.1, 0]])
    assert passed is None
    np.testing.assert_array_equal(decided(None, "acc")[1][:, :2], [[False, False], [True, False]])
    with pytest.raises(
        UserError, match=r"algorithm\.dynamic_sampling_part: .* no part 'ac'; did you mean 'acc'"
    ):
        decided("ac")
    groups.append(Group(None, (1,), [], [{"reward": 1.0}] * 3))  # of another task
    with pytest.raises(UserError, match=r"have no part 'acc'"):
        decided("acc")


def refused(directory, *overrides):
    with pytest.raises(UserError) as caught:
        run(load_config(write_config(directory), [*COMMON, *overrides]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_run_is_said_before_anything_compiles(tmp_path, problems, monkeypatch, capsys):
    monkeypatch.setattr(loop, "compile_programs", lambda run: pytest.fail("it compiles"))
    long = refused(tmp_path, task(problems), "rollout.max_prompt_length=8", "rollout.long_prompts=stop")
    assert long.startswith("rollout.max_prompt_length: 8, but ") and "sums.jsonl:" in long
    solved = {"name": "dataset", "args": {"path": str(problems)}, "rewards": [{"name": "numeric"}]}
    capsys.readouterr()
    assert "max_prompt_length" in refused(
        tmp_path, f"task={json.dumps(solved)}", "rollout.max_prompt_length=8", "evaluation.problems=24"
    )
    assert "of the first 24 heldout problems are different ones" in capsys.readouterr().out
    no_solutions = refused(tmp_path, f"task={json.dumps(solved)}", "warm_start={steps: 1}")
    assert "task dataset has no worked solution of sums.jsonl:" in no_solutions
