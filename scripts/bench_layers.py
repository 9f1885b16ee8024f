"""Layers traced once against layers written out: `python scripts/bench_layers.py [--only SECTIONS]`.

Processor seconds to trace and compile, and temporary memory of the same programs, whose compiler inlines the
layers or calls them (`policy.outline_layers`). The sections `gpu` and `tpu` compile for
an H100 and for v5e chips that need not be here. `docs/planning.md` says what it showed.
"""

import contextlib
import dataclasses
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig, load_config
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.planning.planner import make_planning, tracing
from rljax.planning.programs import Planning, PlanningPool, Program
from rljax.planning.topologies import parse_topology
from workloads import REAL, config_of

_V5E = (
    "engine.max_slots=64", "engine.batch_buckets=[8,16,32,64]", "speculation.max_batch=32",
    "rollout.max_response_length=3072", "engine.cache_buckets=[1024,2048,4096]", "training.pack_length=4096",
    "training.rows_per_microbatch=8",
)  # fmt: skip
_H100 = (
    "policy.compute_dtype=bfloat16", "engine.row_invariant=warn", "kernels.tree_attention=mosaic_gpu",
    "engine.max_slots=64", "engine.batch_buckets=[8,64]", "engine.cache_buckets=[1024]",
    "rollout.max_prompt_length=1000", "rollout.max_response_length=24", "speculation.verify_buckets=[16]",
    "training.pack_length=1024", "training.rows_per_microbatch=8",
)  # fmt: skip
_KINDS = ("prefill", "generate", "verify", "gradients")
_LAYOUTS = ("inlined", "called")
_WRITTEN_OUT = "written out"


def _written_out(function: Callable[..., Any], remat: bool, outlined: bool) -> Callable[..., Any]:
    """In the place of `transformer.traced_once`."""
    del outlined
    return jax.checkpoint(function) if remat else function


class _TimedPool(PlanningPool):
    """A pool that notes the processor seconds of this process, and of those it starts, by kind of program."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.processor_seconds: dict[str, float] = {}

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        known, start = key in self, _processor_seconds()
        results = super().get(key, *args, **kwargs)
        if key in self and not known:
            self.processor_seconds[key[0]] = _processor_seconds() - start
        return results


def _processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class _TimedPlanning(Planning):
    def pool(self, skips: Callable[[tuple], bool] = lambda args: False, drafter: str | None = None) -> Any:
        """As `Planning.pool`, with a `_TimedPool`."""
        exact = bool(self.config.engine.row_invariant)
        return _TimedPool(None, exact, self.place, self._default, skips, drafter)


def _programs(
    config: ExperimentConfig, topology: str, model: ModelConfig | None, depth: int, layout: str
) -> dict[str, tuple[Program, float]]:
    """Returns the largest program of every kind, compiled for a topology, and its processor seconds."""
    planning, _ = make_planning(config, parse_topology(topology))
    fields = {field.name: getattr(planning, field.name) for field in dataclasses.fields(planning)}
    fields["model"] = dataclasses.replace(model or planning.model, num_layers=depth)
    fields["numerics"] = dataclasses.replace(planning.numerics, outline_layers=layout == "called")
    planning = _TimedPlanning(**fields)
    written_out = mock.patch.object(transformer, "traced_once", _written_out)
    laid_out = written_out if layout == _WRITTEN_OUT else contextlib.nullcontext()
    with tracing(planning, parse_topology(topology)), laid_out:
        _, pool = planning.begin()
    return {  # the last verifying pass is the largest
        program.kind: (program, pool.processor_seconds[program.kind]) for program in pool.programs()
    }


def compile_rows(
    name: str,
    config: ExperimentConfig,
    topology: str,
    depths: Sequence[int],
    model: ModelConfig | None = None,
    layouts: Sequence[str] = _LAYOUTS,
) -> list[Row]:
    """Compares processor seconds and temporary bytes of programs at some depths, by default of the config's
    policy.
    """
    rows = []
    for depth in depths:
        written_out = _programs(config, topology, model, depth, _WRITTEN_OUT)
        for layout in layouts:
            once = _programs(config, topology, model, depth, layout)
            for kind in _KINDS:
                (ours, seconds), (theirs, their_seconds) = once[kind], written_out[kind]
                figures = {
                    "processor seconds": (seconds, their_seconds, "s"),
                    "temporaries": (ours.temporaries / 2**20, theirs.temporaries / 2**20, "MiB"),
                }
                if theirs.accessed:  # the compiler for GPUs does not count it
                    figures["accessed"] = ours.accessed / 2**20, theirs.accessed / 2**20, "MiB"
                rows += [
                    Row(
                        f"{name}/{depth} layers/{kind}/{layout}/{what}",
                        value,
                        unit,
                        _WRITTEN_OUT,
                        baseline,
                        baseline / max(value, 1e-9),
                        {"layers": depth, "topology": topology, "program": ours.name},
                    )
                    for what, (value, baseline, unit) in figures.items()
                ]
    return rows


def _config(name: str, *overrides: str) -> ExperimentConfig:
    return load_config(f"configs/{name}.yaml", overrides)


BENCHMARK = Benchmark(
    name="layers",
    description=__doc__,
    plan=(
        Measurement(
            "gpu",
            "SmolLM2-135M for an H100",
            lambda: compile_rows(
                "smollm2", _config("qwen2.5-0.5b", *_H100), "h100:1", (30,), config_of(REAL), ("inlined",)
            ),
        ),
        Measurement(
            "tpu",
            "Qwen3-8B for v5e:2x4",
            lambda: compile_rows("qwen3-8b", _config("qwen3-8b", *_V5E), "v5e:2x4", (4, 12)),
        ),
        Measurement(
            "cpu",
            "SmolLM2-135M",
            lambda: compile_rows("smollm2", _config("qwen2.5-0.5b"), "cpu:1", (30,), config_of(REAL)),
        ),
    ),
    packages=("libtpu", "jax-cuda13-plugin"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    jax.config.update("jax_enable_compilation_cache", False)  # a program from there says nothing of compiling
    return BENCHMARK.main(argv)


if __name__ == "__main__":
    sys.exit(main())
