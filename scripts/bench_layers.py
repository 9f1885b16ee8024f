"""What a pass starts and moves on a device that is not here: kernels and bytes, read off compiled programs.

    python scripts/bench_layers.py --compiled-for h100:1    # needs pip install -e '.[compilers]'

Two small depths are compiled; a layer is what the deeper one adds, and a whole policy is extrapolated.
`bytes` are what the kernels read and write, of a loop one turn where the text does not say how many;
`least_bytes` are the weights of a layer and the cache of its slots. `--update` compiles a micro-batch of
one packed row in the place of passes, whose gradients are added to those before: before every turn of a
loop whose turns the text does not count, a GPU's host waits for the device. docs/gpu.md explains the rows.
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

from compiled_programs import compiling_for, counts_of_loop, counts_of_program, loops_of_program, text_of
from engine_benchmarks.update import GRPO, equal_batch
from gpu_parts.engines import cache_bytes, kernel_of, make_engine, run_numerics
from rljax.config import TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import exit_status
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.transformer import Params, num_params, param_shapes
from rljax.numerics import products
from rljax.numerics.rows import Numerics
from rljax.provenance import command_line, write_figures
from rljax.sampling.distribution import SamplingParams
from rljax.training.objectives import gradients, policy_objective
from rljax.training.scoring import score_packed
from rljax.training.weight_copies import weight_copies, with_copies
from workloads import REAL, RESULTS, SHAPES, config_of

DEPTHS, UPDATE_DEPTHS = (4, 8), (2, 4)
SLOTS = {"decode": 64, "verify": 8}
ROWS = 64  # of either pass
LENGTH = 2048  # positions of a slot's cache
UPDATE_TOKENS = 4096

Compile = Callable[..., Any]
"""What `compiling_for` yields."""
Line = tuple[dict[str, Any], str]
"""A row, and what is printed of it."""


class _Compiled(ExecutablePool):
    """Compiles and runs nothing; `by_kind` has the last program of each kind."""

    def __init__(self, compile_: Compile) -> None:
        super().__init__()
        self._compile_for, self.by_kind = compile_, {}

    def get(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...] = ()
    ) -> Any:
        self.by_kind[key[0]] = self._compile_for(function, *args, donate_argnums=donate_argnums)
        return self.by_kind[key[0]]


def _param_shapes(config: ModelConfig, dtype: Any) -> Params:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32),
        param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def extrapolated(
    config: ModelConfig, depths: tuple[int, int], counts_of: Callable[[ModelConfig], Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Returns counts of a layer and of the whole policy, from those of two depths."""
    shallow, deep = (
        np.asarray(counts_of(dataclasses.replace(config, num_layers=depth)), float) for depth in depths
    )
    of_layer = (deep - shallow) / (depths[1] - depths[0])
    return of_layer.tolist(), (shallow + (config.num_layers - depths[0]) * of_layer).tolist()


# --- passes ----------------------------------------------------------------------------------------------


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


def pass_counts(config: ModelConfig, numerics: Numerics, compile_: Compile, kind: str) -> tuple[int, int]:
    """Kernels and bytes of a pass, "decode" or "verify"."""
    pool, slots, params = _Compiled(compile_), SLOTS[kind], _param_shapes(config, numerics.dtype)
    if kind == "decode":
        make_engine(config, numerics, pool, slots, LENGTH).compile_plain(params, slots, LENGTH)
        counts = counts_of_loop(text_of(pool.by_kind["generate"]))
    else:
        engine = make_engine(config, numerics, pool, slots, LENGTH, (ROWS,))
        engine.compile_verify(params, slots, LENGTH, ROWS, ROWS // slots - 1)
        counts = counts_of_program(text_of(pool.by_kind["verify"]))
    return counts.kernels, counts.bytes


def pass_rows(policy: str, device: str, compile_: Compile) -> Iterator[Line]:
    """Yields a row for every variant and pass."""
    config = config_of(policy)
    one, two = (num_params(dataclasses.replace(config, num_layers=layers)) for layers in (1, 2))
    for variant, numerics in variants(run_numerics(config, quick=False)):
        for kind, slots in SLOTS.items():
            counts = functools.partial(pass_counts, numerics=numerics, compile_=compile_, kind=kind)
            (kernels, moved), (of_pass, moved_of_pass) = extrapolated(config, DEPTHS, counts)
            cache = cache_bytes(dataclasses.replace(config, num_layers=1), slots * LENGTH)
            least = 2.0 * (two - one) + cache  # weights in bfloat16
            row = {
                "name": f"{device}/{policy}/{kind}/{variant}",
                "value": kernels,
                "unit": "kernels a layer",
                "slots": slots,
                "rows": ROWS,
                "cache_positions": LENGTH,
                "kernels_of_pass": round(of_pass),
                "bytes_of_layer": moved,
                "least_bytes_of_layer": least,
                "bytes_of_pass": moved_of_pass,
            }
            yield (
                row,
                f"{kernels:.1f} kernels a layer, {round(of_pass)} a pass; {moved / 1e6:.1f} MB a layer,"
                f" {moved / least:.2f} times the least",
            )


# --- updates ---------------------------------------------------------------------------------------------


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


def update_counts(
    config: ModelConfig, numerics: Numerics, compile_: Compile, sequences: int, training: TrainingConfig
) -> tuple[int, ...]:
    """Compiles a micro-batch of a row of equal sequences, for float32 weights and their copies. Returns its
    loops, those of unknown turns, kernels, the bytes that these move, and the bytes of arguments and
    temporaries.
    """

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
    program = compile_(step, params, copies, params, batch, rope, donate_argnums=(2,))
    text, memory = text_of(program), program.memory_analysis()
    work = counts_of_program(text)
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return *loops_of_program(text), work.kernels, work.bytes, *sizes


def update_rows(policy: str, device: str, compile_: Compile, sequences: int) -> Iterator[Line]:
    """Yields a row for every variant."""
    config = config_of(policy)
    for variant, numerics, training in update_variants(run_numerics(config, quick=False)):
        given = {"numerics": numerics, "compile_": compile_, "sequences": sequences, "training": training}
        of_layer, whole = extrapolated(config, UPDATE_DEPTHS, functools.partial(update_counts, **given))
        loops, unknown, kernels, moved, _, temporaries = map(int, whole)
        row = {
            "name": f"{device}/{policy}/update of {sequences} sequences/{variant}",
            "value": unknown,
            "unit": "loops of unknown turns",
            "loops": loops,
            "kernels": kernels,
            "bytes_of_layer": of_layer[3],
            "bytes": moved,
            "argument_bytes_of_layer": of_layer[4],
            "temporary_bytes_of_layer": of_layer[5],
            "temporary_bytes": temporaries,
            "tokens": UPDATE_TOKENS,
        }
        yield (
            row,
            f"{loops} loops, {unknown} of them of unknown turns; {kernels} kernels;"
            f" {of_layer[5] / 1e6:.1f} MB a layer, {temporaries / 1e6:.0f} in all, beside weights and"
            " gradients",
        )


@exit_status()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="bench_layers.py", description=__doc__.splitlines()[0])
    parser.add_argument("--compiled-for", nargs="+", default=["h100:1", "v5e:1x1"], metavar="DEVICES")
    parser.add_argument(
        "--policy", nargs="+", choices=[REAL, *SHAPES], default=[REAL, "Qwen3-1.7B", "Qwen3-8B"]
    )
    parser.add_argument(
        "--update", type=int, metavar="N", help=f"of a row of {UPDATE_TOKENS} tokens in N sequences"
    )
    parser.add_argument("--output", type=Path, help="default: layers.json, or update-layers.json")
    arguments = parser.parse_args(argv)
    sequences, found = arguments.update, []
    rows_of = functools.partial(update_rows, sequences=sequences) if sequences else pass_rows
    for name in arguments.compiled_for:
        with compiling_for(name) as compile_:
            for policy in arguments.policy:
                for row, line in rows_of(policy, name.split(":")[0], compile_):
                    found.append(row)
                    print(f"{row['name']}: {line}", flush=True)
    output = arguments.output or RESULTS / ("update-layers.json" if sequences else "layers.json")
    write_figures(output, {"rows": found}, command_line())
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
