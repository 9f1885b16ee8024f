"""The calculator: Python's arithmetic on whatever a policy may write, in bounded time."""

import math
import re
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from rljax.tools import calculator
from rljax.tools.base import ToolError
from rljax.tools.calculator import MAX_BITS, MAX_DEPTH, MAX_LENGTH, Calculator, evaluate

NUMBERS = st.one_of(
    st.integers(0, 10**12).map(str),
    st.floats(0, 1e12).map(repr),
    st.sampled_from(["0", "1", "2", ".5", "3.", "1e3", "2.5E-2"]),
)


def _larger(inner):
    power = st.tuples(inner, st.sampled_from(["0", "2", "3", "-1", "-2", ".5"]))
    binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "%", " - ", " * "]), inner)
    alone = (inner.map(form.format) for form in ("({})", "-{}", "+{}"))
    return st.one_of(binary.map("".join), power.map(lambda pair: "({})**{}".format(*pair)), *alone)


EXPRESSIONS = st.recursive(NUMBERS, _larger, max_leaves=12)


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(EXPRESSIONS)
def test_has_the_value_that_python_gives(text):
    try:
        expected = eval(text, {"__builtins__": {}})
    except (ZeroDivisionError, OverflowError):
        expected = None
    if isinstance(expected, complex | None) or not math.isfinite(expected):
        with pytest.raises(ToolError):
            evaluate(text)
        return
    try:
        value = evaluate(text)
    except ToolError as error:  # somewhere inside there was what we have no numbers for, and Python has
        assert str(error) in ("the result is too large", "the result is not a real number")
        return
    assert value == expected and type(value) is type(expected)


WRITTEN = {"347*862-95": "299019", " ( 1 + 2 ) * 3\n": "9", "-2**2": "-4", "2**3**2": "512", "2**-1": "0.5"}
WRITTEN |= {"7/2": "3.5", "6/3": "2", "-7%3": "2", "0.1+0.2": "0.30000000000000004", "007+1": "8"}
WRITTEN |= {"2**100": str(2**100), "1e22": "1e+22"}  # 10**22 and its neighbours are one float


def test_writes_numbers():
    assert {text: Calculator().call(text) for text in WRITTEN} == WRITTEN


REFUSED = {
    "not complete": ["", "1+"],
    "not closed": ["(1", "(" * 10 + "9" * 900],
    "unexpected ')'": ["1)"],
    "unexpected '2'": ["1 2"],
    "unexpected 'x'": ["2x"],
    "unexpected ','": ["1,000"],
    "unexpected '.'": ["."],
    "unexpected": ["٣+1", "\x00\n\r"],
    "unexpected '/'": ["1//2"],
    "unexpected '_'": ["1_000", "__import__('os').system('true')"],
    "unexpected 'l'": ["(lambda: 1)()"],
    "division by zero": ["1/0", "1%0", "0**-1"],
    "not a real number": ["(-8)**.5"],
    "too large": ["1e999", "1e308*10", "9**9**9**9", "(2**4000)**1000", "2**4095*" * 120 + "1"],
    "longer than": ["9" * MAX_LENGTH + "9"],
    f"deeper than {MAX_DEPTH}": ["(" * 400 + "1" + ")" * 400, "-" * 900 + "1", "2**" * 300 + "1"],
}


@pytest.mark.parametrize("says", REFUSED)
def test_says_what_is_wrong_in_one_line_and_at_once(says):
    for text in REFUSED[says]:
        start = time.process_time()
        with pytest.raises(ToolError, match=re.escape(says)) as raised:
            Calculator().call(text)
        assert time.process_time() - start < 0.1
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 100


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.text(alphabet="0123456789+-*/%(). e\n", max_size=MAX_LENGTH))
def test_any_text_has_a_short_answer_or_an_error(text):
    start = time.process_time()
    try:
        assert len(Calculator().call(text)) < MAX_BITS / 3
    except ToolError as error:
        assert "\n" not in str(error)
    assert time.process_time() - start < 0.1


def test_a_power_that_is_too_large_is_not_computed():
    class Number(int):
        def __pow__(self, exponent):
            pytest.fail("computed")

    for base, exponent in ((2, MAX_BITS + 1), (3, 10**9), (-9, 10**30)):
        with pytest.raises(OverflowError):
            calculator._power(Number(base), exponent)
