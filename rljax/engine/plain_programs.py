"""Plain decoding with programs that a thread compiles: prefill, insertion, decode steps, changes of shape.

    engine.background = PlainPrograms(engine, params, thread, Shapes(engine.buckets, slots=64, ...))

The shape that decoding begins with is compiled at once, and all others by the thread. The decoding thread
compiles nothing: it waits where the decode state must grow (`wait_for`), stays in a larger shape where the
state could shrink (`smallest_batch`), and pads prompts more than they need (`prefill_shape`). None of it
changes a token, since a token depends on its request and its prefix alone.
"""

import functools
from collections.abc import Callable, Iterable

from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape, compile_all
from rljax.engine.engine import DecodeEngine
from rljax.engine.shapes import ProgramList, Shapes, compile_until
from rljax.models.transformer import Params

_MOST_PADDING = 4  # prompts share a prefill at first unless it is so many times as long as they need
_PREFILL_DELAY = 1  # in buckets: after the shapes that come next
_UNSEEN_LENGTH = 2  # buckets by which padded lengths that the first prompts do not have come later


class PlainPrograms:
    """Compiles the programs of plain decoding, shape by shape.

    Args:
      params: weights from `engine.load_params`, or their shapes.
      shapes: the shapes. The programs with which its first prompts, of which there are some, are prefilled
        and first decoded are compiled at once.

    Attributes:
      seconds_waited: seconds in which the decoding thread waited for programs.
    """

    def __init__(self, engine: DecodeEngine, params: Params, thread: CompilerThread, shapes: Shapes) -> None:
        buckets = engine.buckets
        self._plain = plain = ProgramList(engine, engine.param_shapes(params), shapes)
        self.seconds_waited = 0.0
        # What the first prompts need.
        padded = [engine.prefill_length(length) for length in shapes.first_prompts]
        first_lengths = set(padded)
        first_prefixes = _cover((_rows_for(engine, padded.count(length)), length) for length in padded)
        first = shapes.first
        # Everything else that may be needed; of two batches, the one that decoding may wait for first.
        others = [
            (batch, length)
            for batch in reversed(shapes.batches)
            for length in shapes.foreseen
            if (batch, length) != first
        ]
        # Prompts that are shorter than the first ones are padded to their length, unless there are any: then
        # their programs are compiled, too.
        later = [
            (rows, length)
            for rows, length in shapes.prefixes
            if length >= min(padded) and (rows, length) not in first_prefixes
        ]
        # Compile what comes first, the largest programs to begin with, and leave the rest to the thread.
        at_once = [*plain.steps(first), *map(plain.prefill, first_prefixes)]
        compile_all([*at_once, *plain.inserts(first, first_prefixes)])
        thread.near = first
        failure = "are not decoded so, since plain decoding cannot be compiled"
        self._shapes = BackgroundCompiler(
            self._compile_state, buckets, others, first, False, thread, failure=failure
        )
        self._shapes.mark_ready(first)
        self._prefills = BackgroundCompiler(
            self._compile_prefill,
            buckets,
            later,
            first,
            False,
            thread,
            _PREFILL_DELAY,
            lambda prefix: 0 if prefix[1] in first_lengths else _UNSEEN_LENGTH,
            "are not prefilled together, since prefill cannot be compiled",
        )
        for prefix in first_prefixes:
            self._prefills.mark_ready(prefix)

    @property
    def left(self) -> int:
        """Number of shapes of decode states and of prefill that are still to be compiled."""
        compilers = self._shapes, self._prefills
        return sum(compiler.total - len(compiler.ready) - len(compiler.errors) for compiler in compilers)

    def wait(self) -> None:
        """Waits until everything is compiled."""
        self._shapes.wait()
        self._prefills.wait()

    def finish(self) -> None:
        """Compiles everything, and whatever else its thread is to compile, before it returns
        (`CompilerThread.finish`).

        Raises:
          Exception: the first error of what plain decoding needs.
        """
        self._shapes.thread.finish()
        for compiler in (self._shapes, self._prefills):
            if len(compiler.ready) < compiler.total:
                raise next(iter(compiler.errors.values()))

    def close(self) -> None:
        """Ends the thread. What is needed and not compiled is then compiled by the thread that needs it."""
        self._shapes.close()

    def wait_for(self, shape: Shape) -> None:
        """Waits until decode states may have a shape."""
        self.seconds_waited += self._shapes.wait_for(shape)
        self._shapes.near = shape

    def start_length(self, batch: int, length: int) -> int:
        """Returns the cache length of a state that begins, `length` or longer: one that is ready, if any."""
        ready = self._shapes.ready
        lengths = self._plain.shapes.lengths
        longer = [other for other in lengths if other >= length and (batch, other) in ready]
        start = min(longer, default=length)
        if start != length:
            self._shapes.is_ready((batch, length), near=False)  # compile it for the next time
        self.wait_for((batch, start))
        return start

    def smallest_batch(self, state: Shape, batch: int) -> int:
        """Returns the smallest batch bucket from `batch` on that a decode state can be compacted into."""
        reached, length = state
        self._shapes.is_ready(state)  # what is near to it is compiled next
        for bucket in sorted(self._plain.shapes.batches, reverse=True):
            if batch <= bucket < reached:
                if not self._shapes.is_ready((bucket, length), near=False):
                    break
                reached = bucket
        self._shapes.near = reached, length
        return reached

    def prefill_shape(self, rows: int, length: int) -> Shape:
        """Returns the rows and padded length to prefill prompts with, which need at least these: some that
        are ready, if possible.
        """
        shape = rows, length
        if self._prefills.is_ready(shape, near=False):
            return shape
        # Into states of fewer slots, only the smallest prefill is inserted.
        fixed = self._plain.shapes.late_inserts and rows == self._plain.engine.prefill_rows[0]
        larger = [
            other
            for other in self._prefills.ready
            if other[1] >= length and (other[0] == rows if fixed else other[0] >= rows)
        ]
        if larger:
            return min(larger, key=lambda other: (other[0] * other[1], other))
        self.seconds_waited += self._prefills.wait_for(shape)
        return shape

    # -- compiling -------------------------------------------------------------------------------------------

    def _compile_state(self, state: Shape, should_stop: Callable[[], bool]) -> None:
        programs = self._plain.of_state(state)
        if state[1] < self._plain.shapes.shortest:  # the longer states have not compiled this move
            programs.append(functools.partial(self._plain.engine.compile_grow, *state))
        compile_until(should_stop, programs)

    def _compile_prefill(self, prefix: Shape, should_stop: Callable[[], bool]) -> None:
        # All other states compile all insertions themselves.
        inserts = self._plain.inserts(self._plain.shapes.first, [prefix])
        compile_until(should_stop, [self._plain.prefill(prefix), *inserts])


def _cover(prefixes: Iterable[Shape]) -> list[Shape]:
    """Returns those of some prefixes that all of them fit into, with less than `_MOST_PADDING`."""
    kept: list[Shape] = []
    for rows, length in sorted(set(prefixes), reverse=True):
        if not any(rows == other[0] and other[1] < _MOST_PADDING * length for other in kept):
            kept.append((rows, length))
    return kept


def _rows_for(engine: DecodeEngine, prompts: int) -> int:
    return next((count for count in engine.prefill_rows if count >= prompts), engine.prefill_rows[-1])
