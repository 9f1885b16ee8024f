"""What a pass starts and moves on a device that is not here: kernels and bytes, read off compiled programs.

    python scripts/bench_layers.py --compiled-for h100:1    # needs pip install -e '.[compilers]'

A decode step of all slots, and a verifying pass with 64 rows, are compiled for two small depths; a layer is
what the deeper one adds, and a whole policy is extrapolated. `bytes` are what the kernels read and write, of
a loop within a pass one turn where the text does not say how many; `least_bytes` are the weights of a layer
and the cache of its slots, which every pass has to read. On a TPU operations count as kernels. Nothing runs:
no times are measured.

`--update` compiles a micro-batch of one packed row in their place, whose gradients are added to those
before. It counts loops: before every turn of one whose turns the text does not count, a GPU's host
waits for the device. It also reads off the bytes that a layer adds to what the program needs, and those that
its kernels read and write.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from compiled_programs import Counts, counts_of_loop, counts_of_program, loops_of_program, text_of
from engine_benchmarks.update import GRPO, equal_batch
from gpu_parts.engines import cache_bytes, kernel_of, make_engine, run_numerics
from rljax import target
from rljax.config import TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import exit_status
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.transformer import Params, num_params, param_shapes
from rljax.numerics import products
from rljax.numerics.rows import Numerics
from rljax.planning.topologies import compile_devices, parse_topology, platform_of
from rljax.provenance import command_line, write_figures
from rljax.sampling.distribution import SamplingParams
from rljax.training.objectives import gradients, policy_objective
from rljax.training.scoring import score_packed
from rljax.training.weight_copies import weight_copies, with_copies
from workloads import REAL, SHAPES, config_of

DEPTHS = (4, 8)
UPDATE_DEPTHS = (2, 4)
ROWS = 64  # of a verifying pass
UPDATE_TOKENS = 4096
_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


class _Compiled(ExecutablePool):
    """Compiles for a device of a topology, and runs nothing.

    Attributes:
      by_kind: the last program of each kind.
    """

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._placed = SingleDeviceSharding(device)
        self.by_kind: dict[str, Any] = {}

    def get(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...] = ()
    ) -> Any:
        shapes = jax.tree.map(self._abstract, args)
        program = jax.jit(function, donate_argnums=donate_argnums).lower(*shapes).compile()
        self.by_kind[key[0]] = program
        return program

    def _abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf), sharding=self._placed)


def variants(numerics: Numerics) -> Iterator[tuple[str, Numerics]]:
    """Yields name and numerics of what is compared: products that may have other bits for other numbers of
    rows; products of padded rows with plain sums, and with sums that are products with ones; and products of
    slabs, whose kernel is the same for all rows, with plain sums.
    """
    yield "fast", dataclasses.replace(numerics, row_invariant=False)
    padded, slabs = numerics.product_form, products.forms(numerics.compute_dtype)[-1]
    forms = {
        "padded": dataclasses.replace(padded, plain_sums=True),
        "padded, sums with ones": padded,
        f"slabs of {slabs.multiple}": dataclasses.replace(slabs, plain_sums=True),
    }
    for name, form in forms.items():
        yield name, dataclasses.replace(numerics, measured_form=form)


def measure(
    config: ModelConfig, numerics: Numerics, device: Any, slots: int, verified: int, length: int
) -> dict[str, Counts]:
    """Compiles a decode step of `slots` and a verifying pass of `verified` slots; counts by pass."""
    pool = _Compiled(device)
    params = _param_shapes(config, numerics.dtype)
    make_engine(config, numerics, pool, slots, length).compile_plain(params, slots, length)
    few = make_engine(config, numerics, pool, verified, length, (ROWS,))
    few.compile_verify(params, verified, length, ROWS, ROWS // verified - 1)
    return {
        "decode": counts_of_loop(text_of(pool.by_kind["generate"])),
        "verify": counts_of_program(text_of(pool.by_kind["verify"])),
    }


def _param_shapes(config: ModelConfig, dtype: Any) -> Params:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32),
        param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def layer_bytes(config: ModelConfig, slots: int, length: int) -> float:
    """Returns the bytes that a layer has to read: its weights in bfloat16, and the cache of its slots."""
    one, two = (num_params(dataclasses.replace(config, num_layers=layers)) for layers in (1, 2))
    return 2.0 * (two - one) + cache_bytes(dataclasses.replace(config, num_layers=1), slots * length)


def rows_of(policy: str, name: str, slots: int, verified: int, length: int) -> Iterator[dict[str, Any]]:
    """Yields a row for every variant and pass."""
    topology, config = parse_topology(name), config_of(policy)
    device = compile_devices(topology)[0]
    with target.tracing_for(device, 1, platform_of(topology)):
        for variant, numerics in variants(run_numerics(config, quick=False)):
            shallow, deep = (
                measure(
                    dataclasses.replace(config, num_layers=depth), numerics, device, slots, verified, length
                )
                for depth in DEPTHS
            )
            added = DEPTHS[1] - DEPTHS[0]
            for kind, batch in (("decode", slots), ("verify", verified)):
                kernels = (deep[kind].kernels - shallow[kind].kernels) / added
                accessed = (deep[kind].bytes - shallow[kind].bytes) / added
                more = config.num_layers - DEPTHS[0]
                yield {
                    "name": f"{name.split(':')[0]}/{policy}/{kind}/{variant}",
                    "value": kernels,
                    "unit": "kernels a layer",
                    "slots": batch,
                    "rows": slots if kind == "decode" else ROWS,
                    "cache_positions": length,
                    "kernels_of_pass": round(shallow[kind].kernels + more * kernels),
                    "bytes_of_layer": accessed,
                    "least_bytes_of_layer": layer_bytes(config, batch, length),
                    "bytes_of_pass": shallow[kind].bytes + more * accessed,
                }


def update_variants(exact: Numerics) -> Iterator[tuple[str, Numerics, TrainingConfig]]:
    """Yields name, numerics and settings of updates: exact ones as a run has them without a measurement, the
    forms of products beside FlashAttention, and fast ones whose weights every micro-batch casts.
    """
    yield "exact", exact, TrainingConfig(remat=True)
    kernels = dataclasses.replace(exact.kernels, packed_attention=kernel_of("packed_attention"))
    flash = dataclasses.replace(exact, kernels=kernels)
    forms = {"padded": dataclasses.replace(exact.product_form, plain_sums=True)} | {
        f"slabs of {size}": products.ProductForm(size, size, slabs=True, plain_sums=True)
        for size in (products.SLABS[0], products.SLABS[-1])
    }
    for remat, more in ((True, ""), (False, ", without remat")):
        training, fast = TrainingConfig(remat=remat), dataclasses.replace(flash, row_invariant=False)
        yield f"fast{more}", fast, training
        yield f"fast{more}, cast anew", fast, training.model_copy(update={"cast_once": False})
        for name, form in forms.items():
            yield f"{name}{more}", dataclasses.replace(flash, measured_form=form), training


def update_program(
    config: ModelConfig, numerics: Numerics, device: Any, sequences: int, training: TrainingConfig
) -> Any:
    """Returns a micro-batch of a row of equal sequences, compiled for float32 weights and their copies."""

    def step(params: Params, copies: tuple[Params, ...], sums: Params, batch: Any, rope: jax.Array) -> Any:
        def score(params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
            read = with_copies(params, *copies)
            return score_packed(read, config, batch, rope, numerics, SamplingParams(), training.remat)

        objective = functools.partial(policy_objective, algorithm=GRPO)
        more, metrics = gradients(params, batch, None, score, objective)
        return jax.tree.map(jnp.add, sums, more), metrics

    length = UPDATE_TOKENS // sequences
    batch = equal_batch(sequences, length, length // 8, config.vocab_size, UPDATE_TOKENS)
    params, rope = _param_shapes(config, jnp.float32), rope_table(config, UPDATE_TOKENS)
    copies = jax.eval_shape(lambda params: weight_copies(params, numerics, training), params)
    arguments = (params, copies, params, batch, rope)
    return _Compiled(device).get(("gradients",), step, arguments, donate_argnums=(2,))


def update_rows(policy: str, name: str, sequences: int) -> Iterator[dict[str, Any]]:
    """Yields a row for every variant."""
    topology, config = parse_topology(name), config_of(policy)
    device = compile_devices(topology)[0]
    with target.tracing_for(device, 1, platform_of(topology)):
        for variant, numerics, training in update_variants(run_numerics(config, quick=False)):
            counts = []
            for depth in UPDATE_DEPTHS:
                short = dataclasses.replace(config, num_layers=depth)
                program = update_program(short, numerics, device, sequences, training)
                text, memory = text_of(program), program.memory_analysis()
                arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
                work = counts_of_program(text)
                counts.append((*loops_of_program(text), work.kernels, work.bytes, arguments, temporaries))
            loops, unknown, kernels, moved, _, temporaries = (
                _extrapolated(each, config) for each in zip(*counts, strict=True)
            )
            *_, moved_of_layer, arguments_of_layer, temporaries_of_layer = (
                (deep - shallow) / (UPDATE_DEPTHS[1] - UPDATE_DEPTHS[0])
                for shallow, deep in zip(*counts, strict=True)
            )
            yield {
                "name": f"{name.split(':')[0]}/{policy}/update of {sequences} sequences/{variant}",
                "value": unknown,
                "unit": "loops of unknown turns",
                "loops": loops,
                "kernels": kernels,
                "bytes_of_layer": moved_of_layer,
                "bytes": moved,
                "argument_bytes_of_layer": arguments_of_layer,
                "temporary_bytes_of_layer": temporaries_of_layer,
                "temporary_bytes": temporaries,
                "tokens": UPDATE_TOKENS,
            }


def _extrapolated(counts: Sequence[int], config: ModelConfig) -> int:
    """Returns a whole policy's count from those of `UPDATE_DEPTHS`."""
    shallow, deep = UPDATE_DEPTHS
    return counts[0] + (config.num_layers - shallow) * (counts[1] - counts[0]) // (deep - shallow)


@exit_status()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="bench_layers.py", description=__doc__.splitlines()[0])
    parser.add_argument("--compiled-for", nargs="+", default=["h100:1", "v5e:1x1"], metavar="DEVICES")
    parser.add_argument(
        "--policy", nargs="+", choices=[REAL, *SHAPES], default=[REAL, "Qwen3-1.7B", "Qwen3-8B"]
    )
    parser.add_argument("--slots", type=int, default=64, help="of a decode step")
    parser.add_argument("--verified", type=int, default=8, help=f"slots of a verifying pass of {ROWS} rows")
    parser.add_argument("--length", type=int, default=2048, help="positions of a slot's cache")
    parser.add_argument(
        "--update", type=int, metavar="N", help=f"of a row of {UPDATE_TOKENS} tokens in N sequences"
    )
    parser.add_argument("--output", type=Path, help="default: layers.json, or update-layers.json")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)  # a device that is not there reads nothing back
    found = []
    for name in arguments.compiled_for:
        if arguments.update:
            for policy in arguments.policy:
                for row in update_rows(policy, name, arguments.update):
                    found.append(row)
                    print(
                        f"{row['name']}: {row['loops']} loops, {row['value']} of them of unknown turns;"
                        f" {row['kernels']} kernels; {row['temporary_bytes_of_layer'] / 1e6:.1f} MB a layer,"
                        f" {row['temporary_bytes'] / 1e6:.0f} in all, beside weights and gradients",
                        flush=True,
                    )
            continue
        for policy in arguments.policy:
            for row in rows_of(policy, name, arguments.slots, arguments.verified, arguments.length):
                found.append(row)
                over = row["bytes_of_layer"] / row["least_bytes_of_layer"]
                print(
                    f"{row['name']}: {row['value']:.1f} kernels a layer, {row['kernels_of_pass']} a pass;"
                    f" {row['bytes_of_layer'] / 1e6:.1f} MB a layer, {over:.2f} times the least",
                    flush=True,
                )
    output = arguments.output or _RESULTS / ("update-layers.json" if arguments.update else "layers.json")
    write_figures(output, {"rows": found}, command_line())
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
