"""The processes of a run: how they find each other, what the host of one of them decides, and how all end.

JAX is multi-controller: every process runs the same Python and must issue the same programs in the same
order. What the host computes must therefore be equal everywhere. Where it may differ, because it depends on a
clock, on a file or on a user's code, process 0 computes it and the others take its result:

    rewards = from_first(lambda: judge(task, answered))

Such a call is a collective: every process makes it, at the same point between the same programs. With one
process all functions here do nothing but call what they are given.
"""

import atexit
import contextlib
import json
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rljax import errors
from rljax.config.distributed import DistributedConfig
from rljax.errors import ConfigError, UserError
from rljax.rendezvous import Rendezvous

_PREFIX = 1024  # bytes of a result that travel with its length
_GRACE = 1.0  # seconds that process 0, which coordinates the others, lets them end first
_LOST = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|unavailable|socket closed|heartbeat|coordination"
    r"|deadline_exceeded|another task",
    re.I,
)
_ending = threading.Lock()


class _World:
    """The processes that this one has joined; `begun` also while, or after, that failed."""

    begun = False
    size, index = 1, 0
    rendezvous: Rendezvous | None = None


def start(config: DistributedConfig) -> None:
    """Joins the other processes of the run, if the config or a launcher says that there are any. It must come
    before JAX uses a device.

    Raises:
      ConfigError: they cannot be found, or one does not come within `distributed.timeout`.
    """
    if not config.is_wanted() or _World.begun:
        return
    # JAX's service for preemptions would take SIGTERM away from `StopRequest`.
    jax.config.update("jax_enable_preemption_service", False)
    named: dict[str, Any] = {}
    if config.coordinator is not None:
        where = config.coordinator, config.processes, config.process
        _World.rendezvous = Rendezvous(*where, config.timeout)
        named = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process,
            "cluster_detection_method": "deactivate",  # otherwise a launcher's share of the devices
        }
    try:
        _World.begun = True
        jax.distributed.initialize(
            **named,
            initialization_timeout=config.timeout,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
        if _World.rendezvous is not None:
            _World.rendezvous.watch(_lost)
            atexit.register(_World.rendezvous.close)
        _World.size, _World.index = jax.process_count(), jax.process_index()
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"distributed.enabled: {config.enabled}, but JAX finds no other processes ({_first_line(error)});"
            " set distributed.coordinator, processes and process, or start it with srun or mpirun"
        ) from error
    except RuntimeError as error:
        where = config.coordinator or "the coordinator that the launcher names"
        raise ConfigError(
            f"distributed.timeout: not all processes have met at {where} within {config.timeout} seconds"
            f" ({_first_line(error)}); check that every process runs and reaches that address"
        ) from error


def several() -> bool:
    """Whether the run has several processes."""
    return _World.size > 1


def count() -> int:
    """Returns the number of processes of the run."""
    return _World.size


def is_first() -> bool:
    """Whether this process is the one that writes the run's files; true where there is only one."""
    return _World.index == 0


def from_first(compute: Callable[[], Any]) -> Any:
    """Returns, in every process, what `compute` returns in process 0; the others do not call it.

    Args:
      compute: returns JSON values (numbers stay exact, tuples become lists).

    Raises:
      UserError: `compute` raised it in process 0. In the others it has the attribute `elsewhere`.
    """
    return _from_first(compute, lambda answer: json.dumps(answer).encode(), json.loads)


def copied_from_first(compute: Callable[[], Any]) -> Any:
    """As `from_first`, for results that JSON does not hold: every other process gets a copy, by pickle.

    Raises:
      UserError: as `from_first`.
    """
    return _from_first(compute, pickle.dumps, pickle.loads)


def _from_first(
    compute: Callable[[], Any], dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]
) -> Any:
    if not several():
        return compute()
    failure, answer = None, None
    if is_first():
        try:
            answer = {"result": compute()}
        except UserError as error:
            failure, answer = error, {"error": type(error).__name__, "message": str(error)}
    answer = loads(_broadcast(dumps(answer)))
    if failure is not None:
        raise failure
    if "error" in answer:
        error = getattr(errors, answer["error"], UserError)(answer["message"])
        error.elsewhere = True
        raise error
    return answer["result"]


def agree(*seconds: float) -> tuple[float, ...]:
    """Returns, in every process, the times that process 0 has measured: what they decide is decided alike.

    Args:
      seconds: this process's measurements, as many in every process. The result has as many.
    """
    if not several():
        return seconds
    return tuple(np.frombuffer(_broadcast(np.float64(seconds).tobytes()), np.float64).tolist())


def largest(number: int) -> int:
    """Returns the largest of the numbers that the processes give."""
    if not several():
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def put_together(tree: Any) -> Any:
    """Returns arrays of which processes hold parts as NumPy arrays, whole in every process, and others as
    they are. Collective where there are any.
    """

    def whole(array: Any) -> Any:
        if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
            return multihost_utils.process_allgather(array, tiled=True)
        return array

    return jax.tree.map(whole, tree)


def to_host(tree: Any) -> Any:
    """Returns arrays as NumPy arrays, whole in every process. Collective where processes hold parts."""
    return jax.tree.map(np.asarray, put_together(tree))


@contextlib.contextmanager
def ended_by_others() -> Iterator[None]:
    """Context of the work. An error of a collective, because another process has ended, ends this one with
    one line.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX raises both
        if several() and _LOST.search(str(error)):
            _end_lost("another process", _first_line(error))
        raise


def leave(status: int) -> None:
    """Ends a process whose run has failed; does nothing for an ordinary run, or where `status` is 0.

    The others may wait for this process in a program, so the orderly end of `jax.distributed`, which waits
    for all of them, would take minutes.
    """
    if status == 0 or not _World.begun:
        return
    _ending.acquire(timeout=_GRACE)  # that others end now is no news
    if _World.rendezvous is not None:
        _World.rendezvous.close(failed=True)
    if several() and is_first():
        time.sleep(_GRACE)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _broadcast(data: bytes) -> bytes:
    """Returns the bytes of process 0."""
    head = np.zeros(_PREFIX + 8, np.uint8)
    if is_first():
        head[:8] = np.frombuffer(np.int64(len(data)).tobytes(), np.uint8)
        head[8 : 8 + len(data)] = np.frombuffer(data[:_PREFIX], np.uint8)
    head = np.asarray(multihost_utils.broadcast_one_to_all(head), np.uint8)
    size = int(np.frombuffer(head[:8].tobytes(), np.int64)[0])
    if size <= _PREFIX:
        return head[8 : 8 + size].tobytes()
    # The rest, padded so that few sizes are compiled.
    rest = np.zeros(1 << (size - _PREFIX - 1).bit_length(), np.uint8)
    if is_first():
        rest[: size - _PREFIX] = np.frombuffer(data[_PREFIX:], np.uint8)
    rest = np.asarray(multihost_utils.broadcast_one_to_all(rest), np.uint8)
    return head[8:].tobytes() + rest[: size - _PREFIX].tobytes()


def _lost(name: str, reported: bool) -> None:
    """Another process has ended; called by the thread that watches it."""
    if reported:
        time.sleep(_GRACE)  # this process may fail by the same cause, and say so itself
    _end_lost(name, "with an error" if reported else "it was killed, or its host is gone")


def _end_lost(name: str, reason: str) -> None:
    """Ends this process because another one has ended; at once, since nothing that is shared can go on."""
    _ending.acquire()  # never released: the second thread to come here waits for the end
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(
            f"error: {name} of the run has ended ({reason}), and so do all; the same command in all of them"
            " goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
    os._exit(2)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
