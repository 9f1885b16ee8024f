"""Programs of a deep policy from two shallow ones.

Layers are equal, so every figure of a program is a constant and a share per layer: two depths give both.
A layer is traced once, but compiled as often as it is called (`rljax/models/outlining.py`).
`tests/planning/test_planning.py` compares with a whole compile.
"""

import dataclasses
from collections.abc import Sequence

from rljax.planning.programs import Program

DEPTHS = (2, 4)
"""Depths that are compiled in the place of a deeper policy."""
_COUNTED = ("arguments", "outputs", "temporaries")
_MEASURED = ("seconds", "flops", "accessed")


def extrapolated(
    shallow: Sequence[Program], deeper: Sequence[Program], depths: tuple[int, int], depth: int
) -> tuple[Program, ...]:
    """Returns the programs of a policy with `depth` layers.

    Args:
      shallow, deeper: the same programs at two depths, in the same order.
      depths: the two depths, ascending.
      depth: number of layers of the policy.

    Raises:
      ValueError: the programs differ.
    """
    first, second = depths
    share = (depth - first) / (second - first)
    programs = []
    for a, b in zip(shallow, deeper, strict=True):
        if a.kind != b.kind:
            raise ValueError(f"programs differ between depths: {a.name} and {b.name}")
        figures = {}
        for field in _COUNTED + _MEASURED:
            low, high = getattr(a, field), getattr(b, field)
            # A depth compiled while the machine was busy must not make a deeper policy cheaper.
            value = max(low + share * (high - low), high)
            figures[field] = round(value) if field in _COUNTED else value
        programs.append(dataclasses.replace(a, **figures))
    return tuple(programs)
