"""Keys of decoding: sampling, the decode engine, its kernels, and speculation."""

import itertools
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rljax.config.section import Buckets, Count, CountOrOff, PathText, Section

MAX_NODES = 64  # per request and verifying pass, as in rljax/engine/draft_tree.py, which imports JAX


class RolloutConfig(Section):
    """Sampling of responses."""

    prompts_per_step: Count = Field(
        32, description="Prompts per step (P). Raise it for less noisy gradients at proportional cost."
    )
    samples_per_prompt: Count = Field(
        8,
        description="Responses to each prompt, the group (G). Raise it when groups are often all right or all"
        " wrong.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Temperature of the sampling distribution, which is the one trained. Lower it to explore"
        " less.",
    )
    top_k: CountOrOff = Field(
        0,
        description="Sample among the k likeliest tokens; 0 is off. Set it against very unlikely tokens, at"
        " the cost of exploration.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the smallest set of tokens with this probability; 1.0 is off. Lower it"
        " against nonsense tokens in the tail.",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Drop tokens less likely than this times the likeliest; 0 is off. Set it for a filter"
        " that is stricter where the policy is confident.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Divide the positive logits of tokens that occur in the response by this, and multiply"
        " the negative ones; 1.0 is off. Raise it (1.05) when responses run into loops.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Amount subtracted from a token's logit for every occurrence in the response; 0 is off."
        " Raise it when responses run into loops: the penalty grows with each round.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Amount subtracted from a token's logit once it occurs in the response; 0 is off. Raise"
        " it for more varied words.",
    )
    max_prompt_length: Count = Field(
        512, description="Most tokens of a prompt. Raise it when the task's prompts do not fit."
    )
    long_prompts: Literal["leave_out", "stop"] = Field(
        "leave_out",
        description="Reaction to problems whose prompt has more tokens: leave_out asks the next problem"
        " instead, stop ends the run with the length. Set stop where every problem has to be asked.",
    )
    max_response_length: Count = Field(
        1024,
        description="Most tokens of a response. Raise it when many responses are truncated; lower it for"
        " faster steps, since the longest responses determine their time.",
    )
    staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        0,
        description="Steps by which the weights that sample a step's responses are older than those that"
        " learn from them. Set 1 with cluster.workers to decode the next step's responses while the trainer"
        " updates; such a run can be repeated bit for bit as well, with any number of workers or none.",
    )
    max_staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="Most steps by which weights may be older, with batches formed of the groups that end"
        " first and responses that go on under newer weights; 0 is off. Set it with cluster.workers where"
        " few long responses hold up every step, and a run may depend on timing: schedule.jsonl repeats it.",
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        (),
        description="Texts, of special tokens too, that end a response besides the EOS tokens."
        " Set them for policies that do not stop by themselves; a single token may be one of"
        " policy.extra_eos_tokens instead.",
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
        description="Most responses decoded at once; further ones wait. Raise it for throughput until"
        " memory or arithmetic is the limit.",
    )
    row_invariant: bool | Literal["auto", "warn"] = Field(
        "auto",
        description="Make the tokens and logprobs of a request independent of the batch, bit for bit. A"
        " measurement at the start checks this; where it fails, true stops the run, and warn"
        " continues and counts differences (mismatch/tokens). auto is true on a CPU and warn on a GPU or"
        " TPU. Set true where a run must be exact or not begin, false for the most speed where near-ties"
        " may flip.",
    )
    batch_buckets: Buckets | None = Field(
        None,
        description="Compiled batch sizes, ascending; null is powers of two on a CPU and 8, 32, 128 on"
        " a GPU or TPU. Set fewer to compile faster, more to waste less in the long tail.",
    )
    cache_buckets: Buckets | None = Field(
        None,
        description="Compiled KV cache lengths, ascending: up to 256 multiples of 64, above multiples of 256."
        " null grows by a half on a CPU and doubles on a GPU or TPU. Set them to fit known lengths.",
    )
    decode_steps_per_sync: Count = Field(
        16,
        description="Decode steps on the device between two host syncs. Raise where the host is slow;"
        " finished slots idle until the next sync.",
    )
    verification: Literal["coupled", "rejection", "target_only"] = Field(
        "coupled",
        description="Rule by which drafts are verified. coupled samples the tokens of plain decoding, bit for"
        " bit. Set another rule, which samples from the same distribution, for comparison.",
    )
    weights: Literal["replicated", "fsdp"] = Field(
        "replicated",
        description="How devices along mesh.fsdp hold the engine's copy of the policy. replicated decodes"
        " fastest; fsdp keeps a part of every matrix and gathers a layer at a time, in every step: for"
        " policies that do not fit otherwise. The tokens are the same.",
    )
    weight_blocks: bool = Field(
        True,
        description="On a CPU, keep a second copy of the policy's weights in blocks that few rows are"
        " multiplied with faster, where that was measured to be so. The tokens are the same. Set false to"
        " save the memory.",
    )
    compile: Literal["before", "behind"] = Field(
        "behind",
        description="When programs are compiled that the first step does not begin with. behind compiles them"
        " in a thread: decode states shrink and drafts are verified once theirs are ready; before waits for"
        " all of them and measures passes undisturbed, as benchmarks need.",
    )
    compilation_cache: PathText | None = Field(
        "cache/compilation",
        description="Directory that keeps compiled programs for the next process; null compiles every time."
        " Move it to share the programs between runs.",
    )


Kernel = Literal["xla", "mosaic_gpu", "mosaic_tpu", "interpret_gpu", "interpret_tpu"]


def _several(names: Any) -> Any:
    """Returns a single name as a list of one, and an empty list as None."""
    return (names,) if isinstance(names, str) else None if names == [] else names


Kernels = Annotated[Annotated[tuple[Kernel, ...], Field(strict=False)] | None, BeforeValidator(_several)]


class KernelsConfig(Section):
    """Implementations of the operations that determine the speed on an accelerator (docs/kernels.md): xla, a
    Pallas kernel (mosaic_gpu, mosaic_tpu; interpret_... runs one on a CPU, for tests), several in the order
    in which they are tried, or null for a default that depends on device and policy."""

    noisy_argmax: Kernels = Field(
        None,
        description="Implementation of sampling a token. Name one to measure it, or to rule out a kernel as"
        " the cause of a problem.",
    )
    token_logprobs: Kernels = Field(
        None,
        description="Implementation of log-probabilities and entropy in training. Set a kernel, which needs"
        " no memory for logits, for large vocabularies.",
    )
    tree_attention: Kernels = Field(
        None,
        description="Implementation of attention in decoding and verification. Set a kernel, which reads no"
        " further than the length of each slot, for long responses of uneven length.",
    )
    quantized_product: Kernels = Field(
        None,
        description="Implementation of the quantized self-drafter's matrix products. Name one to measure how"
        " much the drafter saves with it.",
    )
    round_to_nearest: Kernels = Field(
        None,
        description="Implementation of rounding the policy for the quantized self-drafter, once per step,"
        " with speculation.args.quantizer: rtn. Name one where speculation/refresh_seconds is"
        " noticeable.",
    )
    compaction: Kernels = Field(
        None,
        description="Implementation of moving accepted paths in the KV cache. Name one to measure it, or to"
        " rule it out.",
    )


class ToggleConfig(Section):
    """EfficientRollout's toggle and patience ladder, with choice: roofline; the defaults are the paper's
    (sections 3.2, 3.3 and 4.1)."""

    margin: float = Field(
        0.05,
        ge=0,
        description="By how much speculation must be predicted to be faster before it is switched on"
        " (epsilon). Raise it where the roofline promises more than the log shows; 0 starts earliest.",
    )
    lengths: Buckets = Field(
        (5, 7, 9, 11),
        min_length=1,
        description="Draft lengths of the patience ladder, ascending (Gamma); those above"
        " speculation.max_drafts are left out. Set shorter ones where few drafts are accepted, a single one"
        " for a fixed length.",
    )
    first: Count | None = Field(
        None,
        description="Draft length of the first training step (gamma_0), one of lengths; null is the shortest."
        " Raise it where the drafter is known to be good, to skip the first rungs.",
    )
    alpha_up: float = Field(
        0.94,
        ge=0,
        le=1,
        description="Share of accepted drafts from which the next longer length is taken. Lower it where"
        " drafting and verifying a further token is cheap.",
    )
    alpha_down: float = Field(
        0.85,
        ge=0,
        le=1,
        description="Share of accepted drafts at which the next shorter length is taken. Lower it where"
        " rejected drafts cost little; it stays below alpha_up.",
    )
    patience: Count = Field(
        2,
        description="Training steps in a row that must agree before the length changes (P). Raise it where"
        " acceptance varies from step to step.",
    )

    @model_validator(mode="after")
    def _check(self) -> "ToggleConfig":
        if any(b <= a for a, b in itertools.pairwise(self.lengths)):
            raise ValueError(f"speculation.toggle.lengths: {list(self.lengths)} should be ascending")
        if self.first is not None and self.first not in self.lengths:
            raise ValueError(
                f"speculation.toggle.first: {self.first} is none of lengths {list(self.lengths)}"
            )
        if self.alpha_down >= self.alpha_up:
            raise ValueError(
                f"speculation.toggle.alpha_down: {self.alpha_down} should be less than alpha_up"
                f" {self.alpha_up}"
            )
        return self


DecodingMode = Literal["plain", "coupled", "decoupled"]


class DecoupledConfig(Section):
    """Decoupled speculation: a small model or an EAGLE head on devices of its own drafts the next window
    while the policy verifies the last one (SpecActor, section 4.1)."""

    window: CountOrOff = Field(
        0,
        description="Most tokens that are drafted ahead at a time, 2 or more; 0 is off. Set it where devices"
        " are left over and the drafts are nearly always accepted; a rejection throws up to"
        " twice as many drafts away.",
    )
    devices: Annotated[tuple[CountOrOff, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Numbers of the devices that draft, from 0 on; several split the model by its heads."
        " null is the first behind those of the mesh. Set others that are nearer to the policy's, or 0 to"
        " share the policy's, without drafting and verifying at once.",
    )
    modes: Annotated[tuple[DecodingMode, ...], Field(strict=False, min_length=1)] = Field(
        ("plain", "coupled", "decoupled"),
        description="Ways to decode that SpecActor's Algorithm 1 chooses among, by measured times and"
        " acceptance. Set decoupled alone to measure what choosing is worth.",
    )

    @model_validator(mode="after")
    def _check(self) -> "DecoupledConfig":
        if self.window == 1:
            raise ValueError(
                "speculation.decoupled.window: 1 leaves nothing to draft ahead; set 0 (off) or at least 2"
            )
        return self

    @property
    def num_devices(self) -> int:
        """Number of devices that draft; 0 where nothing is decoupled."""
        if not self.window:
            return 0
        return 1 if self.devices is None else len(self.devices)


class SpeculationConfig(Section):
    """Speculative decoding. It shortens rollouts and, with engine.verification: coupled, changes no token."""

    drafter: str | None = Field(
        None,
        min_length=1,
        description="Drafter that proposes tokens: prompt_lookup, srt, histospec, suffix_decoding,"
        " quantized, eagle, small_model, or a class of yours as module:Class; null decodes"
        " without drafts. Set srt for prompts that return and groups of samples; quantized (the"
        " policy in fewer bits), eagle (a head trained beside it) or small_model (a smaller"
        " model) also for new prompts.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the drafter, by name; see docs/drafters.md."
    )
    others: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Further drafters by name, with their arguments; before every pass the manager chooses"
        " one. Add eagle or quantized to srt where some prompts are new and others return. kind among the"
        " arguments says which drafter it is, for several of a kind: tiny: {kind: small_model}; without it,"
        " the name does.",
    )
    choice: Literal["expected", "bandit", "roofline", "ladder", "fixed"] = Field(
        "expected",
        description="How the manager chooses drafter and draft length: expected, before every pass, by the"
        " tokens per second predicted from acceptance and times so far; bandit, by a bandit over"
        " strategies (TLT's BEG-MAB); roofline, with one drafter, by"
        " EfficientRollout's roofline and draft length schedule; ladder, by SpecActor's draft"
        " ladder, once per rollout, and by races for its stragglers; fixed, always the one strategy"
        " of speculation.strategies. Set fixed to measure the worth of choosing.",
    )
    calibration_dir: PathText = Field(
        "cache/calibration",
        min_length=1,
        description="Directory of the device's constants from scripts/calibrate.py, for choice: roofline."
        " Move it where several machines share a directory.",
    )
    toggle: ToggleConfig = ToggleConfig()
    mix: bool = Field(
        False,
        description="Verify drafts of several drafters as one tree: with choice: expected wherever several"
        " have drafted, with choice: bandit as further strategies. Set it where drafters fail at"
        " different tokens and verification is cheap.",
    )
    strategies: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Strategies of choice: bandit, as a list of {drafter, depth, top_k, nodes}; drafter:"
        " srt+eagle mixes their trees, and an empty list takes a few sizes of every drafter."
        " With choice: fixed, the one strategy. Set it to restrict the bandit to promising ones.",
    )
    batch_thresholds: Buckets = Field(
        (),
        description="With choice: bandit, the numbers of running responses, ascending, from which on each"
        " group of strategies is an arm, as in TLT's Algorithm 1: strategies that verify equally many nodes"
        " are a group, and the one with the most nodes has the first range. Empty lays the groups of every"
        " drafter along the batch buckets, with their neighbours. Set it where good sizes are known.",
    )
    epsilon: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Probability that the bandit tries a random strategy. Raise it where conditions change"
        " often.",
    )
    window: Count = Field(
        32, description="Number of uses of a strategy that the bandit remembers. Lower it to adapt faster."
    )
    verify_buckets: Buckets = Field(
        (8, 16, 32, 64, 128),
        description="Compiled sizes of a verifying pass, in tokens over all responses, ascending; before"
        " every pass the best predicted size is chosen. Add larger ones where memory bandwidth,"
        " not arithmetic, is the limit.",
    )
    max_drafts: Count = Field(
        15,
        description="Most draft tokens of one response in a pass. Raise it where long drafts are accepted;"
        " attention is always computed for this many.",
    )
    max_batch: Count = Field(
        16,
        description="Largest batch that is decoded with drafts. Raise it on devices where verifying many"
        " responses at once is cheap; every batch bucket up to it compiles more programs.",
    )
    overlap: bool = Field(
        False,
        description="Draft for one half of the responses while the device verifies the other half. Set it"
        " where drafting takes much of a pass (speculation/idle_share), but not where reading"
        " the weights dominates: two half passes then cost nearly two whole ones.",
    )
    decoupled: DecoupledConfig = DecoupledConfig()
    run_ahead_below: CountOrOff = Field(
        0,
        description="Number of running responses from which on idle slots sample requests of the next step"
        " (with algorithm.dynamic_sampling, of a further round where one is likely),"
        " with the noise of these requests, as drafts only; 0 is off. Set it where prompts are"
        " new and updates small. The batch shrinks later where these drafts save more than that costs.",
    )
    run_ahead_share: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Largest share of a rollout's time for inserting such requests into slots. Lower it"
        " when it lengthens the tail of rollouts.",
    )

    @model_validator(mode="after")
    def _check(self) -> "SpeculationConfig":
        if self.run_ahead_below and self.drafter is None:
            raise ValueError(
                "speculation.run_ahead_below: needs a drafter to fall back to; set speculation.drafter"
            )
        if self.args and self.drafter is None:
            raise ValueError(
                f"speculation.args.{next(iter(self.args))}: there is no drafter that would read it; set"
                " speculation.drafter, or speculation.args={}"
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
        self._check_thresholds()
        self._check_decoupled()
        if self.choice == "fixed" and len(self.strategies) != 1:
            raise ValueError(
                f"speculation.choice: fixed needs one strategy in speculation.strategies, got"
                f" {len(self.strategies)}"
            )
        if self.choice == "roofline" and (self.drafter is None or self.others):
            raise ValueError(
                "speculation.choice: roofline switches one drafter on and off; set speculation.drafter, and"
                " no speculation.others"
            )
        first = self.toggle.first
        if self.choice == "roofline" and first is not None and first > self.max_drafts:
            raise ValueError(
                f"speculation.toggle.first: {first} is more than speculation.max_drafts {self.max_drafts}"
            )
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

    def _check_decoupled(self) -> None:
        window, key = self.decoupled.window, "speculation.decoupled.window"
        if not window:
            return
        if self.drafter not in ("small_model", "eagle") or self.others:
            raise ValueError(
                f"{key}: needs speculation.drafter: small_model or eagle alone; others draft on the policy's"
                " devices, or take no time that could be hidden"
            )
        if self.choice != "expected":
            raise ValueError(
                f"{key}: is chosen by SpecActor's Algorithm 1; leave out speculation.choice: {self.choice}"
            )
        if self.overlap or self.run_ahead_below:
            raise ValueError(
                f"{key}: is not possible with speculation.overlap or run_ahead_below; leave these out"
            )
        if window > self.max_drafts:
            raise ValueError(f"{key}: {window} is more than speculation.max_drafts {self.max_drafts}")

    def _check_thresholds(self) -> None:
        thresholds, key = self.batch_thresholds, "speculation.batch_thresholds"
        if not thresholds:
            return
        if self.choice != "bandit" or not self.strategies:
            raise ValueError(f"{key}: needs speculation.choice: bandit, and speculation.strategies")
        if any(larger <= smaller for smaller, larger in itertools.pairwise(thresholds)):
            raise ValueError(f"{key}: should ascend, got {list(thresholds)}")
        if thresholds[-1] > self.max_batch:
            raise ValueError(
                f"{key}: from {thresholds[-1]} responses on nothing is drafted, since speculation.max_batch"
                f" is {self.max_batch}; raise that, or leave the threshold and its strategies out"
            )

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
