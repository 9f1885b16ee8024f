"""Rows of a bfloat16 embedding table: the same bits, and no copy of the table before a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rljax import target
from rljax.models.transformer import embeddings


def looped(read, table, tokens):
    """Sums of rows that a loop reads, as decode steps do."""

    def body(carry):
        step, x = carry
        return step + 1, x + read(table, (tokens + step) % table.shape[0]).astype(jnp.float32)

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.zeros((len(tokens), table.shape[1]))))[1]


@pytest.fixture
def table():
    return jnp.asarray(np.random.default_rng(0).standard_normal((300, 16)), jnp.bfloat16)


def test_a_loop_reads_rows_without_a_copy_of_the_table(table):
    if target.platform() != "cpu":
        pytest.skip("other compilers make no copy")
    tokens = jnp.array([5, 299, 0])
    results = []
    for read in (embeddings, lambda table, tokens: table[tokens]):
        program = jax.jit(lambda *args, read=read: looped(read, *args)).lower(table, tokens).compile()
        results.append((np.asarray(program(table, tokens)), "f32[300,16]" in program.as_text()))
    (rows, copied), (expected, _) = results
    np.testing.assert_array_equal(rows, expected)
    assert not copied  # the other is, by the compiler of JAX 0.10


def test_other_tables_get_gradients(table):
    tokens = jnp.array([1, 1, 7])
    gradient = jax.grad(lambda table: embeddings(table, tokens).sum())(table.astype(jnp.float32))
    assert gradient[:, 0].tolist() == [2.0 if row == 1 else 1.0 if row == 7 else 0.0 for row in range(300)]
