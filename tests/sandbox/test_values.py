"""Values as JSON, and their equality, against Python's own."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.sandbox.code_runner import decode_arguments
from rljax.sandbox.values import encode, same

numbers = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3)
leaves = numbers | st.text("ab", max_size=2) | st.binary(max_size=1)
keys = st.integers(-2, 2) | st.text("ab", max_size=1) | st.tuples(st.integers(0, 1))


def _larger(inner):
    maps = st.sets(keys, max_size=3) | st.dictionaries(keys, inner, max_size=3)
    return st.lists(inner, max_size=3) | st.tuples(inner, inner) | maps


values = st.recursive(leaves, _larger, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(values, values)
def test_equality_is_pythons(a, b):
    over_the_wire = json.loads(json.dumps(encode(a)))
    assert same(over_the_wire, encode(b)) == (a == b)
    assert same(over_the_wire, encode(a))
    assert decode_arguments([over_the_wire]) == [a]


KINDS = [[1, 2], (1, 2), {1, 2}, {1: 2}, "[1, 2]", b"12", 12, 12.5, None, True, "f", ["f", "nan"], ["l", 1]]


def test_kinds_are_kept_apart():
    for a, b in itertools.combinations(KINDS, 2):
        assert not same(encode(a), encode(b)), (a, b)


def test_numbers_are_equal_across_their_types():
    assert same(encode([1, {2: True}, {1.0}]), encode([1.0, {2.0: 1}, {True}]))
    nan, infinity = float("nan"), float("inf")
    assert not same(encode(nan), encode(nan)) and same(encode([infinity]), encode([infinity]))
    assert not same(encode(infinity), encode(-infinity))


def test_items_without_an_order_are_equal_in_any():
    mixed = {(1, 2): "x", 3: "x", "y": "x", b"y": {4, 5.5, None}}
    backwards = dict(reversed(mixed.items())) | {b"y": {None, 5.5, 4}}
    assert same(encode(mixed), encode(backwards))
    assert same(encode({1: 0, 2: 0}), encode({2.0: 0, True: False}))
    assert not same(encode({1: 0, 2: 1}), encode({1: 1, 2: 0}))


def test_comparing_takes_no_longer_than_reading():
    """What comes from inside is compared outside of all limits."""
    deep = ["t"]
    for _ in range(22):
        deep = ["t", deep]
    start = time.process_time()
    for kind in (["d", [deep, 1]], ["s", deep]):
        assert same(kind, kind) and not same(kind, encode({"a": 1}))
    assert time.process_time() - start < 0.1


def test_what_has_no_value_is_refused():
    class Liar:
        def __eq__(self, other):
            return True

    for value in (Liar(), [Liar()], print, 1j):
        with pytest.raises(TypeError, match="cannot be compared"):
            encode(value)


def test_forged_encodings_equal_nothing():
    for forged in ([], [[]], ["x", 1], ["d", 1], ["d", [1]], ["s"], {"a": 1}, ["l", ["d", []]]):
        for right in ([], {}, {1: 2}, [1], set(), None):
            assert forged == encode(right) or not same(forged, encode(right))
