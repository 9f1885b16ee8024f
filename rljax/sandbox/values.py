"""Python values as JSON that distinguishes list, tuple, set and dict with any keys, and their equality.

Both sides of the sandbox use it, so it imports the standard library only. Values from inside are compared in
their encoded form: they never become objects, whose hashing or equality a hostile program could exploit.
"""

import math
from typing import Any

Encoded = Any
"""None, bool, str, int, a finite float, or a list whose first item is a tag: "l" list, "t" tuple, "s" set,
"d" dict (its pairs follow), "b" bytes (as hex), "f" a float that is not finite."""


def encode(value: Any) -> Encoded:
    """Encodes a value; raises a TypeError if its type cannot be compared by value."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["f", repr(float(value))]
    if isinstance(value, list):
        return ["l", *map(encode, value)]
    if isinstance(value, tuple):
        return ["t", *map(encode, value)]
    if isinstance(value, (set, frozenset)):
        return ["s", *map(encode, value)]
    if isinstance(value, dict):
        return ["d", *([encode(key), encode(item)] for key, item in value.items())]
    if isinstance(value, (bytes, bytearray)):
        return ["b", value.hex()]
    raise TypeError(f"a {type(value).__name__} cannot be compared by value")


def same(a: Encoded, b: Encoded) -> bool:
    """Returns whether two encoded values are equal under Python's `==`; NaN equals nothing."""
    if not isinstance(a, list) or not isinstance(b, list):
        return not isinstance(a, list) and not isinstance(b, list) and a == b
    if not a or not b or a[0] != b[0] or len(a) != len(b):
        return False
    tag, left, right = a[0], a[1:], b[1:]
    if tag == "f":
        return left == right and left != ["nan"]
    if tag == "d":
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in (*left, *right)):
            return False
        left, right = (sorted(pairs, key=lambda pair: _order(pair[0])) for pairs in (left, right))
        return all(same(x[0], y[0]) and same(x[1], y[1]) for x, y in zip(left, right, strict=True))
    if tag == "s":
        left, right = sorted(left, key=_order), sorted(right, key=_order)
    return all(same(x, y) for x, y in zip(left, right, strict=True))


def _order(value: Encoded) -> tuple[Any, ...]:
    """Returns a sort key that is equal for equal values, so that sorting aligns them. A key is no longer than
    its value, since keys of untrusted values are computed outside of the sandbox.
    """
    if value is None:
        return (0,)
    if isinstance(value, bool | int | float):
        return (1, value)
    if isinstance(value, str):
        return (2, value)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        return (4,)  # forged
    tag, *items = value
    if tag == "d":  # its pairs have no tags
        items = [["t", *pair] if isinstance(pair, list) else pair for pair in items]
    keys = map(_order, items)
    return (3, tag, tuple(sorted(keys) if tag in ("s", "d") else keys))
