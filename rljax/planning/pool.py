"""Pools that run no program: one that compiles for shapes, and one that only notes what is asked for.

The run's own code asks for its programs, so a plan knows of every one of them: a `Recording` notes all, and
`compile_largest` compiles the largest of each kind in a `PlanningPool`.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.engine.executables import ExecutablePool


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program; all figures are of one device.

    Attributes:
      name: what it computes, such as "verify", with its sizes.
      kind: "prefill", "insert", "generate", "verify", "draft", "grow", "compact", "score", "gradients",
        "apply" or another name of the pool; of a drafter with its name in front.
      drafter: the head or the small model whose program it is; None for those of the policy.
      arguments: bytes of its arguments.
      outputs: bytes of its results that take the place of no argument.
      temporaries: bytes that it needs besides these.
      seconds: time to trace, lower and compile it.
      flops: FLOPs that XLA counts, each loop's body once.
      accessed: bytes that XLA counts, each loop's body once.
    """

    name: str
    kind: str
    drafter: str | None
    arguments: int
    outputs: int
    temporaries: int
    seconds: float
    flops: float
    accessed: float

    @property
    def total(self) -> int:
        """Bytes on the device while it runs, without arrays that are none of its arguments."""
        return self.arguments + self.outputs + self.temporaries


class _Planned:
    """Stands for a compiled program in the run's code: a call returns the shapes of its results."""

    def __init__(self, results: Any) -> None:
        self.out_info = results

    def __call__(self, *args: Any) -> Any:
        del args
        return self.out_info


class PlanningPool(ExecutablePool):
    """A pool that compiles programs for the shapes of their arguments and runs none.

    Programs are traced by the thread that asks for them, and compiled by others meanwhile.

    Args:
      compilers: threads that compile.
      row_invariant: see `ExecutablePool`.
      place: gives a result's shapes the shardings that the run's arrays have.
      default: the sharding of arguments that have none.
      skips: whether a program with these arguments is only counted.
      drafter: whose programs they are; None for the policy's.

    Attributes:
      skipped: number of programs that were only counted, by kind.
    """

    def __init__(
        self,
        compilers: Executor,
        row_invariant: bool,
        place: Callable[[Any], Any],
        default: Any,
        skips: Callable[[tuple], bool],
        drafter: str | None = None,
    ) -> None:
        super().__init__(row_invariant)
        self._compilers = compilers
        self._place = place
        self._default = default
        self._skips = skips
        self._drafter = drafter
        self._by_key: dict[Hashable, _Planned] = {}
        self._in_flight: list[Future[Program]] = []
        self.skipped: dict[str, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def skip(self, kind: str, count: int) -> None:
        """Counts programs of a kind that are not compiled."""
        kind = self._named(kind)
        self.skipped[kind] = self.skipped.get(kind, 0) + count

    def _named(self, kind: str) -> str:
        return kind if self._drafter is None else f"{self._drafter} {kind}"

    def get(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...] = ()
    ) -> Any:
        """Begins to compile the program of `key`; see `ExecutablePool.get`. A skipped one has no results."""
        if key in self._by_key:
            return self._by_key[key]
        if self._skips(args):
            self.skip(key[0], 1)
            return None
        start = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*jax.tree.map(self._abstract, args))
        tracing = time.perf_counter() - start
        self._in_flight.append(self._compilers.submit(self._compiled, key, lowered, tracing))
        results = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
        self._by_key[key] = _Planned(self._place(results))
        return self._by_key[key]

    def programs(self) -> Iterator[Program]:
        """Yields the programs, in the order in which they were asked for; waits for each."""
        for program in self._in_flight:
            yield program.result()

    def _compiled(self, key: Any, lowered: Any, tracing: float) -> Program:
        """Compiles a program, of which tracing took so many seconds, and returns its figures."""
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=self._options)
        seconds = tracing + time.perf_counter() - start
        memory = compiled.memory_analysis()
        cost = compiled.cost_analysis() or {}
        cost = cost[0] if isinstance(cost, list) else cost
        return Program(
            name=self._named(program_name(key)),
            kind=self._named(key[0]),
            drafter=self._drafter,
            arguments=int(memory.argument_size_in_bytes),
            outputs=int(memory.output_size_in_bytes - memory.alias_size_in_bytes),
            temporaries=int(memory.temp_size_in_bytes),
            seconds=seconds,
            flops=float(cost.get("flops", 0.0)),
            accessed=float(cost.get("bytes accessed", 0.0)),
        )

    def _abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._default if sharding is None else sharding)


def program_name(key: Any) -> str:
    """Returns the name of a program from its key in the pool: its kind, and the sizes that follow it."""
    sizes = []
    for part in key[1:]:
        if isinstance(part, str):
            sizes.append(part)
        elif isinstance(part, int) and not isinstance(part, bool):
            sizes.append(str(part))
        elif isinstance(part, tuple) and part and all(isinstance(size, int) for size in part):
            sizes.append("x".join(map(str, part)))
        elif not isinstance(part, bool):
            break
    return " ".join([key[0], *(size for size in sizes if len(size) < 40)])


class Recording(ExecutablePool):
    """A pool that only notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[Hashable, tuple[Callable[..., Any], tuple, tuple[int, ...]]] = {}

    def get(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...] = ()
    ) -> Any:
        self._asked.setdefault(key, (function, args, donate_argnums))

    def compile_largest(self, pool: PlanningPool) -> None:
        """Compiles in `pool` the program of every kind that has the largest arguments; the others are counted
        there.
        """
        kinds: dict[str, list[Hashable]] = {}
        for key in self._asked:
            kinds.setdefault(key[0], []).append(key)
        for kind, keys in kinds.items():
            sizes = {key: sum(map(_size, jax.tree.leaves(self._asked[key][1]))) for key in keys}
            largest = max(reversed(keys), key=sizes.__getitem__)  # of equals the last: the deepest tree
            pool.get(largest, *self._asked[largest])
            pool.skip(kind, len(keys) - 1)


def _size(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf))) * jnp.result_type(leaf).itemsize
