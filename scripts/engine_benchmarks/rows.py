"""Checks whether the bits of a row depend on the number of rows, as evidence for `docs/row-invariance.md`.

Nothing is timed. A result is the number of row counts whose bits differ from those at 64 rows, or of
differing numbers, for the formulation that the policy uses and for the one that it avoids. The compiler has
its default options, so that changed defaults of a new version show.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.benchmarking import Row
from rljax.engine.buckets import make_buckets
from rljax.engine.invariance import measure, row_counts
from rljax.numerics.attention import KEY_BLOCK, block_scores, scale_queries, softmax_terms
from rljax.numerics.rows import KEY_CHUNK, Numerics, row_max, row_sum
from workloads import config_of

_ROWS, _FEWER = 64, (1, 2, 3, 4, 8, 16, 32)
_INPUTS, _OUTPUTS = (192, 512, 768, 1024), 256


def row_invariance_rows(names: Sequence[str]) -> list[Row]:
    """Compares every formulation of `rljax/numerics/rows.py` to the one that it replaces; and the form of
    products of policies.
    """
    rng, rows = np.random.default_rng(0), []
    for inputs in _INPUTS:
        x, weight = (rng.standard_normal((count, inputs), np.float32) for count in (_ROWS, _OUTPUTS))
        ours, reference = (
            _differing(_product(1), x, whole=weight),
            _differing(_product(0), x, whole=weight.T.copy()),
        )
        rows.append(_sizes_row(f"product of {inputs}/weights (out, in)", "(in, out)", ours, reference))
    rows.append(_order(rng))
    x = rng.standard_normal((_ROWS, 2, 192), np.float32)
    ours = _differing(lambda x: row_sum(x, Numerics()), x)
    reference = _differing(lambda x: lax.dot_general(x, jnp.ones((8, 192)), (((2,), (1,)), ((), ()))), x)
    rows.append(_sizes_row("sums of pairs of rows/as matrices", "as they lie", ours, reference))
    x = 3 * rng.standard_normal((_ROWS, KEY_CHUNK), np.float32)
    ours = _differing(lambda x: softmax_terms(x, row_max(x)), x)
    reference = _differing(lambda x: softmax_terms(x, jnp.max(x, axis=-1, keepdims=True)), x)
    rows.append(_sizes_row("softmax terms/row_max", "jnp.max", ours, reference))
    rows.append(_zeros_between(rng))
    # Attention scores of queries that are rounded to bfloat16 in the same program.
    queries = rng.standard_normal((_ROWS, 2, 3, 64), np.float32)
    keys = rng.standard_normal((_ROWS, 2, 2, 64, 64), np.float32)

    def scores(queries: Array, keys: Array, scale: Callable[[Array], Array]) -> Array:
        return block_scores(scale(queries.astype(jnp.bfloat16)), keys, KEY_BLOCK, Numerics())

    ours, reference = (
        _differing(functools.partial(scores, scale=scale), queries, keys)
        for scale in (scale_queries, lambda q: q.astype(jnp.float32) / 8)
    )
    rows.append(_sizes_row("scores of rounded queries/reduce_precision", "casts", ours, reference))
    return rows + [_form(name, dtype) for name in names for dtype in ("float32", "bfloat16")]


def _form(name: str, dtype: str) -> Row:
    """Returns the form of products that is exact here for a policy: the multiple to which rows are padded."""
    buckets = make_buckets(64, 1024, True, verify_buckets=(16, 32, 64, 128), max_drafts=15)
    counts = row_counts(buckets, [4096, 1000, 33])
    measurement = measure(config_of(name), Numerics(compute_dtype=dtype), counts)
    details = dataclasses.asdict(measurement) | {"summary": measurement.summary(dtype)}
    row, multiple = f"rows/form of products/{name}/{dtype}", measurement.form.multiple
    return Row(row, multiple, "rows", "unpadded", 1, 1 / multiple, details)


def _product(axis: int) -> Callable[[Array, Array], Array]:
    return lambda x, weight: lax.dot_general(x, weight, (((1,), (axis,)), ((), ())))


def _order(rng: np.random.Generator) -> Row:
    """Counts numbers of a product that differ from a sequence of fused multiply-adds, and from a sequence of
    multiplications and additions that are rounded separately.
    """
    x, weight = rng.standard_normal((2, 192), np.float32), rng.standard_normal((_OUTPUTS, 192), np.float32)
    product = np.asarray(jax.jit(_product(1))(x, weight))
    fused, rounded = (np.zeros((2, _OUTPUTS), np.float32) for _ in range(2))
    for i in range(192):
        term = x[:, None, i].astype(np.float64) * weight[None, :, i]  # exact
        fused = (fused + term).astype(np.float32)
        rounded = rounded + term.astype(np.float32)
    differ = (int((product != each).sum()) for each in (fused, rounded))
    return _row("order of a product's sum/fused multiply-adds", "both rounded", *differ, of=512)


def _zeros_between(rng: np.random.Generator) -> Row:
    """Counts, of 64 rows, the sums that change when zeros are inserted between their terms."""
    terms = np.zeros((_ROWS, KEY_CHUNK), np.float32)
    terms[:, : KEY_CHUNK // 2] = rng.random((_ROWS, KEY_CHUNK // 2), np.float32)
    apart = np.zeros_like(terms)
    for row in range(_ROWS):
        places = np.sort(rng.choice(KEY_CHUNK, KEY_CHUNK // 2, replace=False))
        apart[row, places] = terms[row, : KEY_CHUNK // 2]
    totals = (
        jax.jit(lambda x, ordered=ordered: row_sum(x, Numerics(), ordered)) for ordered in (True, False)
    )
    differ = (int((np.asarray(total(terms)) != np.asarray(total(apart))).sum()) for total in totals)
    return _row("sums with zeros between/64 rows of ones", "8 rows of ones", *differ, of=_ROWS)


def _differing(
    function: Callable[..., Array], *rows: np.ndarray, whole: np.ndarray | None = None
) -> list[int]:
    """Returns the row counts at which bits differ from those at 64 rows; `whole` has none of the rows."""
    program, rest = jax.jit(function), () if whole is None else (whole,)
    of_all = np.asarray(program(*rows, *rest))
    return [
        count
        for count in _FEWER
        if not np.array_equal(program(*(each[:count] for each in rows), *rest), of_all[:count])
    ]


def _sizes_row(name: str, baseline: str, ours: list[int], reference: list[int]) -> Row:
    details = {"row_counts": ours, "baseline_row_counts": reference, "of": len(_FEWER)}
    return _row(name, baseline, len(ours), len(reference), **details)


def _row(name: str, baseline: str, ours: int, reference: int, **details: object) -> Row:
    ratio = (1 + reference) / (1 + ours)  # either may be 0
    return Row(f"rows/{name}", ours, "differ", baseline, reference, ratio, details)
