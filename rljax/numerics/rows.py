"""Products and sums whose result for one row does not depend on how many rows stand beside it.

Compilers pick another kernel, and another order of summation, for another number of rows; a policy evaluated
one token at a time then differs in the last bits from the same policy evaluated over a packed batch. Three
habits keep the bits the same on a CPU (measured in `docs/row-invariance.md`, checked by
`tests/engine/test_engine.py`):

- weights are stored [out, in], and rows are padded to a number whose kernel is measured to be the same for
  all (`products.py`);
- sums over the last axis are products with ones, never fused reductions, and matrices meet in them as they do
  in a projection: whether the library packs the ones first, and with it the order of summation, may otherwise
  depend on the number of rows;
- attention adds up its values in chunks of `KEY_CHUNK` keys, one chunk after the other, so that where a
  sequence starts inside a packed row does not matter as long as the packer keeps to chunk boundaries
  (`rljax/learning/packing.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.products import ProductForm, unmeasured_form

KEY_CHUNK = 256
"""Keys whose weighted values are summed in one product; a sum over more keys adds chunk after chunk."""

_ONES_ROWS = (
    8  # a product with a single row of ones would become a matrix-vector kernel, which is not row-invariant
)
_ORDERED_ROWS = 64  # a product with fewer takes a kernel that adds in pairs


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How the policy computes: shared by engine and trainer, so that their numbers can be compared bit for
    bit.

    Attributes:
      row_invariant: use the formulations above; False takes whatever is fastest for the shape at hand.
      compute_dtype: "float32" or "bfloat16", the type of weights and activations in products. Norms, softmax
        and logits are float32 either way.
      kernels: the backend of every operation that has kernels.
      measured_form: the form of products that was measured to be exact here; None before it is measured.
    """

    row_invariant: bool = True
    compute_dtype: str = "float32"
    kernels: KernelChoice = dataclasses.field(default_factory=KernelChoice)
    measured_form: ProductForm | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)

    @property
    def product_form(self) -> ProductForm:
        """The form in which a row-invariant policy multiplies."""
        return self.measured_form or unmeasured_form(self.compute_dtype)


def exact_products() -> lax.Precision | None:
    """The precision of products whose float32 must stay float32: by default a GPU rounds factors to TF32 and
    a TPU to bfloat16. A CPU has one precision only.
    """
    return None if jax.default_backend() == "cpu" else lax.Precision.HIGHEST


def row_sum(x: Array, numerics: Numerics, ordered: bool = False) -> Array:
    """Sum over the last axis of float32 x [..., n]: [..., 1].

    Args:
      ordered: add one entry after the other, so that zeros between them do not matter, wherever they are.
    """
    if not numerics.row_invariant:
        return jnp.sum(x, axis=-1, keepdims=True)
    ones = jnp.ones((_ORDERED_ROWS if ordered else _ONES_ROWS, x.shape[-1]), x.dtype)
    # With more than two dimensions a CPU would get the ones as [n, 8]. Elsewhere, axes may be sharded.
    rows = x.reshape(-1, x.shape[-1]) if jax.default_backend() == "cpu" else x
    last = (((rows.ndim - 1,), (1,)), ((), ()))
    total = lax.dot_general(rows, ones, last, precision=exact_products())[..., :1]
    return total.reshape(*x.shape[:-1], 1)


def row_max(x: Array) -> Array:
    """Largest entry along the last axis, [..., 1]; no gradient.

    On one CPU, written as a reduction the compiler has no library kernel for: a known maximum, fused with the
    exponential behind it, would bring another exponential for many rows than for few. Elsewhere a plain
    maximum, which can also be reduced across devices.
    """
    x = lax.stop_gradient(x)
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return jnp.max(x, axis=-1, keepdims=True)
    lowest = jnp.array(-jnp.inf, x.dtype)
    top = lax.reduce(x, lowest, lambda a, b: lax.select(lax.gt(a, b), a, b), (x.ndim - 1,))
    return top[..., None]


def rms_norm(x: Array, weight: Array, epsilon: float, numerics: Numerics) -> Array:
    """Root-mean-square norm over the last axis (Zhang and Sennrich, 2019), in float32, back in x's dtype."""
    h = x.astype(jnp.float32)
    mean_square = row_sum(h * h, numerics) * (1.0 / x.shape[-1])
    h = h * lax.rsqrt(mean_square + epsilon)
    scale = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    # The normed value is rounded to the compute dtype before it is scaled, as Hugging Face's implementations
    # do.
    return (h.astype(x.dtype).astype(jnp.float32) * scale).astype(x.dtype)


def log_normalizer(logits: Array, numerics: Numerics) -> Array:
    """log sum exp over the last axis of float32 logits [..., V]: [..., 1]. Entries may be -inf, not all of
    them.
    """
    top = row_max(logits)
    return top + jnp.log(row_sum(jnp.exp(logits - top), numerics))


@jax.jit
def finite_leaves(tree):
    """For every leaf whether all of its entries are finite: the tree, of bool []."""
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)


def tree_cast(tree, dtype):
    """Every leaf in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def cast_matrices(tree, dtype):
    """Every matrix in `dtype`; norms and biases, which are used in float32 and small, as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, tree)
