"""Keys of decoding: sampling, the decode engine, and its kernels."""

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

    @property
    def oldest_lag(self) -> int:
        """Steps by which a token's weights may be older than those that learn from it."""
        return max(self.staleness, self.max_staleness)

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        if self.top_k == 1:
            raise ValueError(
                "rollout.top_k: 1 makes all samples of a prompt the same, so nothing is learned; set"
                " 0 (off) or at least 2"
            )
        return self


def _present_word(value: Any) -> Any:
    """What `engine.compile` is called now: run directories of earlier releases have `behind`."""
    return "background" if value == "behind" else value


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
    decode_loop: Literal["auto", "until", "fixed"] = Field(
        "auto",
        description="Loop of decode_steps_per_sync steps on the device. until ends as soon as it may, and a"
        " GPU's host reads before every step whether there is one. fixed computes all steps, the last ones"
        " at times in vain, and the host runs ahead. auto measures both at the start, and takes fixed where"
        " the last steps were not in vain; on a CPU, which has nothing to wait for, until. Set one to measure"
        " it.",
    )
    overlap: bool = Field(
        False,
        description="In plain decoding without stop strings and tools, read the results of steps while the"
        " next ones run, once no response waits for a slot. Set true where the host takes long beside the"
        " device. The tokens are the same.",
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
    compile: Annotated[Literal["before", "background"], BeforeValidator(_present_word)] = Field(
        "background",
        description="When programs are compiled that the first step does not begin with. background compiles"
        " them in a thread: decode states shrink and drafts are verified once theirs are ready; before waits"
        " for all of them and measures passes undisturbed, as benchmarks need.",
    )
    compilation_cache: PathText | None = Field(
        "cache/compilation",
        description="Directory that keeps compiled programs for the next process; null compiles every time."
        " Move it to share the programs between runs.",
    )


def misfit(buckets: tuple[int, ...] | None, largest: int, what: str) -> str:
    """Returns what is wrong with compiled sizes, of which one must be `largest` or more, for `what`."""
    if buckets is None:
        return ""
    if not buckets:
        return "is empty; list at least one size, or leave the key out"
    if any(a >= b for a, b in itertools.pairwise(buckets)):
        return f"{list(buckets)} must ascend, without repeats"
    return f"the largest, {buckets[-1]}, is less than {what}" if buckets[-1] < largest else ""


Kernel = Literal[
    "xla", "mosaic_gpu", "mosaic_tpu", "triton", "interpret_gpu", "interpret_tpu", "interpret_triton"
]


def _several(names: Any) -> Any:
    """Returns a single name as a list of one, and an empty list as None."""
    return (names,) if isinstance(names, str) else None if names == [] else names


Kernels = Annotated[Annotated[tuple[Kernel, ...], Field(strict=False)] | None, BeforeValidator(_several)]


class KernelsConfig(Section):
    """Implementations of the operations that determine the speed on an accelerator (docs/kernels.md): xla, a
    Pallas kernel (mosaic_gpu, mosaic_tpu, triton; interpret_... runs one on a CPU, for tests), several in the
    order in which they are tried, or null for a default that depends on device and policy."""

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
        description="Implementation of attention in decoding and verification, and of writing a decoded token"
        " to the KV cache. Set a kernel, which reads no further than the length of each slot, for long"
        " responses of uneven length.",
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
    packed_attention: Kernels = Field(
        None,
        description="Implementation of attention in training and prefill. null is triton on Hopper where"
        " engine.row_invariant is false. Name triton or mosaic_tpu, FlashAttention with other bits than"
        " decoding, for faster updates where these need not be exact.",
    )
    gated_product: Kernels = Field(
        None,
        description="Implementation of an MLP's gate, up and activation, where products are computed in slabs"
        " of rows. Name one to measure it, or to rule it out.",
    )
    head_products: Kernels = Field(
        None,
        description="Implementation of a layer's queries, keys and values, with their norms and rotation,"
        " where products are computed in slabs of rows. Name one to measure it, or to rule it out.",
    )
