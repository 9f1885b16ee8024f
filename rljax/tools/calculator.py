"""A calculator: numbers, + - * / % ** and parentheses, with Python's precedence and Python's numbers.

Expressions are model output. They are parsed by hand, never evaluated as code, and length, nesting and digits
are bounded. Whole numbers are exact; `/` and decimals are float64.
"""

import math
import operator
import re

from rljax.tools.base import ToolError

MAX_LENGTH = 1000
"""Most characters of an expression."""
MAX_DEPTH = 50
"""Most nested parentheses, signs and powers."""
MAX_BITS = 4096
"""Most bits of a whole number, about 1,200 digits: up to this size every operation takes microseconds."""

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(rf"\s*({_NUMBER}|\*\*|.)", re.DOTALL)
_WHOLE = re.compile(r"[0-9]+")
_EXACT = 2.0**53  # from here on not every whole number is a float

Number = int | float


class Calculator:
    """The tool."""

    def call(self, text: str) -> str:
        """Returns the value of an expression: a whole number, or a decimal in Python's notation."""
        return show(evaluate(text))


def show(value: Number) -> str:
    """Returns a value as text; a float that is exactly a whole number is written without a decimal point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    return repr(value)


def evaluate(text: str) -> Number:
    """Returns the value of an expression; raises a ToolError for an invalid one."""
    if len(text) > MAX_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(text)
    value = parser.sum()
    if parser.ahead:
        raise ToolError(f"unexpected {parser.ahead!r}")
    return value


class _Parser:
    """Recursive descent that computes as it goes.

    sum      product (+ or - product)...
    product  signed (* or / or % signed)...
    signed   + or - signed, or a power
    power    atom, or atom ** signed
    atom     a number, or a sum in parentheses
    """

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text.strip())
        self._next = 0
        self._depth = 0

    @property
    def ahead(self) -> str:
        """The next token; "" at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def take(self) -> str:
        token = self.ahead
        self._next += 1
        return token

    def sum(self) -> Number:
        value = self.product()
        while self.ahead in ("+", "-"):
            if self.take() == "+":
                value = _bounded(operator.add, value, self.product())
            else:
                value = _bounded(operator.sub, value, self.product())
        return value

    def product(self) -> Number:
        value = self.signed()
        while self.ahead in ("*", "/", "%"):
            operation = {"*": operator.mul, "/": operator.truediv, "%": operator.mod}[self.take()]
            value = _bounded(operation, value, self.signed())
        return value

    def signed(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolError(f"nested deeper than {MAX_DEPTH}")
        if self.ahead in ("+", "-"):
            value = -self.signed() if self.take() == "-" else self.signed()
        else:
            value = self.atom()
            if self.ahead == "**":
                self.take()
                value = _bounded(_power, value, self.signed())
        self._depth -= 1
        return value

    def atom(self) -> Number:
        token = self.take()
        if token == "(":
            value = self.sum()
            if self.take() != ")":
                raise ToolError("a parenthesis is not closed")
            return value
        if _WHOLE.fullmatch(token):
            return _checked(int(token))
        if token and token[0] in ".0123456789":
            if token == ".":
                raise ToolError("unexpected '.'")
            return _checked(float(token))
        raise ToolError(f"unexpected {token!r}" if token else "the expression is not complete")


def _bounded(operation, left: Number, right: Number) -> Number:
    try:
        return _checked(operation(left, right))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def _checked(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ToolError("the result is too large")
    elif not math.isfinite(value):
        raise ToolError("the result is too large")
    return value


def _power(base: Number, exponent: Number) -> Number | complex:
    # A number of b bits is at least 2 ** (b - 1), so a result that is too large is rejected before computing.
    bits = (base.bit_length() - 1) * exponent if isinstance(base, int) and isinstance(exponent, int) else 0
    if bits > MAX_BITS and abs(base) > 1:
        raise OverflowError
    return base**exponent
