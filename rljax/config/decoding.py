"""Keys of decoding: what is sampled, how the engine computes it, and how speculation speeds it up."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rljax.config.section import Buckets, Count, CountOrOff, Section

MAX_NODES = 64  # of a verifying pass, as in rljax/engine/draft_tree.py, which imports JAX


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
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Divide positive logits of tokens that the response has, multiply negative ones; 1.0 is"
        " off. Raise (1.05) when responses run into loops.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="What a token's logit loses for every time that the response has it; 0 is off. Grows"
        " with a loop.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="What a token's logit loses once the response has it; 0 is off. Asks for other words.",
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
    row_invariant: bool | Literal["warn"] = Field(
        True,
        description="Make a request's tokens and logprobs the same bits whatever else is in the batch. It is"
        " measured at the start; true refuses a processor where it does not hold, warn goes on there and"
        " counts what differs (mismatch/tokens). false is fastest where near-ties may flip.",
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
        description="Decode steps on the device between two host syncs. Raise where the host is slow;"
        " finished slots idle until the next sync.",
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
    they are tried, or null for what is known of device and policy."""

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
    round_to_nearest: Kernels = Field(
        None,
        description="Rounding the policy for the quantized self-drafter, once a step. Name one where"
        " speculation/refresh_seconds shows; with speculation.args.quantizer: rtn.",
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
        " small_model, or a class of yours as module:Class; null decodes plainly. srt suits prompts that come"
        " back and groups of samples; quantized, eagle and small_model also new prompts: the policy in fewer"
        " bits, a head trained beside it, a smaller model.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the drafter, by name; see docs/drafters.md."
    )
    others: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="More drafters by name, each with its arguments; before every pass the one that promises"
        " most drafts. Add eagle or quantized to srt where some prompts are new and others come back. kind"
        " among the arguments says which drafter it is, for several of a kind: tiny: {kind: small_model};"
        " without it, the name does.",
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
        description="Verify drafts of several drafters as one tree: with choice: expected wherever several"
        " have drafted, with choice: bandit as further strategies. Pays where they fail in different places"
        " and verification is cheap.",
    )
    strategies: list[dict[str, Any]] = Field(
        default_factory=list,
        description="With choice: bandit, what it may choose from, each {drafter, depth, top_k, nodes}, where"
        " drafter: srt+eagle mixes their trees; empty takes a few sizes of every drafter. With choice: fixed,"
        " the one.",
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
        if self.mix and (self.choice not in ("expected", "bandit") or not self.others):
            raise ValueError(
                "speculation.mix: needs speculation.others, and speculation.choice: expected or bandit"
            )
        if self.mix and self.strategies:
            raise ValueError(
                "speculation.mix: adds to the default strategies; in speculation.strategies name what is"
                f" mixed, as {{drafter: {'+'.join(self.drafters)}, ...}}"
            )
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
        for name, args in self.others.items():
            if "kind" not in args:
                continue
            if not isinstance(args["kind"], str):
                raise ValueError(
                    f"speculation.others.{name}.kind: should be a drafter's name, got {args['kind']!r}"
                )
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(
                    f"speculation.others: {name!r} is no name for a drafter; use letters, digits, - and _"
                )
        return self

    @property
    def drafters(self) -> list[str]:
        """The names of all drafters."""
        return [] if self.drafter is None else [self.drafter, *self.others]

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every drafter, by its name."""
        first = {} if self.drafter is None else {self.drafter: self.drafter}
        return first | {name: args.get("kind", name) for name, args in self.others.items()}

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments of every drafter, by its name, without its kind."""
        first = {} if self.drafter is None else {self.drafter: self.args}
        return first | {
            name: {key: value for key, value in args.items() if key != "kind"}
            for name, args in self.others.items()
        }
