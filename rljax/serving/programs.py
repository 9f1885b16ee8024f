"""The programs of a server that decodes plainly, compiled in a thread while it answers already.

    programs = JoiningPrograms(engine, params, thread, slots=8, prompt_length=128)
    thread.start()

What the first request needs is compiled at once, and all else by the thread, the nearest shapes first. Nobody
waits for the thread to come to a shape: who needs one compiles its programs, or waits for the one program
that is under way.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.models.transformer import Params


class JoiningPrograms:
    """Compiles the programs of plain decoding in states that requests join, shape by shape.

    Args:
      engine: the decode engine, on one device.
      params: weights from `engine.load_params`, whose shapes are used.
      thread: the thread to compile in.
      slots: number of slots.
      prompt_length: the longest prompt, in tokens.
    """

    def __init__(
        self, engine: DecodeEngine, params: Params, thread: CompilerThread, slots: int, prompt_length: int
    ) -> None:
        self._engine, self._params = engine, engine.param_shapes(params)
        buckets = engine.buckets
        self._largest = buckets.batch_for(slots)
        self._longest = engine.prefill_length(min(prompt_length, buckets.cache[-1]))
        shapes = [
            (batch, length) for length in buckets.cache for batch in buckets.batch if batch <= self._largest
        ]
        self._compile(shapes[0], lambda: False)
        failure = "are compiled when the first request needs it, since it has failed before"
        self._shapes = BackgroundCompiler(
            self._compile, buckets, shapes[1:], shapes[0], False, thread, failure=failure
        )

    @property
    def left(self) -> int:
        """Number of shapes of decode states whose programs are still to be compiled."""
        return self._shapes.total - len(self._shapes.ready) - len(self._shapes.errors)

    def wait(self) -> bool:
        """Waits until everything is compiled, or the thread is closed; returns whether everything is."""
        self._shapes.wait()
        return not self._shapes.thread.stopped

    def _compile(self, shape: Shape, should_stop: Callable[[], bool]) -> None:
        """Compiles prefill for a state of this shape, insertion, decoding, and the moves out of it."""
        (batch, length), engine, params = shape, self._engine, self._params
        programs = [lambda: engine.compile_plain(params, batch, length)]
        for rows in engine.prefill_rows:
            # Into states of fewer slots only the smallest prefill is inserted.
            if rows > self._largest or (batch != self._largest and rows != engine.prefill_rows[0]):
                continue
            for padded in engine.prefill_lengths:
                if padded <= min(length, self._longest):
                    programs += [
                        lambda prefix=(rows, padded): engine.compile_prefill(params, *prefix),
                        lambda prefix=(rows, padded): engine.compile_insert(prefix, batch, length),
                    ]
        smaller = [bucket for bucket in engine.buckets.batch if bucket < batch]
        if smaller:
            programs.append(lambda: engine.compile_compact(batch, smaller[-1], length))
        if batch < self._largest:
            programs.append(lambda: engine.compile_widen(batch, length))
        if length < engine.buckets.cache[-1]:
            programs.append(lambda: engine.compile_grow(batch, length))
        for compile_program in programs:
            if not should_stop():
                compile_program()


@contextlib.contextmanager
def compiling_lines(pool: ExecutablePool, say: Callable[[str], None], seconds: float = 5.0) -> Iterator[None]:
    """Context that says how far compiling is, every few seconds in which something is compiled."""
    over, start, before = threading.Event(), time.perf_counter(), len(pool)

    def watch() -> None:
        while not over.wait(seconds):
            if pool.busy:
                count, taken = len(pool) - before, time.perf_counter() - start
                say(f"compiling: {count} program{'' if count == 1 else 's'} in {taken:.0f} s so far")

    thread = threading.Thread(target=watch, name="compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
