"""Keys of learning: the optimizer and the update."""

from typing import Literal

from pydantic import Field

from rljax.config.section import AutoOnOff, Count, CountOrOff, Section

CHUNK = 256
"""Tokens that attention sums at once (`rljax/numerics/rows.py`); rows of whole chunks waste none."""
TOKENS_PER_DEVICE = 2048
"""Tokens of a micro-batch on each device by default: with more, products are hardly faster."""


def rows_for(longest: int, devices: int) -> dict[str, int]:
    """The default `pack_length` and `rows_per_microbatch`, for the longest sequence in tokens and the number
    of devices that share the rows.
    """
    pack_length = -(-longest // CHUNK) * CHUNK
    rows = max(TOKENS_PER_DEVICE // pack_length, 1) * devices
    return {"pack_length": pack_length, "rows_per_microbatch": rows}


class OptimizerConfig(Section):
    """Update rule of the policy during RL."""

    name: Literal["adamw"] = Field("adamw", description="Update rule; adamw is the only one.")
    learning_rate: float = Field(
        1e-6,
        gt=0,
        description="Peak learning rate. Raise it for small models: 1e-6 suits pretrained models of"
        " billions of weights, 1e-4 toy models.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Schedule after warm-up. Set linear or cosine, which fall to 0 at the last step, for"
        " smaller updates at the end.",
    )
    warmup_steps: CountOrOff = Field(
        0,
        description="Number of updates over which the rate rises from 0. Raise it when the first updates"
        " damage the policy.",
    )
    beta1: float = Field(
        0.9, ge=0, lt=1, description="Decay of the mean gradient. Lower it to react faster to new gradients."
    )
    beta2: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="Decay of the mean squared gradient. Lower it (0.95) to forget spikes sooner.",
    )
    epsilon: float = Field(
        1e-8,
        gt=0,
        description="Constant added to the root of the mean squared gradient. Raise it when gradients are"
        " tiny.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay of matrices (not of norms and biases). Raise it to keep weights"
        " small, which rarely helps in RL.",
    )
    clip_norm: float = Field(
        1.0,
        gt=0,
        description="Largest global norm of a gradient; larger gradients are scaled down. Lower it when the"
        " loss spikes.",
    )


class TrainingConfig(Section):
    """Updates on the rollouts of a step."""

    steps: Count = Field(
        100, description="RL steps, each with new rollouts. Raise it to continue a finished run."
    )
    minibatches_per_step: Count = Field(
        1,
        description="Updates per pass over the rollouts. Raise it to learn faster from the same samples,"
        " which is more off-policy.",
    )
    epochs_per_step: Count = Field(
        1,
        description="Training passes over the rollouts of a step. Raise it to reuse samples; watch the clip"
        " fractions.",
    )
    pack_length: Count = Field(
        2048,
        description="Tokens of a packed row, at least the longest prompt and response together. Raise it for"
        " less padding where most responses are much shorter than the longest.",
    )
    rows_per_microbatch: Count = Field(
        2,
        description="Packed rows per microbatch of the gradient. Lower it when memory runs out; the update"
        " stays the same.",
    )
    share_prompts: AutoOnOff = Field(
        "auto",
        description="Compute the prompt that the responses of a group share once per microbatch. auto does"
        " where a third of the tokens or more are copies. Set off to compile fewer programs, on to share"
        " always; logprobs stay the same. Not on a mesh.",
    )
    remat: bool = Field(
        False,
        description="Recompute activations in the backward pass. Set it when memory runs out, for about a"
        " third more time.",
    )
    cast_once: bool = Field(
        True,
        description="Cast the layers' matrices to policy.compute_dtype once an update, not in every"
        " microbatch. Set false when memory runs out with remat: the copies take 2 bytes a parameter;"
        " gradients stay the same.",
    )
    logprob_chunk: Count | None = Field(
        None,
        description="Number of tokens whose logits are in memory at once, several times over in an update."
        " null is 1,024, on a CPU fewer where these take more than 64 MB. Lower it when memory runs out;"
        " logprobs stay the same.",
    )

    @property
    def updates(self) -> int:
        """Number of updates in the whole run, one a mini-batch."""
        return self.steps * self.minibatches_per_step * self.epochs_per_step
