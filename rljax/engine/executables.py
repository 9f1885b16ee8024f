"""The pool of compiled programs: compiled ahead of time, shared, counted, and stored for later processes."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import jax

from rljax import target
from rljax.engine.stored_programs import StoredPrograms
from rljax.errors import UserError

_CHECKED_EVERY = 16  # programs


class _CacheHits:
    """Programs that JAX took from its compilation cache in this process.

    On a CPU such a program runs, but it is incomplete when it is serialized again: the next process that
    loads it fails with "function not found". JAX returns the same program if it is compiled again in this
    process, so these programs are remembered by their fingerprints. Hits are counted by thread: JAX reports
    one in the thread that compiles.
    """

    fingerprints: ClassVar[set[bytes]] = set()
    _hits: ClassVar[threading.local] = threading.local()

    @classmethod
    def count(cls) -> int:
        """Returns the number of hits in this thread so far."""
        return getattr(cls._hits, "count", 0)

    @classmethod
    def listen(cls, event: str, **_: Any) -> None:
        cls._hits.count = cls.count() + (event == "/jax/compilation_cache/cache_hits")

    @classmethod
    def is_one(cls, program: Any, hits_before: int) -> bool:
        """Whether a program that was just compiled in this thread came from the cache."""
        fingerprint = program.runtime_executable().fingerprint
        hit = cls.count() != hits_before
        if hit and fingerprint is not None:
            cls.fingerprints.add(fingerprint)
        return hit or fingerprint in cls.fingerprints


jax.monitoring.register_event_listener(_CacheHits.listen)


def enable_compilation_cache(directory: str | os.PathLike) -> None:
    """Keeps every compiled program, however small, in `directory` for later processes."""
    jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def row_invariant_compiler_options() -> dict[str, str]:
    """Compiler options under which a row's numbers do not depend on the number of rows.

    On a CPU, XLA hands fused reductions over many rows to another library (YNNPACK), with another
    exponential and another order of summation than its own code for few rows; matrix products stay with that
    library, whose order of summation is fixed.
    """
    if target.platform() != "cpu":
        return {}
    fusions = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    return {"xla_cpu_experimental_ynn_fusion_type": fusions}


def temporary_bytes(program: Any) -> int:
    """Returns the memory that a compiled program needs on each device besides its arguments and results, in
    bytes; 0 where the platform does not tell.
    """
    analysis = program.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0


def free_bytes() -> int | None:
    """Returns the free memory of the first device in bytes; None where it does not tell, as on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def memory_mappings() -> tuple[int, int] | None:
    """Returns the number of memory mappings of this process and the largest that Linux allows; None
    elsewhere.

    A program for a CPU takes some tens of them, and one too many ends the process without a message.
    """
    try:
        taken = Path("/proc/self/maps").read_bytes().count(b"\n")
        return taken, int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except OSError:
        return None


_thread = threading.local()


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Context in which this thread's programs count as compiled in the background."""
    _thread.in_background = True
    try:
        yield
    finally:
        _thread.in_background = False


def _is_in_background() -> bool:
    return getattr(_thread, "in_background", False)


class ExecutablePool:
    """Compiled programs by key, all compiled with the same options.

    Threads may share a pool: a key that one of them compiles is compiled once, and others wait for it.

    Args:
      row_invariant: compile with `row_invariant_compiler_options`.
      directory: directory to store programs in for later processes; None for none.

    Attributes:
      compilations: number of programs compiled so far.
      loaded: number of programs loaded from the directory so far.
      seconds: time in which some thread compiled or loaded, in the background excluded.
      background_programs: number of programs compiled or loaded `in_background` so far.
      background_seconds: time spent on these.
    """

    def __init__(self, row_invariant: bool = True, directory: str | os.PathLike[str] | None = None) -> None:
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._in_flight: dict[Hashable, Future[Callable[..., Any]]] = {}
        self._lock = threading.Lock()
        self._compiling = 0  # threads that compile, in the background excluded
        self._since = 0.0  # when the first of them began
        self._options = row_invariant_compiler_options() if row_invariant else {}
        self._stored = None if directory is None else StoredPrograms(directory)
        self.compilations = self.loaded = 0
        self.seconds = 0.0
        self.background_programs = 0
        self.background_seconds = 0.0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._programs

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def busy(self) -> bool:
        """Whether some thread compiles or loads a program now."""
        return bool(self._in_flight)

    def bytes(self) -> dict[Hashable, int]:
        """`temporary_bytes` of every program."""
        with self._lock:
            programs = dict(self._programs)
        return {key: temporary_bytes(program) for key, program in programs.items()}

    def summary(self) -> str:
        """Returns one line for the user: number of programs, time, and the largest one's memory."""
        largest, count = max(self.bytes().values(), default=0), len(self) - self.background_programs
        return (
            f"programs: {count} in {self.seconds:.0f} s, {self.loaded} of them from disk; the largest takes"
            f" {largest / 1e6:.0f} MB while it runs"
        )

    def get(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Returns the program of `key`, compiled at the first call for the shapes, dtypes and shardings of
        `args`.

        Args:
          key: names the program and its shapes; the same key must always come with args of the same shapes.
          function: pure function to compile.
          args: arrays, or `jax.ShapeDtypeStruct`s in their place.
          donate_argnums: arguments whose buffers the program may overwrite.

        Raises:
          UserError: the operating system allows no more programs.
        """
        program = self._programs.get(key)
        if program is not None:
            return program
        with self._lock:
            others = self._in_flight.get(key)
            if others is None and key not in self._programs:
                future = self._in_flight[key] = Future()
        if others is not None:
            return others.result()  # another thread compiles it
        if key in self._programs:
            return self._programs[key]
        return self._compile(key, future, function, args, donate_argnums)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Adds the time within the context to that of compiling; threads that compile together count once."""
        start, background = time.perf_counter(), _is_in_background()
        with self._lock:
            if not (background or self._compiling):
                self._since = start
            self._compiling += not background
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                if background:
                    self.background_seconds += end - start
                else:
                    self._compiling -= 1
                    self.seconds += end - self._since
                    self._since = end

    def _compile(
        self,
        key: Hashable,
        future: "Future[Callable[..., Any]]",
        function: Callable[..., Any],
        args: tuple,
        donate_argnums: tuple[int, ...],
    ) -> Callable[..., Any]:
        """Compiles or loads a program that no other thread is at, and hands it or the error to `future`."""
        try:
            if len(self) % _CHECKED_EVERY == 0:
                self._check_mappings()
            with self._timed():
                program = self._make(key, function, args, donate_argnums)
        except BaseException as error:
            with self._lock:
                del self._in_flight[key]
            # An interrupt ends this thread's work alone; the others then compile anew.
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        with self._lock:
            self._programs[key] = program
            self.background_programs += _is_in_background()
            del self._in_flight[key]
        future.set_result(program)
        return program

    def _check_mappings(self) -> None:
        mappings = memory_mappings()
        if mappings is not None and mappings[0] > 0.9 * mappings[1]:
            raise UserError(
                f"{len(self)} compiled programs take {mappings[0]} of the {mappings[1]} memory mappings that"
                " a process may have: list fewer sizes in engine.batch_buckets, engine.cache_buckets or"
                " speculation.verify_buckets, or raise the limit (sysctl -w vm.max_map_count=262144)"
            )

    def _make(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate_argnums: tuple[int, ...]
    ) -> Callable[..., Any]:
        settings = (self._options, donate_argnums)
        if self._stored is not None:
            program = self._stored.load(key, args, settings)
            if program is not None:
                with self._lock:
                    self.loaded += 1
                return program
        lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*args)
        hits = _CacheHits.count()
        program = lowered.compile(compiler_options=self._options)
        with self._lock:
            self.compilations += 1
        if not _CacheHits.is_one(program, hits) and self._stored is not None:
            self._stored.save(key, args, settings, program)
        return program
