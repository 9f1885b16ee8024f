"""Sums of rows: the same bits beside few rows and beside many, whatever axes the rows lie along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.executables import row_invariant_compiler_options
from rljax.kernels.packed_attention import base
from rljax.numerics.attention import weigh_chunk
from rljax.numerics.rows import Numerics, rms_norm, row_sum

NUMERICS = Numerics()


def compiled(function, *arrays):
    program = jax.jit(function).lower(*arrays).compile(compiler_options=row_invariant_compiler_options())
    return np.asarray(program(*arrays))


@pytest.mark.default_cases("64-attention", "320-norms", "768-*")
@pytest.mark.parametrize("ordered", [False, True], ids=["norms", "attention"])
@pytest.mark.parametrize("width", [64, 320, 768])
def test_a_sum_does_not_depend_on_the_rows_beside_it(width, ordered):
    x = np.random.default_rng(width).standard_normal((64, 4, width), np.float32)

    def total(x):
        return row_sum(x * x, NUMERICS, ordered)

    whole = compiled(total, x)  # so many that a library rearranges the ones first
    for rows, columns in [(1, 2), (1, 4), (2, 1), (3, 1), (4, 4), (64, 1)]:
        part = compiled(total, x[:rows, :columns])
        np.testing.assert_array_equal(part, whole[:rows, :columns], f"{rows} x {columns}")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_float32_is_not_rounded_on_the_way_into_products(device, monkeypatch):
    """Sums, attention's scores and its weighted values; a GPU rounds to TF32 unless it is told not to."""
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    rows, values = np.ones((1, 2, 3, 8), np.float32), np.ones((1, 2, 8, 4), np.float32)
    programs = (
        jax.make_jaxpr(lambda x: row_sum(x, NUMERICS))(rows),
        jax.make_jaxpr(lambda x, y: weigh_chunk(x, y, NUMERICS))(rows, values),
        jax.make_jaxpr(lambda x, y: base._scores(x, y))(rows[:, :, None], rows),
    )
    text = " ".join(str(program) for program in programs)
    assert text.count("dot_general[") == 4
    exact = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert text.count(exact) == text.count("precision=") == (0 if device == "cpu" else 4)


def test_an_ordered_sum_adds_one_entry_after_the_other():
    x = np.random.default_rng(0).standard_normal((3, 5, 256), np.float32)
    expected = np.zeros((3, 5), np.float32)
    for column in np.moveaxis(x, -1, 0):
        expected += column
    sums = compiled(lambda x: row_sum(x, NUMERICS, ordered=True), x)
    np.testing.assert_array_equal(sums[..., 0], expected)


def test_a_norm_does_not_depend_on_the_rows_beside_it():
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((64, 4, 192), np.float32), rng.standard_normal(192, np.float32)

    def norm(x, weight):
        return rms_norm(x, weight, 1e-6, NUMERICS)

    whole = compiled(norm, x, weight)
    for rows in (1, 2, 3):
        np.testing.assert_array_equal(compiled(norm, x[:rows], weight), whole[:rows])


def test_a_norm_is_rounded_before_it_is_scaled():
    """As published implementations do; in bfloat16 many entries differ from those that are rounded once."""
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((16, 192)), 1 + rng.standard_normal(192)
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    h = x.astype(np.float32)
    h /= np.sqrt((h * h).mean(-1, keepdims=True) + np.float32(1e-6))
    rounded = h.astype(x.dtype).astype(np.float32)
    expected, once = ((each * weight.astype(np.float32)).astype(x.dtype) for each in (rounded, h))
    assert (expected != once).mean() > 0.05
    found = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6, NUMERICS))
    # The mean is summed in another order, so a few entries are rounded to the other side.
    assert found.dtype == x.dtype and (found != expected).mean() < 0.005


def test_a_tpu_sums_float32_in_parts_that_lose_nothing(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    rng = np.random.default_rng(2)
    x = np.exp(8 * rng.standard_normal((5, 3, 512))).astype(np.float32) * rng.choice([-1, 1], (5, 3, 512))
    x = x.astype(np.float32)
    total = np.asarray(jax.jit(lambda x: row_sum(x, NUMERICS))(x))
    exact, size = x.astype(np.float64).sum(-1, keepdims=True), np.abs(x).sum(-1, keepdims=True)
    assert (np.abs(total - exact) < 1e-6 * size).all()  # rounded to bfloat16, the factors differ by 4e-3
    weights = exact[..., 0].astype(np.float32)
    # As `training.remat` does.
    again = jax.checkpoint(lambda x: (row_sum(x, NUMERICS)[..., 0] * weights).sum())
    gradient = jax.jit(jax.grad(again))(x)
    np.testing.assert_array_equal(gradient, np.broadcast_to(exact.astype(np.float32), x.shape))
    program = str(jax.make_jaxpr(lambda x: row_sum(x, NUMERICS))(x))
    assert program.count("dot_general[") == 3
