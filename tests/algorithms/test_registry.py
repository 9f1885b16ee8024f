"""The table of algorithms: every preset is a whole, valid section, and the papers' choices are in it."""

from typing import get_args

import pytest
import yaml
from pydantic import ValidationError

from rljax.algorithms.registry import ALGORITHMS
from rljax.config import AlgorithmConfig
from tests.configs import experiment, table

KEYS = set(AlgorithmConfig.model_fields) - {"name", "critic", "skip_zero_advantages", "teacher"}
KEYS -= {"dynamic_sampling_part"}  # a task's


def test_every_name_is_a_preset_and_every_setting_a_key():
    assert set(get_args(AlgorithmConfig.model_fields["name"].annotation)) == set(ALGORITHMS)
    assert set(ALGORITHMS["grpo"].settings) == KEYS
    for name, algorithm in ALGORITHMS.items():
        assert set(algorithm.settings) <= KEYS
        config = AlgorithmConfig(name=name)
        for key, value in {**ALGORITHMS["grpo"].settings, **algorithm.settings}.items():
            assert getattr(config, key) == value, (name, key)
        assert "arXiv" in algorithm.paper


def test_what_tells_the_algorithms_apart():
    """Their defining choices, so that an edit of the table is noticed."""

    def chosen(name, *keys):
        return tuple(getattr(AlgorithmConfig(name=name), key) for key in keys)

    advantage = ("advantage_baseline", "advantage_normalization")
    assert chosen("grpo", *advantage) == ("group", "std")
    assert chosen("dr_grpo", *advantage, "aggregation") == ("group", "none", "constant")
    assert chosen("rloo", *advantage, "kl_in") == ("leave_one_out", "none", "reward")
    assert chosen("reinforce++", *advantage, "kl_in", "kl_estimator") == ("none", "batch", "reward", "k1")
    assert chosen("reinforce++-baseline", *advantage, "kl_in") == ("group", "batch", "loss")
    clips = chosen("gspo", "ratio", "clip_low", "clip_high", "aggregation")
    assert clips == ("sequence", 3e-4, 4e-4, "sequence_mean")
    assert chosen("ppo", *advantage, "gae_lambda") == ("critic", "batch", 0.95)
    teacher = chosen("distillation", *advantage, "kl_in", "discount", "reward_coefficient")
    assert teacher == ("none", "none", "reward", 0.0, 0.0)
    for name in ALGORITHMS:
        assert not AlgorithmConfig(name=name).corrects_rollout


def test_a_key_that_is_set_wins():
    config = AlgorithmConfig(name="ppo", gae_lambda=1.0, critic={"learning_rate": 1e-3})
    assert (config.gae_lambda, config.critic.learning_rate, config.critic.value_clip) == (1.0, 1e-3, 0.2)
    assert config.advantage_baseline == "critic"


REFUSED = """
advantage_baseline: none -> algorithm.advantage_normalization: std is that of a group
advantage_baseline: critic -> algorithm.advantage_normalization: std is that of a group
name: gspo, advantage_baseline: none, advantage_normalization: batch -> ratio: sequence
name: gspo, advantage_baseline: critic, advantage_normalization: batch -> ratio: sequence
correction_low: 1.5 -> correction_low
correction_high: 0.5 -> correction_high
correction_cap: 0.0 -> correction_cap
gae_lambda: 1.01 -> gae_lambda
teacher: there, kl_coefficient: 0.0 -> algorithm.teacher: is not used
discount: 0.0 -> discount
discount: 0.9 -> algorithm.discount: 0.9 is read with
entropy_coefficient: -0.1 -> entropy_coefficient
name: grpo, kl_in: reward -> algorithm.kl_estimator
name: reinforce++-baseline, kl_in: reward -> algorithm.kl_estimator
name: ppo, kl_in: loss -> algorithm.kl_estimator
"""


def test_what_cannot_go_together_names_the_key():
    for keys, message in table(REFUSED):
        given = yaml.safe_load(f"{{{keys}}}")
        with pytest.raises(ValidationError) as refused:
            experiment(algorithm=given)
        assert message in str(refused.value)
        if "kl_in" in given:  # a KL whose gradient is not that of a KL; where there is none, nothing is wrong
            AlgorithmConfig(**given, kl_coefficient=0.0)


def test_what_differs_from_the_paper_is_told():
    assert AlgorithmConfig(name="ppo").describe(96) == "ppo"
    assert AlgorithmConfig(name="dapo", overlong_buffer=19).describe(96) == "dapo"  # a fifth of the length
    shorter = AlgorithmConfig(name="dapo", overlong_buffer=8).describe(96)
    assert shorter == "dapo with overlong_buffer 8 instead of 19"
    told = AlgorithmConfig(name="rloo", kl_coefficient=0.0).describe(96)
    assert told == "rloo with kl_coefficient 0.0 instead of 0.03"
