"""Whole runs: what they leave, that they resume with the same numbers, that every option runs."""

import itertools
import signal

import pytest

import rljax.training.reference
from rljax.algorithms.dynamic_sampling import DynamicSamplingError
from rljax.config import load_config
from rljax.errors import CheckpointError, ConfigError, Interrupted, UserError
from rljax.run_directory import RunDirectory
from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.devices import run_on_devices
from tests.tracking.test_tensorboard import scalars
from tests.training.test_several_processes import _agree
from tests.training.tiny_run import numbers, train

LEARNS = "algorithm.overlong_buffer=40"
"""So little trained, responses differ in reward by their length only; without it no update moves a weight."""
TRACKED = ("tracking.report=true", "tracking.samples_per_step=2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    lines = train(directory, LEARNS, *TRACKED, f"warm_start.cache_dir={directory}/warm_start")
    assert all(line["gradient_norm"] > 0 for line in lines[1:])
    return directory, lines


def test_a_run_leaves_its_metrics(plain):
    directory, lines = plain
    assert [line["step"] for line in lines] == [0, 1, 2]
    required = "step entropy reward/mean loss/policy mismatch/logprob_abs_mean engine/compilations"
    required += " response_length/mean response_length/p75 response_length/max rollout/tokens"
    required += (
        " rollout/tokens_per_second time/step time/rollout time/reward time/logprobs time/update time/elapsed"
    )
    assert set(required.split()) <= lines[-1].keys()
    assert "evaluation/reward" in lines[0] and "evaluation/reward" in lines[-1]
    assert load_config(directory / "run" / "config.yaml").training.steps == 2
    assert (directory / "run" / "checkpoints").is_dir()
    sessions = RunDirectory(directory / "run").read_sessions()
    assert [session["step"] for session in sessions] == [0]
    assert {"date", "command", "commit", "machine"} <= sessions[0].keys()
    # The training pass has the rollout's logprobs, and nothing compiles after warm-up.
    assert [line["mismatch/logprob_abs_max"] for line in lines[1:]] == [0.0, 0.0]
    assert lines[1]["engine/compilations"] == lines[2]["engine/compilations"]
    # What is finished has nothing left to do, and another experiment is refused.
    assert train(directory, LEARNS) == lines
    with pytest.raises(ConfigError, match="seed"):
        train(directory, LEARNS, "seed=5")


def test_every_step_leaves_its_rollout_and_the_run_a_report(plain):
    """Two prompts with four responses each."""
    directory, metrics = plain
    run = RunDirectory(directory / "run")
    rollouts = run.read_rollouts()
    assert [line["step"] for line in rollouts] == [1, 2]
    for line, own in zip(rollouts, metrics[1:], strict=True):
        assert sum(line["lengths"]["counts"]) == 8
        assert len(line["lengths"]["counts"]) == own["response_length/max"]  # bins of one token
        (points,) = line["running"]
        assert 0 < points[-1][0] <= own["time/rollout"]
        assert max(running for _, running in points) == 4  # slots
        assert len(line["best"]) == 2 and 1 <= len(line["best"]) + len(line["worst"]) <= 4
        rewards = [each["rewards"]["reward"] for each in line["best"] + line["worst"]]
        assert max(rewards) == rewards[0] and min(rewards) <= own["reward/mean"] <= rewards[0]
        assert all("=" in each["prompt"] for each in line["best"])
        lengths = [own[f"response_length/{name}"] for name in ("p50", "p75", "p95", "max")]
        assert lengths == sorted(lengths)
        assert own["reward/standard_error"] >= 0 and own["reward/std"] >= 0
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert 'aria-label="Running requests"' in text and text.count("<details") > 3


def test_a_run_that_a_signal_stops_continues_with_the_same_numbers(plain, tmp_path, monkeypatch):
    """The step that is running is finished and saved, though no checkpoint is due."""
    directory, lines = plain
    reward, calls = ChainArithmetic.reward, itertools.count()

    def interrupted(*args):
        if next(calls) == 4:  # behind an evaluation
            signal.raise_signal(signal.SIGTERM)
        return reward(*args)

    monkeypatch.setattr(ChainArithmetic, "reward", interrupted)
    with pytest.raises(Interrupted, match="step 1") as stopped:
        train(tmp_path, LEARNS, *TRACKED, "checkpoint.every=0")
    assert stopped.value.signal == signal.SIGTERM
    resumed = train(tmp_path, LEARNS, *TRACKED, "checkpoint.every=0")
    assert [line["step"] for line in resumed] == [0, 1, 2]
    assert numbers(resumed) == numbers(lines)
    left = [RunDirectory(each / "run").read_rollouts() for each in (tmp_path, directory)]
    samples, expected = ([line | {"running": None} for line in rollouts] for rollouts in left)
    assert samples == expected and len(samples) == 2  # `running` are times
    # TensorBoard has what the metrics have, of both sessions.
    logged = {(line["step"], name): line[name] for line in resumed for name in line if name != "step"}
    assert scalars(RunDirectory(tmp_path / "run")) == pytest.approx(logged, rel=1e-6)


def test_a_hugging_face_directory_trains_like_the_policy_it_was_saved_from(plain, tmp_path):
    directory, lines = plain
    (saved,) = (directory / "warm_start").iterdir()
    mine = train(tmp_path, LEARNS, f"policy={{path: {saved}}}", "warm_start=null")
    assert numbers(mine) == numbers(lines)


def test_a_run_on_a_mesh_agrees_with_one_on_a_single_device(tmp_path):
    """Two devices share the batch, two the heads; forced on the host before JAX starts, so elsewhere. Nothing
    is learned, as Adam's first step would make a rounded gradient another token of the second step.
    """
    (tmp_path / "one").mkdir()
    lines = train(tmp_path / "one")
    code = (
        "import json, pathlib, sys; from tests.training.tiny_run import train;"
        "mesh = ('mesh.data=2', 'mesh.tensor=2', 'training.rows_per_microbatch=2');"
        "lines = train(pathlib.Path(sys.argv[1]), *mesh);"
        "print('FOUND' + json.dumps(lines))"
    )
    sharded = run_on_devices(code, 4, tmp_path)
    _agree(sharded, lines)
    for line in sharded[1:]:
        assert line["mismatch/logprob_abs_max"] < 1e-4
        assert line["engine/compilations"] == sharded[1]["engine/compilations"]


def test_another_seed_gives_other_numbers(plain, tmp_path):
    _, lines = plain
    first = train(tmp_path, LEARNS, "seed=1", "training.steps=1", "evaluation.problems=0")[1]
    assert all(first[name] != lines[1][name] for name in ("gradient_norm", "entropy", "rollout/tokens"))


def test_reference_overlong_and_several_epochs_in_bfloat16(tmp_path, monkeypatch):
    keys = (
        "policy.compute_dtype=bfloat16",
        "algorithm.kl_coefficient=0.1",
        "algorithm.overlong_buffer=8",
        "training.minibatches_per_step=2",
        "training.epochs_per_step=2",
        "rollout.top_p=0.95",
        "rollout.temperature=0.9",
        "rollout.stop=['#']",
    )
    monkeypatch.setattr(ChainArithmetic, "fingerprint", lambda self: {"a.jsonl": "1"}, raising=False)
    lines = train(tmp_path, *keys)
    # The first update starts from the reference itself; the second step's does not.
    assert lines[2]["loss/kl"] > 0.0
    assert [line["mismatch/logprob_abs_max"] for line in lines[1:]] == [0.0, 0.0]
    monkeypatch.setattr(rljax.training.reference, "weights_digest", lambda params: "another")
    monkeypatch.setattr(ChainArithmetic, "fingerprint", lambda self: {"a.jsonl": "2", "new.jsonl": "3"})
    says = r"^a\.jsonl holds other data than .*; the reference of the KL penalty.*--allow-changes"
    with pytest.raises(CheckpointError, match=says):
        train(tmp_path, *keys, "training.steps=3")


def test_dynamic_sampling_refills_the_batch_or_gives_up_with_a_message(tmp_path, monkeypatch):
    calls = itertools.count()

    def reward(*_):
        """Every second group of four is uninformative; in the others one response is right, for two steps."""
        group, sample = divmod(next(calls), 4)
        return {"reward": float(group % 2 == 1 and sample == 0 and group < 8)}

    monkeypatch.setattr(ChainArithmetic, "reward", reward)
    keys = (
        "algorithm.dynamic_sampling=true",
        "algorithm.dynamic_sampling_max_rounds=3",
        "evaluation.problems=0",
    )
    with pytest.raises(DynamicSamplingError, match="3 rounds"):
        train(tmp_path, *keys, "training.steps=3")
    lines = RunDirectory(tmp_path / "run").read_metrics()
    assert [line["rollout/groups_sampled"] for line in lines[1:]] == [4, 4]
    assert lines[-1]["gradient_norm"] > 0.0


def test_a_reward_that_raises_is_one_line_and_costs_no_step(plain, tmp_path, monkeypatch):
    """In the second step, with no checkpoint due: the first is saved, and the run goes on from there."""
    _, lines = plain
    reward, calls = ChainArithmetic.reward, []

    def failing(*args):
        calls.append(args)
        if len(calls) > 4 + 2 * 4:  # evaluation, and the first step
            raise RuntimeError("no")
        return reward(*args)

    monkeypatch.setattr(ChainArithmetic, "reward", failing)
    with pytest.raises(UserError, match=r"problem train/2 raised RuntimeError\('no'\)"):
        train(tmp_path, LEARNS, "checkpoint.every=0")
    monkeypatch.undo()
    assert numbers(train(tmp_path, LEARNS, "checkpoint.every=0")) == numbers(lines)
