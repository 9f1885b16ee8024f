"""The policy in fewer bits drafts for itself: tokens a pass by format and quantizer, and bytes that it reads.

Real drafting, with a verifying pass behind each chain. All draft for the same responses, so they differ in
passes alone. EfficientRollout (appendix C.4) compares rounding to nearest with activation-aware quantization
(AWQ, Lin et al., arXiv 2306.00978, section 3.2), from activations of the training step before. AWQ shares
scales among projections with the same input; here each has its own, which can only be closer.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters.quantized import PROJECTIONS, QuantizedPolicy, WeightFormat, rtn
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.errors import UserError
from rljax.kernels import linear
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.blocked_weights import whole
from rljax.numerics.quantized import dequantize
from rljax.numerics.rows import Numerics
from rljax.requests import Request
from rollout_benchmarks.variants import collect_step, open_run, step_requests, with_keys

Quantizing = Literal["rtn", "clipped", "activation-aware"]
_W4, _W8 = WeightFormat(4, 128), WeightFormat(8, 0)
BITS: Mapping[str, tuple[WeightFormat, Quantizing]] = {
    "8 bits by output, integers": (WeightFormat(8, 0, "int8"), "rtn"),
    "8 bits by output": (_W8, "rtn"),
    "8 bits, groups of 128": (WeightFormat(8, 128), "rtn"),
    "4 bits, groups of 128": (_W4, "rtn"),
    "4 bits, groups of 32": (WeightFormat(4, 32), "rtn"),
    "4 bits by output": (WeightFormat(4, 0), "rtn"),
}
"""Formats by name, the first the baseline: the default on a CPU, then formats of the config and finer or
coarser ones.
"""
QUANTIZERS: Mapping[int, Mapping[str, tuple[WeightFormat, Quantizing]]] = {
    fmt.bits: {f"{fmt.bits} bits, {each}": (fmt, each) for each in ("rtn", "clipped", "activation-aware")}
    for fmt in (_W8, _W4)
}
"""Quantizers by bits and name, rounding to nearest first."""
_EXPONENTS = tuple(step / 10 for step in range(11))  # of scales that follow activations
_INPUTS = 256  # of a projection, on which exponents are compared
_CALIBRATED = 32  # responses whose activations are looked at


def self_draft_rows(
    config: ExperimentConfig,
    drafters: Mapping[str, tuple[WeightFormat, Quantizing]],
    responses: int,
    depth: int,
) -> list[Row]:
    """Counts verifying passes by drafter, the baseline first, at temperature 1: so many responses, each to a
    prompt and in a slot of its own, with chains of `depth` drafts. Raises a UserError if one has changed a
    token.
    """
    rollout = {"prompts_per_step": responses, "samples_per_prompt": 1, "temperature": 1.0}
    slots = {"max_slots": responses, "batch_buckets": (responses,)}
    with open_run(with_keys(config, rollout=rollout, engine=slots)) as (run, progress):
        params, requests = run.state.params, step_requests(run, 1)
        activations: list[dict[str, Array]] = []
        if any(quantizer == "activation-aware" for _, quantizer in drafters.values()):
            groups, _, _ = collect_step(run, run.collector, 0)
            sampled = [(*each.prompt_ids, *each.completions[0].response_ids) for each in groups[:_CALIBRATED]]
            activations = _activations(params, run.trainer.config, sampled)
        buckets = Buckets((responses,), run.engine.buckets.cache, (responses * (depth + 1),), depth)
        old = run.engine
        given = old.config, old.numerics, old.sampling, buckets, old.eos_token_ids
        engine = DecodeEngine(*given, pool=old.pool)
        loaded = engine.load_params(params)
        progress.stage("bench", len(drafters))
        decoded, sizes = {}, {}
        for number, (name, (fmt, quantizer)) in enumerate(drafters.items(), 1):
            weights, sizes[name] = _rounded(engine, loaded, fmt, quantizer, activations)
            decoded[name] = _decode(engine, loaded, weights, requests, depth)
            progress.step(number, {"accept_length": decoded[name].accept_length})
        dtype = engine.numerics.compute_dtype
    baseline, first = next(iter(decoded.items()))
    rows = []
    for name, each in decoded.items():
        if each.responses != first.responses:
            raise UserError(f"{name}: sampled other tokens than with the drafts of {baseline}")
        read, own = sizes[name]
        speeds = np.append(1.0, 1.0 + np.cumsum(each.accepted)) / (1.0 + np.arange(depth + 1) * read / own)
        details = {
            "ratio_error": each.ratio_error(first),
            "accepted_by_position": each.accepted.tolist(),
            "mb_read_by_a_draft": read / 1e6,
            "mb_of_the_policy": own / 1e6,
            "break_even": 1.0 + depth * read / own,
            "best": {"drafts": int(speeds.argmax()), "speed": float(speeds.max())},
            "depth": depth,
            "responses": len(requests),
            "tokens": sum(map(len, each.responses)),
            "dtype": dtype,
        }
        both, label = (each.accept_length, first.accept_length), f"self_draft/{name}"
        rows.append(counted_row(label, *both, "tokens a pass", baseline, **details))
    return rows


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A drafter's responses by request, its verifying passes by request, int [R], and the share of the passes
    that accepted at least so many drafts, from 1 on, float [depth].
    """

    responses: list[list[int]]
    passes: np.ndarray
    accepted: np.ndarray

    @property
    def accept_length(self) -> float:
        """Tokens that a pass yields."""
        return sum(map(len, self.responses)) / int(self.passes.sum())

    def ratio_error(self, other: "Decoded") -> float:
        """Standard error of the ratio of both accept lengths, paired by response."""
        ratio = other.passes.sum() / self.passes.sum()
        spread = np.std(other.passes - ratio * self.passes, ddof=1)
        return float(spread * np.sqrt(len(self.passes)) / self.passes.sum())


def _decode(
    engine: DecodeEngine, params: Params, weights: Params, requests: Sequence[Request], depth: int
) -> Decoded:
    """Decodes requests, a slot each, with chains by `weights` before every pass."""
    prefix = engine.prefill(params, [request.prompt_ids for request in requests])
    state = engine.init_state(len(requests), engine.buckets.cache[-1])
    slots = [Assignment(i, i, request.noise_key, request.max_response) for i, request in enumerate(requests)]
    state = engine.bulk_insert(prefix, state, slots)
    responses: list[list[int]] = [[] for _ in requests]
    passes, accepted = np.zeros(len(requests), np.int64), np.zeros(depth, np.int64)
    active = np.asarray(state.active)
    while active.any():
        state, drafts = engine.draft(weights, state, depth)
        state, pending = engine.verify(params, state, drafts.tree(depth))
        result = pending.result()
        counts = (result.tokens >= 0).sum(axis=1)
        for response, tokens, count in zip(responses, result.tokens, counts, strict=True):
            response += tokens[:count].tolist()
        passes += active
        accepted += (counts[:, None] > np.arange(1, depth + 1)).sum(axis=0)
        active = result.active
    return Decoded(responses, passes, accepted / passes.sum())


def _rounded(
    engine: DecodeEngine,
    params: Params,
    fmt: WeightFormat,
    quantizer: Quantizing,
    activations: Sequence[Mapping[str, Array]],
) -> tuple[Params, tuple[int, int]]:
    """Returns a drafter's weights, and the bytes that a draft and a step of the policy read.

    Where activations are not rounded, products see the dequantized weights, so these stand for them: one
    program drafts with all.
    """
    policy = QuantizedPolicy(fmt, "rtn" if quantizer == "activation-aware" else quantizer)
    quantized = policy.refresh(params)
    layers, whole_bytes = [], 0
    for number, (rounded, layer) in enumerate(zip(quantized["layers"], params["layers"], strict=True)):
        weights = {name: whole(layer[name]) for name in PROJECTIONS}
        whole_bytes += sum(weight.nbytes for weight in weights.values())
        if quantizer == "activation-aware":
            inputs = activations[number]
            own = {name: _activation_aware(weights[name], fmt, inputs[name]) for name in PROJECTIONS}
        else:
            own = {name: dequantize(rounded[name]) for name in PROJECTIONS}
        layers.append(layer | own)
    sizes = policy.read_bytes, policy.read_bytes - policy.bytes + whole_bytes
    return quantized if fmt.activations == "int8" else engine.load_params(params | {"layers": layers}), sizes


def _activation_aware(weight: Array, fmt: WeightFormat, inputs: Array) -> Array:
    """Returns a projection [out, in] rounded under the scales that are best for `inputs` [n, in]."""
    weight = weight.astype(jnp.float32)
    tried = [_scaled(weight, inputs, exponent, fmt) for exponent in _EXPONENTS]
    return min(tried, key=lambda each: float(each[1]))[0]


@functools.partial(jax.jit, static_argnames="fmt")
def _scaled(weight: Array, inputs: Array, exponent: float, fmt: WeightFormat) -> tuple[Array, Array]:
    """Returns the projection rounded under scales mean|x|^exponent, and the squared error of its outputs."""
    scales = jnp.maximum(jnp.mean(jnp.abs(inputs), axis=0), 1e-4) ** exponent
    scales = scales / jnp.sqrt(jnp.max(scales) * jnp.min(scales))
    rounded = dequantize(rtn(weight * scales[None], fmt)) / scales[None]
    return rounded, jnp.sum(jnp.square(inputs @ (rounded - weight).T))


def _activations(
    params: Params, model: ModelConfig, sequences: Sequence[Sequence[int]]
) -> list[dict[str, Array]]:
    """Returns inputs of every layer's projections, float32 [_INPUTS, in] each, drawn from all positions."""
    length, numerics = max(map(len, sequences)), Numerics(False, "float32")
    tokens, segments = (np.zeros((len(sequences), length), np.int32) for _ in range(2))
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
    places = np.flatnonzero(segments.reshape(-1))
    places = np.random.default_rng(0).choice(places, min(_INPUTS, len(places)), replace=False)
    seen: list[Array] = []
    honest = linear.product

    def watched(x: Array, *arguments: Any, **options: Any) -> Array:
        seen.append(x.reshape(-1, x.shape[-1])[places].astype(jnp.float32))
        return honest(x, *arguments, **options)

    x = jnp.asarray(params["embed"])[tokens].astype(jnp.float32)
    angles = jnp.asarray(rope_table(model, length))[np.broadcast_to(np.arange(length), tokens.shape)]
    attention, found = PackedAttention(jnp.asarray(segments), numerics), []
    with mock.patch.object(linear, "product", watched):
        for layer in params["layers"]:
            seen.clear()
            x, _ = transformer.decoder_layer(layer, None, x, angles, attention, model, numerics)
            found.append(dict(zip(PROJECTIONS, seen, strict=True)))  # in the order of their products
    return found


# --- samples of a prompt that agree ----------------------------------------------------------------------

# Samples of a group whose tokens are the same so far have the same keys, values and logits, and could be one
# row of a pass until they part: the rows that prefix-shared verification could save.


def shared_states(sampled: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Returns how many rows a group of responses decodes, how many different states are among them, and how
    many rows stand behind sampled tokens that another response has, too.
    """
    prefixes = [tuple(tokens[:count]) for tokens in sampled for count in range(len(tokens))]
    times = Counter(prefixes)
    return len(prefixes), len(times), sum(bool(prefix) and times[prefix] > 1 for prefix in prefixes)


def shared_prefix_rows(config: ExperimentConfig, steps: int) -> list[Row]:
    """Counts rows of decoding in some steps' rollouts, and different states among those of a group."""
    counts = np.zeros(3, int)
    with open_run(config) as (run, progress):
        progress.stage("bench", steps)
        for step in range(steps):
            groups, _, _ = collect_step(run, run.collector, step)
            for group in groups:
                counts += shared_states([completion.response_ids for completion in group.completions])
            progress.step(step + 1, {"shared": 1.0 - counts[1] / counts[0]})
    rows, states, behind = counts.tolist()
    details = {
        "share_saved": 1.0 - states / rows,
        "share_behind_equal_tokens": behind / rows,
        "steps": steps,
        "samples_of_a_prompt": config.rollout.samples_per_prompt,
        "temperature": config.rollout.temperature,
    }
    baseline = "a row for every sample"
    return [counted_row("shared_prefixes", states, rows, "rows", baseline, less=True, **details)]
