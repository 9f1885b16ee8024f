"""Whether a row's bits can depend on the number of rows, on an accelerator: docs/row-invariance.md.

    python scripts/bench_rows.py --compiled-for v5e:1x1   # without the device: reads the compiled programs

Compiled programs tell which kernel computes a formulation for every number of rows, and in which pieces it
adds up: the same pieces in the same order give the same bits. What a program leaves to a library that chooses
a kernel when it runs, or to measurements on the device, is named as unknown.
"""

import argparse
import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from compiled_programs import Operation, parsed, text_of
from rljax import target
from rljax.engine import kv_cache
from rljax.errors import exit_status
from rljax.kernels.tree_attention import decode_attention, tree_attention
from rljax.models.config import ModelConfig
from rljax.numerics import products
from rljax.numerics.rows import KEY_CHUNK, Numerics, row_sum
from rljax.planning.topologies import compile_devices, parse_topology, platform_of
from rljax.provenance import command_line, write_figures
from workloads import REAL, SHAPES, config_of

ROWS = (1, 2, 8, 16, 32, 64, 128, 512)
_NODES = (2, 8, 16)  # of a verifying pass, in each of 8 slots
_CACHE = 1024  # positions
_PIECE = 2048  # inputs of a product whose pieces are added in order; no policy does that yet
_WIDEST = 16_384  # outputs of an LM head
_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a compiled program says of one of its sums of products.

    Attributes:
      by: the compiler's emitter or library.
      pieces: how it splits the sum: the same pieces are added up in the same order.
      tiles: how it splits the results, which does not matter for their bits.
      unknown: why the order is not known, or empty.
    """

    by: str
    pieces: str
    tiles: str = ""
    unknown: str = ""


# -- formulations ------------------------------------------------------------------------------------------


def formulations(config: ModelConfig, dtype: str) -> Iterator[tuple[str, Callable[..., Any], Callable]]:
    """Yields name, function, and argument shapes for a number of rows, of everything that a policy sums."""
    numerics = Numerics(True, dtype)
    d, f = config.hidden_size, config.mlp_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    shapes = {(d, heads * dim), (d, kv_heads * dim), (heads * dim, d), (d, f), (f, d)}
    shapes |= {(d, min(config.vocab_size, _WIDEST))}

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    padded = [form for form in products.forms(dtype) if not form.float32 and not form.slabs]
    slabs = [products.ProductForm(size, size, slabs=True) for size in products.SLABS]
    for form in (padded[0], padded[-1], *slabs):
        for inputs, outputs in sorted(shapes):
            multiply = functools.partial(products.padded_dot, form=form)

            def args(rows: int, i: int = inputs, o: int = outputs) -> tuple:
                return array(rows, i, dtype=dtype), array(o, i, dtype=dtype)

            yield f"product [{inputs} -> {outputs}], {form}", multiply, args
            if form is padded[0] and inputs > _PIECE:
                name = f"product [{inputs} -> {outputs}] in pieces of {_PIECE} inputs"
                yield name, functools.partial(_in_pieces, form=form), args
    for width, ordered in ((d, False), (KEY_CHUNK, True)):
        add = functools.partial(row_sum, numerics=numerics, ordered=ordered)
        yield f"sum of {width}{', in order' if ordered else ''}", add, lambda rows, w=width: (array(rows, w),)

    cache_dtype = jnp.dtype(dtype)
    keys = (kv_heads, _CACHE // kv_cache.KEY_BLOCK, dim, kv_cache.KEY_BLOCK)

    def decoding(slots: int) -> tuple:
        new = array(slots, 1, kv_heads, dim, dtype=cache_dtype)
        queries, values = array(slots, 1, heads, dim, dtype=dtype), (slots, kv_heads, _CACHE, dim)
        cache = array(slots, *keys, dtype=cache_dtype), array(*values, dtype=cache_dtype)
        return queries, *cache, array(slots, dtype=jnp.int32), new, new

    yield "attention of a token in each slot", _plainly(decode_attention, numerics), decoding

    def verifying(nodes: int) -> tuple:
        q, cached_keys, cached_values, lengths, _, _ = decoding(8)
        new = array(8, nodes, kv_heads, dim, dtype=cache_dtype)
        q = array(8, nodes, heads, dim, dtype=dtype)
        tree = array(8, nodes, nodes, dtype=bool), array(8, nodes, dtype=jnp.int32)
        return q, cached_keys, cached_values, lengths, new, new, *tree

    yield "attention of draft nodes in 8 slots", _plainly(tree_attention, numerics), verifying


def _plainly(attention: Callable[..., Any], numerics: Numerics) -> Callable[..., Any]:
    return lambda *args: attention(*args, numerics, "xla")


def _in_pieces(rows: jax.Array, weight: jax.Array, form: products.ProductForm) -> jax.Array:
    """A product whose sum is split by the program instead of the compiler: pieces that are added in order."""
    total = 0.0
    for first in range(0, rows.shape[1], _PIECE):
        piece = slice(first, first + _PIECE)
        total = total + products.padded_dot(rows[:, piece], weight[:, piece], form)
    return total


# -- reading compiled programs -----------------------------------------------------------------------------


def kernels_of(text: str, platform: str) -> list[Kernel]:
    """Returns the kernels of a compiled program that add up products, in the order of the program."""
    computations, read = parsed(text), _tpu_kernel if platform == "tpu" else _gpu_kernel
    found = (
        read(operation, computations.get(operation.called, []))
        for operations in computations.values()
        for operation in operations
    )
    return [kernel for kernel in found if kernel]


def _tpu_kernel(operation: Operation, inside: Sequence[Operation]) -> Kernel | None:
    config = operation.config
    window = config.get("window_config", {})
    kinds = {each.kind for each in inside or [operation]}
    if not window.get("kernel_window_bounds") or "convolution" not in kinds:
        return None
    kernel, iterations = ((window[f"{name}_bounds"] or ["1"])[-1] for name in ("kernel_window", "iteration"))
    sizes = {name: "x".join(window[name]) for name in window if name.endswith("bounds")}
    return Kernel(
        by=config.get("convolution_algorithm_config", {}).get("emitter", "convolution"),
        pieces=f"{kernel} x {iterations}",
        tiles=" ".join(f"{name.split('_')[0]} {size}" for name, size in sizes.items() if size),
    )


def _gpu_kernel(operation: Operation, inside: Sequence[Operation]) -> Kernel | None:
    if operation.kind == "custom-call" and "gemm" in f"{operation.name} {operation.rest}".lower():
        name = re.search(r'custom_call_target="([^"]+)"', operation.rest)
        why = "the library chooses its kernel when it runs"
        return Kernel(name[1] if name else "gemm", "", unknown=why)
    fusion = operation.config.get("fusion_backend_config", {})
    dot = next((each for each in inside if each.kind == "dot"), None)
    if dot is None or not fusion.get("kind", "").startswith("__triton"):
        return None
    tiles = fusion.get("block_level_fusion_config", fusion.get("triton_gemm_config", {}))
    sizes, block = tiles.get("output_tiles", [{}])[0].get("sizes", []), dot.config.get("sizes", ["?"])
    return Kernel(
        by="triton",
        pieces=f"{_split_of(dot, inside)} parts, {'x'.join(block)} at a time",
        tiles=f"{'x'.join(sizes)}, {tiles.get('num_warps', '?')} warps",
        unknown="autotuning on the device may choose other tiles",
    )


def _split_of(dot: Operation, inside: Sequence[Operation]) -> int:
    """Into how many parts a sum is split among blocks: a dimension that both factors of the product have
    beside the contracted one.
    """
    batch = re.search(r"lhs_batch_dims=\{(\d+)", dot.rest)
    shapes = {each.name: re.search(r"\[([\d,]+)\]", each.shape) for each in inside}
    shape = shapes.get(dot.operands[0])
    return int(shape[1].split(",")[int(batch[1])]) if batch and shape else 1


# -- the command -------------------------------------------------------------------------------------------


def compiled(name: str, config: ModelConfig, dtype: str, rows: Sequence[int]) -> dict[str, Any]:
    """Returns, by formulation, the kernels that a device of a topology computes numbers of rows with."""
    topology = parse_topology(name)
    device = compile_devices(topology)[0]
    placed = SingleDeviceSharding(device)
    jax.config.update("jax_enable_compilation_cache", False)
    found: dict[str, Any] = {}
    with target.tracing_for(device, 1, platform_of(topology)):
        for formulation, function, arguments in formulations(config, dtype):
            of_attention = "nodes" in formulation
            by_rows = {}
            for count in _NODES if of_attention else rows:
                shapes = jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed),
                    arguments(count),
                )
                text = text_of(jax.jit(function).lower(*shapes).compile())
                by_rows[count] = kernels_of(text, platform_of(topology))
            found[formulation] = {
                str(count): [dataclasses.asdict(kernel) for kernel in kernels]
                for count, kernels in by_rows.items()
            }
            print(_line(formulation, by_rows), flush=True)
    return found


def _line(formulation: str, by_rows: dict[int, list[Kernel]]) -> str:
    """Returns a line for the user: the numbers of rows with the same order of sums."""
    groups = collections.defaultdict(list)
    for rows, kernels in by_rows.items():
        groups[tuple(sorted((kernel.by, kernel.pieces) for kernel in kernels))].append(rows)
    unknown = {kernel.unknown for kernels in by_rows.values() for kernel in kernels if kernel.unknown}
    verdict = "one order of sums for all rows" if len(groups) == 1 else f"{len(groups)} orders of sums"
    parts = [
        f"{', '.join(map(str, rows))}: "
        + ("; ".join(f"{by} {pieces}" for by, pieces in order) or "a fused loop")
        for order, rows in groups.items()
    ]
    return f"{formulation}: {verdict} ({' | '.join(parts)})" + "".join(f"; {why}" for why in sorted(unknown))


@exit_status()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="bench_rows.py", description=__doc__.splitlines()[0])
    parser.add_argument("--compiled-for", required=True, metavar="DEVICES", help="v5e:1x1, v6e:1x1, h100:1")
    parser.add_argument("--policy", choices=[REAL, *SHAPES], default="Qwen2.5-1.5B")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results, named after the device")
    arguments = parser.parse_args(argv)
    of_policy = config_of(arguments.policy), arguments.dtype, arguments.rows
    result = {
        "policy": arguments.policy,
        "dtype": arguments.dtype,
        "compiled_for": arguments.compiled_for,
        "formulations": compiled(arguments.compiled_for, *of_policy),
    }
    name = arguments.compiled_for.split(":")[0]
    output = arguments.output or _RESULTS / f"rows-{name}-{arguments.dtype}.json"
    write_figures(output, result, command_line())
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
