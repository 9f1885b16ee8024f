"""Compiling by decode-state shape in a background thread, while the caller decodes with what is ready."""

import atexit
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rljax import processes
from rljax.engine.buckets import Buckets
from rljax.engine.executables import in_background

Shape = tuple[int, int]
"""Batch and cache length of a decode state."""

CompileShape = Callable[[Shape, Callable[[], bool]], Callable[[], None] | None]
"""Compiles what a shape needs, unless its second argument says that it should stop. Returns a function that
is called when the shape is taken over; None for none."""


class Compiling(Protocol):
    """What compiles plain decoding while it goes on (`PlainPrograms`), as the engine asks it."""

    def start_length(self, batch: int, length: int) -> int:
        """Returns the cache length of a state that begins, `length` or longer."""

    def prefill_shape(self, rows: int, length: int) -> Shape:
        """Returns the rows and padded length to prefill prompts with, which need at least these."""

    def smallest_batch(self, state: Shape, batch: int) -> int:
        """Returns the smallest batch bucket from `batch` on that a decode state can be compacted into."""

    def wait_for(self, shape: Shape) -> None:
        """Waits until decode states may have a shape."""

    def close(self) -> None:
        """Ends the compiling."""


def compile_all(tasks: Iterable[Callable[[], Any]]) -> list[Any]:
    """Calls functions that compile, in as many threads as there are cores, and returns their results. XLA
    compiles without the GIL, and keeps little more than one core busy with a program.

    Several processes, which must compile the same programs, call one after the other.

    Raises:
      Exception: the first error of a function. Functions that have not begun by then are not called.
    """
    if processes.several():
        return [task() for task in tasks]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            return [future.result() for future in [threads.submit(task) for task in tasks]]
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


class CompilerThread:
    """The thread in which `BackgroundCompiler`s compile, one shape at a time: first what is waited for, then
    what is nearest to the present decode state.

    It ends when nothing is left to compile, and after its shape when nobody holds it any more.

    Args:
      near: the shape that is used first.

    Attributes:
      near: the present shape, or one that comes before those that are compiled.
      stopped: whether `close` was called.
      changed: a condition, notified when a shape is done.
    """

    def __init__(self, buckets: Buckets, near: Shape) -> None:
        self.buckets, self.near = buckets, near
        self.stopped = False
        self.changed = threading.Condition(threading.RLock())
        self._compilers: list[weakref.ref[BackgroundCompiler]] = []
        self._thread: threading.Thread | None = None

    def add(self, compiler: "BackgroundCompiler") -> None:
        """Adds a compiler, whose shapes are compiled for as long as somebody holds it."""
        with self.changed:
            self._compilers.append(weakref.ref(compiler))

    def start(self) -> None:
        """Starts the thread unless it runs, or there is nothing to compile."""
        with self.changed:
            if self._thread is None and not self.stopped and any(each.waiting for each in self._alive()):
                _running.add(self)
                # The thread holds this object only while it compiles a shape.
                arguments = (weakref.ref(self),)
                self._thread = threading.Thread(target=_run, args=arguments, name="compiler", daemon=True)
                self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether it compiles."""
        return self._thread is not None

    def finish(self) -> None:
        """Compiles everything before it returns, by `compile_all`."""
        with self.changed:
            left = [(compiler, shape) for compiler in self._alive() for shape in compiler.waiting]
            for compiler, shape in left:
                compiler.waiting.remove(shape)
        try:
            compile_all(functools.partial(compiler.compile, shape) for compiler, shape in left)
        except BaseException:  # an interrupt
            self.stopped = True
            raise

    def close(self) -> None:
        """Ends the thread after the program that it compiles now. Further shapes stay as they are."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        self.join()

    def join(self) -> None:
        """Waits until the thread has ended."""
        thread = self._thread  # it forgets itself when it ends
        if thread is not None:
            thread.join()

    def _alive(self) -> "list[BackgroundCompiler]":
        return [compiler for reference in self._compilers if (compiler := reference()) is not None]

    def _compile_next(self) -> bool:
        """Compiles the next shape, in the thread. Returns False, and ends the thread, if there is none."""
        with self.changed:
            shapes = [(compiler, shape) for compiler in self._alive() for shape in compiler.waiting]
            if self.stopped or not shapes:
                self._thread = None
                return False
            compiler, shape = min(shapes, key=lambda item: item[0].rank(item[1]))
            compiler.waiting.remove(shape)
        del shapes
        compiler.compile(shape)
        with self.changed:
            self.changed.notify_all()
        return True


class BackgroundCompiler:
    """Compiles one kind of program for each shape in a thread, the shapes nearest to the present one first.

    XLA compiles without the GIL, so decoding goes on meanwhile. Results are taken over by the thread that
    decodes, in `is_ready`: nothing that it reads changes while it works on a pass. All methods are called by
    that thread, except for `rank` and `compile`. A compiler that nobody holds any more ends after the shape
    that it is at.

    Args:
      compile_shape: see `CompileShape`; called in the background.
      shapes: shapes to compile. Others are added when `is_ready` asks for them.
      near: the shape that is used first.
      start: begin at once; False begins when `is_ready` asks for the first time.
      thread: the thread to compile in, which other compilers share; None for one of its own.
      delay: shapes come as late as those of other compilers that are so many buckets farther away.
      distance: the distance of a shape that is not that of a decode state; None for steps between buckets.
      failure: the end of the warning about a shape that cannot be compiled.

    Attributes:
      errors: by shape, the error that it could not be compiled for. The shape is left out, with a warning.
      waiting: shapes that are not begun.
    """

    def __init__(
        self,
        compile_shape: CompileShape,
        buckets: Buckets,
        shapes: Iterable[Shape],
        near: Shape,
        start: bool = True,
        thread: CompilerThread | None = None,
        delay: int = 0,
        distance: Callable[[Shape], int] | None = None,
        failure: str = "decode plainly, since their verifying passes cannot be compiled",
    ) -> None:
        self.thread = CompilerThread(buckets, near) if thread is None else thread
        self.waiting = list(dict.fromkeys(shapes))
        self.errors: dict[Shape, Exception] = {}
        self._compile_shape, self._delay, self._own_distance = compile_shape, delay, distance
        self._failure = failure
        self._registered = set(self.waiting)
        self._ready: set[Shape] = set()
        self._urgent: Shape | None = None  # the shape that the decoding thread waits for
        self._hurried = False  # it waits for all of them
        self._compiled: list[tuple[Shape, Callable[[], None] | None]] = []  # not taken over yet
        self._failed: list[tuple[Shape, Exception]] = []  # not taken over yet
        self.thread.add(self)
        if start:
            self.thread.start()

    @property
    def near(self) -> Shape:
        """The present shape, or one that comes before those that are compiled."""
        return self.thread.near

    @near.setter
    def near(self, shape: Shape) -> None:
        self.thread.near = shape

    @property
    def total(self) -> int:
        """Number of shapes, those that are ready included."""
        return len(self._registered)

    @property
    def left(self) -> int:
        """Number of shapes that are still to be taken over."""
        return len(self._registered) - len(self._ready) - len(self.errors)

    @property
    def ready(self) -> frozenset[Shape]:
        """The shapes that are ready."""
        self._take_over()
        return frozenset(self._ready)

    def mark_ready(self, shape: Shape) -> None:
        """Adds a shape that was compiled elsewhere."""
        self._registered.add(shape)
        self._ready.add(shape)

    def is_ready(self, shape: Shape, near: bool = True) -> bool:
        """Whether everything is compiled for a shape. If not, it is compiled soon.

        Args:
          near: it is that of the present decode state, so that it comes next.
        """
        if near:
            self.near = shape
        self._take_over()
        if shape in self._ready:
            self.thread.start()  # with what is left
            return True
        if shape not in self._registered and not self.thread.stopped:
            with self.thread.changed:
                self._registered.add(shape)
                self.waiting.append(shape)
        self.thread.start()
        return False

    def wait_for(self, shape: Shape) -> float:
        """Waits until a shape is ready, which is compiled before all others. Returns the seconds.

        After `close` the calling thread compiles it.

        Raises:
          Exception: the error that it cannot be compiled for.
        """
        if self.is_ready(shape, near=False):
            return 0.0
        start, thread = time.perf_counter(), self.thread
        with thread.changed:
            self._urgent = shape
            while not (thread.stopped or self._is_done(shape)):
                thread.changed.wait()
            self._urgent = None
        self._take_over()
        if shape in self.errors:
            raise self.errors[shape]
        if shape not in self._ready:
            taken_over = self._compile_shape(shape, lambda: False)
            if taken_over is not None:
                taken_over()
            self.mark_ready(shape)
        return time.perf_counter() - start

    def complete(self) -> None:
        """Compiles all shapes before it returns, in this thread and in the other, which does nothing else."""
        self._hurried = True
        while True:
            with self.thread.changed:
                if not self.waiting:
                    break
                shape = self.waiting.pop(0)
            self.compile(shape)
        with self.thread.changed:
            while not (self.thread.stopped or all(map(self._is_done, self._registered))):
                self.thread.changed.wait()
        self._take_over()

    def wait(self) -> None:
        """Waits until all shapes are compiled."""
        self.thread.start()
        self.thread.join()
        self._take_over()

    def close(self) -> None:
        """Ends the thread after the program that it compiles now. Further shapes stay as they are."""
        self.thread.close()

    def rank(self, shape: Shape) -> tuple[bool, int, int, bool]:
        """The order in which shapes are compiled, the smallest first. Called with the thread's lock."""
        steps, backward = self._distance(shape)
        return not (self._hurried or shape == self._urgent), steps + self._delay, self._delay, backward

    def compile(self, shape: Shape) -> None:
        """Compiles a shape, in the thread."""
        try:
            taken_over = self._compile_shape(shape, lambda: self.thread.stopped)
            if not self.thread.stopped:
                self._compiled.append((shape, taken_over))
        except Exception as error:  # out of memory, or of memory mappings: decoding goes on without it
            if not self.thread.stopped:
                self._failed.append((shape, error))

    def _is_done(self, shape: Shape) -> bool:
        """Whether a shape is compiled, or cannot be."""
        done = [other for other, _ in (*self._compiled, *self._failed)]
        return shape in done or shape in self._ready or shape in self.errors

    def _distance(self, shape: Shape) -> tuple[int, bool]:
        """Steps between buckets from the present decode state; batches shrink and caches grow."""
        if self._own_distance is not None:
            return self._own_distance(shape), False
        (batch, length), (near_batch, near_length) = shape, self.near
        buckets = self.thread.buckets
        steps = sum(min(batch, near_batch) < bucket <= max(batch, near_batch) for bucket in buckets.batch)
        low, high = min(length, near_length), max(length, near_length)
        steps += sum(low < bucket <= high for bucket in buckets.cache)
        return steps, length < near_length or batch > near_batch

    def _take_over(self) -> None:
        while self._compiled:
            shape, taken_over = self._compiled.pop(0)
            if taken_over is not None:
                taken_over()
            self._ready.add(shape)
        while self._failed:
            shape, error = self._failed.pop(0)
            self.errors[shape] = error
            warnings.warn(
                f"{shape[0]} responses in caches of {shape[1]} {self._failure}:"
                f" {' '.join(str(error).split()) or repr(error)}",
                stacklevel=2,
            )


_running: "weakref.WeakSet[CompilerThread]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter must not end under a thread that compiles."""
    for thread in list(_running):
        thread.close()


def _run(reference: "weakref.ref[CompilerThread]") -> None:
    """Compiles shape after shape until none is left, or nobody holds the thread's object any more."""
    with in_background():
        while (thread := reference()) is not None and thread._compile_next():
            del thread
