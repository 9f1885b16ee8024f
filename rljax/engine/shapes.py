"""The one list of the shapes that programs are compiled for, and the programs of plain decoding.

    shapes = Shapes(engine.buckets, slots=64, prompt_length=128, longest=512)
    compile_all(ProgramList(engine, params, shapes).everything())

Warm-up, background compiling, plans, drafters on the device, and the measurement of numerics read it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rljax.engine.background import Shape, compile_all
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.models.transformer import Params

Program = Callable[[], Any]
"""Compiles a program unless the engine's pool has it."""

Pass = tuple[int, int, int, int]
"""A verifying pass: batch, cache length, rows, draft nodes of a slot."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes of prefill, of decode states (batch, cache length), and of verifying passes over these.

    Attributes:
      slots: requests decoded at a time; waiting ones are inserted only into a state of that many.
      prompt_length: the longest prompt, in tokens.
      longest: the most tokens of a prompt and its response; None for the largest cache bucket.
      max_batch: larger batches are not verified.
      first_prompts: lengths of the first prompts, in tokens. Shorter caches than these need are not foreseen.
      late_inserts: prompts also enter states of fewer slots, a few at a time.
      appends: tokens that were not sampled are appended.
      resumes: requests may arrive with response tokens, which are prefilled after the prompt.
      widens: states grow to more slots.
    """

    buckets: Buckets
    slots: int
    prompt_length: int
    longest: int | None = None
    max_batch: int = 0
    first_prompts: Sequence[int] = ()
    late_inserts: bool = False
    appends: bool = False
    resumes: bool = False
    widens: bool = False

    @functools.cached_property
    def batches(self) -> list[int]:
        """Batch buckets up to that of all slots."""
        largest = self.buckets.batch_for(self.slots)
        return [batch for batch in self.buckets.batch if batch <= largest]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Cache buckets up to that of the longest sequence."""
        return self.buckets.cache_up_to(self.longest)

    @functools.cached_property
    def shortest(self) -> int:
        """The shortest cache that is foreseen."""
        return self.buckets.cache_for(min(self.first_prompts, default=0) + 1)

    @functools.cached_property
    def foreseen(self) -> list[int]:
        """Those of `lengths` that are compiled before a decode state needs them."""
        return [length for length in self.lengths if length >= self.shortest]

    @property
    def states(self) -> list[Shape]:
        """All decode states, by cache length."""
        return [(batch, length) for length in self.lengths for batch in self.batches]

    @property
    def first(self) -> Shape:
        """The decode state of the first prompts."""
        longest = max(self.first_prompts, default=self.prompt_length)
        return self.batches[-1], self.buckets.cache_for(min(longest + 1, self.lengths[-1]))

    @functools.cached_property
    def prefixes(self) -> list[Shape]:
        """Numbers of prompts that are prefilled together, and their padded lengths."""
        longest = self.lengths[-1] if self.resumes else min(self.prompt_length, self.lengths[-1])
        counts, lengths = self.buckets.prefill()
        needed, most = next(length for length in lengths if length >= longest), self.batches[-1]
        return [(rows, length) for rows in counts if rows <= most for length in lengths if length <= needed]

    def entering(self, state: Shape, prefixes: Iterable[Shape] | None = None) -> list[Shape]:
        """Returns those of some prefixes, None for all, that are inserted into a state: into one of fewer
        slots only those of the fewest prompts, if any.
        """
        whole, fewest = state[0] == self.batches[-1], self.buckets.prefill()[0][0]
        return [
            (rows, length)
            for rows, length in (self.prefixes if prefixes is None else prefixes)
            if length <= state[1] and (whole or (self.late_inserts and rows == fewest))
        ]

    def larger(self, batch: int) -> list[int]:
        """Returns the batches from which states are compacted into one of `batch` slots, step by step."""
        return [other for other in self.batches if other > batch]

    @functools.cached_property
    def verified_batches(self) -> list[int]:
        """Batches that are verified."""
        return self.buckets.verified_batches(min(self.max_batch, self.batches[-1]))

    def drafted(self, batch: int) -> list[int]:
        """Returns the cache lengths of states of `batch` slots that are drafted for."""
        return self.lengths if batch in self.verified_batches else []

    @property
    def verified(self) -> list[Shape]:
        """Decode states that are verified, of foreseen lengths, by batch."""
        return list(itertools.product(self.verified_batches, self.foreseen))

    def passes(self, state: Shape) -> list[Pass]:
        """Returns the verifying passes over a state."""
        return [(*state, rows, nodes) for rows, nodes in self.buckets.passes(state[0])]


@dataclasses.dataclass(frozen=True)
class ProgramList:
    """Programs of prefill, insertion, decode steps, and moves between decode states, each as a function that
    compiles it. `params` are weights from `engine.load_params`, or their shapes.
    """

    engine: DecodeEngine
    params: Params
    shapes: Shapes

    def prefill(self, prefix: Shape) -> Program:
        """Returns prefill of a shape."""
        return functools.partial(self.engine.compile_prefill, self.params, *prefix)

    def inserts(self, state: Shape, prefixes: Iterable[Shape] | None = None) -> list[Program]:
        """Returns the insertions of `Shapes.entering`."""
        return [
            functools.partial(self.engine.compile_insert, prefix, *state)
            for prefix in self.shapes.entering(state, prefixes)
        ]

    def steps(self, state: Shape) -> list[Program]:
        """Returns what a state needs to decode."""
        shapes = self.shapes
        programs: list[Program] = [
            functools.partial(self.engine.compile_plain, self.params, *state, shapes.appends)
        ]
        if shapes.resumes and (shapes.late_inserts or state[0] == shapes.batches[-1]):
            programs.append(functools.partial(self.engine.compile_counts, *state))
        return programs

    def moves(self, state: Shape) -> list[Program]:
        """Returns the moves into a state: from one with a shorter cache that is foreseen, from one of more
        slots, and from one of fewer.
        """
        (batch, length), engine, shapes = state, self.engine, self.shapes
        shorter = [other for other in shapes.foreseen if other < length]
        smaller = [other for other in shapes.batches if other < batch]
        moves: list[Program] = []
        if shorter:
            moves.append(functools.partial(engine.compile_grow, batch, shorter[-1]))
        if larger := shapes.larger(batch):
            moves.append(functools.partial(engine.compile_compact, larger[0], batch, length))
        if smaller and shapes.widens:
            moves.append(functools.partial(engine.compile_widen, smaller[-1], length))
        return moves

    def of_state(self, state: Shape) -> list[Program]:
        """Returns everything that a state needs, prefill aside."""
        return [*self.steps(state), *self.inserts(state), *self.moves(state)]

    def everything(self) -> list[Program]:
        """Returns all programs."""
        states = (program for state in self.shapes.states for program in self.of_state(state))
        return [*map(self.prefill, self.shapes.prefixes), *states]


def compile_until(should_stop: Callable[[], bool], programs: Iterable[Program]) -> None:
    """Compiles programs one after the other, until it should stop."""
    for compile_program in programs:
        if should_stop():
            break
        compile_program()


def warm_up_plain(
    engine: DecodeEngine, params: Params, slots: int, prompt_length: int, **others: Any
) -> None:
    """Compiles all programs of plain decoding. Arguments as of `Shapes`."""
    shapes = Shapes(engine.buckets, slots, prompt_length, **others)
    compile_all(ProgramList(engine, engine.param_shapes(params), shapes).everything())
