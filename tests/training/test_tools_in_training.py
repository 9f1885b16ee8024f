"""Whole runs whose responses call a calculator: what is learned from them, and that they can be repeated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.config import AlgorithmConfig
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.training.objectives import policy_objective
from tests.training.tiny_run import ONE_PASS, digests, numbers, train

# What a policy soon writes of itself: "a5+47=52" calls the calculator with "47".
TOOLS = "tools={names: [calculator], opening: '+', closing: '=', answer_opening: '<', answer_closing: '>'}"
HOW = ("rollout/occupancy", "rollout/decode_steps", "engine/", "speculation/")
HOW += ("tools/seconds", "tools/waiting")


def test_runs_with_tools_repeat_exactly_resumed_and_with_drafts(tmp_path):
    """With drafts a run chooses its passes by its own clock."""
    for name in ("plain", "drafted"):
        (tmp_path / name).mkdir()
    # With a critic: values, returns and a KL in the reward, all of single tokens. What is so little trained
    # differs in reward by its length only.
    tools = [TOOLS, "warm_start.steps=20", "algorithm.name=ppo", "algorithm.kl_coefficient=0.02"]
    tools += ["algorithm.overlong_buffer=40"]
    plain = train(tmp_path / "plain", *tools)
    for line in plain[1:]:
        assert line["tools/calls"] >= line["tools/errors"] >= 0 and line["tools/tokens"] > 0
        assert line["mismatch/logprob_abs_max"] == 0.0
        assert line["update/tokens"] == line["rollout/tokens"]
        assert line["policy/ratio_mean"] == pytest.approx(1.0)  # weights of what was sampled add up to 1
        assert line["gradient_norm"] > 0 and line["critic/gradient_norm"] > 0
    assert plain[1]["engine/compilations"] == plain[2]["engine/compilations"]
    drafted = [*tools, "speculation.drafter=srt", *ONE_PASS]
    train(tmp_path / "drafted", *drafted, "training.steps=1")
    resumed = train(tmp_path / "drafted", *drafted)
    assert resumed[-1]["speculation/accepted"] >= 0
    for line, other in zip(numbers(resumed, *HOW), numbers(plain, *HOW), strict=True):
        shared = line.keys() & other.keys()
        assert {"tools/calls", "loss/policy"} <= shared or line["step"] == 0
        assert {name: line[name] for name in shared} == {name: other[name] for name in shared}
    arrays = digests(tmp_path / "plain" / "run", 2)
    assert digests(tmp_path / "drafted" / "run", 2) == arrays
    assert any(name.startswith("critic.optimizer_state.") for name in arrays)


def test_an_answer_has_no_gradient_and_no_part_in_any_metric():
    own = [True, True, False, False, True]
    sequences = [
        TrainingSequence([5, 6, 7], [1, 2, 3, 4, 5], [-1.0, -2.0, 0.0, 0.0, -3.0], 0.5, 0.25, own),
        TrainingSequence([8], [9, 9], [-1.0, -1.0], -0.5, 0.25),
    ]
    batch = build_batch(sequences, pack_sequences([8, 3], 16), range(1))
    algorithm = AlgorithmConfig(kl_coefficient=0.1)
    reference = jnp.full(batch.tokens.shape, -1.5)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(logprobs, entropy):
        return policy_objective(logprobs, entropy, batch, reference, algorithm)

    rng = np.random.default_rng(0)
    logprobs, entropy = rng.normal(size=(2, *batch.tokens.shape)).astype(np.float32)
    answers = np.zeros(batch.tokens.shape, bool)
    answers[0, 4:6] = True
    gradient, metrics = gradients(logprobs, entropy)
    assert (np.asarray(gradient)[answers] == 0).all()
    assert (np.asarray(gradient)[np.asarray(batch.response_mask)] != 0).all()
    assert metrics["update/tokens"] == 5
    other, same = gradients(*(np.where(answers, np.float32(np.nan), each) for each in (logprobs, entropy)))
    np.testing.assert_array_equal(other, gradient)
    assert {k: float(v) for k, v in same.items()} == {k: float(v) for k, v in metrics.items()}
    logprobs[0, 2] = -np.inf  # what a filter excludes by now
    gradient, metrics = gradients(logprobs, entropy)
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0
    assert np.isfinite(metrics["loss/policy"]) and np.isfinite(metrics["loss/kl"])
