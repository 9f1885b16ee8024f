"""Times a case: every function compiled, warmed up, and called in turns on rotating arguments."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kernel_benchmarks.case import Case
from rljax.errors import UserError
from rljax.kernels.switch import Refused

_MOST_BYTES = 2**30  # of all sets of arguments together
_MOST_SETS = 8


class Timed:
    """A case's functions and arguments, ready to be called.

    Args:
      case: what is measured.
      names: of its functions; those that refuse the case are left out.
      seed: of the arguments.

    Attributes:
      functions: by name, compiled.
      refused: by name why.
    """

    def __init__(self, case: Case, names: Sequence[str], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        first = case.make(rng)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        sets = min(max(_MOST_BYTES // max(size, 1), 1), _MOST_SETS)
        self._case = case
        self._sets = [first, *(case.make(rng) for _ in range(sets - 1))]
        self.functions: dict[str, Callable[..., Any]] = {}
        self.refused: dict[str, str] = {}
        for name in names:
            try:
                self.functions[name] = (
                    jax.jit(case.functions[name], donate_argnums=case.donated).lower(*first).compile()
                )
            except Refused as refusal:
                self.refused[name] = str(refusal)

    def seconds(self, calls: int, repeats: int) -> dict[str, list[float]]:
        """Seconds a call by function, a list over repeats, in each of which the functions take turns."""
        taken: dict[str, list[float]] = {name: [] for name in self.functions}
        for repeat in range(repeats + 1):
            order = list(self.functions)
            for name in reversed(order) if repeat % 2 else order:
                seconds = self._once(self.functions[name], calls)
                if repeat:  # the first is for warming up
                    taken[name].append(seconds)
        return taken

    def _once(self, function: Callable[..., Any], calls: int) -> float:
        jax.block_until_ready(self._sets)
        start = time.perf_counter()
        for call in range(calls):
            at = call % len(self._sets)
            out = function(*self._sets[at])
            self._take_back(at, out)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    def _take_back(self, at: int, out: Any) -> None:
        """Arguments that were given up come back as the function's result, in their order."""
        donated = self._case.donated
        if donated:
            back = dict(zip(donated, out if len(donated) > 1 else (out,), strict=True))
            self._sets[at] = tuple(back.get(i, argument) for i, argument in enumerate(self._sets[at]))


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Of the repeats, by function."""
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def chosen_functions(case: Case, implementations: Sequence[str], interpreted: bool) -> list[str]:
    """Names of the case's functions to be timed: those asked for and what they are compared with.

    Args:
      implementations: asked for; empty for all.
      interpreted: whether kernels that are interpreted count as all.
    """
    unknown = [name for name in implementations if name not in case.functions]
    if unknown:
        raise UserError(
            f"--implementation: {unknown[0]!r} is none of {case.name}'s; they are {', '.join(case.functions)}"
        )
    if implementations:
        return list(dict.fromkeys(["xla", *implementations]))
    return [name for name in case.functions if interpreted or not name.startswith("interpret")]
