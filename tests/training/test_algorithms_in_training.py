"""Every algorithm in whole runs, from a config: parameters move, numbers are finite. PPO resumes exactly in
`test_tools_in_training.py`.
"""

import pytest

from rljax.algorithms.registry import ALGORITHMS, NEED_TEACHER
from tests.engines import stored_pool
from tests.training.tiny_run import digests, train

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

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


_TRAINED_ELSEWHERE = ("grpo", "dapo", *NEED_TEACHER)


@pytest.mark.default_cases("ppo", "rloo", "dr_grpo", "gspo")  # REINFORCE++ updates in test_learner.py
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in _TRAINED_ELSEWHERE])
def test_an_algorithm_trains(tmp_path, name):
    """One of them with a correction, and an entropy bonus."""
    corrected = ("correction_cap=2.0", "correction_mask=sequence", "entropy_coefficient=0.01")
    lines = run(tmp_path, name, *(f"algorithm.{key}" for key in corrected if name == "dr_grpo"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert "nonfinite" not in line and line["mismatch/logprob_abs_max"] == 0.0
        assert line["gradient_norm"] > 0 and line["update/tokens"] > 0
        assert all(key in line for key in _OTHERS.get(name, ()))
        if name == "dr_grpo":  # the rollout is the policy's own, so there is nothing to correct
            assert line["correction/ratio_mean"] == line["correction/ratio_max"] == 1.0
            assert line["correction/kl"] == line["correction/masked"] == 0.0
    assert lines[1]["engine/compilations"] == lines[2]["engine/compilations"]
    assert ("critic/loss" in lines[-1]) == (name == "ppo")
    first, second = (digests(tmp_path / "run", step) for step in (1, 2))
    critic = ("critic.params.trunk.", "critic.params.head.", "critic.optimizer_state.")
    for start in ("params.", *(critic if name == "ppo" else ())):
        assert any(first[name] != second[name] for name in first if name.startswith(start)), start
