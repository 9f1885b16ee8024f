"""Keys of the algorithm: `name` chooses the defaults of the other keys (`rljax/algorithms/registry.py`)."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rljax.algorithms.registry import ALGORITHMS, overlong_buffer
from rljax.config.learning import OptimizerConfig
from rljax.config.section import Count, CountOrOff, PathText, Section

_GRPO = ALGORITHMS["grpo"].settings


def _preset_field(key: str, **field: Any) -> Any:
    return Field(_GRPO[key], **field)


class CriticConfig(OptimizerConfig):
    """The critic of advantage_baseline: critic, a copy of the policy with a value head, and its optimizer."""

    learning_rate: float = Field(
        1e-5,
        gt=0,
        description="Peak learning rate of the critic. Set it higher than the policy's, because the value"
        " head starts at 0.",
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="Range within which an update may profit from moving a value. Raise it where returns are"
        " larger than 1.",
    )


class AlgorithmConfig(Section):
    """The policy gradient. The name chooses the defaults of the other keys; a key that is set wins."""

    name: Literal[tuple(ALGORITHMS)] = Field(  # type: ignore[valid-type]  # the names of a table
        "grpo",
        description="The paper whose settings are the defaults; docs/algorithms.md compares them. Choose dapo"
        " for clip-higher, token mean and dynamic sampling, ppo for a critic.",
    )
    advantage_baseline: Literal["group", "leave_one_out", "none", "critic"] = _preset_field(
        "advantage_baseline",
        description="Baseline of a reward: the mean of the group, the mean of the other samples only"
        " (unbiased), none, or a critic's value of every token (costs a second model). Change it"
        " to reduce variance.",
    )
    advantage_normalization: Literal["std", "batch", "none"] = _preset_field(
        "advantage_normalization",
        description="Divide advantages by the standard deviation of their group, whiten them over the"
        " tokens of the step, or neither (Dr. GRPO). Set none where easy and hard prompts weigh"
        " too much.",
    )
    discount: float = _preset_field(
        "discount",
        ge=0,
        le=1,
        description="Gamma: the factor that a reward loses with every earlier token, with baseline none or"
        " critic. Lower it to let early tokens learn less from the end; at 0 a token learns from its reward"
        " alone, as in distillation.",
    )
    gae_lambda: float = _preset_field(
        "gae_lambda",
        ge=0,
        le=1,
        description="Lambda of generalized advantage estimation. Lower it to rely more on the critic, with"
        " less noise and more bias; 1 suits long responses with one reward at the end.",
    )
    ratio: Literal["token", "sequence"] = _preset_field(
        "ratio",
        description="Clip the ratio of each token, or the mean ratio of a whole response (GSPO). Set"
        " sequence, with a clip range of about 1e-4, where token ratios are noisy.",
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
        description="Weights of the tokens in the loss. token_mean gives all tokens of the batch the same"
        " weight, so that long responses count more; sequence_mean does so for responses; constant divides by"
        " max_response_length, independent of the sampled lengths (Dr. GRPO).",
    )
    entropy_coefficient: float = _preset_field(
        "entropy_coefficient",
        ge=0,
        description="Weight of the entropy in the objective. Raise it a little (1e-3) when the policy stops"
        " exploring; 0 saves its backward pass.",
    )
    reward_coefficient: float = _preset_field(
        "reward_coefficient",
        ge=0,
        description="Factor of the task's reward in the objective. Raise it above 0 with distillation, to"
        " learn from a teacher and from the task; other algorithms rarely need it.",
    )
    kl_coefficient: float = _preset_field(
        "kl_coefficient",
        ge=0,
        description="Weight of the KL penalty towards the policy before RL, or the teacher. Raise it when the"
        " policy drifts too far; 0 keeps no reference policy and saves a forward pass.",
    )
    teacher: PathText | None = Field(
        None,
        min_length=1,
        description="Run directory or Hugging Face directory of a policy with the same tokens, the reference"
        " of the KL penalty; null is the policy before RL. Set it to distil a larger model, with algorithm"
        " distillation or beside the reward of another one.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = _preset_field(
        "kl_estimator",
        description="Estimator of the KL divergence: k1 is unbiased and noisy, k2 biased with the right"
        " gradient, k3 unbiased and positive. Use k1 in the reward, k2 or k3 in the loss.",
    )
    kl_in: Literal["loss", "reward"] = _preset_field(
        "kl_in",
        description="Place of the KL penalty: a term of the loss, or subtracted from the reward (token by"
        " token with baseline none or critic). Set reward to use k1.",
    )
    correction_cap: float | None = _preset_field(
        "correction_cap",
        gt=0,
        description="Largest importance weight of a token, the ratio of training to rollout probability"
        " (truncated importance sampling); 2 is usual. Set it where engine and training compute different"
        " probabilities; null applies no weights, which is exact on a CPU.",
    )
    correction_mask: Literal["none", "token", "sequence"] = _preset_field(
        "correction_mask",
        description="Leave out tokens, or whole responses by their mean ratio, whose ratio of training to"
        " rollout probability is outside correction_low to correction_high. Set it where"
        " outliers spoil updates.",
    )
    correction_low: float = _preset_field(
        "correction_low",
        ge=0,
        le=1,
        description="Smallest ratio that correction_mask accepts. Set it near 1, such as 0.99, for sequence.",
    )
    correction_high: float = _preset_field(
        "correction_high",
        ge=1,
        description="Largest ratio that correction_mask accepts. Set it near 1, such as 1.01, for sequence.",
    )
    overlong_buffer: CountOrOff = _preset_field(
        "overlong_buffer",
        description="Number of last tokens before max_response_length that cost reward, linearly; 0 is off."
        " Set it when truncated responses make rewards noisy.",
    )
    overlong_penalty: float = _preset_field(
        "overlong_penalty",
        ge=0,
        description="Reward that a response of the full length loses. Match it to the size of the task's"
        " reward.",
    )
    dynamic_sampling: bool = _preset_field(
        "dynamic_sampling",
        description="Replace groups whose rewards are all equal (no gradient) by new groups until the batch"
        " is full. Set it, at the cost of further rollouts, when many groups are too easy or too"
        " hard.",
    )
    dynamic_sampling_max_rounds: Count = _preset_field(
        "dynamic_sampling_max_rounds",
        description="Most rounds of rollouts before dynamic sampling stops with an error. Raise it for very"
        " hard or very easy tasks.",
    )
    dynamic_sampling_part: str | None = Field(
        None,
        min_length=1,
        description="Part of the reward that has to differ within a group for dynamic sampling to keep it;"
        " null is the whole reward. Set it to the part of correctness, such as correct or exact, where"
        " rewards are shaped: groups whose format alone differs are then replaced, too.",
    )
    mask_truncated: bool = _preset_field(
        "mask_truncated",
        description="Leave responses that end at max_response_length out of the loss; their rewards still"
        " count in the baseline of their group (DAPO's overlong filtering). Set it where truncated responses"
        " would be right if they could go on.",
    )
    skip_zero_advantages: bool = Field(
        True,
        description="Leave responses with advantage 0 (all of a group right, or all wrong) out of updates,"
        " because they have no gradient. Set it to false to measure entropy and mismatch on them too.",
    )
    critic: CriticConfig = CriticConfig()

    @property
    def compares_groups(self) -> bool:
        """Whether rewards are compared within a group, so that a group of one has no gradient."""
        return self.advantage_baseline in ("group", "leave_one_out")

    @property
    def corrects_rollout(self) -> bool:
        """Whether the training pass computes logprobs before the first update, to correct the rollout's."""
        return self.correction_cap is not None or self.correction_mask != "none"

    @property
    def advantages_alone(self) -> bool:
        """Whether a response with advantage 0 has no gradient: neither KL nor entropy is in the loss, and no
        critic is trained.
        """
        kl_in_loss = self.kl_coefficient > 0 and self.kl_in == "loss"
        return not kl_in_loss and self.entropy_coefficient == 0 and self.advantage_baseline != "critic"

    @property
    def skips_responses(self) -> bool:
        """Whether updates leave out responses with advantage 0."""
        return self.skip_zero_advantages and self.advantages_alone

    def describe(self, max_response_length: int) -> str:
        """Returns the name, and the settings that differ from the paper's for this longest response."""
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
