"""The sections and keys of the config: types, defaults, reasons, and what cannot go together."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rljax.errors import ConfigError


class Section(BaseModel):
    """Keys that belong together: immutable, none unknown, none converted silently (but 1 will do for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Buckets = Annotated[tuple[Count, ...], Field(strict=False)]  # YAML has lists only; the items stay strict


class ShapeConfig(Section):
    """Architecture of a policy made from scratch."""

    hidden_size: Count = Field(
        description="Width of the residual stream. Raise for capacity; cost grows with its square."
    )
    num_layers: Count = Field(
        description="Decoder layers. Raise for longer chains of reasoning; decoding time grows in step."
    )
    num_heads: Count = Field(description="Query heads; a multiple of num_kv_heads.")
    num_kv_heads: Count = Field(
        description="Key/value heads. Fewer make the KV cache, and so long decodes, cheaper."
    )
    head_dim: Count = Field(
        description="Size of a head, even; num_heads * head_dim may differ from hidden_size."
    )
    mlp_size: Count = Field(
        description="Width of the SwiGLU layer, where most weights are; about 2.7 times hidden_size is usual."
    )
    rope_theta: float = Field(
        10_000.0,
        gt=0,
        description="Base of the rotary frequencies. Raise for contexts of many thousand tokens.",
    )
    tie_embeddings: bool = Field(
        True, description="Use the embedding as the LM head. Turn off for large models with weights to spare."
    )
    qk_norm: bool = Field(
        True,
        description="Normalise queries and keys (Qwen3); steadier at high learning rates. Off makes a Llama.",
    )
    attention_bias: bool = Field(
        False, description="Bias on the query, key and value projections (Qwen2); excludes qk_norm."
    )
    max_positions: Count = Field(
        4096, description="Longest sequence the policy is made for; raise when prompt and response need more."
    )

    @model_validator(mode="after")
    def _check(self) -> "ShapeConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"policy.shape.num_heads: {self.num_heads} is not a multiple of num_kv_heads"
                f" {self.num_kv_heads};"
                " every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"policy.shape.head_dim: {self.head_dim} is odd; rotary embeddings turn pairs, so it"
                " must be even"
            )
        if self.qk_norm and self.attention_bias:
            raise ValueError(
                "policy.shape.attention_bias: cannot be true together with qk_norm;"
                " Qwen2 has the bias, Qwen3 the norms, and no supported architecture both"
            )
        return self


class GrowthConfig(Section):
    """Make the policy larger after its warm start without changing what it computes: new channels, neurons
    and layers write zeros. For benchmarks: the cost of a large policy with the behaviour of a small one.
    """

    hidden_size: Count = Field(description="Width of the residual stream; products get wider with it.")
    mlp_size: Count = Field(description="Width of the SwiGLU layers; most of the weights that are added.")
    num_layers: Count = Field(description="Decoder layers; each adds the latency of a layer.")


class PolicyConfig(Section):
    """The model to be trained: a Hugging Face directory, or a new one of a given shape."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Hugging Face directory to start from. Set this or policy.shape, not both.",
    )
    shape: ShapeConfig | None = Field(
        None, description="Architecture of a policy made on the spot; set this or policy.path."
    )
    growth: GrowthConfig | None = Field(
        None, description="Grow the policy to a size worth measuring; null trains it as it is."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of activations and of the weights while they are used; master weights are always"
        " float32. bfloat16 halves memory and is fast on TPU and GPU; float32 is the faster one on most"
        " CPUs.",
    )

    @model_validator(mode="after")
    def _check(self) -> "PolicyConfig":
        if self.path is None and self.shape is None:
            raise ValueError(
                "policy: neither policy.path (a Hugging Face directory) nor policy.shape (a new"
                " model) is set; set one"
            )
        if self.path is not None and self.shape is not None:
            raise ValueError(
                "policy: both policy.path and policy.shape are set; keep one (policy.shape=null"
                " drops the shape)"
            )
        return self


class WarmStartConfig(Section):
    """Supervised training on the task's worked solutions before RL; leave the section out (null) for none."""

    steps: Count = Field(
        500,
        description="Updates. Too few and no sample is ever right, so RL has no signal; too many leave RL"
        " nothing to gain.",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="Peak learning rate. Lower it for a pretrained policy (1e-5)."
    )
    tokens_per_step: Count = Field(
        8192, description="Tokens in an update's batch. Raise when the loss is noisy and time allows."
    )
    cache_dir: str = Field(
        "cache/warm_start",
        min_length=1,
        description="Where the warmed-up policy is kept for the next run with the same settings; delete it"
        " to start over.",
    )


class TaskConfig(Section):
    """What is to be learned: prompts and a reward that can be checked."""

    name: str = Field(min_length=1, description="Which registered task to train on.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the task, by name, such as its difficulty; see docs/tasks.md.",
    )
    problems: CountOrOff = Field(
        0,
        description="Train on this many problems, which come back epoch after epoch; 0 never repeats one."
        " Set it to see what history is worth to a drafter.",
    )


class RolloutConfig(Section):
    """Sampling of responses."""

    prompts_per_step: Count = Field(
        32, description="Prompts a step (P). Raise for steadier gradients at proportional cost."
    )
    samples_per_prompt: Count = Field(
        8,
        description="Responses to each prompt, the group (G). Raise when groups are often all right or all"
        " wrong.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Of the sampling distribution, which is also the one trained. Lower explores less.",
    )
    top_k: CountOrOff = Field(
        0, description="Sample among the k likeliest tokens; 0 is off. Filters make training narrower."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample inside the smallest set with this probability; 1.0 is off. Cuts nonsense tails.",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Drop tokens less likely than this times the likeliest; 0 is off. Follows confidence.",
    )
    max_prompt_length: Count = Field(
        512, description="Longest prompt in tokens; raise when the task's prompts do not fit."
    )
    max_response_length: Count = Field(
        1024,
        description="Longest response in tokens. Raise when many are cut off; the long tail sets the time"
        " of a step.",
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        (),
        description="Texts that end a response besides the end-of-sequence tokens; for policies that do"
        " not stop by themselves.",
    )

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        if self.top_k == 1:
            raise ValueError(
                "rollout.top_k: 1 makes all samples of a prompt the same, so nothing is learned; set"
                " 0 (off) or at least 2"
            )
        return self


class EngineConfig(Section):
    """The decode engine. Nothing here changes a sampled token while row_invariant is on."""

    max_slots: Count = Field(
        64,
        description="Responses decoded at once. Raise for throughput until memory or arithmetic is full;"
        " the rest wait.",
    )
    row_invariant: bool = Field(
        True,
        description="Make a request's tokens and logprobs the same bits whatever else is in the batch."
        " Turn off to measure what exactness costs, or where near-ties may flip.",
    )
    batch_buckets: Buckets | None = Field(
        None,
        description="Batch sizes that are compiled, ascending; null is powers of two. Fewer compile"
        " faster, more waste less in the long tail.",
    )
    cache_buckets: Buckets | None = Field(
        None,
        description="KV cache lengths that are compiled, ascending; null grows by a half. Set to fit"
        " known lengths.",
    )
    decode_steps_per_visit: Count = Field(
        16,
        description="Tokens decoded on the device between two looks of the host. Raise where the host is"
        " slow; finished slots idle until the next look.",
    )
    verification: Literal["coupled", "rejection", "target_only"] = Field(
        "coupled",
        description="How drafts are verified. coupled samples the tokens of plain decoding, bit for bit; the"
        " others sample from the same distribution by other rules, for comparison.",
    )
    compilation_cache: str | None = Field(
        "cache/compilation",
        description="Directory that keeps compiled programs for the next process; null compiles anew every"
        " time.",
    )


Kernel = Literal["xla", "mosaic_gpu", "mosaic_tpu", "interpret_gpu", "interpret_tpu"]


def _several(given: Any) -> Any:
    """A name alone is a list of one, and a list of none leaves the choice open."""
    return (given,) if isinstance(given, str) else None if given == [] else given


Kernels = Annotated[Annotated[tuple[Kernel, ...], Field(strict=False)] | None, BeforeValidator(_several)]


class KernelsConfig(Section):
    """Who computes the operations that decide the speed on an accelerator (docs/kernels.md): xla, a Pallas
    kernel (mosaic_gpu, mosaic_tpu; interpret_... runs one on a CPU, for tests), several in the order in which
    they are tried, or null for what is known of device and shape."""

    noisy_argmax: Kernels = Field(
        None, description="The sampled token. Name one to measure it, or to rule a kernel out as a cause."
    )
    token_logprobs: Kernels = Field(
        None,
        description="Log-probabilities and entropy in training. A kernel needs no memory for logits: set it"
        " where a large vocabulary leaves none.",
    )
    tree_attention: Kernels = Field(
        None,
        description="Attention of decoding and verification. A kernel reads no further than each slot's"
        " length: set it for long responses of uneven length.",
    )
    quantized_product: Kernels = Field(
        None, description="Products of the quantized self-drafter: how much it saves depends on them."
    )
    compaction: Kernels = Field(
        None, description="Accepted paths into the KV cache. Name one to measure it, or to rule it out."
    )


class SpeculationConfig(Section):
    """Speculative decoding. It changes how long rollouts take, and (with engine.verification: coupled) no
    token.
    """

    drafter: str | None = Field(
        None,
        min_length=1,
        description="Who proposes tokens: prompt_lookup, srt, histospec, suffix_decoding, quantized, eagle,"
        " small_model; null decodes plainly. srt suits prompts that come back and groups of samples; the last"
        " three also new prompts: the policy in fewer bits, a head trained beside it, a smaller model.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the drafter, by name; see docs/drafters.md."
    )
    others: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="More drafters, each with its arguments; before every pass the one that promises most"
        " drafts. Add eagle or quantized to srt where some prompts are new and others come back.",
    )
    choice: Literal["expected", "bandit", "roofline", "ladder", "fixed"] = Field(
        "expected",
        description="How it is decided who drafts, and how far: before every pass, by the tokens per second"
        " that acceptance and times so far promise; by a bandit over strategies (TLT's BEG-MAB); with the"
        " quantized drafter, by EfficientRollout's roofline and patience ladder; by SpecActor's draft ladder,"
        " for a rollout and anew for its stragglers; or not at all (fixed): the one strategy of"
        " speculation.strategies, always, to see what deciding is worth.",
    )
    calibration_dir: str = Field(
        "cache/calibration",
        min_length=1,
        description="With choice: roofline, where scripts/calibrate.py keeps the device's constants.",
    )
    mix: bool = Field(
        False,
        description="With choice: expected, verify drafts of several drafters as one tree. Pays where they"
        " fail in different places and verification is cheap.",
    )
    strategies: list[dict[str, Any]] = Field(
        default_factory=list,
        description="With choice: bandit, what it may choose from, each {drafter, depth, top_k, nodes}; empty"
        " takes a few sizes of every drafter. With choice: fixed, the one.",
    )
    epsilon: float = Field(
        0.1, ge=0, le=1, description="How often the bandit tries any strategy. Raise it where much changes."
    )
    window: Count = Field(
        32, description="Uses of a strategy that the bandit remembers. Lower it to forget sooner."
    )
    verify_buckets: Buckets = Field(
        (8, 16, 32, 64, 128),
        description="Tokens of a verifying pass over all responses that are compiled, ascending; before every"
        " pass the size that promises most is chosen. Larger ones pay where memory, not arithmetic, is the"
        " limit.",
    )
    max_drafts: Count = Field(
        15,
        description="Most draft tokens of one response in a pass. Raise it where drafts are right for long"
        " stretches; attention is computed for that many.",
    )
    max_batch: Count = Field(
        16,
        description="Larger batches decode plainly. Raise it on devices where verifying many responses at"
        " once still costs little; every batch bucket up to it compiles more programs.",
    )
    overlap: bool = Field(
        False,
        description="Draft for one half of the responses while the device verifies the other. Pays where"
        " drafting takes a good part of a pass (speculation/idle_share); where reading weights is what a pass"
        " costs, two half passes cost nearly two whole ones.",
    )
    run_ahead_below: CountOrOff = Field(
        0,
        description="Once no more than this many responses are still running, idle slots sample the next"
        " step's requests under their own noise, into drafts only; 0 is off. Pays where prompts are new and"
        " updates are small.",
    )
    run_ahead_share: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Most of a rollout's time that putting such requests into slots may take. Lower it when"
        " the tail gets longer by it.",
    )

    @model_validator(mode="after")
    def _check(self) -> "SpeculationConfig":
        if self.run_ahead_below and self.drafter is None:
            raise ValueError(
                "speculation.run_ahead_below: needs a drafter to fall back to; set speculation.drafter"
            )
        if self.others and self.drafter is None:
            raise ValueError("speculation.others: needs a first drafter; set speculation.drafter")
        if self.mix and (self.choice != "expected" or not self.others):
            raise ValueError("speculation.mix: needs speculation.others, and speculation.choice: expected")
        if self.strategies and self.choice not in ("bandit", "fixed"):
            raise ValueError("speculation.strategies: only speculation.choice: bandit or fixed reads them")
        if self.choice == "fixed" and len(self.strategies) != 1:
            raise ValueError(
                f"speculation.choice: fixed needs one strategy in speculation.strategies, got"
                f" {len(self.strategies)}"
            )
        if self.choice == "roofline" and (self.drafter != "quantized" or self.others):
            raise ValueError("speculation.choice: roofline needs speculation.drafter: quantized, alone")
        if self.drafter in self.others:
            raise ValueError(f"speculation.others: {self.drafter} is speculation.drafter already")
        return self

    @property
    def drafters(self) -> list[str]:
        """The names of all drafters."""
        return [] if self.drafter is None else [self.drafter, *self.others]


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
DEVICE_DRAFTERS = ("quantized", "eagle", "small_model")  # they draft on the device
MAX_NODES = 64  # of a verifying pass, as in rljax/engine/draft_tree.py, which imports JAX


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


class MeshConfig(Section):
    """Devices along each axis of the mesh; the product may not exceed the devices there are."""

    data: Count = Field(
        1, description="Replicas, each with its share of the batch. The cheapest way to use more devices."
    )
    fsdp: Count = Field(
        1, description="Devices that share the weights and optimizer state. Raise when these do not fit."
    )
    tensor: Count = Field(
        1, description="Devices that split every layer. Raise to decode faster where links are fast."
    )

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes."""
        return self.data * self.fsdp * self.tensor


class CheckpointConfig(Section):
    """Checkpoints of the run; a run that is started again with the same config continues from the newest."""

    every: CountOrOff = Field(
        10,
        description="Steps between checkpoints; 0 saves only at the end. Lower where machines are taken"
        " away.",
    )
    keep: Count = Field(2, description="Newest checkpoints kept. Raise to compare policies along the run.")


class EvaluationConfig(Section):
    """Reward on held-out problems, before, during and after training."""

    every: CountOrOff = Field(
        0,
        description="Steps between evaluations; 0 is only before and after. More show the curve, and cost"
        " time.",
    )
    problems: CountOrOff = Field(
        128,
        description="Held-out problems each time; 0 turns evaluation off. The error of the mean falls with"
        " the root.",
    )


class ExperimentConfig(Section):
    """The whole experiment."""

    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="All randomness derives from it. Change it to repeat an experiment independently.",
    )
    run_dir: str = Field(
        min_length=1,
        description="Where config, metrics and checkpoints go; starting again with the same one resumes"
        " the run.",
    )
    policy: PolicyConfig
    warm_start: WarmStartConfig | None = None
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    kernels: KernelsConfig = KernelsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="before")
    @classmethod
    def _scale_overlong_buffer(cls, data: Any) -> Any:
        """DAPO's buffer follows the response length, which the algorithm section does not know."""
        if not isinstance(data, dict) or not isinstance(data.get("algorithm"), dict):
            return data
        algorithm, rollout = data["algorithm"], data.get("rollout", {})
        if algorithm.get("name") != "dapo" or "overlong_buffer" in algorithm or not isinstance(rollout, dict):
            return data
        length = rollout.get("max_response_length", RolloutConfig().max_response_length)
        if not isinstance(length, int):
            return data  # the type error is reported where it is
        return {**data, "algorithm": {**algorithm, "overlong_buffer": max(length, 0) // OVERLONG_SHARE}}

    @model_validator(mode="after")
    def _check(self) -> "ExperimentConfig":
        problem = next(_impossible_combinations(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self


def _impossible_combinations(config: ExperimentConfig) -> Iterator[str]:
    """One line for each pair of keys in different sections that cannot hold together."""
    rollout, engine, algorithm, training = config.rollout, config.engine, config.algorithm, config.training
    group, num_samples = rollout.samples_per_prompt, rollout.prompts_per_step * rollout.samples_per_prompt
    length = rollout.max_prompt_length + rollout.max_response_length
    length_sum = f"rollout.max_prompt_length + max_response_length = {length}"
    if algorithm.dynamic_sampling and group < 2:
        yield (
            "algorithm.dynamic_sampling: needs rollout.samples_per_prompt of at least 2, got 1;"
            " a group of one always has equal rewards, so no batch would ever fill"
        )
    if group < 2:
        yield (
            "rollout.samples_per_prompt: 1 makes every advantage 0 (rewards are compared within the group);"
            " set at least 2"
        )
    if config.policy.shape is not None and config.policy.shape.max_positions < length:
        yield f"policy.shape.max_positions: {config.policy.shape.max_positions} is less than {length_sum}"
    if training.pack_length < length:
        yield (
            f"training.pack_length: {training.pack_length} is less than {length_sum};"
            " a row must hold the longest sequence"
        )
    if algorithm.overlong_buffer >= rollout.max_response_length:
        yield (
            f"algorithm.overlong_buffer: {algorithm.overlong_buffer} must be less than"
            f" rollout.max_response_length {rollout.max_response_length}"
        )
    if training.minibatches_per_step > num_samples:
        yield (
            f"training.minibatches_per_step: {training.minibatches_per_step} is more than the {num_samples}"
            " responses of a step (rollout.prompts_per_step * samples_per_prompt)"
        )
    if config.speculation.run_ahead_below and engine.verification != "coupled":
        yield (
            f"speculation.run_ahead_below: needs engine.verification: coupled, got {engine.verification}; the"
            " other rules want drafts that know nothing of the noise"
        )
    drafters = config.speculation.drafters
    if "quantized" in drafters and engine.verification != "coupled":
        yield (
            "speculation.drafter: quantized needs engine.verification: coupled, got"
            f" {engine.verification}; how much of a chain is verified depends on its noise"
        )
    if "eagle" in drafters and config.mesh.num_devices > 1:
        yield (
            f"speculation.drafter: eagle drafts on one device, but mesh has {config.mesh.num_devices};"
            " use another drafter there"
        )
    if config.speculation.run_ahead_below and all(name in DEVICE_DRAFTERS for name in drafters):
        yield (
            f"speculation.run_ahead_below: must be 0 with speculation.drafter: {drafters[0]}, unless"
            " speculation.others holds a drafter on the host, such as srt, that proposes what was sampled"
        )
    if config.speculation.max_drafts >= MAX_NODES:
        yield f"speculation.max_drafts: {config.speculation.max_drafts} is more than {MAX_NODES - 1}"
    slots, slots_named = engine.max_slots, f"engine.max_slots {engine.max_slots}"
    for key, buckets, largest, what in (
        ("engine.batch_buckets", engine.batch_buckets, slots, slots_named),
        ("engine.cache_buckets", engine.cache_buckets, length, length_sum),
        ("speculation.verify_buckets", config.speculation.verify_buckets, 4, "a pass over two responses"),
    ):
        if buckets is None:
            continue
        if not buckets:
            yield f"{key}: is empty; list at least one size, or leave the key out"
        elif any(a >= b for a, b in itertools.pairwise(buckets)):
            yield f"{key}: {list(buckets)} must ascend, without repeats"
        elif buckets[-1] < largest:
            yield f"{key}: the largest, {buckets[-1]}, is less than {what}"


def check_devices(mesh: MeshConfig, num_devices: int) -> None:
    """Raises a ConfigError if the mesh needs more devices than there are; called once they are known."""
    if mesh.num_devices > num_devices:
        raise ConfigError(
            f"mesh: data {mesh.data} * fsdp {mesh.fsdp} * tensor {mesh.tensor} = {mesh.num_devices} devices,"
            f" but there {'is' if num_devices == 1 else 'are'} {num_devices}"
        )
