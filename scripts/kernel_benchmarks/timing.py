"""Times a case: every function compiled, warmed up, and called in turns on rotating arguments.

Many operations take a few microseconds, less than it takes to start a program. So one program calls the
function on every set of arguments, one after the other.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kernel_benchmarks.cases import Case
from rljax.numerics.kernel_choice import Refused

_MOST_BYTES = 2**30  # of all sets of arguments together
_MOST_SECONDS = 1.0  # of all repeats of a function together
_LEAST_REPEATS = 3  # of one program each, however long that takes
_CACHE = 50 * 2**20  # bytes of the last cache of an H100 or H200


class Timed:
    """A case's functions of these names and at most so many sets of arguments, and of calls in one program.

    Attributes:
      functions: by name, compiled.
      refused: reasons of functions that were left out, by name: refusals, and lack of memory. Any other error
        ends the measurement.
    """

    def __init__(self, case: Case, names: Sequence[str], most_sets: int) -> None:
        rng = np.random.default_rng(0)
        first, self._case = case.make(rng), case
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        sets = min(max(_MOST_BYTES // max(size, 1), 1), most_sets)
        self._sets = [first, *(case.make(rng) for _ in range(sets - 1))]
        self.functions: dict[str, Callable[..., Any]] = {}
        self.refused: dict[str, str] = {}
        for name in names:
            with self._left_out_if_refused(name):
                self.functions[name] = self._compile(case.functions[name])

    @contextlib.contextmanager
    def _left_out_if_refused(self, name: str) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            self.refused[name] = str(refusal)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.refused[name] = str(error).splitlines()[0]
            self.functions.pop(name, None)

    @property
    def cold(self) -> bool:
        """Whether calls read from memory: all sets together are more than twice as large as the cache."""
        return len(self._sets) * self._case.bytes > 2 * _CACHE

    def temporary_bytes(self, name: str) -> int:
        """Returns the temporary bytes of a function's program, besides arguments and results, for all
        sets.
        """
        return self.functions[name].memory_analysis().temp_size_in_bytes

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a program from the donated and the kept arguments of all sets to the results by set."""
        one = jax.jit(function)  # traced once for all sets

        def of_all(donated: list[tuple[Any, ...]], kept: list[tuple[Any, ...]]) -> list[Any]:
            return [one(*first, *rest) for first, rest in zip(donated, kept, strict=True)]

        return jax.jit(of_all, donate_argnums=0).lower(*self._arguments()).compile()

    def _arguments(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Returns donated and kept arguments of every set."""
        count = self._case.donated
        return [arguments[:count] for arguments in self._sets], [each[count:] for each in self._sets]

    def seconds(self, calls: int, repeats: int) -> dict[str, list[float]]:
        """Returns seconds per call by function, as a list over so many repeats, in which the functions take
        turns, with at least so many calls each. Slow functions get fewer calls and repeats.
        """
        most, slowest = -(-calls // len(self._sets)), 0.0
        programs = dict.fromkeys(self.functions, 1)
        for name, function in list(self.functions.items()):
            with self._left_out_if_refused(name):
                self._once(function, 1)  # for warming up
                if repeats > 1:
                    one = len(self._sets) * self._once(function, 1)
                    programs[name] = min(most, max(int(_MOST_SECONDS / repeats / one), 1))
                    slowest = max(slowest, one)
        if slowest > _MOST_SECONDS / repeats:
            repeats = max(int(_MOST_SECONDS / slowest), min(repeats, _LEAST_REPEATS))
        taken: dict[str, list[float]] = {name: [] for name in self.functions}
        for repeat in range(repeats):
            order = list(self.functions)
            for name in reversed(order) if repeat % 2 else order:
                taken[name].append(self._once(self.functions[name], programs[name]))
        return taken

    def _once(self, function: Callable[..., Any], programs: int) -> float:
        jax.block_until_ready(self._sets)
        start = time.perf_counter()
        for _ in range(programs):
            out = function(*self._arguments())
            if count := self._case.donated:
                self._sets = [(*new[:count], *old[count:]) for new, old in zip(out, self._sets, strict=True)]
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / programs / len(self._sets)


def chosen_functions(case: Case, implementations: Sequence[str], quick: bool) -> list[str]:
    """Returns the names of functions to time: `xla` and the requested ones that the case has; none if it has
    none of them. Without a request all that are not interpreted, but for one in a look at a CPU.
    """
    if not implementations:
        interpreted = ["interpret_tpu"] if quick and jax.default_backend() == "cpu" else []
        return [name for name in case.functions if name in interpreted or not name.startswith("interpret")]
    asked = [name for name in implementations if name in case.functions]
    return list(dict.fromkeys(["xla", *asked])) if asked else []
