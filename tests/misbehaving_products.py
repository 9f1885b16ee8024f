"""Products whose bits depend on the number of rows, as some processors' do, for tests on any processor."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import jax
import pytest

from rljax.numerics import products

Product = Callable[[jax.Array, jax.Array], jax.Array]

_tracing = jax.make_user_context()


def traced_anew() -> contextlib.AbstractContextManager[None]:
    """Context in which this thread uses nothing that was traced before it, and after which nobody uses what
    was traced in it. In contrast to `jax.clear_caches`, everybody else keeps their programs.
    """
    return _tracing(object())


def lone_rows_and_rests(dot: Product) -> Product:
    """As bfloat16 on an Intel processor with AMX: one or two rows, and one or two rows beyond a multiple of
    16, have other bits than the same rows among more.
    """

    def misbehaving(rows: jax.Array, weight: jax.Array) -> jax.Array:
        y, rest = dot(rows, weight), rows.shape[0] % 16
        return y if rest not in (1, 2) else y.at[-rest:].multiply(1 + 2**-12)

    return misbehaving


def every_count(dot: Product) -> Product:
    """No two numbers of rows have the same bits, as where a library has a kernel for each."""

    def misbehaving(rows: jax.Array, weight: jax.Array) -> jax.Array:
        y = dot(rows, weight) * (1 + 2**-12 * rows.shape[0])
        return jax.lax.reduce_precision(y, 8, 22)  # otherwise fused with an addition, and then rounded once

    return misbehaving


def every_call(dot: Product) -> Product:
    """No two products of a program, nor of two programs, have the same bits."""
    calls = itertools.count(1)

    def misbehaving(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(rows, weight) * (1 + 2**-12 * next(calls))

    return misbehaving


@contextlib.contextmanager
def replaced(kind: Callable[[Product], Product]) -> Iterator[None]:
    """Every product of a policy is of this kind in programs that this thread traces."""
    with pytest.MonkeyPatch.context() as patch, traced_anew():
        patch.setattr(products, "dot", kind(products.dot))
        yield
