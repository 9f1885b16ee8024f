"""Every algorithm in whole runs, from a config: parameters move, numbers are finite, PPO resumes exactly."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

from rljax.algorithms.registry import ALGORITHMS, NEED_TEACHER
from tests.engines import stored_pool
from tests.training.tiny_run import train

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

_VOLATILE = ("time/", "rollout/tokens_per_second", "engine/compilations")
_OTHERS = {
    "ppo": ("critic/loss", "critic/explained_variance", "reward/kl_penalty"),
    "rloo": ("reward/kl_penalty",),
    "reinforce++": ("reward/kl_penalty",),
    "reinforce++-baseline": ("loss/kl",),
    "dr_grpo": ("correction/ratio_mean", "loss/entropy"),
}


POOL = stored_pool()  # what the runs share, such as the engine, is compiled once


@pytest.fixture(autouse=True, scope="module")
def _one_pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rljax.training.building.ExecutablePool", lambda *_: POOL)
        yield


def run(directory, name, *overrides):
    """The tiny run by an algorithm, with its own KL coefficient instead of the tiny run's 0."""
    coefficient = ALGORITHMS[name].settings.get("kl_coefficient", 0.0)
    return train(
        directory,
        "evaluation.problems=0",
        f"algorithm.name={name}",
        f"algorithm.kl_coefficient={coefficient}",
        "algorithm.dynamic_sampling=false",
        "algorithm.overlong_buffer=40",  # nearly untrained, only lengths differ in reward
        "training.minibatches_per_step=2",
        *overrides,
    )


def arrays(directory, step):
    """Leaves of a checkpoint, by name."""
    path = directory / "run" / "checkpoints" / str(step)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return {name: np.asarray(leaf) for name, leaf in checkpointer.restore(path / "arrays").items()}


def check(lines, name):
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert "nonfinite" not in line and line["mismatch/logprob_abs_max"] == 0.0
        assert line["gradient_norm"] > 0 and line["update/tokens"] > 0
        assert all(key in line for key in _OTHERS.get(name, ()))
    assert lines[1]["engine/compilations"] == lines[2]["engine/compilations"]
    assert ("critic/loss" in lines[-1]) == (name == "ppo")


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ppo")
    return directory, run(directory, "ppo")


_TRAINED_ELSEWHERE = ("grpo", "dapo", "ppo", *NEED_TEACHER)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in _TRAINED_ELSEWHERE])
def test_an_algorithm_trains(tmp_path, name):
    """One of them with a correction, and an entropy bonus."""
    corrected = ("correction_cap=2.0", "correction_mask=sequence", "entropy_coefficient=0.01")
    lines = run(tmp_path, name, *(f"algorithm.{key}" for key in corrected if name == "dr_grpo"))
    check(lines, name)
    if name == "dr_grpo":
        for line in lines[1:]:  # the rollout is the policy's own, so there is nothing to correct
            assert line["correction/ratio_mean"] == line["correction/ratio_max"] == 1.0
            assert line["correction/kl"] == line["correction/masked"] == 0.0
    first, second = arrays(tmp_path, 1), arrays(tmp_path, 2)
    assert any(np.any(first[leaf] != second[leaf]) for leaf in first if leaf.startswith("params."))


def test_ppo_trains_policy_and_critic(ppo):
    directory, lines = ppo
    check(lines, "ppo")
    first, second = arrays(directory, 1), arrays(directory, 2)
    for start in ("params.", "critic.params.trunk.", "critic.params.head.", "critic.optimizer_state."):
        assert any(np.any(first[leaf] != second[leaf]) for leaf in first if leaf.startswith(start)), start


def test_ppo_resumes_with_the_same_numbers(ppo, tmp_path):
    """Killed after a step and started again: metrics and every array of the last checkpoint, bit for bit."""
    directory, lines = ppo
    run(tmp_path, "ppo", "training.steps=1")
    resumed = run(tmp_path, "ppo")
    for line, other in zip(resumed, lines, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            assert key.startswith(_VOLATILE) or value == other[key], key
    mine, expected = arrays(tmp_path, 2), arrays(directory, 2)
    assert mine.keys() == expected.keys() and any(name.startswith("critic.") for name in mine)
    for name, leaf in mine.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
