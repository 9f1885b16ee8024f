"""A save that fails is one error of ours: nothing that Orbax leaves behind is printed beside it."""

import asyncio
import gc
import sys
import types
import warnings

import pytest

from rljax.assembly.orbax_silence import silence_orbax
from tests.fork_server import run

ORBAX, OURS = "/orbax/checkpoint/serialization.py", "/ours.py"


def coroutine_of(file: str):
    names = {}
    exec(compile("async def write(): raise ValueError(0)", file, "exec"), names)
    return names["write"]


async def tasks(file):
    failing = [asyncio.create_task(coroutine_of(file)()) for _ in range(2)]
    await asyncio.wait(failing)
    failing[0].exception()


async def gathered(file):
    nested = [asyncio.gather(coroutine_of(file)()) for _ in range(2)]
    await asyncio.wait(nested)
    nested[0].exception()


async def futures(file):
    future = asyncio.get_running_loop().create_future()
    directory = "7/arrays.orbax-checkpoint-tmp/" if file == ORBAX else "7/arrays/"
    future.set_exception(ValueError(f'Error writing "embed" at local file "{directory}"'))


@pytest.mark.parametrize(("file", "told"), [(ORBAX, 0), (OURS, 3)])
def test_what_has_failed_and_nobody_asked_for(file, told, caplog):
    silence_orbax()
    for left_behind in (tasks, gathered, futures):
        asyncio.run(left_behind(file))
    gc.collect()
    assert [record.name for record in caplog.records] == ["asyncio"] * told


def test_what_has_not_begun():
    silent = ("async_serialize_from_host", "async_serialize_from_host.<locals>.write_fragment", "Store.write")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence_orbax()
        for name in (*silent, "Bookstore.write", "answer"):
            coroutine = coroutine_of(OURS)()
            coroutine.__qualname__ = name
        del coroutine
        gc.collect()
    told = [str(each.message).split("'")[1] for each in seen]
    assert told == ["Bookstore.write", "answer"]


def test_who_tells_a_loop_that_is_gone(monkeypatch):
    others, heard = [RuntimeError("no"), OSError("Event loop is closed")], []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    silence_orbax()
    silence_orbax()
    for error in (RuntimeError("Event loop is closed"), *others):
        sys.unraisablehook(types.SimpleNamespace(exc_type=type(error), exc_value=error))
    assert [each.exc_value for each in heard] == others


MANY_FAILURES = """
import gc, resource, signal, sys
import jax.numpy as jnp
from rljax.errors import CheckpointError
from rljax.assembly.checkpoint import RunCheckpoints

state = {str(i): jnp.full(s, 1.0) for i, s in enumerate([(64, 2048), (320, 64), (64, 64), ()] * 8)}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))
failures = 0
for number in range(int(sys.argv[2])):
    checkpoints = RunCheckpoints(f"{sys.argv[1]}/{number}", keep=1)
    try:
        checkpoints.save(1, state, {})
        checkpoints.close()
    except CheckpointError:
        failures += 1
    gc.collect()
print(failures)
"""


def test_many_saves_that_fail(tmp_path, pytestconfig):
    """Which of the ways an array ends in is a matter of luck: unfiltered, some of forty saves speak."""
    saves = 40 if pytestconfig.option.all else 12
    assert run(MANY_FAILURES, tmp_path, saves) == (0, f"{saves}\n", "")
