"""The operations of rljax/kernels at shapes of real policies: a table of cases, the most telling first."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters.quantized import WeightFormat, rtn
from rljax.kernels.compaction import compaction
from rljax.kernels.gated_product import gated_product
from rljax.kernels.head_products import HeadWeights, head_products
from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.kernels.packed_attention import packed_attention
from rljax.kernels.quantized_product import quantized_product
from rljax.kernels.round_to_nearest import round_to_nearest
from rljax.kernels.switch import IMPLEMENTATIONS
from rljax.kernels.token_logprobs import token_logprobs
from rljax.kernels.tree_attention import decode_attention, tree_attention
from rljax.models.config import ModelConfig
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.quantized import QuantizedWeight
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from workloads import SHAPES, qwen3

POLICIES = {  # the first is measured first: a measurement may be cut short
    "Qwen2.5-7B": qwen3(152_064, 3584, 28, 28, 4, 18_944, head_dim=128),
    "Llama-3.1-8B": qwen3(128_256, 4096, 32, 32, 8, 14_336, head_dim=128),
    "Qwen2.5-1.5B": SHAPES["Qwen2.5-1.5B"],
    "Qwen2.5-0.5B": SHAPES["Qwen2.5-0.5B"],
}
_TINY = qwen3(2048, 256, 1, 4, 2, 512)  # for a look at a CPU, where kernels are interpreted
_SAMPLING = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of an operation.

    Attributes:
      name: name in the rows, such as "Qwen2.5-7B, 16 slots of 4096, 16 nodes".
      sizes: sizes of the policy that the operation's default depends on (`rljax.kernels.switch.call`).
      make: returns one set of random arguments on the device. Several sets take turns in the measurement, so
        that the device's cache is as cold as in a real step.
      functions: implementations and their baselines, by name. Pure; compiled with the arguments of `make`.
      bytes: smallest number of bytes to move between memory and processor, each read or write counted once.
      flops: additions and multiplications in matrix products.
      donated: how many of the first arguments are donated, such as a cache that is written in place: so many
        of the first results take their places.
    """

    name: str
    sizes: tuple[int, ...]
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    functions: Mapping[str, Callable[..., Any]]
    bytes: int
    flops: int
    donated: int = 0


def _case(
    name: str,
    sizes: tuple[int, ...],
    make: Callable[[np.random.Generator], tuple[Any, ...]],
    function: Callable[..., Any],
    bytes: int,
    flops: int = 0,
    donated: int = 0,
    **others: Callable[..., Any],
) -> Case:
    """A case of `function(*args, implementation=name)`, and `others` beside it."""
    own = {name: functools.partial(function, implementation=name) for name in IMPLEMENTATIONS}
    return Case(name, sizes, make, own | others, bytes, flops, donated)


def _key(rng: np.random.Generator) -> Array:
    return jax.random.key(int(rng.integers(2**31)))


def _normals(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Array]:
    """Random bfloat16 arrays of these shapes."""
    keys = jax.random.split(_key(rng), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


# --- decoding and verifying ------------------------------------------------------------------------------


def _noisy_argmax(name: str, policy: ModelConfig, rows: int) -> Case:
    """The sampled token: slots, times nodes in verification."""
    vocab = policy.vocab_size

    def make(rng: np.random.Generator) -> tuple:
        logits = 2.5 * jax.random.normal(_key(rng), (rows, vocab))
        keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
        return logits, jnp.asarray(keys), jnp.arange(rows, dtype=jnp.int32)

    def sampled(*args, implementation):
        return noisy_argmax(*args, _SAMPLING, Numerics(), implementation)

    moved = rows * vocab * 4 + rows * 24  # logits; keys and positions, tokens and logprobs
    return _case(f"{name}, {rows} rows", (vocab,), make, sampled, moved)


def _tree_attention(
    name: str, policy: ModelConfig, batch: int, capacity: int, nodes: int, ragged: bool = False
) -> Case:
    """Verifying, and decoding with one node: slots all as long as the cache, or of any length up to it.
    Decoding has the cache first, in arguments and results.
    """
    heads, kv_heads, dim = policy.num_heads, policy.num_kv_heads, policy.head_dim
    numerics = Numerics(row_invariant=False, compute_dtype="bfloat16")
    room = capacity - nodes  # what a slot may hold before this pass
    lengths = np.random.default_rng(0).integers(0, room + 1, batch) if ragged else np.full(batch, room)
    parents = np.maximum(np.arange(nodes) - 1, 0) // 2  # a binary tree below the last token
    ancestors = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]

    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        queries, keys, values, *new = _normals(
            rng,
            (batch, nodes, heads, dim),
            (batch, kv_heads, capacity // KEY_BLOCK, dim, KEY_BLOCK),
            (batch, kv_heads, capacity, dim),
            *[(batch, nodes, kv_heads, dim)] * 2,
        )
        committed = jnp.asarray(lengths, jnp.int32)
        if nodes == 1:
            return keys, values, queries, committed, *new
        everywhere = jnp.broadcast_to(jnp.asarray(ancestors)[None], (batch, nodes, nodes))
        depth = jnp.broadcast_to(jnp.asarray(ancestors.sum(-1) - 1, jnp.int32)[None], (batch, nodes))
        return queries, keys, values, committed, *new, everywhere, depth

    def decode(keys: Array, values: Array, queries: Array, *args: Array, implementation: str) -> Any:
        out, *cache = decode_attention(queries, keys, values, *args, numerics, implementation)
        return *cache, out

    def verify(*args: Array, implementation: str) -> Array:
        return tree_attention(*args, numerics, implementation)

    label = f"{name}, {batch} slots of {'up to ' * ragged}{capacity}, "
    label += f"{nodes} nodes" if nodes > 1 else "decoding"
    cached = 2 * int(lengths.sum()) * kv_heads * dim
    written_once = 2 * batch * nodes * (heads + kv_heads) * dim  # queries and output, the nodes' entries
    seen = int(lengths.sum()) * nodes + batch * int(ancestors.sum())  # pairs of node and position
    moved, flops = 2 * (cached + written_once), 4 * seen * heads * dim
    sizes = heads, kv_heads, dim
    if nodes > 1:
        return _case(label, sizes, make, verify, moved, flops)
    moved += 2 * 2 * batch * kv_heads * dim  # the token, written to the cache
    return _case(label, sizes, make, decode, moved, flops, donated=2)


_ACCEPTED = 4  # nodes of a path, the last token included


def _compaction(name: str, policy: ModelConfig, batch: int, capacity: int, nodes: int) -> Case:
    """Accepted paths in one layer's cache: a token a slot (decoding), and four of 16 nodes."""
    kv_heads, dim = policy.num_kv_heads, policy.head_dim
    count = min(_ACCEPTED, nodes)
    path = np.zeros((batch, nodes), np.int32)
    path[:, :count] = np.linspace(0, nodes - 1, count).astype(np.int32)

    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        caches_and_nodes = _normals(
            rng,
            (batch, kv_heads, capacity // KEY_BLOCK, dim, KEY_BLOCK),
            (batch, kv_heads, capacity, dim),
            *[(batch, nodes, kv_heads, dim)] * 2,
        )
        lengths = rng.integers(0, capacity - nodes, batch)
        counts = jnp.full(batch, count, jnp.int32)
        return (*caches_and_nodes, jnp.asarray(path), counts, jnp.asarray(lengths, jnp.int32))

    label = f"{name}, {batch} slots of {capacity}, {count} of {nodes} nodes"
    moved = 2 * 2 * batch * count * kv_heads * dim  # keys and values, read and written
    return _case(label, (kv_heads, dim), make, compaction, 2 * moved, donated=2)


_WEIGHTS = 2**28  # bytes in a call, well beyond a cache of 50 MB
_MOST_LAYERS = 16


def _layers(name: str, stored: int) -> int:
    """Layers of a call, of `stored` bytes of weights each; a look has one."""
    return min(max(_WEIGHTS // stored, 1), _MOST_LAYERS) if name in POLICIES else 1


def _gated_product(name: str, policy: ModelConfig, rows: int) -> Case:
    """Gate, up and activation of one layer after another, as a decode step does."""
    width, outputs = policy.hidden_size, policy.mlp_size
    layers = _layers(name, 4 * outputs * width)

    def make(rng: np.random.Generator) -> tuple[Array, list[Array]]:
        x, *weights = _normals(rng, (layers, rows, 1, width), *[(outputs, width)] * 2 * layers)
        return x, weights

    def gated(x: Array, weights: list[Array], implementation: str) -> list[Array]:
        pairs = zip(x, weights[::2], weights[1::2], strict=True)
        return [gated_product(*each, jax.nn.silu, False, implementation)[0] for each in pairs]

    moved = 2 * layers * (2 * outputs * width + rows * (width + outputs))
    label, flops = f"{name}, {rows} rows, {layers} layers", layers * 4 * rows * outputs * width
    return _case(label, (outputs, width), make, gated, moved, flops)


def _head_products(name: str, policy: ModelConfig, rows: int) -> Case:
    """Queries, keys and values of one layer after another, with norms of heads."""
    width, dim = policy.hidden_size, policy.head_dim
    outputs = [count * dim for count in (policy.num_heads, policy.num_kv_heads, policy.num_kv_heads)]
    stored = 2 * sum(outputs) * width
    layers = _layers(name, stored)

    def make(rng: np.random.Generator) -> tuple[Array, Array, list[Array]]:
        x, *matrices = _normals(rng, (layers, rows, 1, width), *[(size, width) for size in outputs] * layers)
        return x, jax.random.normal(_key(rng), (rows, 1, 2, dim // 2)), matrices

    def heads(x: Array, angles: Array, matrices: list[Array], implementation: str) -> list[Array]:
        numerics = Numerics(True, "bfloat16", KernelChoice(head_products=implementation))
        scales = (jnp.ones(dim),) * 2
        layered = [
            HeadWeights(tuple(each), (), scales, policy.norm_epsilon)
            for each in zip(*(matrices[i::3] for i in range(3)), strict=True)
        ]
        pairs = zip(x, layered, strict=True)
        return [head_products(rows, angles, weights, False, numerics)[0] for rows, weights in pairs]

    label, sizes = f"{name}, {rows} rows, {layers} layers", (policy.num_heads, policy.num_kv_heads, dim)
    moved = layers * (stored + rows * (2 * width + 2 * sum(outputs) + 4 * dim))
    return _case(label, sizes, make, heads, moved, layers * 2 * rows * sum(outputs) * width)


# --- the quantized drafter -------------------------------------------------------------------------------

_FORMATS = {"W4": WeightFormat(4, 128), "W8": WeightFormat(8, 0)}
_PARTS = ("down", "up", "o")


def _projection(policy: ModelConfig, part: str, fmt: WeightFormat) -> tuple[int, int, int]:
    """Outputs and inputs of a projection, and the bytes that it takes in a format."""
    outputs, inputs = {
        "up": (policy.mlp_size, policy.hidden_size),
        "down": (policy.hidden_size, policy.mlp_size),
        "o": (policy.hidden_size, policy.num_heads * policy.head_dim),
    }[part]
    of_group = 5 if fmt.bits == 4 else 4  # bytes of a scale, and of a zero
    stored = outputs * inputs * fmt.bits // 8 + outputs * -(-inputs // (fmt.group or inputs)) * of_group
    return outputs, inputs, stored


def _quantized_product(name: str, policy: ModelConfig, part: str, fmt: str, rows: int) -> Case:
    """Products of the self-drafter. One takes a few microseconds, less than it takes to start a program, and
    its matrix fits the cache. So a call multiplies with one layer's matrix after the other, as a draft step
    does.
    """
    outputs, inputs, stored = _projection(policy, part, _FORMATS[fmt])
    layers = _layers(name, stored)

    def make(rng: np.random.Generator) -> tuple[Array, list[QuantizedWeight], list[Array]]:
        x, *matrices = _normals(rng, (layers, rows, inputs), *[(outputs, inputs)] * layers)
        quantize = jax.jit(lambda matrix: rtn(matrix.astype(jnp.float32), _FORMATS[fmt]))
        return x, [quantize(matrix) for matrix in matrices], matrices

    def bfloat16(x: Array, weights: list[QuantizedWeight], matrices: list[Array]) -> list[Array]:
        """Computes the policy's products, with the weights before quantization."""
        pairs = zip(x, matrices, strict=True)
        return [jnp.dot(rows, matrix.T, preferred_element_type=jnp.float32) for rows, matrix in pairs]

    def products(
        x: Array, weights: list[QuantizedWeight], matrices: list[Array], implementation: str
    ) -> list[Array]:
        one = jax.jit(quantized_product, static_argnums=2)  # traced and lowered once for all layers
        return [one(*operands, implementation) for operands in zip(x, weights, strict=True)]

    label = f"{name}, {part}, {fmt}, {rows} rows, {layers} layers"
    moved, flops = layers * (stored + rows * (2 * inputs + 4 * outputs)), layers * 2 * rows * outputs * inputs
    return _case(label, (outputs, inputs), make, products, moved, flops, bfloat16=bfloat16)


def _round_to_nearest(name: str, policy: ModelConfig, part: str, fmt: str) -> Case:
    """Projections rounded to 4 bits in groups of 128, and to 8 by whole rows."""
    outputs, inputs, stored = _projection(policy, part, _FORMATS[fmt])

    def rounded(weight: Array, implementation: str) -> tuple[Array, Array, Array | None]:
        return round_to_nearest(weight, _FORMATS[fmt].bits, _FORMATS[fmt].group, implementation)

    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        return tuple(_normals(rng, (outputs, inputs)))

    moved = 2 * outputs * inputs + stored
    return _case(f"{name}, {part}, {fmt}", (outputs, inputs), make, rounded, moved)


# --- training --------------------------------------------------------------------------------------------


def _token_logprobs(name: str, policy: ModelConfig, tokens: int, gradient: bool) -> Case:
    """Log-probabilities of a micro-batch, scored, and with forward and backward pass in one call."""
    vocab, width, numerics = policy.vocab_size, policy.hidden_size, Numerics(compute_dtype="bfloat16")

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        hidden, head = _normals(rng, (1, tokens, width), (vocab, width))
        return hidden, 0.02 * head, jnp.asarray(rng.integers(0, vocab, (1, tokens), np.int32))

    def score(*args: Array, implementation: str) -> tuple[Array, Array]:
        chunk = 1024  # the config's default
        return token_logprobs(*args, _SAMPLING, numerics, chunk, implementation=implementation)

    def gradients(*args: Array, implementation: str) -> tuple[Array, ...]:
        return jax.grad(lambda *args: jnp.sum(score(*args, implementation=implementation)[0]), (0, 1))(*args)

    # Scoring reads both matrices and computes logits. The backward pass reads and writes them, and computes
    # logits again, and two products.
    moved, flops = 2 * (vocab + tokens) * width, 2 * tokens * vocab * width
    if gradient:
        label = f"{name}, {tokens} tokens, with gradient"
        return _case(label, (vocab, width), make, gradients, 3 * moved, 4 * flops)
    return _case(f"{name}, {tokens} tokens, scored", (vocab, width), make, score, moved, flops)


def _packed_attention(name: str, policy: ModelConfig, tokens: int, sequences: int) -> Case:
    """Attention of a packed row of equal sequences in one layer, with forward and backward pass."""
    heads, kv_heads, dim = policy.num_heads, policy.num_kv_heads, policy.head_dim
    numerics = Numerics(row_invariant=False, compute_dtype="bfloat16")
    segment_ids = jnp.asarray(1 + np.arange(tokens) * sequences // tokens, jnp.int32)[None]

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        shapes = [(1, tokens, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
        return (*_normals(rng, *shapes), segment_ids)

    def gradients(
        q: Array, k: Array, v: Array, weights: Array, segment_ids: Array, implementation: str
    ) -> tuple[Array, ...]:
        def weighed(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out = packed_attention(q, k, v, segment_ids, numerics, implementation=implementation)
            return jnp.sum(weights * out.astype(jnp.float32)), out

        gradients, out = jax.grad(weighed, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    moved = 2 * tokens * dim * (5 * heads + 6 * kv_heads)  # what is given, what comes out, both once
    flops = 14 * (tokens**2 // sequences // 2) * heads * dim  # two products, and in the backward pass five
    label = f"{name}, {sequences} sequences in {tokens} tokens"
    return _case(label, (heads, kv_heads, dim), make, gradients, moved, flops)


# --- the table -------------------------------------------------------------------------------------------

_TREES = [
    *(
        (name, batch, length, nodes)
        for batch, length in ((16, 4096), (64, 4096), (16, 16_384))
        for name in POLICIES
        for nodes in (16, 1)
    ),
    *((name, 16, 4096, 64) for name in POLICIES),
    *((name, 64, 4096, nodes, True) for name in POLICIES for nodes in (16, 1)),
]
_NAMES = list(POLICIES)
# By operation: what makes a case, its arguments behind the policy for a look, and policies with arguments.
_TABLE: dict[str, tuple[Callable[..., Case], list[tuple], list[tuple]]] = {
    "noisy_argmax": (
        _noisy_argmax,
        [(16,)],
        [(_NAMES[0], rows) for rows in (64, 16, 256, 1, 1024)] + [(name, 64) for name in _NAMES[1:3]],
    ),
    "token_logprobs": (
        _token_logprobs,
        [(64, False), (64, True)],
        [(name, n, gradient) for n in (4096, 16_384) for name in _NAMES for gradient in (False, True)],
    ),
    "packed_attention": (
        _packed_attention,
        [(256, 2)],
        [(name, 4096, count) for count in (4, 1) for name in _NAMES],
    ),
    "tree_attention": (_tree_attention, [(2, 128, 5)], _TREES),
    "head_products": (_head_products, [(64,)], [(name, rows) for rows in (64, 256) for name in _NAMES[:3]]),
    "gated_product": (_gated_product, [(64,)], [(name, rows) for rows in (64, 256) for name in _NAMES]),
    "quantized_product": (
        _quantized_product,
        [("down", fmt, 16) for fmt in _FORMATS],
        [
            (name, part, fmt, rows)
            for part in _PARTS
            for name in _NAMES[:3]
            for fmt in _FORMATS
            for rows in ((16, 1, 64) if part == "down" and fmt == "W4" else (16,))
        ],
    ),
    "round_to_nearest": (
        _round_to_nearest,
        [("down", fmt) for fmt in _FORMATS],
        [(name, part, fmt) for part in _PARTS for name in _NAMES for fmt in _FORMATS],
    ),
    "compaction": (
        _compaction,
        [(2, 256, 5)],
        [(name, batch, 4096, nodes) for batch in (16, 64) for name in _NAMES for nodes in (16, 1)],
    ),
}
OPS = tuple(_TABLE)


def op_cases(op: str, quick: bool) -> list[Case]:
    """Shapes of one operation; `quick` are tiny ones."""
    case, tiny, real = _TABLE[op]
    if quick:
        return [case("tiny", _TINY, *each) for each in tiny]
    return [case(name, POLICIES[name], *each) for name, *each in real]
