"""Products and sums whose result for one row does not depend on the number of rows computed together.

Compilers choose kernels, and with them the order of summation, by the number of rows. A policy evaluated one
token at a time then differs in the last bits from the same policy evaluated on a packed batch. Three rules
keep the bits the same on a CPU (measured in `docs/row-invariance.md`, checked by
`tests/engine/test_engine.py`):

- weights are stored [out, in], and rows are padded to a number for which the kernel was measured to be the
  same (`products.py`);
- sums over the last axis are products with ones, never fused reductions (but on an accelerator where these
  are measured to be exact), and have their factors in the order of a projection: otherwise it may depend on
  the number of rows whether the library packs the ones first, and with it the order of summation;
- attention adds its values in chunks of `KEY_CHUNK` keys, one chunk after another, so that the start of a
  sequence in a packed row has no effect as long as the packer respects chunk boundaries
  (`rljax/learning/packing.py`).

With JAX 0.12 a fourth one: what is computed entry by entry over a short last axis is computed as one row
(`as_one_row`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax import target
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.products import ProductForm, exact_products, unmeasured_form

KEY_CHUNK = 256
"""Number of keys whose weighted values are summed in one product; chunks are then added in order."""

# A product with a single row of ones would use a matrix-vector kernel, which is not row-invariant.
_ONES_ROWS = 8
_TPU_LANES = 128
_ORDERED_ROWS = 64  # a product with fewer rows uses a kernel that adds in pairs
_UNROLLS_SHORT_AXES = jax.__version_info__ >= (0, 12)
_LONGEST_UNROLLED = 8
_LONGEST_VECTOR = 16  # float32 entries


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Number formats and products of the policy, shared by engine and trainer, whose results can then be
    compared bit for bit.

    Attributes:
      row_invariant: use the formulations above; False uses the fastest ones for the shape.
      compute_dtype: "float32" or "bfloat16", the type of weights and activations in products. Norms, softmax
        and logits are float32 either way.
      kernels: the backend of every operation that has kernels.
      measured_form: the form of products that was measured here to be exact, where rows must be invariant,
        and fast; None before it is measured.
      outline_layers: the compiler calls the decoder layer instead of inlining it
        (`rljax/models/outlining.py`).
    """

    row_invariant: bool = True
    compute_dtype: str = "float32"
    kernels: KernelChoice = dataclasses.field(default_factory=KernelChoice)
    measured_form: ProductForm | None = None
    outline_layers: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)

    @property
    def product_form(self) -> ProductForm:
        """The form of products; only those of a row-invariant policy are padded."""
        return self.measured_form or unmeasured_form(self.compute_dtype)


def row_sum(x: Array, numerics: Numerics, ordered: bool = False) -> Array:
    """Sums float32 x [..., n] over the last axis: [..., 1].

    Args:
      ordered: add one entry after another, so that zeros between them have no effect; never a plain reduction
        where rows must be invariant.
    """
    if not numerics.row_invariant or (numerics.product_form.plain_sums and not ordered):
        return jnp.sum(x, axis=-1, keepdims=True)
    if target.platform() == "tpu":
        return _sum_of_parts(x)
    ones = jnp.ones((_ORDERED_ROWS if ordered else _ONES_ROWS, x.shape[-1]), x.dtype)
    # With more than two dimensions, XLA passes the ones as [n, 8] to a CPU. Elsewhere, axes may be sharded.
    rows = x.reshape(-1, x.shape[-1]) if target.platform() == "cpu" else x
    last = (((rows.ndim - 1,), (1,)), ((), ()))
    total = lax.dot_general(rows, ones, last, precision=exact_products())[..., :1]
    return total.reshape(*x.shape[:-1], 1)


@jax.custom_vjp
def _sum_of_parts(x: Array) -> Array:
    """Sums float32 x [..., n] over the last axis by three products of bfloat16 with ones: [..., 1].

    A TPU's exact product of float32 splits both factors in three, and takes six products and several times
    as long to compile. Ones need no splitting. All their rows are kept until the parts are added: for one of
    them the compiler would choose its kernel by the number of rows of x.
    """
    high = lax.reduce_precision(x, 8, 7)  # a conversion there and back would be left out by the compiler
    middle = lax.reduce_precision(x - high, 8, 7)
    ones = jnp.ones((_TPU_LANES, x.shape[-1]), jnp.bfloat16)
    last = (((x.ndim - 1,), (1,)), ((), ()))
    total = 0.0
    for part in (x - high - middle, middle, high):  # the smallest first
        total += lax.dot_general(part.astype(ones.dtype), ones, last, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(total)[..., :1]


_sum_of_parts.defvjp(
    lambda x: (_sum_of_parts(x), jnp.zeros((x.shape[-1], 0))),  # only to tell the width
    lambda width, gradient: (jnp.broadcast_to(gradient, (*gradient.shape[:-1], width.shape[0])),),
)


def row_max(x: Array) -> Array:
    """Returns the largest entry along the last axis, [..., 1], without a gradient.

    On a single CPU device it is a reduction that the compiler does not recognize as a maximum: a maximum
    would be fused with the exponential after it, which would then differ between many rows and few. Elsewhere
    it is a plain maximum, which can also be reduced across devices.
    """
    x = lax.stop_gradient(x)
    if target.platform() != "cpu" or target.device_count() > 1:
        return jnp.max(x, axis=-1, keepdims=True)
    lowest = jnp.array(-jnp.inf, x.dtype)
    top = lax.reduce(x, lowest, lambda a, b: lax.select(lax.gt(a, b), a, b), (x.ndim - 1,))
    return top[..., None]


def as_one_row(function: Callable[[Array], Array], x: Array) -> Array:
    """Returns `function`, which maps entry by entry, of x [..., n] with a small n.

    From JAX 0.12 on, the compiler of a CPU unrolls a last axis of 3 to 8 entries, axes of one entry aside,
    and rounds some products there before an addition that it fuses elsewhere; so it does in the rest of a
    row that is no multiple of its vectors. Between barriers it sees one row of whole vectors. On several
    devices axes may be sharded, and bits are not guaranteed.
    """
    if not _UNROLLS_SHORT_AXES or target.platform() != "cpu" or target.device_count() > 1:
        return function(x)
    row = jnp.pad(x.reshape(-1), (0, -x.size % _LONGEST_VECTOR), constant_values=1)
    row = lax.optimization_barrier(function(lax.optimization_barrier(row)))
    return row[: x.size].reshape(x.shape)


def exp(x: Array) -> Array:
    """Returns e^x [..., n], with bits that do not depend on n."""
    return as_one_row(jnp.exp, x) if x.shape[-1] <= _LONGEST_UNROLLED else jnp.exp(x)


def rms_norm(x: Array, weight: Array, epsilon: float, numerics: Numerics) -> Array:
    """Applies the root-mean-square norm (Zhang and Sennrich, 2019) in float32 to the last axis of x."""
    h = x.astype(jnp.float32)
    factor = lambda total: lax.rsqrt(total * (1.0 / x.shape[-1]) + epsilon)  # noqa: E731
    h = h * as_one_row(factor, row_sum(h * h, numerics))
    scale = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    # Round to the compute dtype before scaling, as in Hugging Face's implementations.
    return (h.astype(x.dtype).astype(jnp.float32) * scale).astype(x.dtype)


def apply_rope(x: Array, angles: Array) -> Array:
    """Rotates x [N, T, heads, D] by angles [N, T, at least 2, D/2] (cosines, sines, others) in float32
    (Su et al., 2021); returns x's dtype.
    """
    cos, sin = angles[:, :, None, 0], angles[:, :, None, 1]
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def log_normalizer(logits: Array, numerics: Numerics) -> Array:
    """Returns log sum exp over the last axis of float32 logits [..., V]: [..., 1]. Entries may be -inf, but
    not all.
    """
    top = row_max(logits)
    return top + as_one_row(jnp.log, row_sum(exp(logits - top), numerics))


@jax.jit
def _is_finite(leaf):
    return jnp.isfinite(leaf).all()


def finite_leaves(tree):
    """Returns a tree of bool []: whether all entries of each leaf are finite.

    Leaves of one shape share a small program. A program of all leaves would take long to compile.
    """
    return jax.tree.map(_is_finite, tree)


def tree_cast(tree, dtype):
    """Casts every leaf to `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def cast_matrices(tree, dtype):
    """Casts every matrix to `dtype`; leaves norms and biases, which are small and used in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, tree)
