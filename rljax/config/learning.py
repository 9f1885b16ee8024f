"""Keys of learning: the algorithm and its presets, the optimizer, and the update."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rljax.config.section import Count, CountOrOff, Section

# What the papers set, as the default of every key that the config leaves out. GRPO: DeepSeekMath, arXiv
# 2402.03300, section 4.2 and Eq. 3-4; DAPO: arXiv 2503.14476, section 4.1. DAPO's overlong buffer (4,096 of
# 20,480 tokens) is a share of the response length, which ExperimentConfig fills in.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage_normalization": "std",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence_mean",
        "kl_coefficient": 0.04,
        "kl_estimator": "k3",
        "overlong_buffer": 0,
        "overlong_penalty": 1.0,
        "dynamic_sampling": False,
        "dynamic_sampling_max_rounds": 10,
    },
    "dapo": {"clip_high": 0.28, "aggregation": "token_mean", "kl_coefficient": 0.0, "dynamic_sampling": True},
}
OVERLONG_SHARE = 5


def _preset_field(key: str, **field: Any) -> Any:
    return Field(PRESETS["grpo"][key], **field)


class AlgorithmConfig(Section):
    """The policy gradient. The name only chooses defaults for the keys below it; a key that is set wins."""

    name: Literal["grpo", "dapo"] = Field(
        "grpo",
        description="Which paper's settings are the defaults. dapo adds clip-higher, token mean and"
        " dynamic sampling.",
    )
    advantage_normalization: Literal["std", "none"] = _preset_field(
        "advantage_normalization",
        description="Divide a group's centred rewards by their standard deviation, or not (Dr. GRPO): none"
        " keeps easy and hard prompts from weighing too much.",
    )
    clip_low: float = _preset_field(
        "clip_low",
        gt=0,
        le=1,
        description="Ratios below 1 - clip_low get no gradient. Lower it when updates overshoot.",
    )
    clip_high: float = _preset_field(
        "clip_high",
        gt=0,
        description="Ratios above 1 + clip_high get no gradient. Raise it when entropy collapses"
        " (clip-higher).",
    )
    aggregation: Literal["token_mean", "sequence_mean"] = _preset_field(
        "aggregation",
        description="Every token of the batch weighs the same, or every response does. token_mean lets"
        " long ones count.",
    )
    kl_coefficient: float = _preset_field(
        "kl_coefficient",
        ge=0,
        description="Weight of the KL penalty towards the policy as it was before RL; 0 keeps no reference"
        " and saves a pass.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = _preset_field(
        "kl_estimator",
        description="k1 is unbiased and noisy, k2 biased with the right gradient, k3 unbiased and positive.",
    )
    overlong_buffer: CountOrOff = _preset_field(
        "overlong_buffer",
        description="The last this many tokens before max_response_length cost reward, linearly; 0 is off."
        " Set when cut-off responses make rewards noisy.",
    )
    overlong_penalty: float = _preset_field(
        "overlong_penalty",
        ge=0,
        description="Reward lost at the full length. Match it to the size of the task's reward.",
    )
    dynamic_sampling: bool = _preset_field(
        "dynamic_sampling",
        description="Replace groups whose rewards are all equal (no gradient) with fresh ones until the"
        " batch is full. Costs rollouts, and pays when many groups are too easy or too hard.",
    )
    dynamic_sampling_max_rounds: Count = _preset_field(
        "dynamic_sampling_max_rounds",
        description="Rounds of rollouts before dynamic sampling gives up with an error. Raise for very"
        " hard or very easy tasks.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("name"), str):
            return {**PRESETS.get(data["name"], {}), **data}
        return data


class OptimizerConfig(Section):
    """Update rule of the policy during RL."""

    name: Literal["adamw"] = Field("adamw", description="Update rule.")
    learning_rate: float = Field(
        1e-6,
        gt=0,
        description="Peak learning rate. 1e-6 suits pretrained models of billions of weights; toys take"
        " 1e-4.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Course after warm-up; linear and cosine fall to 0 at the last step, for a calmer end.",
    )
    warmup_steps: CountOrOff = Field(
        0,
        description="Updates over which the rate rises from 0. Raise when the first updates wreck the"
        " policy.",
    )
    beta1: float = Field(
        0.9, ge=0, lt=1, description="Decay of the mean gradient. Lower reacts faster to a moving policy."
    )
    beta2: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="Decay of the mean squared gradient. Lower (0.95) forgets spikes sooner.",
    )
    epsilon: float = Field(
        1e-8, gt=0, description="Added to the root of the squared gradient. Raise when gradients are tiny."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled decay of matrices (not of norms and biases); rarely helps in RL."
    )
    clip_norm: float = Field(
        1.0,
        gt=0,
        description="Gradients with a larger global norm are scaled down. Lower when the loss spikes.",
    )


class TrainingConfig(Section):
    """How a step's rollouts become updates."""

    steps: Count = Field(
        100, description="RL steps, each with its own rollouts. May be raised to go on with a finished run."
    )
    minibatches_per_step: Count = Field(
        1,
        description="Updates a pass makes over the rollouts. More learn faster from the same samples and"
        " are more off-policy.",
    )
    epochs_per_step: Count = Field(
        1, description="Passes over the rollouts. More reuse samples; watch the clip fractions."
    )
    pack_length: Count = Field(
        2048,
        description="Tokens in a packed row, at least prompt and response together. Longer rows pad less,"
        " attend more.",
    )
    rows_per_microbatch: Count = Field(
        4,
        description="Packed rows differentiated at once. Lower it when memory runs out; the update stays"
        " the same.",
    )
    remat: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    logprob_chunk: Count = Field(
        1024,
        description="Tokens whose logits exist at once. Lower it for large vocabularies; the numbers stay"
        " the same.",
    )
