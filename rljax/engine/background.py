"""Compiling by decode-state shape in a background thread, while the caller decodes with what is ready."""

import atexit
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable

from rljax.engine.buckets import Buckets

Shape = tuple[int, int]
"""Batch and cache length of a decode state."""


class BackgroundCompiler:
    """Compiles what each shape needs in a thread, the shapes nearest to the present decode state first.

    XLA compiles without the GIL, so decoding goes on meanwhile. Results are taken over by the thread that
    decodes, in `is_ready`: nothing that it reads changes while it works on a pass. All methods are called by
    that thread. A compiler that nobody holds any more ends after the shape that it is at.

    Args:
      compile_shape: compiles what a shape needs, in the background, unless its second argument says that it
        should stop. Returns a function that is called when the shape is taken over; None for none.
      buckets: the engine's.
      shapes: shapes to compile. Others are added when `is_ready` asks for them.
      near: the shape that is used first.
      start: begin at once; False begins when `is_ready` asks for the first time.

    Attributes:
      near: the present shape, or one that comes before those that are compiled.
      errors: by shape, the error that it could not be compiled for. The shape is left out, with a warning.
    """

    def __init__(
        self,
        compile_shape: Callable[[Shape, Callable[[], bool]], Callable[[], None] | None],
        buckets: Buckets,
        shapes: Iterable[Shape],
        near: Shape,
        start: bool = True,
    ) -> None:
        self._compile_shape, self._buckets, self.near = compile_shape, buckets, near
        self._waiting = list(dict.fromkeys(shapes))
        self._lock = threading.Lock()
        self._compiled: list[tuple[Shape, Callable[[], None] | None]] = []  # not taken over yet
        self._known = set(self._waiting)
        self._ready: set[Shape] = set()
        self._failed: list[tuple[Shape, Exception]] = []  # not taken over yet
        self.errors: dict[Shape, Exception] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None
        if start:
            self._start()

    @property
    def total(self) -> int:
        """Number of shapes, those that are ready included."""
        return len(self._known)

    @property
    def left(self) -> int:
        """Number of shapes that are still to be taken over."""
        return len(self._known) - len(self._ready) - len(self.errors)

    def is_ready(self, shape: Shape) -> bool:
        """Whether everything is compiled for the present decode state. If not, it is compiled next."""
        self.near = shape
        self._take_over()
        if shape in self._ready:
            return True
        if shape not in self._known and not self._stopped:
            self._known.add(shape)
            with self._lock:
                self._waiting.append(shape)
        self._start()
        return False

    def wait(self) -> None:
        """Waits until all shapes are compiled."""
        self._start()
        self._join()
        self._take_over()

    def close(self) -> None:
        """Ends the thread after the program that it compiles now. Further shapes stay as they are."""
        self._stopped = True
        self._join()

    def _join(self) -> None:
        thread = self._thread  # it forgets itself when it ends
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Starts the thread unless it runs."""
        with self._lock:
            if self._thread is None and self._waiting and not self._stopped:
                _running.add(self)
                # The thread holds the compiler only while it compiles a shape.
                arguments = (weakref.ref(self),)
                self._thread = threading.Thread(target=_run, args=arguments, name="compiler", daemon=True)
                self._thread.start()

    def _compile_next(self) -> bool:
        """Compiles the nearest shape, in the thread. Returns False, and ends the thread, if there is none."""
        with self._lock:
            if self._stopped or not self._waiting:
                self._thread = None
                return False
            shape = min(self._waiting, key=self._distance)
            self._waiting.remove(shape)
        try:
            taken_over = self._compile_shape(shape, lambda: self._stopped)
            if not self._stopped:
                self._compiled.append((shape, taken_over))
        except Exception as error:  # out of memory, or of memory mappings: decoding goes on without it
            self._failed.append((shape, error))
        return True

    def _distance(self, shape: Shape) -> tuple[int, bool]:
        """Steps between buckets from the present decode state; batches shrink and caches grow."""
        (batch, length), (near_batch, near_length) = shape, self.near
        steps = sum(
            min(batch, near_batch) < bucket <= max(batch, near_batch) for bucket in self._buckets.batch
        )
        low, high = min(length, near_length), max(length, near_length)
        steps += sum(low < bucket <= high for bucket in self._buckets.cache)
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
                f"{shape[0]} responses in caches of {shape[1]} decode plainly, since their verifying passes"
                f" cannot be compiled: {' '.join(str(error).split()) or repr(error)}",
                stacklevel=2,
            )


_running: "weakref.WeakSet[BackgroundCompiler]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter must not end under a thread that compiles."""
    for compiler in list(_running):
        compiler.close()


def _run(reference: "weakref.ref[BackgroundCompiler]") -> None:
    """Compiles shape after shape until none is left, or nobody holds the compiler any more."""
    while (compiler := reference()) is not None and compiler._compile_next():
        del compiler
