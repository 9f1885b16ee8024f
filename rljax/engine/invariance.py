"""Row-invariance, measured where the program runs.

A token's bits must not depend on how many rows are computed beside it (`docs/row-invariance.md`). No compiler
promises that, and processors differ. So before a policy is used, its products, sums, and attention scores are
computed over the row counts that its programs use, and compared bit for bit. From that follows the form in
which its products are computed, or that nothing is exact here. Whether sums are plain reductions on an
accelerator, and which weights are multiplied in blocks (`rljax/engine/weight_blocks.py`), the form says, too.

A result is kept in a file, since it depends only on the processor, the library versions, the number type, the
shapes and the row counts.
"""

import dataclasses
import functools
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax import target
from rljax.durable_files import write_durably
from rljax.engine import appending, kv_cache
from rljax.engine.buckets import Buckets
from rljax.engine.executables import row_invariant_compiler_options
from rljax.engine.shapes import Shapes
from rljax.engine.stored_programs import processor
from rljax.engine.weight_blocks import WIDEST_HEAD, measured_blocks
from rljax.kernels.tree_attention import decode_attention, tree_attention
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics import products
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import KEY_CHUNK, Numerics, cast_matrices, row_sum

_LARGEST = 512
"""Row counts above this are measured at a smaller one with the same rest."""
_REST = 256
_TINY = ModelConfig("qwen3", 256, 64, 1, 4, 2, 16, 192, qk_norm=True, tie_embeddings=True)
"""The policy of the fingerprint."""


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """The numbers of rows that a policy's programs compute.

    Attributes:
      products: rows of a product, ascending, all at most `_LARGEST`.
      slots: slots that decode plainly together, ascending.
      passes: (slots, draft nodes a slot) of the verifying passes.
      most: rows of the largest plain or verifying pass.
    """

    products: tuple[int, ...]
    slots: tuple[int, ...]
    passes: tuple[tuple[int, int], ...]
    most: int = 0


@dataclasses.dataclass(frozen=True)
class Invariance:
    """Results of the measurement.

    Attributes:
      form: the form of products under which nothing failed, or the first one if all failed.
      failures: per computation that is not exact under that form, one phrase.
      rejected: per cheaper form, one phrase that says what failed; the last may be of its plain sums.
      fingerprint: eight hexadecimal digits: the bits of a fixed tiny policy at every row count. Equal
        fingerprints, equal numerics.
      seconds: time that measuring took.
    """

    form: ProductForm
    failures: tuple[str, ...]
    rejected: tuple[str, ...]
    fingerprint: str
    seconds: float

    @property
    def exact(self) -> bool:
        return not self.failures

    def summary(self, compute_dtype: str) -> str:
        """One line for the user."""
        device = jax.devices()[0].device_kind if jax.default_backend() != "cpu" else "this processor"
        because = f" ({self.rejected[-1]})" if self.rejected else ""
        where = f"in {compute_dtype} on {device}, {self.form}"
        if self.exact:
            return f"numerics: exact {where}{because}; fingerprint {self.fingerprint}"
        return f"numerics: not exact {where}: {'; '.join(self.failures)}; fingerprint {self.fingerprint}"


def row_counts(buckets: Buckets, others: Sequence[int] = ()) -> RowCounts:
    """The row counts of an engine with these buckets, and `others` (the trainer's)."""
    slots, longest = buckets.batch[-1], buckets.cache[-1]
    shapes = Shapes(buckets, slots, longest, max_batch=slots)
    passes = [each for state in shapes.verified for each in shapes.passes(state)]
    decoded = {*shapes.batches, *(rows for _, _, rows, _ in passes)}
    counts = decoded | {*appending.ROWS, *others, *(rows * length for rows, length in shapes.prefixes)}
    measured = {count if count <= _LARGEST else _REST + count % _REST for count in counts}
    nodes = {(batch, nodes) for batch, _, _, nodes in passes}
    return RowCounts(tuple(sorted(measured)), buckets.batch, tuple(sorted(nodes)), max(decoded))


def measure(config: ModelConfig, numerics: Numerics, counts: RowCounts) -> Invariance:
    """Compares the bits of a policy's computations over row counts, on the default device.

    Args:
      config: the policy's architecture; its widths are measured, not its depth.
      numerics: compute dtype and kernels; a form in it is ignored. Where rows need not be invariant, no bits
        are compared, and only blocks of weights are measured.
      counts: from `row_counts`.
    """
    start = time.perf_counter()
    if not numerics.row_invariant:
        form = ProductForm(smallest=1)
        form = dataclasses.replace(form, blocks=_blocks(config, numerics, counts, form))
        return Invariance(form, (), (), "", time.perf_counter() - start)
    rejected: list[str] = []
    for form in products.forms(numerics.compute_dtype, counts.most):
        failures = _product_failures(config, numerics, counts, form)
        if not failures:
            break
        rejected.append(failures[0])
    shared = failures[:1]
    if failures:
        form = products.unmeasured_form(numerics.compute_dtype)
    elif target.platform() != "cpu":
        form, refused = _form_of_sums(config, numerics, counts, form)
        rejected += refused
    numerics = dataclasses.replace(numerics, measured_form=form)
    shared += [*_sum_failures(config, numerics, counts), *_attention_failures(config, numerics, counts)]
    form = dataclasses.replace(form, blocks=_blocks(config, numerics, counts, form))
    numerics = dataclasses.replace(numerics, measured_form=form)
    crc, same = _tiny_policy(numerics, counts, target.platform(), products.dot)
    if not same and not shared:
        shared = ["the logits of a tiny policy differ between row counts"]
    seconds = time.perf_counter() - start
    return Invariance(form, tuple(shared), tuple(rejected), f"{crc:08x}", seconds)


def measured(
    config: ModelConfig, numerics: Numerics, counts: RowCounts, directory: str | os.PathLike[str] | None
) -> Invariance:
    """Like `measure`, with the result cached in this process and, unless None, in `directory`."""
    key = (config, dataclasses.replace(numerics, measured_form=None), counts)
    if directory is None:
        return _measured(*key, products.dot)
    path = Path(directory) / "numerics" / f"{surroundings_digest(key)}.json"
    try:
        kept = json.loads(path.read_bytes())
        form = kept.pop("form")
        form = ProductForm(**form | {"blocks": tuple(map(tuple, form["blocks"]))})
        return Invariance(form, **{n: tuple(v) if isinstance(v, list) else v for n, v in kept.items()})
    except (OSError, ValueError, TypeError, KeyError):
        pass  # Measured anew, whatever was wrong with the file.
    result = _measured(*key, products.dot)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(dataclasses.asdict(result)).encode())
    except OSError:
        pass  # A later process measures again.
    return result


def surroundings_digest(key: object) -> str:
    """Returns a name for what is measured here about `key`: another one on another processor, with another
    number of cores, another JAX, other compiler flags, or another source.
    """
    here = [processor(), os.cpu_count(), jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")]
    here += [jax.__version__, _source_digest()]
    return hashlib.sha256(repr((here, key)).encode()).hexdigest()[:24]


@functools.lru_cache(maxsize=64)
def _measured(config: ModelConfig, numerics: Numerics, counts: RowCounts, dot: Callable) -> Invariance:
    del dot  # Tests put another product in its place, with results of its own.
    return measure(config, numerics, counts)


@functools.cache
def _source_digest() -> str:
    """A digest of the source that the result depends on."""
    root = Path(products.__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("numerics", "models", "engine", "kernels"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _compiled(function: Callable, *args: Any) -> Any:
    """The result of a function compiled as the engine compiles, as numpy arrays."""
    program = jax.jit(function).lower(*args).compile(compiler_options=row_invariant_compiler_options())
    return jax.device_get(program(*args))


def _at_every_count(function: Callable, rows: dict[int, Any], shared: Any = ()) -> dict[int, Any]:
    """The results of a function of rows and of what they share, by the number of rows: one program, in which
    barriers keep the numbers apart. A compiler may compute together what multiplies the same weights.
    """

    def one_by_one(rows: dict[int, Any], shared: Any) -> dict[int, Any]:
        results, last = {}, None
        for count, each in rows.items():
            each, shared, last = lax.optimization_barrier((each, shared, last))
            results[count] = last = function(each, shared)
        return results

    return _compiled(one_by_one, rows, shared)


def _differing(results: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The rows, per count, whose bits are not those of the largest count's result [count, ...]."""
    whole = results[max(results)]
    different = {}
    for count, result in results.items():
        same = (result == whole[:count]).reshape(count, -1).all(axis=1)
        if not same.all():
            different[count] = np.nonzero(~same)[0]
    return different


def _counts_phrase(counts: Sequence[int], noun: str = "row") -> str:
    listed = ", ".join(map(str, sorted(counts)[:6])) + (", ..." if len(counts) > 6 else "")
    return f"{listed} {noun}{'s' if list(counts) != [1] else ''}"


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the policy's products."""
    shapes = transformer.param_shapes(config)
    matrices = [shape for shape in shapes["layers"][0].values() if len(shape) == 2]
    head = (min(config.vocab_size, WIDEST_HEAD), config.hidden_size)
    return sorted({(inputs, outputs) for outputs, inputs in [*matrices, head]})


def _blocks(
    config: ModelConfig, numerics: Numerics, counts: RowCounts, form: ProductForm
) -> tuple[tuple[int, int, int], ...]:
    """`ProductForm.blocks` of a policy."""
    return measured_blocks(_product_shapes(config), numerics, form, counts.products)


def _product_failures(
    config: ModelConfig, numerics: Numerics, counts: RowCounts, form: ProductForm
) -> list[str]:
    """One phrase per product whose bits depend on the number of rows in this form."""
    shapes = _product_shapes(config)
    dtype = numerics.dtype
    # Compared with a count that no program has to use: 64 more than the largest.
    padded = sorted({form.padded(count) for count in counts.products} | {form.padded(_LARGEST + 64)})
    weights = [_normal(1, outputs, inputs).astype(dtype) for inputs, outputs in shapes]
    rows = [_normal(2, padded[-1], inputs).astype(dtype) for inputs, _ in shapes]

    def multiply(rows: list[Array], weights: list[Array]) -> list[Array]:
        return [products.padded_dot(x, weight, form) for x, weight in zip(rows, weights, strict=True)]

    results = _at_every_count(multiply, {count: [x[:count] for x in rows] for count in padded}, weights)
    failures = []
    for index, (inputs, outputs) in enumerate(shapes):
        differing = _differing({count: result[index] for count, result in results.items()})
        if differing:
            failures.append(
                f"a {numerics.compute_dtype} product [{inputs} -> {outputs}] of"
                f" {_counts_phrase(list(differing))} has other bits than one of {padded[-1]}"
            )
    return failures


def _sum_failures(config: ModelConfig, numerics: Numerics, counts: RowCounts) -> list[str]:
    """One phrase per sum over a last axis whose bits depend on the number of rows. Those of norms do not in
    slabs.
    """
    of_norms = () if numerics.product_form.slabs else (config.hidden_size, config.head_dim)
    widths = sorted({*of_norms, min(config.vocab_size, WIDEST_HEAD)})
    sizes = sorted({max(count, 2) for count in counts.products} | {_LARGEST + 64})
    entries = [_normal(3, sizes[-1], width) for width in widths]
    entries.append(np.exp(_normal(4, sizes[-1], KEY_CHUNK)))

    def add(entries: list[Array], _: Any) -> list[Array]:
        *plain, terms = entries
        return [row_sum(x, numerics) for x in plain] + [row_sum(terms, numerics, ordered=True)]

    results = _at_every_count(add, {count: [x[:count] for x in entries] for count in sizes})
    failures = []
    for index, width in enumerate([*widths, KEY_CHUNK]):
        differing = _differing({count: result[index] for count, result in results.items()})
        if differing:
            failures.append(
                f"a sum over {width} entries in {_counts_phrase(list(differing))} has other bits than in"
                f" {sizes[-1]}"
            )
    return failures


def _form_of_sums(
    config: ModelConfig, numerics: Numerics, counts: RowCounts, form: ProductForm
) -> tuple[ProductForm, list[str]]:
    """Returns the form with plain sums where these are exact, otherwise as it is, and a phrase why.

    A compiler fuses a plain sum with what is around it, and may add in another order there. So they are also
    measured within a layer of this policy, and where its gradient is computed.
    """
    plain = dataclasses.replace(form, plain_sums=True)
    numerics = dataclasses.replace(numerics, measured_form=plain)
    failures = _sum_failures(config, numerics, counts)
    if not failures:
        gemma = config.gemma and dataclasses.replace(config.gemma, local_layers=config.gemma.local_layers[:1])
        vocab_size = min(config.vocab_size, WIDEST_HEAD)
        layer = dataclasses.replace(config, num_layers=1, vocab_size=vocab_size, gemma=gemma)
        failures = [*_layer_failures(layer, numerics, counts), *_layer_failures(_TINY, numerics, counts)]
    return (form, [f"plain sums: {failures[0]}"]) if failures else (plain, [])


def _layer_failures(config: ModelConfig, numerics: Numerics, counts: RowCounts) -> list[str]:
    """One phrase if the logits of a policy of one layer depend on the number of rows or on their gradient."""
    params, by_count, compute = _random_policy(config, numerics, counts)

    def with_gradients(params: transformer.Params, tokens: Array) -> tuple[Array, list[Array]]:
        logits, backward = jax.vjp(lambda params: compute(params, tokens), params)
        return logits, [leaf for leaf in jax.tree.leaves(backward(logits)) if leaf.ndim == 1]

    results = _at_every_count(lambda tokens, params: compute(params, tokens), by_count, params)
    where = f"the logits of a layer of {config.hidden_size} in"
    if differing := _differing(results):
        return [f"{where} {_counts_phrase(list(differing))} have other bits than in {max(results)}"]
    most = max(by_count)
    if not np.array_equal(_compiled(with_gradients, params, by_count[most])[0], results[most]):
        return [f"{where} {most} rows have other bits beside their gradient"]
    return []


def _attention_failures(config: ModelConfig, numerics: Numerics, counts: RowCounts) -> list[str]:
    """One phrase per kind of attention whose bits are not those of the training pass.

    The last tokens of a packed row are computed as the training pass does, by plain decoding in every number
    of slots, and as a chain of draft nodes in the smallest and the largest pass of every number of nodes.
    """
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    most = max((nodes for _, nodes in counts.passes), default=0) + 1
    length = 2 * KEY_BLOCK
    committed = length - most
    q = jnp.asarray(_normal(5, 1, length, heads, dim), numerics.dtype)
    k, v = (jnp.asarray(_normal(seed, 1, length, kv_heads, dim), numerics.dtype) for seed in (6, 7))

    def prepare(q: Array, k: Array, v: Array) -> tuple[Array, kv_cache.KVCache]:
        out = PackedAttention(jnp.ones((1, length), jnp.int32), numerics)(None, q, k, v)[0]
        return out[0], kv_cache.from_prefill([(k, v)], kv_cache.cache_dtype(numerics))

    expected, cache = _compiled(prepare, q, k, v)
    tokens = [np.asarray(q), *(np.asarray(x).astype(cache.values[0].dtype) for x in (k, v))]

    def repeated(slots: int, span: slice) -> list[np.ndarray]:
        """Queries, keys, and values of a span of the row in as many slots, and their caches."""
        return [
            np.repeat(x, slots, axis=0) for x in (*(x[:, span] for x in tokens), *cache.keys, *cache.values)
        ]

    kernel = numerics.kernels.tree_attention

    def decode(arguments: dict[int, list[Array]]) -> dict[int, Array]:
        out = {}
        for slots, (q, k, v, keys, values) in arguments.items():
            positions = jnp.full(slots, length - 1, jnp.int32)
            out[slots], *_ = decode_attention(q, keys, values, positions, k, v, numerics, kernel)
        return out

    def verify(arguments: dict[tuple[int, int], list[Array]]) -> dict[tuple[int, int], Array]:
        out = {}
        for (slots, nodes), (q, k, v, keys, values) in arguments.items():
            lengths = jnp.full(slots, committed, jnp.int32)
            ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (slots, nodes, nodes))
            depth = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (slots, nodes))
            out[slots, nodes] = tree_attention(
                q, keys, values, lengths, k, v, ancestors, depth, numerics, kernel
            )
        return out

    failures = []
    last = slice(length - 1, length)
    decoded = _compiled(decode, {slots: repeated(slots, last) for slots in counts.slots})
    differing = [slots for slots, out in decoded.items() if not (out[:, 0] == expected[last]).all()]
    if differing:
        phrase = _counts_phrase(differing, "slot")
        failures.append(f"attention of one token in each of {phrase} has other bits than in training")
    extremes = {
        (choose(slots for slots, nodes in counts.passes if nodes == drafts), drafts + 1)
        for _, drafts in counts.passes
        for choose in (min, max)
    }
    spans = {(slots, nodes): slice(committed, committed + nodes) for slots, nodes in sorted(extremes)}
    verified = _compiled(verify, {size: repeated(size[0], span) for size, span in spans.items()})
    differing = [
        slots for (slots, nodes), out in verified.items() if not (out == expected[spans[slots, nodes]]).all()
    ]
    if differing:
        phrase = _counts_phrase(differing, "slot")
        failures.append(f"attention of draft trees in {phrase} has other bits than in training")
    return failures


@functools.lru_cache(maxsize=64)
def _tiny_policy(numerics: Numerics, counts: RowCounts, platform: str, dot: Callable) -> tuple[int, bool]:
    """The CRC-32 of the logits of `_TINY` at every row count, and whether they are equal between counts. They
    are the same for all policies.
    """
    del platform, dot  # other numbers on another, or where tests replace it
    params, batches, compute = _random_policy(_TINY, numerics, counts)
    results = _compiled(
        lambda params, batches: {n: compute(params, each) for n, each in batches.items()}, params, batches
    )
    crc = 0
    for count in batches:
        crc = zlib.crc32(results[count].tobytes(), crc)
    return crc, not _differing(results)


def _random_policy(
    config: ModelConfig, numerics: Numerics, counts: RowCounts
) -> tuple[transformer.Params, dict[int, np.ndarray], Callable[[transformer.Params, Array], Array]]:
    """Returns weights, tokens [count, 1] by the number of rows, and the logits [count, V] of tokens."""
    params = cast_matrices(transformer.init_params(config, seed=0), numerics.dtype)
    rope = jnp.asarray(rope_table(config, 1))

    def itself(cache: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        """Attention of a token that sees only itself; `_attention_failures` measures the rest."""
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), None

    def logits(params: transformer.Params, tokens: Array) -> Array:
        positions = jnp.zeros_like(tokens)
        hidden, _ = transformer.forward(params, config, tokens, positions, itself, rope, numerics)
        return transformer.logits(params, config, hidden[:, 0], numerics)

    tokens = np.arange(_LARGEST, dtype=np.int32)[:, None] % config.vocab_size
    by_count = {count: tokens[:count] for count in sorted({max(count, 2) for count in counts.products})}
    return params, by_count, logits
