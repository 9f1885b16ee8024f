"""scripts/evaluate.py on a real run: the numbers of the run's evaluation; stopped and started again,
drafted or not, from a run or a Hugging Face directory, the same bytes.
"""

import dataclasses
import json
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.assembly.decoding import evaluation_sampling
from rljax.assembly.saved_policy import load_saved_policy
from rljax.config import load_config
from rljax.errors import ConfigError
from rljax.evaluation import evaluator
from rljax.evaluation.evaluator import Evaluator
from rljax.evaluation.records import JsonLog
from rljax.models.digest import weights_digest
from rljax.models.huggingface import save_model
from rljax.speculation.managers import expected as expected_manager
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.training.session import run as run_training
from tests.configs import table
from tests.scripts import load_script
from tests.training.tiny_run import numbers, train, write_config

PROBLEMS, SAMPLES = 5, 4
FILES = ("responses.jsonl", "judgements.jsonl", "evaluation.json")


def fingerprint(text):
    return zlib.crc32(text.encode()) % 3


def reward(self, problem, text):
    """A policy that has learned nothing is right in a third of its texts."""
    correct = float(fingerprint(text) == 0)
    return {"reward": 0.9 * correct + 0.1 * (len(text) % 2), "correct": correct, "odd": len(text) % 2}


@pytest.fixture(scope="module", autouse=True)
def _easy_task():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainArithmetic, "reward", reward)
        patch.setattr(ChainArithmetic, "extracted_answer", lambda *args: str(fingerprint(args[2])))
        yield


def trained_in(directory, *more):
    """The run directory and the metrics of a run in which a policy is trained and evaluated."""
    evaluation = f"evaluation={{problems: {PROBLEMS}, samples: {SAMPLES}, by_difficulty: true}}"
    task = "task.args={max_terms: 4, tail_exponent: 0}"
    return directory / "run", train(directory, "training.steps=1", evaluation, task, *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_in(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """The same training, evaluated otherwise than it samples, in the same programs."""
    return trained_in(tmp_path_factory.mktemp("greedy"), "evaluation.temperature=0")


def evaluate(run, *arguments):
    return load_script("evaluate").main([str(run), *map(str, arguments)])


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """An evaluation that nothing stopped."""
    output = tmp_path_factory.mktemp("whole")
    assert evaluate(trained[0], "--output", output) == 0
    return output


def results(output):
    contents = json.loads((output / "results.json").read_text())
    assert contents.pop("made_by")["machine"]
    return contents


def assert_same_files(output, expected):
    for name in FILES:
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name
    assert results(output) == results(expected)


def test_a_checkpoint_gives_the_numbers_of_the_evaluation_inside_the_run(trained, whole, capsys):
    _, (*_, line) = trained
    evaluated = results(whole)
    asked = (evaluated["problems"], evaluated["samples"], evaluated["success"])
    assert asked == (PROBLEMS, SAMPLES, "correct")
    for name in ("mean@4", "pass@2", "pass@4", "maj@2", "maj@4"):
        assert evaluated["overall"][name]["value"] == line[f"evaluation/{name}"]
        for group in evaluated["by_difficulty"]:
            key = f"evaluation/difficulty_{group['difficulty']}/{name}"
            assert group["metrics"][name]["value"] == line[key]
    for name in ("reward", "correct", "odd"):
        assert evaluated["overall"][name]["value"] == pytest.approx(line[f"evaluation/{name}"], abs=1e-12)
    assert 0 < evaluated["overall"]["mean@4"]["value"] < evaluated["overall"]["pass@4"]["value"]
    assert len(evaluated["by_difficulty"]) > 1
    assert sum(group["problems"] for group in evaluated["by_difficulty"]) == PROBLEMS
    responses = (whole / "responses.jsonl").read_text().splitlines()
    lengths = [len(json.loads(each)["tokens"]) for each in responses]
    assert evaluated["overall"]["response_length"]["value"] == pytest.approx(np.mean(lengths))
    assert line["evaluation/tokens"] == sum(lengths)


def test_a_greedy_evaluation_changes_nothing_in_training(trained, greedy):
    learned, same = (
        [{name: value for name, value in line.items() if "evaluation" not in name} for line in numbers(lines)]
        for _, lines in (trained, greedy)
    )
    assert learned == same
    assert "loss/policy" in learned[1] and learned[1]["mismatch/logprob_abs_max"] == 0.0
    tokens = [[line["evaluation/tokens"] for line in lines] for _, lines in (trained, greedy)]
    assert tokens[0] != tokens[1]


def test_a_checkpoint_gives_the_numbers_of_the_greedy_evaluation_inside_the_run(greedy, tmp_path, capsys):
    run, (*_, line) = greedy
    assert evaluate(run, "--output", tmp_path) == 0
    evaluated = results(tmp_path)
    assert evaluated["overall"]["reward"]["value"] == pytest.approx(line["evaluation/reward"], abs=1e-12)
    assert evaluated["overall"]["mean@4"]["value"] == line["evaluation/mean@4"]
    assert evaluated["settings"]["evaluation.temperature"] == 0
    responses = list(JsonLog(tmp_path / "responses.jsonl").lines.values())
    assert sum(len(each["tokens"]) for each in responses) == line["evaluation/tokens"]
    assert all(each["logprob"] == 0.0 for each in responses)
    assert len({(each["problem"], each["text"]) for each in responses}) == PROBLEMS
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


def test_stopped_and_started_again_the_files_are_the_same(trained, whole, tmp_path, monkeypatch):
    run, _ = trained
    append, calls = JsonLog.append, []

    def interrupted(log, key, content):
        calls.append(key)
        if len(calls) in (7, PROBLEMS * SAMPLES + 4):  # while decoding, then while judging
            raise KeyboardInterrupt
        append(log, key, content)

    monkeypatch.setattr(JsonLog, "append", interrupted)
    arguments = (run, "--output", tmp_path)
    assert evaluate(*arguments) == 130
    assert len(JsonLog(tmp_path / "responses.jsonl").lines) == 6
    with open(tmp_path / "responses.jsonl", "ab") as file:
        file.write(b'{"problem": 1, "sample"')
    assert evaluate(*arguments) == 130
    assert not (tmp_path / "results.json").exists()
    assert evaluate(*arguments) == 0
    # Nothing was sampled or judged twice, but for what the two interrupts had cut off.
    assert len(calls) == 2 * PROBLEMS * SAMPLES + 2
    assert_same_files(tmp_path, whole)
    assert evaluate(*arguments) == 0
    assert len(calls) == 2 * PROBLEMS * SAMPLES + 2


def test_more_samples_later_are_the_samples_of_a_larger_evaluation(trained, whole, tmp_path):
    run, _ = trained
    assert evaluate(run, "--output", tmp_path, "evaluation.samples=2", "evaluation.problems=3") == 0
    assert results(tmp_path)["samples"] == 2
    assert evaluate(run, "--output", tmp_path) == 0
    assert_same_files(tmp_path, whole)


def test_drafts_change_no_byte(trained, whole, tmp_path, monkeypatch):
    run, _ = trained
    passes = []

    def choose(candidates, buckets, times, batch, length):
        passes.append((batch, length))
        return buckets.passes(batch)[-1][0]

    monkeypatch.setattr(expected_manager, "best_rows", choose)
    speculation = "speculation={drafter: prompt_lookup, verify_buckets: [16], max_drafts: 3}"
    assert evaluate(run, "--output", tmp_path, speculation) == 0
    assert passes
    assert_same_files(tmp_path, whole)


def test_a_hugging_face_directory_gives_what_its_run_gives(trained, whole, tmp_path, monkeypatch):
    run, _ = trained
    policy = load_saved_policy(run).policy
    save_model(tmp_path / "model", policy.config, policy.params, "float32", policy.tokenizer_directory)
    monkeypatch.chdir(tmp_path)
    assert evaluate(tmp_path / "model", "--config", run / "config.yaml") == 0
    evaluated, expected = results(tmp_path / "evaluations" / "model"), results(whole)
    responses = (tmp_path / "evaluations/model/responses.jsonl").read_bytes()
    assert responses == (whole / "responses.jsonl").read_bytes()
    assert evaluated | {"policy": None} == expected | {"policy": None}


def test_a_split_that_ends_is_evaluated_once(trained, tmp_path):
    run, _ = trained
    arguments = ("--split", "train", "task.problems=3", "evaluation.samples=1", "evaluation.problems=9")
    assert evaluate(run, "--output", tmp_path, *arguments) == 0
    evaluated = results(tmp_path)
    assert evaluated["problems"] == 3 and {name for name in evaluated["overall"] if "@" in name} == {"mean@1"}


def test_a_digest_names_the_bits_of_the_weights():
    params = {"embed": np.ones((2, 3), np.float32), "layers": [{"q": np.zeros(4, np.float32)}]}
    assert weights_digest(params) == weights_digest(jax.tree.map(jnp.asarray, params))
    changed = jax.tree.map(np.copy, params)
    changed["layers"][0]["q"][3] = -0.0
    renamed = {"embed": params["embed"], "layers": [{"k": params["layers"][0]["q"]}]}
    digests = [weights_digest(each) for each in (params, changed, renamed)]
    assert len(set(digests)) == 3


BAD = """
evaluation.success=corect -> no part 'corect'; did you mean 'correct'
rollout.max_prompt_length=4 rollout.long_prompts=stop
    -> max_prompt_length: 4, but the prompt of problem heldout/0
speculation.drafter=nobody -> unknown drafter 'nobody'
"""


@pytest.mark.parametrize(("arguments", "message"), table(BAD))
def test_bad_input_is_one_line_before_anything_compiles(
    trained, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(evaluator, "warm_up", lambda *_: pytest.fail("compiled"))
    assert evaluate(trained[0], "--output", tmp_path, *arguments.split()) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_a_reward_that_raises_keeps_the_responses(trained, whole, tmp_path, capsys, monkeypatch):
    def raising(self, problem, text):
        raise ZeroDivisionError("no reward")

    with monkeypatch.context() as patch:
        patch.setattr(ChainArithmetic, "reward", raising)
        assert evaluate(trained[0], "--output", tmp_path) == 2
    assert "the reward of problem heldout/0 raised ZeroDivisionError" in capsys.readouterr().err
    assert (tmp_path / "responses.jsonl").read_bytes() == (whole / "responses.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(ChainArithmetic, "reward", lambda *_: {"reward": float("nan")})
        assert evaluate(trained[0], "--output", tmp_path) == 2
    assert "nan" in capsys.readouterr().err
    # What the message of a reward that fails advises is taken: nothing is sampled, all is judged.
    monkeypatch.setattr(Evaluator, "_response", lambda *_: pytest.fail("sampled"))
    assert evaluate(trained[0], "--output", tmp_path, "task.reward_errors=zero") == 0
    assert results(tmp_path)["overall"] == results(whole)["overall"]


def test_edited_data_are_noticed(trained, whole, tmp_path, capsys, monkeypatch):
    """A mended answer: the same responses are judged anew. Another question: they are no answers to it."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    problem, judged = ChainArithmetic.problem, []
    monkeypatch.setattr(Evaluator, "_response", lambda *_: pytest.fail("sampled"))
    judging = lambda *arguments: judged.append(arguments[1]) or reward(*arguments)  # noqa: E731
    monkeypatch.setattr(ChainArithmetic, "reward", judging)

    def edited(**changes):
        def changed(self, split, index):
            original = problem(self, split, index)
            return dataclasses.replace(original, **changes) if index == 3 else original

        monkeypatch.setattr(ChainArithmetic, "problem", changed)
        return evaluate(trained[0], "--output", tmp_path)

    assert edited(answer="right now") == 0
    assert [each.answer for each in judged] == ["right now"] * SAMPLES
    assert edited(messages=({"role": "user", "content": "1a2="},)) == 2
    assert "holds responses to another problem 3 than heldout/3 is now" in capsys.readouterr().err


def test_a_run_is_told_of_a_wrong_part_before_it_begins(tmp_path):
    overrides = ["evaluation.success=rigth", f"warm_start.cache_dir={tmp_path}/warm_start"]
    config = load_config(write_config(tmp_path), overrides)
    with pytest.raises(ConfigError, match=r"evaluation\.success: the task's rewards have no part 'rigth'"):
        run_training(config)
    assert not (tmp_path / "warm_start").exists()
