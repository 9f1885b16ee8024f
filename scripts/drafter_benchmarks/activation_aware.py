"""The self-drafter in 4 bits with scales that follow activations, against rounding to nearest.

EfficientRollout (appendix C.4) leaves activation-aware quantization (AWQ, Lin et al., arXiv 2306.00978,
section 3.2) out, since it gained little and has to be calibrated at every refresh. Here each projection's
inputs have scales s = mean|x|^a, and a is searched for the least squared error of the outputs on the
rollouts of a training step. AWQ folds scales into the layer before, so that projections with the same input
share them; here each has its own, which can only be closer.

What drafts are worth is computed on held-out rollouts: the chance that the sampled token is drafted under the
request's noise, multiplied along the response.
"""

import functools
from collections.abc import Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters.eagle.losses import coupled_at
from drafters.eagle.model import HeadConfig
from drafters.eagle.states import States
from drafters.quantized import PROJECTIONS, WeightFormat, clipped, rtn
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.quantized import dequantize
from rljax.numerics.rows import Numerics, log_normalizer
from rljax.sampling.distribution import SamplingParams, transform_logits
from rljax.training.drafter_warm_up import PolicyRollouts
from rollout_benchmarks.variants import open_run, with_keys

_FORMAT = WeightFormat(4, 128)
_EXPONENTS = tuple(step / 10 for step in range(11))
_INPUTS = 256  # of a projection, on which exponents are compared
_NUMERICS = Numerics(False, "float32")


def activation_aware_rows(config: ExperimentConfig, heldout: int, prompts: int, depth: int) -> list[Row]:
    """Compares quantizers of the present policy by the tokens of a pass.

    Args:
      heldout: held-out responses.
      prompts: of a training step, whose responses' activations are looked at.
      depth: drafts of a chain.
    """
    with open_run(with_keys(config, rollout={"prompts_per_step": prompts})) as (run, progress):
        model, params = run.trainer.config, run.state.params
        rollouts = PolicyRollouts(run, HeadConfig("eagle", model))
        scored = rollouts.heldout(heldout)
        statistics = _inputs(params, model, list(rollouts.training(0)))
        names = ("rtn", "clipped", "activation-aware")
        progress.stage("bench", len(names) + 1)
        rounded: dict[str, Params] = {}
        for number, name in enumerate(names, 1):
            layers = [
                layer | {each: _rounded(name, layer[each], inputs[each]) for each in PROJECTIONS}
                for layer, inputs in zip(params["layers"], statistics, strict=True)
            ]
            rounded[name] = params | {"layers": layers}
            progress.step(number, {})
        found = _tokens_of_a_pass(rounded, params, model, scored, run.engine.sampling, depth)
        progress.step(len(names) + 1, {})
    roundings = {"rtn": 1, "clipped": 11, "activation-aware": len(_EXPONENTS)}
    return [
        counted_row(
            f"activation-aware/{name}",
            value,
            found["rtn"],
            "tokens a pass",
            "rtn",
            roundings_of_a_matrix=roundings[name],
            forward_pass_for_statistics=name == "activation-aware",
            responses=len(scored),
            depth=depth,
        )
        for name, value in found.items()
    ]


def _rounded(quantizer: str, weight: Array, inputs: Array) -> Array:
    """Returns a projection [out, in] as its 4 bits stand for it; inputs are [n, in]."""
    weight = jnp.asarray(weight, jnp.float32)
    if quantizer != "activation-aware":
        return dequantize({"rtn": rtn, "clipped": clipped}[quantizer](weight, _FORMAT))
    tried = [_scaled(weight, inputs, exponent) for exponent in _EXPONENTS]
    return min(tried, key=lambda each: float(each[1]))[0]


@functools.partial(jax.jit, static_argnums=2)
def _scaled(weight: Array, inputs: Array, exponent: float) -> tuple[Array, Array]:
    """Returns the projection rounded under scales, and the squared error of its outputs."""
    scales = jnp.maximum(jnp.mean(jnp.abs(inputs), axis=0), 1e-4) ** exponent
    scales = scales / jnp.sqrt(jnp.max(scales) * jnp.min(scales))
    rounded = dequantize(rtn(weight * scales[None], _FORMAT)) / scales[None]
    return rounded, jnp.sum(jnp.square(inputs @ (rounded - weight).T))


def _padded(sequences: Sequence[States], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and segment ids, int32 [n, length], a sequence in each row."""
    tokens, segments = (np.zeros((len(sequences), length), np.int32) for _ in range(2))
    for row, (ids, *_) in enumerate(sequences):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return tokens, segments


def _inputs(params: Params, model: ModelConfig, sequences: Sequence[States]) -> list[dict[str, Array]]:
    """Returns inputs of every layer's projections, float32 [_INPUTS, in] each, drawn from all positions."""
    length = max(len(ids) for ids, *_ in sequences)
    tokens, segments = _padded(sequences, length)
    places = np.flatnonzero(segments.reshape(-1))
    places = np.random.default_rng(0).choice(places, min(_INPUTS, len(places)), replace=False)
    seen: list[Array] = []
    honest = transformer.linear

    def watched(x: Array, *arguments: Array) -> Array:
        seen.append(x.reshape(-1, x.shape[-1])[places].astype(jnp.float32))
        return honest(x, *arguments)

    x = jnp.asarray(params["embed"])[tokens].astype(jnp.float32)
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    angles = jnp.asarray(rope_table(model, length))[positions]
    attention, found = PackedAttention(jnp.asarray(segments), _NUMERICS), []
    with mock.patch.object(transformer, "linear", watched):
        for layer in params["layers"]:
            seen.clear()
            x, _ = transformer.decoder_layer(layer, None, x, angles, attention, model, _NUMERICS)
            found.append(dict(zip(PROJECTIONS, seen, strict=True)))  # in the order of their products
    return found


def _tokens_of_a_pass(
    rounded: dict[str, Params],
    params: Params,
    model: ModelConfig,
    sequences: Sequence[States],
    sampling: SamplingParams,
    depth: int,
) -> dict[str, float]:
    """Mean over the positions of responses of the tokens that a pass over a chain yields, by quantizer."""
    length = max(len(ids) for ids, *_ in sequences)
    rope = jnp.asarray(rope_table(model, length))
    positions = np.arange(length, dtype=np.int32)[None]

    @jax.jit
    def logprobs(weights: Params, head: Params, tokens: Array, segments: Array) -> Array:
        attention = PackedAttention(segments, _NUMERICS)
        hidden, _ = transformer.forward(weights, model, tokens, positions, attention, rope, _NUMERICS)
        logits = transform_logits(transformer.logits(head, model, hidden, _NUMERICS), sampling, _NUMERICS)
        return logits - log_normalizer(logits, _NUMERICS)

    drafted_at = jax.jit(coupled_at)
    totals, count = dict.fromkeys(rounded, 0.0), 0
    for sequence in sequences:
        tokens, segments = map(jnp.asarray, _padded([sequence], length))
        policy, following = logprobs(params, params, tokens, segments), jnp.roll(tokens, -1, axis=1)
        ids, _, response = sequence
        first = int(np.argmax(response)) - 1  # where the first token of the response is predicted
        for name, weights in rounded.items():
            drafts = logprobs(weights, params, tokens, segments)
            own = np.exp(np.asarray(drafted_at(policy, drafts, following))[0, first : len(ids) - 1])
            chains = [np.cumprod(own[start : start + depth]).sum() for start in range(len(own))]
            totals[name] += len(own) + float(sum(chains))
        count += len(ids) - 1 - first
    return {name: total / count for name, total in totals.items()}
