"""A loop over parts: the results of `lax.map`, in arrays that are made where its input is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var

from rljax.numerics.loops import mapped
from tests.kernels.compilation import HOPPER, compile_for


def squares(part):
    return {"square": part["x"] ** 2, "large": part["x"] > 2, "sum": part["y"].sum()}


def test_results_are_those_of_map_and_what_fills_them_first_is_no_constant():
    parts = {"x": jnp.arange(5.0), "y": jnp.arange(15).reshape(5, 3)}
    nothing = jnp.full((2, 2), jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, mapped(squares, parts, nothing), lax.map(squares, parts))
    program = jax.make_jaxpr(mapped, static_argnums=0)(squares, parts, nothing)
    filled = [eqn.invars[0] for eqn in program.eqns if eqn.primitive.name == "broadcast_in_dim"]
    assert len(filled) == 3 and all(isinstance(filler, Var) for filler in filled)


@pytest.mark.long
def test_hopper_holds_the_results_of_a_layer_at_a_time():
    """Loops of later layers take no memory before: a layer adds what the backward pass keeps."""
    x = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)

    @jax.custom_vjp
    def layer(x):
        return mapped(lambda rows: jnp.tanh(rows @ rows.T) @ rows, x, x)

    def backward(x, gradient):
        y = mapped(lambda rows: rows @ rows.T, x, x)
        return (y @ gradient,)

    layer.defvjp(lambda x: (layer(x), x), backward)

    def temporaries(depth):
        def loss(x):
            for _ in range(depth):
                x = layer(x)
            return x.astype(jnp.float32).sum()

        return compile_for(HOPPER, jax.grad(loss), x).memory_analysis().temp_size_in_bytes

    shallow, deep = temporaries(2), temporaries(6)
    assert (deep - shallow) / 4 <= 1.1 * x.size * x.dtype.itemsize
