"""Keys of the algorithm: its name chooses the defaults of the rest (`rljax/algorithms/registry.py`)."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rljax.algorithms.registry import ALGORITHMS, overlong_buffer
from rljax.config.learning import OptimizerConfig
from rljax.config.section import Count, CountOrOff, Section

_GRPO = ALGORITHMS["grpo"].settings


def _preset_field(key: str, **field: Any) -> Any:
    return Field(_GRPO[key], **field)


class CriticConfig(OptimizerConfig):
    """The critic of advantage_baseline: critic, a copy of the policy with a value head, and its optimizer."""

    learning_rate: float = Field(
        1e-5,
        gt=0,
        description="Peak learning rate of the critic. Higher than the policy's: its value head starts at 0.",
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="How far an update may profit from moving a value. Raise it where returns are larger"
        " than 1.",
    )


class AlgorithmConfig(Section):
    """The policy gradient. The name only chooses defaults for the keys below it; a key that is set wins."""

    name: Literal[tuple(ALGORITHMS)] = Field(
        "grpo",
        description="Which paper's settings are the defaults; docs/algorithms.md compares them. dapo adds"
        " clip-higher, token mean and dynamic sampling; ppo trains a critic.",
    )
    advantage_baseline: Literal["group", "leave_one_out", "none", "critic"] = _preset_field(
        "advantage_baseline",
        description="What a reward is compared with: the group's mean, that of its siblings only (unbiased),"
        " nothing, or a critic's values per token (costs a second model).",
    )
    advantage_normalization: Literal["std", "batch", "none"] = _preset_field(
        "advantage_normalization",
        description="Divide advantages by the standard deviation of their group, whiten them over the step's"
        " tokens, or neither (Dr. GRPO): none keeps easy and hard prompts from weighing too much.",
    )
    discount: float = _preset_field(
        "discount",
        gt=0,
        le=1,
        description="Gamma: what a reward is worth a token earlier, with baseline none or critic. Below 1,"
        " early tokens learn less from the end.",
    )
    gae_lambda: float = _preset_field(
        "gae_lambda",
        ge=0,
        le=1,
        description="How far advantages look before they trust the critic. Lower is less noisy and more"
        " biased; 1 suits long responses with one reward at the end.",
    )
    ratio: Literal["token", "sequence"] = _preset_field(
        "ratio",
        description="Clip the ratio of each token, or the mean one of the whole response (GSPO); sequence"
        " wants a clip range of about 1e-4.",
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
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = _preset_field(
        "aggregation",
        description="Every token of the batch weighs the same, or every response does. token_mean lets"
        " long ones count; constant divides by max_response_length, whatever was sampled (Dr. GRPO).",
    )
    entropy_coefficient: float = _preset_field(
        "entropy_coefficient",
        ge=0,
        description="Weight of the entropy in the objective. Raise it a little (1e-3) when the policy stops"
        " exploring; 0 saves its backward pass.",
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
    kl_in: Literal["loss", "reward"] = _preset_field(
        "kl_in",
        description="Where the KL penalty goes: a term of the loss, or taken from the reward (token by token"
        " with baseline none or critic), where k1 does what it should.",
    )
    correction_cap: float | None = _preset_field(
        "correction_cap",
        gt=0,
        description="Weigh tokens by training over rollout probability, at most this (truncated importance"
        " sampling); 2 is usual. null trusts the rollout, which on a CPU is exact.",
    )
    correction_mask: Literal["none", "token", "sequence"] = _preset_field(
        "correction_mask",
        description="Leave out tokens, or whole responses by their mean ratio, where training and rollout"
        " disagree by more than correction_low and correction_high allow.",
    )
    correction_low: float = _preset_field(
        "correction_low",
        ge=0,
        le=1,
        description="Smallest ratio that correction_mask lets pass. sequence wants it near 1, such as 0.99.",
    )
    correction_high: float = _preset_field(
        "correction_high",
        ge=1,
        description="Largest ratio that correction_mask lets pass. sequence wants it near 1, such as 1.01.",
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
    skip_zero_advantages: bool = Field(
        True,
        description="Leave responses whose advantage is 0 (all of a group right, or all wrong) out of"
        " updates: they have no gradient. Set false to measure entropy and mismatch on them too.",
    )
    critic: CriticConfig = CriticConfig()

    @property
    def compares_groups(self) -> bool:
        """Whether a response is judged by its siblings, so that a group of one teaches nothing."""
        return self.advantage_baseline in ("group", "leave_one_out")

    @property
    def corrects_rollout(self) -> bool:
        """Whether the training pass scores the responses before the first update, to correct them."""
        return self.correction_cap is not None or self.correction_mask != "none"

    @property
    def advantages_alone(self) -> bool:
        """Whether a response without advantage has no gradient: neither KL nor entropy is in the loss, and no
        critic learns from the responses.
        """
        kl_in_loss = self.kl_coefficient > 0 and self.kl_in == "loss"
        return not kl_in_loss and self.entropy_coefficient == 0 and self.advantage_baseline != "critic"

    @property
    def skips_responses(self) -> bool:
        """Whether updates leave out responses whose advantage is 0."""
        return self.skip_zero_advantages and self.advantages_alone

    def describe(self, max_response_length: int) -> str:
        """The name, and where the settings are not its paper's for responses of up to so many tokens."""
        preset = {**_GRPO, **ALGORITHMS[self.name].settings}
        if self.name == "dapo":
            preset["overlong_buffer"] = overlong_buffer(max_response_length)
        changed = [
            f"{key} {getattr(self, key)} instead of {value}"
            for key, value in preset.items()
            if getattr(self, key) != value
        ]
        return self.name + (f" with {', '.join(changed)}" if changed else "")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("name"), str) and data["name"] in ALGORITHMS:
            return {**ALGORITHMS[data["name"]].settings, **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> "AlgorithmConfig":
        if not self.compares_groups and self.advantage_normalization == "std":
            raise ValueError(
                "algorithm.advantage_normalization: std is that of a group, but advantage_baseline"
                f" {self.advantage_baseline} compares no groups; use batch or none"
            )
        if not self.compares_groups and self.ratio == "sequence":
            raise ValueError(
                "algorithm.ratio: sequence gives all tokens of a response one gradient, but"
                f" advantage_baseline {self.advantage_baseline} gives each an advantage of its own; use token"
            )
        if self.compares_groups and self.discount != 1:
            raise ValueError(
                f"algorithm.discount: {self.discount} is read with advantage_baseline none or critic, not"
                f" with {self.advantage_baseline}"
            )
        # Expected gradients near the reference: docs/algorithms.md, "KL as a penalty".
        if self.kl_coefficient > 0 and (self.kl_estimator == "k1") != (self.kl_in == "reward"):
            right = "k1" if self.kl_in == "reward" else "k2 or k3"
            raise ValueError(
                f"algorithm.kl_estimator: {self.kl_estimator} with kl_in: {self.kl_in} does not hold the"
                f" policy near the reference; use {right}"
            )
        return self
