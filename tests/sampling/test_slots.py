"""Sampling settings by row: the bits of programs with the settings inside, whatever the other rows have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.engine.executables import row_invariant_compiler_options
from rljax.engine.sampling import sample
from rljax.numerics.rows import Numerics
from rljax.sampling import distribution, slots, split
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.sampling.slots import SlotSampling
from tests.sampling.test_split import DISTRIBUTIONS, make_logits, with_ties

ROWS, VOCAB = 48, 520
NUMERICS = Numerics()
SETTINGS = [*DISTRIBUTIONS.values(), SamplingParams(temperature=0.7)]
SETTINGS += [SamplingParams(top_k=VOCAB)]  # no filter
LOGITS = {"float32": make_logits(ROWS), "bfloat16": with_ties(make_logits(ROWS))}
KEYS = np.stack([request_key(0, row) for row in range(ROWS)])
POSITIONS = np.arange(ROWS, dtype=np.int32)


def compiled(function, *args):
    """As the engine compiles. The logits come from a product, as there."""

    def program(logits, *others):
        return function(logits @ jnp.eye(VOCAB), *others)

    return jax.jit(program).lower(*args).compile(compiler_options=row_invariant_compiler_options())


@functools.cache
def with_settings_inside(params):
    return compiled(lambda *args: sample(*args, params, NUMERICS), LOGITS["float32"], KEYS, POSITIONS)


@functools.cache
def by_row():
    args = LOGITS["float32"], KEYS, POSITIONS, SlotSampling.of([SamplingParams()] * ROWS, VOCAB)
    return compiled(lambda *args: sample(*args[:3], SamplingParams(), NUMERICS, settings=args[3]), *args)


def assert_rows_have_their_own(dtype, mix):
    """`mix` has the settings of every row."""
    logits = LOGITS[dtype]
    tokens, logprobs = by_row()(logits, KEYS, POSITIONS, SlotSampling.of(mix, VOCAB))
    for params in set(mix):
        rows = np.flatnonzero([each == params for each in mix])
        expected = with_settings_inside(params)(logits, KEYS, POSITIONS)
        for mine, alone in zip((tokens, logprobs), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(mine)[rows], np.asarray(alone)[rows], str(params))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_a_mix_and_each_alone(dtype):
    assert_rows_have_their_own(dtype, [SETTINGS[i % len(SETTINGS)] for i in range(ROWS)])
    for params in SETTINGS:
        assert_rows_have_their_own(dtype, [params] * ROWS)


@pytest.mark.long  # above, settings of every kind in a mix
@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(list(LOGITS)),
    st.lists(st.sampled_from(SETTINGS), min_size=ROWS, max_size=ROWS),
    st.builds(
        SamplingParams,
        temperature=st.floats(0.1, 3.0),
        top_k=st.integers(0, 2 * VOCAB),
        top_p=st.floats(1e-6, 1.0),
        min_p=st.floats(0.0, 1.0),
    ),
)
def test_any_settings_in_any_mix(dtype, mix, params):
    assert_rows_have_their_own(dtype, [params, *mix[1:]])


@functools.cache
def thresholds_by_row():
    return [
        jax.jit(lambda x, rows, f=f: f(x, rows, NUMERICS))
        for f in (slots.kept_from, split.kept_from_of_slots)
    ]


@pytest.mark.parametrize("params", [each for each in SETTINGS if each.filters(VOCAB)], ids=str)
def test_thresholds_are_those_of_the_reference(params):
    """Sorting finds the same number, bisection one that keeps the same tokens; with settings by row and with
    those of all rows.
    """
    rows, whole = [params] * ROWS, [distribution.kept_from, split.kept_from]
    reference, bisection = (jax.jit(lambda x, f=f: f(x, params, NUMERICS)) for f in whole)
    for logits in LOGITS.values():
        scaled = logits.copy()
        scaled[:, -3:] = -np.inf  # as the padding of a vocabulary
        scaled[0] *= 1e30
        expected = np.asarray(reference(scaled))
        sorted_by_row, bisected_by_row = (
            f(scaled, SlotSampling.of(rows, VOCAB)) for f in thresholds_by_row()
        )
        np.testing.assert_array_equal(sorted_by_row, expected)
        for threshold in (bisected_by_row, bisection(scaled)):
            np.testing.assert_array_equal(scaled >= np.asarray(threshold), scaled >= expected)


def test_a_row_with_nan_is_told():
    logits = LOGITS["float32"].copy()
    logits[::2, 5] = np.nan
    mix = [SETTINGS[row // 2 % len(SETTINGS)] for row in range(ROWS)]
    _, logprobs = by_row()(logits, KEYS, POSITIONS, SlotSampling.of(mix, VOCAB))
    told = [row % 2 == 0 and not params.greedy for row, params in enumerate(mix)]
    np.testing.assert_array_equal(np.isnan(logprobs), told)


def test_what_slots_that_have_ended_had_on_is_off():
    rows = SlotSampling.of([SamplingParams(0.0), SamplingParams(top_k=3)], VOCAB)
    among = rows.among(jnp.asarray([False, True]))
    assert among.greedy.tolist() == [False, False] and among.filtered.tolist() == [False, True]
