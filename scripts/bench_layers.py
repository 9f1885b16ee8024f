"""Layers compiled once against layers written out: `python scripts/bench_layers.py [--only SECTIONS]`.

Compile time, temporary memory and, on the CPU, speed of the same programs both ways
(`policy.outline_layers`). The section `tpu` compiles Qwen3-8B for eight v5e chips that need not be here.
`docs/planning.md` says what it showed.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, paired
from rljax.config import ExperimentConfig, load_config
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.planning.planner import make_planning, tracing
from rljax.planning.programs import Program
from rljax.planning.topologies import parse_topology
from rljax.sampling.distribution import SamplingParams
from rljax.training.scoring import score_packed

_V5E = (
    "engine.max_slots=64",
    "engine.batch_buckets=[8,16,32,64]",
    "speculation.max_batch=32",
    "rollout.max_response_length=3072",
    "engine.cache_buckets=[1024,2048,4096]",
    "training.pack_length=4096",
    "training.rows_per_microbatch=8",
)
_KINDS = ("prefill", "generate", "verify", "gradients")


def _programs(config: ExperimentConfig, topology: str, depth: int, outline: bool) -> dict[str, Program]:
    """Returns the largest program of every kind, compiled for a topology."""
    planning, _ = make_planning(config, parse_topology(topology))
    planning = dataclasses.replace(
        planning,
        model=dataclasses.replace(planning.model, num_layers=depth),
        numerics=dataclasses.replace(planning.numerics, outline_layers=outline),
    )
    with tracing(planning, parse_topology(topology)):
        _, pool = planning.begin()
    return {program.kind: program for program in pool.programs()}  # the last verifying pass is the largest


def compile_rows(
    name: str, config: ExperimentConfig, topology: str, depths: Sequence[int], kinds: Sequence[str] = _KINDS
) -> list[Row]:
    """Compares compile seconds and temporary bytes of programs at some depths."""
    rows = []
    for depth in depths:
        written_out, once = (_programs(config, topology, depth, outline) for outline in (False, True))
        for kind in kinds:
            ours, theirs = once[kind], written_out[kind]
            figures = {
                "seconds": (ours.seconds, theirs.seconds, "s"),
                "temporaries": (ours.temporaries / 2**20, theirs.temporaries / 2**20, "MiB"),
                "accessed": (ours.accessed / 2**20, theirs.accessed / 2**20, "MiB"),
            }
            rows += [
                Row(
                    f"{name}/{depth} layers/{kind}/{what}",
                    value,
                    unit,
                    "written out",
                    baseline,
                    baseline / max(value, 1e-9),
                    {"layers": depth, "topology": topology},
                )
                for what, (value, baseline, unit) in figures.items()
            ]
    return rows


def _policy(depth: int) -> ModelConfig:
    return ModelConfig("qwen3", 2048, 512, depth, 8, 2, 64, 1536, tie_embeddings=True, qk_norm=True)


def _decoding(depth: int, dtype: str, slots: int, outline: bool) -> Callable[[], None]:
    """Returns a function that decodes 16 steps."""
    config = _policy(depth)
    engine = DecodeEngine(
        config,
        Numerics(compute_dtype=dtype, outline_layers=outline),
        SamplingParams(),
        Buckets((slots,), (512,)),
        (),
        16,
    )
    params = engine.load_params(init_params(config, 0))
    state = engine.init_state(slots, 512)
    holder = [
        state.replace(active=jnp.ones(slots, bool), remaining=jnp.full(slots, 2**20, jnp.int32)),
    ]

    def decode() -> None:
        state = holder[0].replace(lengths=jnp.full(slots, 256, jnp.int32))
        holder[0], _ = engine.generate(params, state)

    return decode


def _update(depth: int, dtype: str, outline: bool) -> Callable[[], None]:
    """Returns a function that computes the gradients of 2 rows of 512 tokens."""
    config, rng = _policy(depth), np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, 512)
    sequence = TrainingSequence(tokens[:8], tokens[8:], -np.ones(504), 1.0, 1.0)
    batch = build_batch([sequence] * 2, pack_sequences([512] * 2, 512), range(2))
    numerics, rope = Numerics(compute_dtype=dtype, outline_layers=outline), rope_table(config, 512)
    score = functools.partial(
        score_packed, config=config, rope=rope, numerics=numerics, sampling=SamplingParams(), remat=True
    )
    step = jax.jit(jax.grad(lambda params: jnp.sum(score(params, batch=batch)[0])))
    params = init_params(config, 0)
    return lambda: jax.block_until_ready(step(params))


def speed_rows(depths: Sequence[int], dtypes: Sequence[str], repeats: int) -> list[Row]:
    """Compares the time of decode steps and of gradients on this machine."""
    rows = []
    cases = {f"decode, {slots} slots": functools.partial(_decoding, slots=slots) for slots in (4, 32)} | {
        "gradients of 2 x 512 tokens": _update
    }
    for depth in depths:
        for dtype in dtypes:
            for name, case in cases.items():
                actions = [case(depth, dtype, outline=outline) for outline in (True, False)]
                times = paired(*actions, repeats)
                rows.append(
                    Row(
                        f"cpu/{depth} layers/{name}/{dtype}",
                        1e3 * times.seconds,
                        "ms",
                        "written out",
                        1e3 * times.baseline_seconds,
                        times.ratio,
                        {"layers": depth, "ratio_low": times.ratio_low, "ratio_high": times.ratio_high},
                    )
                )
    return rows


def _config(name: str, *overrides: str) -> ExperimentConfig:
    return load_config(f"configs/{name}.yaml", overrides)


BENCHMARK = Benchmark(
    name="layers",
    description=__doc__.splitlines()[0],
    plan=(
        Measurement(
            "tpu",
            "Qwen3-8B for v5e:2x4",
            lambda: compile_rows("qwen3-8b", _config("qwen3-8b", *_V5E), "v5e:2x4", (4, 12, 36)),
        ),
        Measurement(
            "cpu",
            "Qwen2.5-0.5B",
            lambda: compile_rows("qwen2.5-0.5b", _config("qwen2.5-0.5b"), "cpu:1", (4, 12, 24)),
        ),
        Measurement("speed", "two depths", lambda: speed_rows((4, 12), ("float32", "bfloat16"), 7)),
    ),
    quick_plan=(Measurement("speed", "two layers", lambda: speed_rows((2,), ("float32",), 1)),),
    packages=("libtpu",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    jax.config.update("jax_enable_compilation_cache", False)  # a program from there says nothing of compiling
    return BENCHMARK.run(BENCHMARK.parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
