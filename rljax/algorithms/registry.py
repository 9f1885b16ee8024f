"""The algorithms by name: the settings of each paper, as defaults of the config's section `algorithm`.

An algorithm is a choice of interchangeable parts. Its settings, and the functions that read them:

    advantage_baseline, advantage_normalization, discount, gae_lambda    `estimation.estimate_advantages`
    ratio, clip_low, clip_high                                          `losses.policy_loss`
    aggregation                                                         `losses.aggregation_weights`
    reward_coefficient                                                  the reward of the task, times this
    kl_coefficient, kl_estimator, kl_in                                 `kl.kl_estimate`
    correction_cap, correction_mask                                     `rollout_correction`
    overlong_buffer                                                     `reward_shaping`
    mask_truncated                                                      `rljax/training/learner.py`
    dynamic_sampling                                                    `dynamic_sampling.DynamicSampler`

Nothing here imports JAX: the config reads it, and help and errors are instant.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

OVERLONG_SHARE = 5
"""DAPO's overlong buffer (4,096 of 20,480 tokens) is this share of the response length."""


def overlong_buffer(max_response_length: int) -> int:
    """Returns the length of DAPO's overlong buffer, in tokens."""
    return max(max_response_length, 0) // OVERLONG_SHARE


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    Attributes:
      paper: its source.
      settings: keys of the section `algorithm` that differ from GRPO's; GRPO has all keys with a preset.
    """

    paper: str
    settings: Mapping[str, Any]


# KL coefficients are starting points: the papers tune them to their rewards.
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        "Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.2 and Eq. 3-4",
        {
            "advantage_baseline": "group",
            "advantage_normalization": "std",
            "discount": 1.0,
            "gae_lambda": 1.0,
            "ratio": "token",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "sequence_mean",
            "entropy_coefficient": 0.0,
            "reward_coefficient": 1.0,
            "kl_coefficient": 0.04,
            "kl_estimator": "k3",
            "kl_in": "loss",
            "correction_cap": None,
            "correction_mask": "none",
            "correction_low": 0.5,
            "correction_high": 2.0,
            "overlong_buffer": 0,
            "overlong_penalty": 1.0,
            "mask_truncated": False,
            "dynamic_sampling": False,
            "dynamic_sampling_max_rounds": 10,
        },
    ),
    "dr_grpo": Algorithm(
        "Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
        {"advantage_normalization": "none", "aggregation": "constant", "kl_coefficient": 0.0},
    ),
    "dapo": Algorithm(
        "Yu et al., DAPO, arXiv 2503.14476, section 4.1",
        {"clip_high": 0.28, "aggregation": "token_mean", "kl_coefficient": 0.0, "dynamic_sampling": True},
    ),
    "rloo": Algorithm(
        "Ahmadian et al., Back to Basics, arXiv 2402.14740, section 3.2",
        {
            "advantage_baseline": "leave_one_out",
            "advantage_normalization": "none",
            "aggregation": "constant",
            "kl_coefficient": 0.03,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "reinforce++": Algorithm(
        "Hu et al., REINFORCE++, arXiv 2501.03262, section 3",
        {
            "advantage_baseline": "none",
            "advantage_normalization": "batch",
            "aggregation": "token_mean",
            "kl_coefficient": 0.01,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "reinforce++-baseline": Algorithm(
        "Hu et al., REINFORCE++, arXiv 2501.03262, section 3",
        {
            "advantage_normalization": "batch",
            "aggregation": "token_mean",
            "kl_coefficient": 0.01,
            "kl_estimator": "k2",
        },
    ),
    "gspo": Algorithm(
        "Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, Eq. 5-7 and section 5.1",
        {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coefficient": 0.0},
    ),
    "ppo": Algorithm(
        "Schulman et al., PPO, arXiv 1707.06347; with language models: Ouyang et al., arXiv 2203.02155",
        {
            "advantage_baseline": "critic",
            "advantage_normalization": "batch",
            "gae_lambda": 0.95,
            "aggregation": "token_mean",
            "kl_coefficient": 0.02,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "distillation": Algorithm(
        "Agarwal et al., GKD, arXiv 2306.13649; as a policy gradient Gu et al., MiniLLM, arXiv 2306.08543",
        {
            "advantage_baseline": "none",
            "advantage_normalization": "none",
            "discount": 0.0,
            "aggregation": "token_mean",
            "reward_coefficient": 0.0,
            "kl_coefficient": 1.0,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
}

NEED_TEACHER = ("distillation",)
"""Algorithms whose reference is always a teacher."""
