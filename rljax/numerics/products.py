"""Forms of a matrix product, to choose one whose bits do not depend on the number of rows.

Libraries choose a kernel, and with it an order of summation, by the number of rows. A single row is
multiplied as a vector on every processor measured so far. In bfloat16, an Intel processor with AMX computes
one or two rows, and one or two rows beyond a multiple of 16, by another kernel than the rest
(`docs/row-invariance.md`). Rows of zeros, added up to a multiple of a few rows, avoid those kernels. An
accelerator may have another kernel for every number of rows. There the same kernels compute a fixed number of
rows, a slab, as often as it takes (`in_slabs`). Which form is exact is measured on the machine that runs the
program (`rljax/engine/invariance.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax import target
from rljax.numerics.cast_weight import CastWeight
from rljax.numerics.loops import mapped

SLABS = (64, 128, 256)
"""Rows of a slab. An accelerator needs about as long to read a weight as to multiply it with 128 (TPU v5e) to
256 (H100) rows of bfloat16; fewer rows take no less time, and more slabs read the weight again.
"""


@dataclasses.dataclass(frozen=True)
class ProductForm:
    """Form in which a product of activations [rows, in] with weights [out, in] is computed.

    Attributes:
      smallest: the smallest number of rows to multiply; fewer are padded with rows of zeros.
      multiple: number of rows to pad to a multiple of, with zeros.
      float32: multiply in float32 where the compute dtype is bfloat16: slower, but exact on more machines.
      slabs: compute `multiple` rows at a time, with the same kernels for all of them (`in_slabs`).
      plain_sums: sums over a last axis are plain reductions, not products with ones (`rows.row_sum`).
      blocks: (inputs, outputs, rows) of the weights that a decoder multiplies with up to so many rows in
        blocks (`rljax/numerics/blocked_weights.py`).
    """

    smallest: int = 2
    multiple: int = 1
    float32: bool = False
    slabs: bool = False
    plain_sums: bool = False
    blocks: tuple[tuple[int, int, int], ...] = ()

    def padded(self, rows: int) -> int:
        """Returns the number of rows to multiply for `rows` rows."""
        return -(-max(rows, self.smallest) // self.multiple) * self.multiple

    def __str__(self) -> str:
        kind = "float32 products" if self.float32 else "products"
        if self.slabs:
            text = f"{kind} of {self.multiple} rows at a time"
        elif self.multiple > 1:
            text = f"{kind} of rows in multiples of {self.multiple}"
        else:
            text = f"{kind} of at least {self.smallest} rows"
        if self.plain_sums:
            text += ", plain sums"
        if not self.blocks:
            return text
        return f"{text}, in blocks of weights up to {max(rows for *_, rows in self.blocks)} rows"


def forms(compute_dtype: str, most_rows: int = 0) -> tuple[ProductForm, ...]:
    """Returns the forms of a product, the cheapest first.

    Args:
      most_rows: rows of the largest pass of a decoder, which one slab holds if it can. A CPU, where rows take
        time, has the smallest slabs.
    """
    padded = (ProductForm(2, 1), ProductForm(4, 4), ProductForm(16, 16), ProductForm(64, 64))
    on_cpu = target.platform() == "cpu"
    size = SLABS[0] if on_cpu else next((size for size in SLABS if size >= most_rows), SLABS[-1])
    in_slabs = ProductForm(size, size, slabs=True)
    if compute_dtype == "float32" or not on_cpu:  # there slabs are faster than float32
        return (*padded, in_slabs)
    return (*padded, *(dataclasses.replace(form, float32=True) for form in padded), in_slabs)


def unmeasured_form(compute_dtype: str) -> ProductForm:
    """Returns the form to use without a measurement: exact on all processors in `docs/row-invariance.md`."""
    return forms(compute_dtype)[0 if compute_dtype == "float32" else 1]


def exact_products() -> lax.Precision | None:
    """Returns the precision of products that must not round float32 factors: by default a GPU rounds them to
    TF32 and a TPU to bfloat16. A CPU has one precision only.
    """
    return None if target.platform() == "cpu" else lax.Precision.HIGHEST


def dot(rows: Array, weight: Array) -> Array:
    """Multiplies rows [R, in] by weight [out, in]: float32 [R, out]. All products of a policy use it."""
    return _product(rows, weight, ((1,), (1,)))


def _product(a: Array, b: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Contracts these axes of a and b, with sums in float32; float32 factors are not rounded."""
    precision = exact_products() if a.dtype == b.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


@jax.custom_vjp
def rounded_dot(rows: Array, weight: Array | CastWeight) -> Array:
    """As `dot`, with the same bits, but for a result that is rounded to the type of `rows` next.

    The cotangent then has no more digits than `rows`, and both products of the backward pass are computed in
    the type of `rows`, with sums in float32. Autodiff of `dot` would compute them in float32, the type of the
    result, which on a processor with AMX has a fifth of the speed of bfloat16.

    Args:
      rows: bfloat16 [R, in].
      weight: [out, in], any float dtype; cast to that of `rows`. The gradient has the dtype of the weight.

    Returns:
      float32 [R, out].
    """
    return dot(rows, weight.astype(rows.dtype))


def _rounded_dot_backward(residuals: tuple[Array, Any], cotangent: Array) -> tuple[Array, Any]:
    rows, weight = residuals
    cotangent = cotangent.astype(rows.dtype)
    d_rows = _product(cotangent, weight.astype(rows.dtype), ((1,), (0,)))
    d_weight = sum_of_outer_products(cotangent, rows)
    of_weight = weight.of_gradient if isinstance(weight, CastWeight) else lambda d: d.astype(weight.dtype)
    return d_rows.astype(rows.dtype), of_weight(d_weight)


rounded_dot.defvjp(lambda rows, weight: (rounded_dot(rows, weight), (rows, weight)), _rounded_dot_backward)


def sum_of_outer_products(a: Array, b: Array) -> Array:
    """Returns a [R, out] and b [R, in] contracted over their rows: float32 [out, in].

    CPUs have no fast bfloat16 kernel for a contraction of the first axes. For a contraction of two axes the
    compiler transposes both factors first, and then a fast kernel applies: 3 to 6 times faster with AMX
    (`scripts/bench_engine.py --only price`, the updates).
    """
    if target.platform() != "cpu" or target.device_count() > 1:
        return _product(a, b, ((0,), (0,)))
    a, b = (jnp.pad(factor, ((0, factor.shape[0] % 2), (0, 0))) for factor in (a, b))
    a, b = (factor.reshape(2, -1, factor.shape[1]) for factor in (a, b))
    return _product(a, b, ((0, 1), (0, 1)))


def padded_dot(rows: Array, weight: Array | CastWeight, form: ProductForm, rounded: bool = False) -> Array:
    """Computes `dot` in a given form; float32 [R, out].

    Args:
      rows: [R, in].
      weight: [out, in], any float dtype; cast to that of `rows`.
      rounded: whether the result is rounded to the type of `rows` next; see `rounded_dot`.
    """
    count, rounded = rows.shape[0], rounded and not form.float32
    if form.float32:
        rows, weight = rows.astype(jnp.float32), weight.astype(rows.dtype).astype(jnp.float32)
    rows = jnp.pad(rows, ((0, form.padded(count) - count), (0, 0)))
    if form.slabs:
        cast = lambda weight: weight.astype(rows.dtype)  # noqa: E731
        one = lambda _, rows, weight: chosen_dot(rows, weight, rounded)  # noqa: E731
        return in_slabs(one, rows, weight, form.multiple, cast)[:count]
    return chosen_dot(rows, weight, rounded)[:count]


@dataclasses.dataclass
class Keep:
    """What a function keeps of its results for its gradient; called with a result, returns it.

    Attributes:
      kept: the results so far, in order; None where no gradient will be computed.
      values: in the gradient's own pass, what was kept: results are these, and not computed again.
    """

    kept: list[Array] | None = None
    values: Iterator[Array] | None = None

    def __call__(self, y: Array) -> Array:
        if self.values is not None:
            return _with_value(y, next(self.values))
        if self.kept is not None:
            self.kept.append(y)
        return y

    def fused(self, apart: Callable[[], Array], kernel: Callable[[bool], tuple[Array, ...]]) -> Array:
        """Returns what a kernel without a gradient computes.

        Args:
          apart: computes the same from products that it keeps, and has the gradient.
          kernel: its argument says whether to return these products, in order, after the result.
        """
        if self.values is not None:
            return apart()
        y, *inner = kernel(self.kept is not None)
        for result in inner:
            self(result)
        return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def in_slabs(
    function: Callable[[Keep, Any, Any], Any],
    rows: Any,
    weights: Any,
    size: int,
    prepare: Callable[[Any], Any],
) -> Any:
    """Returns `function(keep, rows, weights)`, computed for `size` rows at a time, with bits that do not
    depend on how many there are: whatever kernels the compiler or its library has for computations of this
    shape, they compute all rows.

    Barriers make a slab the same to an accelerator's compiler everywhere: nothing else is fused with it, and
    products are not merged with others that share a factor. Within a slab the compiler fuses and merges as
    it likes. A CPU's, which drops barriers before it fuses, calls its library for a product alone.

    The gradients are those of all rows at once. They read what `function` gives to its `Keep`, once for each
    result that is expensive to compute again; all else is computed again.

    Args:
      function: closes over no arrays; each row of its results depends on the same row of `rows` only.
      rows: arrays [R, ...], R a multiple of `size`.
      weights: a pytree of arrays.
      prepare: casts the weights, once for all slabs.

    Returns:
      The results of the function, arrays [R, ...].
    """
    return _of_slabs(function, rows, weights, size, prepare, for_gradients=False)[0]


def _of_slabs(
    function: Callable[[Keep, Any, Any], Any],
    rows: Any,
    weights: Any,
    size: int,
    prepare: Callable[[Any], Any],
    for_gradients: bool,
) -> tuple[Any, list[Array]]:
    """Returns the results of `in_slabs`, and what its function keeps if that is `for_gradients`."""
    weights = prepare(weights)

    def of_slab(slab: Any) -> tuple[Any, list[Array]]:
        slab, own = lax.optimization_barrier((slab, weights))
        keep = Keep([] if for_gradients else None)
        y = function(keep, slab, own)
        return lax.optimization_barrier((y, keep.kept or []))

    slabs = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), rows)
    first = jax.tree.leaves(slabs)[0]
    if len(first) == 1:
        return of_slab(jax.tree.map(lambda x: x[0], slabs))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), mapped(of_slab, slabs, first))


def _in_slabs_forward(function: Any, rows: Any, weights: Any, size: int, prepare: Any) -> tuple[Any, Any]:
    y, kept = _of_slabs(function, rows, weights, size, prepare, for_gradients=True)
    return y, (rows, weights, kept)


def _in_slabs_backward(
    function: Any, size: int, prepare: Any, residuals: Any, cotangents: Any
) -> tuple[Any, Any]:
    rows, weights, kept = residuals

    def of_all(rows: Any, weights: Any) -> Any:
        return function(Keep(values=iter(kept)), rows, weights)

    return jax.vjp(of_all, rows, weights)[1](cotangents)


in_slabs.defvjp(_in_slabs_forward, _in_slabs_backward)


@jax.custom_vjp
def _with_value(y: Array, value: Array) -> Array:
    """Returns `value`, whose gradient is that of `y`: what computes y is left out."""
    return value


_with_value.defvjp(lambda y, value: (value, None), lambda _, gradient: (gradient, None))


def chosen_dot(rows: Array, weight: Array | CastWeight, rounded: bool) -> Array:
    """Computes `rounded_dot` if it differs from `dot`, otherwise `dot`. Arguments as in `padded_dot`."""
    if rounded and rows.dtype == jnp.bfloat16:
        return rounded_dot(rows, weight)
    return dot(rows, weight.astype(rows.dtype))
