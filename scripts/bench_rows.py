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

from compiled_programs import Operation, compiling_for, parsed, text_of
from rljax import target
from rljax.engine import kv_cache
from rljax.errors import exit_status
from rljax.kernels.tree_attention import decode_attention, tree_attention
from rljax.models.config import ModelConfig
from rljax.numerics import products
from rljax.numerics.rows import KEY_CHUNK, Numerics, row_sum
from rljax.provenance import command_line, write_figures
from workloads import REAL, RESULTS, SHAPES, config_of

ROWS = (1, 2, 8, 16, 32, 64, 128, 512)
_NODES = (2, 8, 16)  # of a verifying pass, in each of 8 slots
_CACHE = 1024  # positions
_PIECE = 2048  # inputs of a product whose pieces are added in order; no policy does that yet
_WIDEST = 16_384  # outputs of an LM head
_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a compiled program says of one of its sums of products."""

    by: str  # the compiler's emitter or library
    pieces: str  # how it splits the sum: the same pieces are added up in the same order
    tiles: str = ""  # how it splits the results, which does not matter for their bits
    unknown: str = ""  # why the order is not known, or empty


# -- formulations ------------------------------------------------------------------------------------------


def formulations(config: ModelConfig) -> Iterator[tuple[str, Callable[..., Any], Callable]]:
    """Yields name, function, and argument shapes for a number of rows, of everything that a policy sums."""
    numerics = Numerics(True, _DTYPE)
    d, f = config.hidden_size, config.mlp_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    shapes = {(d, heads * dim), (d, kv_heads * dim), (heads * dim, d), (d, f), (f, d)}
    shapes |= {(d, min(config.vocab_size, _WIDEST))}

    def array(*shape: int, dtype: Any = _DTYPE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    padded = [form for form in products.forms(_DTYPE) if not form.float32 and not form.slabs]
    slabs = [products.ProductForm(size, size, slabs=True) for size in products.SLABS]
    for form in (padded[0], padded[-1], *slabs):
        for inputs, outputs in sorted(shapes):
            name, sides = f"product [{inputs} -> {outputs}]", (inputs, array(outputs, inputs))
            args = lambda rows, sides=sides: (array(rows, sides[0]), sides[1])  # noqa: E731
            yield f"{name}, {form}", functools.partial(products.padded_dot, form=form), args
            if form is padded[0] and inputs > _PIECE:
                in_pieces = functools.partial(_in_pieces, form=form)
                yield f"{name} in pieces of {_PIECE} inputs", in_pieces, args
    for width, ordered in ((d, False), (KEY_CHUNK, True)):
        add = functools.partial(row_sum, numerics=numerics, ordered=ordered)
        args = lambda rows, width=width: (array(rows, width, dtype=jnp.float32),)  # noqa: E731
        yield f"sum of {width}{', in order' if ordered else ''}", add, args

    keys = (kv_heads, _CACHE // kv_cache.KEY_BLOCK, dim, kv_cache.KEY_BLOCK)

    def decoding(slots: int, nodes: int = 1) -> tuple:
        queries, new = array(slots, nodes, heads, dim), array(slots, nodes, kv_heads, dim)
        cache = array(slots, *keys), array(slots, kv_heads, _CACHE, dim)
        return queries, *cache, array(slots, dtype=jnp.int32), new, new

    def verifying(nodes: int) -> tuple:
        tree = array(8, nodes, nodes, dtype=bool), array(8, nodes, dtype=jnp.int32)
        return *decoding(8, nodes), *tree

    for name, attention, args in (
        ("attention of a token in each slot", decode_attention, decoding),
        ("attention of draft nodes in 8 slots", tree_attention, verifying),
    ):
        yield name, lambda *given, attention=attention: attention(*given, numerics, "xla"), args


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


def compiled(name: str, config: ModelConfig) -> dict[str, Any]:
    """Returns, by formulation, the kernels that a device of a topology computes numbers of rows with."""
    found: dict[str, Any] = {}
    with compiling_for(name) as compile_:
        for formulation, function, arguments in formulations(config):
            by_rows = {
                count: kernels_of(text_of(compile_(function, *arguments(count))), target.platform())
                for count in (_NODES if "nodes" in formulation else ROWS)
            }
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
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results, named after the device")
    arguments = parser.parse_args(argv)
    device, policy = arguments.compiled_for, arguments.policy
    result = {"policy": policy, "dtype": _DTYPE, "compiled_for": device}
    result["formulations"] = compiled(device, config_of(policy))
    output = arguments.output or RESULTS / f"rows-{device.split(':')[0]}-{_DTYPE}.json"
    write_figures(output, result, command_line())
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
