"""The list of what plain decoding compiles, by the shapes of its decode states.

    shapes = PlainShapes(engine, params, slots=64, prompt_length=128, longest=512)
    compile_all(shapes.everything())

Each program is a function that compiles it. `PlainPrograms` and the server's `JoiningPrograms` compile them
in a thread, one decode state after the other.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from rljax.engine.background import Shape, compile_all
from rljax.engine.engine import DecodeEngine
from rljax.models.transformer import Params

Program = Callable[[], Any]
"""Compiles a program unless the engine's pool has it."""


@dataclasses.dataclass(frozen=True)
class PlainShapes:
    """Programs of prefill, insertion, decode steps, and moves between decode states.

    Attributes:
      params: weights from `engine.load_params`, or their shapes.
      slots: requests decoded at a time; waiting ones are inserted only into a state of that many.
      prompt_length: the longest prompt, in tokens.
      longest: the most tokens of a prompt and its response; None for the largest cache bucket.
      late_inserts: prompts also enter states of fewer slots, a few at a time.
      appends: tokens that were not sampled are appended.
      resumes: requests may arrive with response tokens, which are prefilled after the prompt.
      widens: states grow to more slots.
    """

    engine: DecodeEngine
    params: Params
    slots: int
    prompt_length: int
    longest: int | None = None
    late_inserts: bool = False
    appends: bool = False
    resumes: bool = False
    widens: bool = False

    @functools.cached_property
    def batches(self) -> list[int]:
        """Batch buckets up to that of all slots."""
        largest = self.engine.buckets.batch_for(self.slots)
        return [batch for batch in self.engine.buckets.batch if batch <= largest]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Cache buckets up to that of the longest sequence."""
        return self.engine.buckets.cache_up_to(self.longest)

    @functools.cached_property
    def prefixes(self) -> list[Shape]:
        """Numbers of prompts that are prefilled together, and their padded lengths."""
        longest = self.lengths[-1] if self.resumes else min(self.prompt_length, self.lengths[-1])
        needed = self.engine.prefill_length(longest)
        return [
            (rows, length)
            for rows in self.engine.prefill_rows
            for length in self.engine.prefill_lengths
            if rows <= self.batches[-1] and length <= needed
        ]

    def prefill(self, prefix: Shape) -> Program:
        """Returns prefill of a shape."""
        return functools.partial(self.engine.compile_prefill, self.params, *prefix)

    def entering(self, state: Shape, prefixes: Iterable[Shape] | None = None) -> list[Shape]:
        """Returns those of some prefixes, None for all, that are inserted into a state: into one of fewer
        slots only those of the fewest prompts, if any.
        """
        whole, fewest = state[0] == self.batches[-1], self.engine.prefill_rows[0]
        return [
            (rows, length)
            for rows, length in (self.prefixes if prefixes is None else prefixes)
            if length <= state[1] and (whole or (self.late_inserts and rows == fewest))
        ]

    def inserts(self, state: Shape, prefixes: Iterable[Shape] | None = None) -> list[Program]:
        """Returns the insertions of `entering`."""
        return [
            functools.partial(self.engine.compile_insert, prefix, *state)
            for prefix in self.entering(state, prefixes)
        ]

    def steps(self, state: Shape) -> list[Program]:
        """Returns what a state needs to decode."""
        programs: list[Program] = [
            functools.partial(self.engine.compile_plain, self.params, *state, self.appends)
        ]
        if self.resumes and (self.late_inserts or state[0] == self.batches[-1]):
            programs.append(functools.partial(self.engine.compile_counts, *state))
        return programs

    def moves(self, state: Shape, shortest: int = 0) -> list[Program]:
        """Returns the moves into a state: from one with a shorter cache, of at least `shortest`, from one of
        more slots, and from one of fewer.
        """
        (batch, length), engine = state, self.engine
        shorter = [other for other in self.lengths if shortest <= other < length]
        larger = [other for other in self.batches if other > batch]
        smaller = [other for other in self.batches if other < batch]
        moves: list[Program] = []
        if shorter:
            moves.append(functools.partial(engine.compile_grow, batch, shorter[-1]))
        if larger:
            moves.append(functools.partial(engine.compile_compact, larger[0], batch, length))
        if smaller and self.widens:
            moves.append(functools.partial(engine.compile_widen, smaller[-1], length))
        return moves

    def of_state(self, state: Shape, shortest: int = 0) -> list[Program]:
        """Returns everything that a state needs, prefill aside; `shortest` as in `moves`."""
        return [*self.steps(state), *self.inserts(state), *self.moves(state, shortest)]

    def everything(self) -> list[Program]:
        """Returns all programs."""
        states = [(batch, length) for length in self.lengths for batch in self.batches]
        return [
            *map(self.prefill, self.prefixes),
            *(program for state in states for program in self.of_state(state)),
        ]


def compile_until(should_stop: Callable[[], bool], programs: Iterable[Program]) -> None:
    """Compiles programs one after the other, until it should stop."""
    for compile_program in programs:
        if should_stop():
            break
        compile_program()


def warm_up_plain(
    engine: DecodeEngine, params: Params, slots: int, prompt_length: int, **others: Any
) -> None:
    """Compiles all programs of plain decoding. Arguments as of `PlainShapes`."""
    shapes = PlainShapes(engine, engine.param_shapes(params), slots, prompt_length, **others)
    compile_all(shapes.everything())
