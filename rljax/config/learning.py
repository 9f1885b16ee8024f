"""Keys of learning: the optimizer and the update."""

from typing import Literal

from pydantic import Field

from rljax.config.section import Count, CountOrOff, Section


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
    """Updates on the rollouts of a step."""

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
