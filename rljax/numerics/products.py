"""Forms of a matrix product: the one to use is that whose bits do not depend on the number of rows.

Libraries choose a kernel, and with it an order of summation, by the number of rows. A lone row is multiplied
as a vector on every processor seen so far. In bfloat16, an Intel processor with AMX computes one or two rows,
and one or two rows beyond a multiple of 16, by another kernel than the rest (`docs/row-invariance.md`). Rows
of zeros, added up to a multiple of a few rows, avoid those kernels. Which form is exact is measured where the
program runs (`rljax/engine/invariance.py`).
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax


@dataclasses.dataclass(frozen=True)
class ProductForm:
    """How a product of activations [rows, in] with weights [out, in] is computed.

    Attributes:
      smallest: the fewest rows that are multiplied; fewer get rows of zeros beside them.
      multiple: rows are padded with zeros to a multiple of this.
      float32: multiply in float32 where the compute dtype is bfloat16: slower, more widely exact.
    """

    smallest: int = 2
    multiple: int = 1
    float32: bool = False

    def padded(self, rows: int) -> int:
        """The number of rows that is multiplied for `rows` rows."""
        return -(-max(rows, self.smallest) // self.multiple) * self.multiple

    def __str__(self) -> str:
        kind = "float32 products" if self.float32 else "products"
        if self.multiple > 1:
            return f"{kind} of rows in multiples of {self.multiple}"
        return f"{kind} of at least {self.smallest} rows"


def forms(compute_dtype: str) -> tuple[ProductForm, ...]:
    """The forms of a product, the cheapest first."""
    padded = (ProductForm(2, 1), ProductForm(4, 4), ProductForm(16, 16), ProductForm(64, 64))
    if compute_dtype == "float32":
        return padded
    return padded + tuple(dataclasses.replace(form, float32=True) for form in padded)


def unmeasured_form(compute_dtype: str) -> ProductForm:
    """The form where nothing was measured: it held on every processor in `docs/row-invariance.md`."""
    return forms(compute_dtype)[0 if compute_dtype == "float32" else 1]


def dot(rows: Array, weight: Array) -> Array:
    """Rows [R, in] times weight [out, in]: float32 [R, out]. Every product of a policy goes through here."""
    return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def padded_dot(rows: Array, weight: Array, form: ProductForm) -> Array:
    """`dot` in a given form; float32 [R, out]."""
    count = rows.shape[0]
    if form.float32:
        rows, weight = rows.astype(jnp.float32), weight.astype(jnp.float32)
    rows = jnp.pad(rows, ((0, form.padded(count) - count), (0, 0)))
    return dot(rows, weight)[:count]
