"""Speed of the engine on an accelerator: `python scripts/bench_device.py [--kernels NAMES] [--quick]`.

Decode steps against the time it takes to read the weights, a verifying pass of 16 nodes against a decode
step, and the quantized self-drafter's step against the policy's, for policies of real shapes with random
bfloat16 weights. All slots are busy in half-filled caches. On a CPU only `--quick` makes sense.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from drafters.quantized import QuantizedPolicy, default_format
from kernel_benchmarks.ceilings import copy_bandwidth
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, compare
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, param_shapes
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.warm_up import time_drafts, time_passes

_NODES = 16  # of a verifying pass, including the last token of the slot
_LENGTH = 512  # of a slot's cache
_DRAFTS = 8  # most draft steps in sequence
_PASSES = 16  # between two host syncs, so that a sync is a small part of the time
_REPEATS = 9
_SELF_DRAFT_BATCHES = (16, 1, 64)


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
    "Qwen2.5-7B": qwen2(152_064, 3584, 28, 28, 4, 18_944, tied=False),
    "Qwen2.5-1.5B": qwen2(151_936, 1536, 28, 12, 2, 8960, tied=True),
}
TINY = qwen2(320, 128, 1, 2, 1, 256, tied=True)


def random_params(config: ModelConfig) -> Params:
    """Makes normally distributed weights on the device: bfloat16 matrices, norms of 1 and biases of 0."""

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
    """Returns the bytes of weights that a step reads: all except an untied input embedding."""
    unread = params["embed"].nbytes if "lm_head" in params else 0
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - unread


def make_engine(config: ModelConfig, batch: int, kernels: KernelChoice, nodes: int = 0) -> DecodeEngine:
    """A row-invariant bfloat16 engine, the default of a run, with one batch bucket and `nodes` to verify
    in a pass, if any.
    """
    buckets = make_buckets(
        batch,
        _LENGTH,
        True,
        batch_buckets=(batch,),
        cache_buckets=(_LENGTH,),
        verify_buckets=(nodes,) if nodes else (),
        max_drafts=max(nodes - 1, _DRAFTS),
    )
    return DecodeEngine(config, Numerics(True, "bfloat16", kernels), SamplingParams(), buckets, ())


class Policy:
    """A policy with random weights, which are made at their first use.

    Args:
      name: name of the policy.
      config: shape of the policy.
      kernels: implementations of every operation, in the order in which they are tried; None for the default.
      quick: a small copy for the bandwidth, and every time taken once.
    """

    def __init__(self, name: str, config: ModelConfig, kernels: tuple[str, ...] | None, quick: bool) -> None:
        self.label = f"{name}/{'default' if kernels is None else '+'.join(kernels)}"
        self.config, self.quick, self.repeats = config, quick, 1 if quick else _REPEATS
        self.kernels = KernelChoice(**{field.name: kernels for field in dataclasses.fields(KernelChoice)})

    @functools.cached_property
    def params(self) -> Params:
        return make_engine(self.config, 1, self.kernels).load_params(random_params(self.config))

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy."""
        return copy_bandwidth(8 if self.quick else 2048)

    def decode_rows(self, batch: int, verified: bool) -> list[Row]:
        """Measures decode steps of `batch` slots; with `verified`, verifying passes too."""
        engine = make_engine(self.config, batch, self.kernels, _NODES if verified else 0)
        seconds = time_passes(engine, self.params, engine.buckets.batch[0], _LENGTH, self.repeats, _PASSES)
        rows = [_decode_row(self.label, batch, engine, self.params, seconds[0], self.bandwidth)]
        return [*rows, _verify_row(self.label, batch, engine, seconds)] if _NODES in seconds else rows

    def draft_rows(self, batch: int) -> list[Row]:
        """Measures steps of the quantized self-drafter, against the same steps with the policy's weights."""
        engine = make_engine(self.config, batch, self.kernels)
        return _self_draft_rows(self.label, batch, engine, self.params, self.repeats)


def _decode_row(
    label: str,
    batch: int,
    engine: DecodeEngine,
    params: Params,
    seconds: list[float],
    bandwidth: float,
) -> Row:
    step, size = statistics.median(seconds), read_bytes(params)
    return Row(
        f"decode/{label}/batch {batch}",
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


def _verify_row(label: str, batch: int, engine: DecodeEngine, seconds: dict[int, list[float]]) -> Row:
    timing = compare(seconds[_NODES], seconds[0])
    return Row(
        f"verify/{label}/batch {batch}, {_NODES} nodes",
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


def _self_draft_rows(label: str, batch: int, engine: DecodeEngine, params: Params, repeats: int) -> list[Row]:
    bucket, rows = engine.buckets.batch[0], []
    policy_times = time_drafts(engine, params, bucket, _LENGTH, repeats)
    for bits in (4, 8):
        fmt = dataclasses.replace(default_format(bits), activations="float")
        # Hopper's kernel rounds no whole rows, which W8 is made of.
        kernels = dataclasses.replace(engine.numerics.kernels, round_to_nearest=None)
        policy = QuantizedPolicy(fmt, kernels=kernels)
        drafter = policy.refresh(params)
        try:
            ours = time_drafts(engine, drafter, bucket, _LENGTH, repeats)
        except Refused as refusal:
            print(f"self_draft/{label}, W{bits}, batch {batch} left out: {refusal}")
            continue
        timing = compare(ours, policy_times)
        rows.append(
            Row(
                f"self_draft/{label}/batch {batch}/W{bits}",
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


def measurements(
    name: str, policy: Policy, batches: Sequence[int], drafts: Sequence[int]
) -> list[Measurement]:
    """Returns the measurements of one policy, the most important first; verifying passes for one batch."""
    first, *others = batches
    return [
        _measurement(name, f"batch {first}", policy.decode_rows, first, True),
        *(_measurement(name, f"drafts, batch {batch}", policy.draft_rows, batch) for batch in drafts[:1]),
        *(_measurement(name, f"batch {batch}", policy.decode_rows, batch, False) for batch in others),
        *(_measurement(name, f"drafts, batch {batch}", policy.draft_rows, batch) for batch in drafts[1:]),
    ]


def _measurement(name: str, what: str, rows: Callable[..., list[Row]], *args: object) -> Measurement:
    return Measurement(name, what, functools.partial(rows, *args))


def benchmark(kernels: tuple[str, ...] | None) -> Benchmark:
    """Returns everything that this script measures, in order."""
    plan = [
        measurement
        for name, config in POLICIES.items()
        for measurement in measurements(
            name, Policy(name, config, kernels, quick=False), (1, 8, 64), _SELF_DRAFT_BATCHES
        )
    ]
    return Benchmark(
        name="device",
        description=__doc__.splitlines()[0],
        plan=plan,
        quick_plan=measurements("tiny", Policy("tiny", TINY, kernels, quick=True), (1,), (1,)),
        quick_help="a tiny policy, every time taken once: a look at a CPU",
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
