"""The programs of a server that decodes plainly, compiled in a thread while it answers already.

    programs = JoiningPrograms(engine, params, thread, slots=8, prompt_length=128)
    thread.start()

What the first request needs is compiled first, all else by the thread, the nearest shapes first. No
request waits for the thread to come to a shape: it compiles its programs, or waits for the one program
that is being compiled.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.shapes import ProgramList, Shapes, compile_until
from rljax.models.transformer import Params


class JoiningPrograms:
    """Compiles the programs of plain decoding in states that requests join, shape by shape.

    Args:
      engine: the decode engine, on one device.
      params: weights from `engine.load_params`, whose shapes are used.
      prompt_length: the longest prompt, in tokens.
    """

    def __init__(
        self, engine: DecodeEngine, params: Params, thread: CompilerThread, slots: int, prompt_length: int
    ) -> None:
        shapes = Shapes(engine.buckets, slots, prompt_length, late_inserts=True, widens=True)
        self._programs, states = ProgramList(engine, engine.param_shapes(params), shapes), shapes.states
        self._compile(states[0], lambda: False)
        failure = "are compiled when the first request needs it, since it has failed before"
        self._shapes = BackgroundCompiler(
            self._compile, engine.buckets, states[1:], states[0], False, thread, failure=failure
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
        """Compiles prefill for a state of this shape, insertion, decoding, and the moves into it."""
        plain = self._programs
        entering = plain.shapes.entering(shape)
        compile_until(should_stop, [*map(plain.prefill, entering), *plain.of_state(shape)])


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
