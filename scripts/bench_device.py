"""Speed of the engine on an accelerator: `python scripts/bench_device.py [--kernels NAMES] [--quick]`.

Decode steps against the time it takes to read the weights, a verifying pass of 16 nodes against a decode
step, and the quantized self-drafter's step against the policy's, for policies of real shapes with random
bfloat16 weights. All slots are busy in half-filled caches. On a CPU only `--quick` makes sense.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from drafters.quantized import QuantizedPolicy, default_format
from kernel_benchmarks.ceilings import copy_bandwidth
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, compare
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.sampling import SamplingParams
from rljax.kernels.switch import KernelChoice, Refused
from rljax.models.config import ModelConfig
from rljax.models.numerics import Numerics
from rljax.models.transformer import Params, param_shapes
from rljax.rollout.pass_choice import time_drafts, time_passes

_NODES = 16  # of a verifying pass
_LENGTH = 512  # of a slot's cache
_SELF_DRAFT_BATCHES = (1, 16, 64)


def qwen2(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool
) -> ModelConfig:
    """A Qwen2.5 of this size."""
    return ModelConfig(
        architecture="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        mlp_size=mlp,
        rope_theta=1e6,
        tie_embeddings=tied,
        attention_bias=True,
        max_positions=32_768,
    )


POLICIES = {
    "Qwen2.5-1.5B": qwen2(151_936, 1536, 28, 12, 2, 8960, tied=True),
    "Qwen2.5-7B": qwen2(152_064, 3584, 28, 28, 4, 18_944, tied=False),
}
TINY = qwen2(320, 128, 2, 2, 1, 256, tied=True)


def random_params(config: ModelConfig) -> Params:
    """Normal weights, made where they are used: bfloat16 matrices, norms of 1 and biases of 0."""

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return config.hidden_size**-0.5 * jax.random.normal(key, shape, jnp.bfloat16)

    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=_is_shape)
    leaves = []
    for index, (path, shape) in enumerate(shapes):
        if len(shape) > 1:
            leaves.append(normal(jax.random.key(index), shape))
        else:
            leaves.append(jnp.full(shape, 1.0 if path[-1].key.endswith("norm") else 0.0, jnp.float32))
    return jax.tree.unflatten(jax.tree.structure(param_shapes(config), is_leaf=_is_shape), leaves)


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple)


def read_bytes(params: Params) -> int:
    """Of weights that a step reads: all, but of an untied input embedding."""
    unread = params["embed"].nbytes if "lm_head" in params else 0
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - unread


def make_engine(config: ModelConfig, batch: int, kernels: KernelChoice, drafts: int) -> DecodeEngine:
    """A row-invariant bfloat16 engine, the default of a run, with one batch bucket."""
    buckets = make_buckets(
        batch,
        _LENGTH,
        True,
        batch_buckets=(batch,),
        cache_buckets=(_LENGTH,),
        verify_buckets=(_NODES,) if batch < _NODES else (),
        max_drafts=drafts,
    )
    return DecodeEngine(config, Numerics(True, "bfloat16", kernels), SamplingParams(), buckets, ())


def policy_rows(
    name: str,
    config: ModelConfig,
    batches: Sequence[int],
    self_draft_batches: Sequence[int],
    kernels: str | tuple[str, ...] | None,
    repeats: int,
    quick: bool = False,
) -> list[Row]:
    """All rows of one policy, whose weights are made once.

    Args:
      name: of the policy.
      batches: whose decode steps are measured; the first one's verifying pass too.
      self_draft_batches: whose draft steps are measured.
      kernels: implementations of every operation, in the order in which they are tried; None for the default.
      repeats: of every time.
      quick: a small copy for the bandwidth.
    """
    choice = KernelChoice(**{field.name: kernels for field in dataclasses.fields(KernelChoice)})
    params = make_engine(config, batches[0], choice, 0).load_params(random_params(config))
    bandwidth = copy_bandwidth(64 if quick else 2048)
    label = "default" if kernels is None else "+".join([kernels] if isinstance(kernels, str) else kernels)
    rows = []
    for batch in batches:
        engine = make_engine(config, batch, choice, _NODES - 1)
        seconds = time_passes(engine, params, engine.buckets.batch[0], _LENGTH, repeats)
        rows.append(_decode_row(name, label, batch, engine, params, seconds[0], bandwidth))
        if batch == batches[0] and _NODES in seconds:
            rows.append(_verify_row(name, label, batch, engine, seconds))
    for batch in self_draft_batches:
        rows += _self_draft_rows(name, label, batch, make_engine(config, batch, choice, 8), params, repeats)
    return rows


def _decode_row(
    name: str,
    label: str,
    batch: int,
    engine: DecodeEngine,
    params: Params,
    seconds: list[float],
    bandwidth: float,
) -> Row:
    step, size = statistics.median(seconds), read_bytes(params)
    return Row(
        f"decode/{name}/{label}/batch {batch}",
        size / step / 1e9,
        "GB/s",
        "copy bandwidth",
        bandwidth / 1e9,
        size / step / bandwidth,
        {
            "step_ms": 1e3 * step,
            "limit_ms": 1e3 * size / bandwidth,
            "tokens_per_second": batch / step,
            "computed_rows": engine.buckets.batch[0],
            "weight_bytes": size,
            "rounds": len(seconds),
            "ratio_low": size / max(seconds) / bandwidth,
            "ratio_high": size / min(seconds) / bandwidth,
        },
    )


def _verify_row(
    name: str, label: str, batch: int, engine: DecodeEngine, seconds: dict[int, list[float]]
) -> Row:
    timing = compare(seconds[_NODES], seconds[0])
    return Row(
        f"verify/{name}/{label}/batch {batch}, {_NODES} nodes",
        1e3 * timing.seconds,
        "ms",
        "a decode step",
        1e3 * timing.baseline_seconds,
        timing.ratio,
        {
            "time_ratio": 1.0 / timing.ratio,
            "ratio_low": timing.ratio_low,
            "ratio_high": timing.ratio_high,
            "rounds": len(seconds[0]),
            "computed_slots": engine.buckets.batch[0],
        },
    )


def _self_draft_rows(
    name: str, label: str, batch: int, engine: DecodeEngine, params: Params, repeats: int
) -> list[Row]:
    bucket, rows = engine.buckets.batch[0], []
    own = time_drafts(engine, params, bucket, _LENGTH, repeats)
    for bits in (4, 8):
        fmt = dataclasses.replace(default_format(bits), activations="float")
        policy = QuantizedPolicy(fmt, implementation=engine.numerics.kernels.quantized_product)
        drafter = policy.refresh(params)
        try:
            ours = time_drafts(engine, drafter, bucket, _LENGTH, repeats)
        except Refused as refusal:
            print(f"self_draft/{name}/{label}, W{bits}, batch {batch} left out: {refusal}")
            continue
        timing = compare(ours, own)
        rows.append(
            Row(
                f"self_draft/{name}/{label}/batch {batch}/W{bits}",
                1e3 * timing.seconds,
                "ms/step",
                "the policy's own weights",
                1e3 * timing.baseline_seconds,
                timing.ratio,
                {
                    "time_ratio": 1.0 / timing.ratio,
                    "ideal_time_ratio": policy.read_bytes / read_bytes(params),
                    "refresh_ms": 1e3 * policy.seconds,
                    "ratio_low": timing.ratio_low,
                    "ratio_high": timing.ratio_high,
                    "rounds": repeats,
                    "computed_rows": bucket,
                },
            )
        )
    return rows


def benchmark(kernels: str | tuple[str, ...] | None) -> Benchmark:
    """What this script measures."""

    def one(name: str, config: ModelConfig) -> Measurement:
        return Measurement(
            name, "real shape", lambda: policy_rows(name, config, (1, 8, 64), _SELF_DRAFT_BATCHES, kernels, 5)
        )

    quick = Measurement("tiny", "a look", lambda: policy_rows("tiny", TINY, (1, 8), (1, 4), kernels, 3, True))
    return Benchmark(
        name="device",
        description=__doc__.splitlines()[0],
        plan=[one(name, config) for name, config in POLICIES.items()],
        quick_plan=[quick],
        quick_help="a tiny policy and few repeats: a look at a CPU",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = benchmark(None).parser()
    parser.add_argument(
        "--kernels",
        metavar="NAMES",
        help="implementations of every operation, separated by commas, in the order in which they are tried;"
        " default: what is tuned for the device",
    )
    arguments = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and not arguments.quick:
        parser.error("no accelerator here: --quick measures a tiny policy")
    return benchmark(tuple(arguments.kernels.split(",")) if arguments.kernels else None).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
