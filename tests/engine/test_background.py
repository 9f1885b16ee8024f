"""Compiling in the background: what comes first, what is ready when, and how it ends."""

import threading
import time
import weakref

import jax.numpy as jnp
import pytest

from rljax.engine.background import BackgroundCompiler, CompilerThread, compile_all
from rljax.engine.buckets import Buckets
from rljax.engine.executables import ExecutablePool, in_background

BUCKETS = Buckets((2, 4, 8), (64, 128, 192))
SHAPES = [(batch, length) for batch in (2, 4) for length in (64, 128, 192)]


class Gate:
    """Compiles nothing, one shape at each `open`, and remembers the order."""

    def __init__(self):
        self.order, self._turns, self._begun = [], threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, shape, should_stop):
        self.order.append(shape)
        self._begun.release()
        self._turns.acquire()

    def begun(self):
        self._begun.acquire()

    def open(self, times=1):
        self._turns.release(times)


def test_what_is_nearest_to_the_present_state_comes_first():
    gate = Gate()
    compiler = BackgroundCompiler(gate, BUCKETS, SHAPES, near=(8, 128))
    gate.begun()
    assert compiler.total == compiler.left == 6
    assert not compiler.is_ready((2, 64))  # the decode state has moved
    gate.open()
    gate.begun()
    assert gate.order == [(4, 128), (2, 64)]  # the second ahead of those near to the first
    gate.open(5)
    compiler.wait()
    assert gate.order[2:4] == [(2, 128), (4, 64)]  # caches grow, so these come before larger batches
    assert compiler.left == 0 and all(map(compiler.is_ready, SHAPES))


def test_what_the_caller_needs_whole_is_compiled_by_both_threads():
    """The caller takes what the thread has not begun, and the thread does nothing else meanwhile."""
    met, threads, others = threading.Barrier(2), {}, Gate()

    def needed(shape, should_stop):
        threads[shape] = threading.current_thread().name
        met.wait(20)  # each waits until the other has begun one

    thread = CompilerThread(BUCKETS, (8, 64))
    far = BackgroundCompiler(needed, BUCKETS, [(1, 0), (2, 0)], (8, 64), False, thread, distance=lambda _: 9)
    near = BackgroundCompiler(others, BUCKETS, SHAPES, (8, 64), thread=thread)
    others.begun()
    others.open()  # the thread takes what is needed next, though it is farther away
    far.complete()
    others.open(5)
    near.wait()
    assert set(threads) == {(1, 0), (2, 0)} and set(threads.values()) == {"MainThread", "compiler"}
    assert far.left == near.left == 0


def test_everything_is_compiled_at_once_in_the_threads_of_all_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    met = threading.Barrier(2)

    def together(shape, should_stop):
        met.wait(60)

    thread = CompilerThread(BUCKETS, (8, 64))
    compiler = BackgroundCompiler(together, BUCKETS, SHAPES[:4], (8, 64), False, thread)
    thread.finish()
    assert compiler.left == 4 and len(compiler.ready) == 4 and not thread.busy
    assert compile_all([lambda: 1, lambda: 2]) == [1, 2]


def test_functions_behind_one_that_fails_are_not_called(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    called = []
    with pytest.raises(ZeroDivisionError):
        compile_all([lambda: 1 / 0, lambda: time.sleep(0.1), lambda: called.append(1)])
    assert not called


def test_a_question_begins_the_thread_and_compiles_a_shape_that_nobody_foresaw():
    gate = Gate()
    compiler = BackgroundCompiler(gate, BUCKETS, SHAPES[:1], near=(2, 64), start=False)
    gate.open(2)
    assert compiler.thread._thread is None and compiler.total == compiler.left == 1 and not gate.order
    for shape in ((2, 64), (8, 64)):
        assert not compiler.is_ready(shape)
        compiler.wait()
        assert compiler.is_ready(shape)
    assert compiler.total == 2


def test_an_error_leaves_the_shape_out_with_a_warning():
    def fail(shape, should_stop):
        if shape == (2, 64):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    compiler = BackgroundCompiler(fail, BUCKETS, SHAPES, near=(2, 64))
    with pytest.warns(UserWarning, match=r"^2 responses in caches of 64 decode plainly, .* out of memory$"):
        compiler.wait()
    assert not compiler.is_ready((2, 64)) and compiler.left == 0 and list(compiler.errors) == [(2, 64)]
    assert all(compiler.is_ready(shape) for shape in SHAPES[1:])


def test_results_are_taken_over_by_the_thread_that_decodes():
    threads = []
    taken_over = lambda: threads.append(threading.current_thread())  # noqa: E731
    BackgroundCompiler(lambda *_: taken_over, BUCKETS, [(2, 64)], near=(2, 64)).wait()
    assert threads == [threading.current_thread()]


def test_closing_waits_for_one_program_and_no_more():
    gate = Gate()
    compiler = BackgroundCompiler(gate, BUCKETS, SHAPES, near=(2, 64))
    gate.begun()
    closing = threading.Thread(target=compiler.close)
    closing.start()
    gate.open()
    closing.join(60)
    assert not closing.is_alive() and len(gate.order) == 1
    assert not compiler.is_ready((2, 64))  # half of it may be missing
    assert not compiler.is_ready((4, 192)) and len(gate.order) == 1


def test_a_compiler_that_nobody_holds_ends_after_its_shape():
    gate = Gate()
    compiler = BackgroundCompiler(gate, BUCKETS, SHAPES, near=(2, 64))
    gate.begun()
    thread, dropped = compiler.thread._thread, weakref.ref(compiler)
    del compiler
    gate.open(len(SHAPES))
    thread.join(timeout=60)
    assert not thread.is_alive() and len(gate.order) == 1
    assert dropped() is None


def sine(pool):
    return pool.get("sine", jnp.sin, (jnp.zeros(4),))


def meet(monkeypatch, make, first, second):
    """Calls one function in a thread, and the other in a second one while the first compiles by `make`."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert go_on.wait(60)
        return make(*args)

    monkeypatch.setattr(ExecutablePool, "_make", slow)
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(60)


def test_two_threads_compile_a_program_once(monkeypatch):
    pool, programs = ExecutablePool(), []

    def behind():
        with in_background():
            programs.append(sine(pool))

    meet(monkeypatch, ExecutablePool._make, behind, lambda: programs.append(sine(pool)))
    assert programs[0] is programs[1] and pool.compilations == len(pool) == pool.background_programs == 1
    assert pool.seconds == 0 < pool.background_seconds


def test_an_error_in_one_thread_reaches_those_that_wait_and_the_next_compiles_anew(monkeypatch):
    pool, errors, make = ExecutablePool(), [], ExecutablePool._make

    def fail(*_):
        raise ValueError("no such program")

    def failing():
        try:
            sine(pool)
        except ValueError as error:
            errors.append(str(error))

    meet(monkeypatch, fail, failing, failing)
    assert errors == ["no such program"] * 2
    monkeypatch.setattr(ExecutablePool, "_make", make)
    assert sine(pool)(jnp.zeros(4)).shape == (4,)
