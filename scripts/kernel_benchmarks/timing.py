"""Times a case: every function compiled, warmed up, and called in turns on rotating arguments.

Many operations take a few microseconds, less than it takes to start a program. So one program calls the
function on every set of arguments, one after the other.
"""

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


class Timed:
    """A case's functions and arguments, ready to be called.

    Args:
      case: what is measured.
      names: of its functions; those that refuse the case are left out.
      most_sets: of arguments, and so calls in one program; 1 where kernels are interpreted.

    Attributes:
      functions: by name, compiled.
      refused: by name why.
    """

    def __init__(self, case: Case, names: Sequence[str], most_sets: int) -> None:
        rng = np.random.default_rng(0)
        first = case.make(rng)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        sets = min(max(_MOST_BYTES // max(size, 1), 1), most_sets)
        self._case = case
        self._sets = [first, *(case.make(rng) for _ in range(sets - 1))]
        self.functions: dict[str, Callable[..., Any]] = {}
        self.refused: dict[str, str] = {}
        for name in names:
            try:
                self.functions[name] = self._compile(case.functions[name])
            except Refused as refusal:
                self.refused[name] = str(refusal)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A program of what each set gives up and what it keeps, to the results by set."""
        one = jax.jit(function)  # traced once for all sets

        def of_all(given: list[dict[int, Any]], kept: list[dict[int, Any]]) -> list[Any]:
            sets = [a | b for a, b in zip(given, kept, strict=True)]
            return [one(*(arguments[i] for i in range(len(arguments)))) for arguments in sets]

        return jax.jit(of_all, donate_argnums=0).lower(*self._arguments()).compile()

    def _arguments(self) -> tuple[list[dict[int, Any]], list[dict[int, Any]]]:
        """Arguments by their position, those that are given up first."""
        donated = self._case.donated
        given = [{i: arguments[i] for i in donated} for arguments in self._sets]
        kept = [{i: a for i, a in enumerate(arguments) if i not in donated} for arguments in self._sets]
        return given, kept

    def seconds(self, calls: int, repeats: int) -> dict[str, list[float]]:
        """Seconds a call by function, a list over repeats, in each of which the functions take turns.

        Args:
          calls: in a repeat, at least; every set of arguments takes part.
        """
        programs = -(-calls // len(self._sets))
        taken: dict[str, list[float]] = {name: [] for name in self.functions}
        for repeat in range(repeats + 1):
            order = list(self.functions)
            for name in reversed(order) if repeat % 2 else order:
                seconds = self._once(self.functions[name], programs)
                if repeat:  # the first is for warming up
                    taken[name].append(seconds)
        return taken

    def _once(self, function: Callable[..., Any], programs: int) -> float:
        jax.block_until_ready(self._sets)
        start = time.perf_counter()
        for _ in range(programs):
            out = function(*self._arguments())
            self._take_back(out)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / programs / len(self._sets)

    def _take_back(self, results: list[Any]) -> None:
        """Arguments that were given up come back as the function's results, in their order."""
        donated = self._case.donated
        if not donated:
            return
        for at, out in enumerate(results):
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
