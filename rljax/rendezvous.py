"""Where the processes of a run meet before JAX starts, and how each notices that another one has ended.

JAX's coordination service aborts a process with a stack trace when another does not come or dies. So the
processes meet first, over plain connections to process 0, where a process that is missing or has a wrong
index becomes one line. The connections stay open: the operating system closes them when a process ends,
however it ends, and a thread at their other end notices at once.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

from rljax.errors import ConfigError

_RETRY = 0.2  # seconds
_GREETING = 256  # bytes at most
_DONE, _FAILED = b"d", b"f"

OnLost = Callable[[str, bool], None]
"""Called with the name of a process that has ended, and whether it has reported an error itself."""


class Rendezvous:
    """The connections of a process to process 0, or of process 0 to all others.

    Args:
      coordinator: address of process 0, host:port. JAX's coordinator uses it afterwards.
      process: index of this one.
      timeout: seconds to wait for all of them.

    Raises:
      ConfigError: a process does not come in time, or two have the same index, or other numbers of processes.
    """

    def __init__(self, coordinator: str, processes: int, process: int, timeout: float) -> None:
        self._connections: dict[str, socket.socket] = {}
        host, _, port = coordinator.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._deadline = time.monotonic() + timeout
        self._timeout = f"distributed.timeout: {timeout:g} seconds are over, and"
        if process == 0:
            self._await_others(processes)
        else:
            self._join(processes, process)

    def watch(self, on_lost: OnLost) -> None:
        """Calls `on_lost` from a thread when another process ends without `close`."""
        for name, connection in self._connections.items():
            connection.settimeout(None)
            threading.Thread(target=_watch, args=(name, connection, on_lost), daemon=True).start()

    def close(self, failed: bool = False) -> None:
        """Tells the others that this process ends, and whether with an error that it has reported."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(_FAILED if failed else _DONE)

    def _await_others(self, processes: int) -> None:
        try:
            listener = socket.create_server(("", self._address[1]), backlog=processes)
        except OSError as error:
            raise ConfigError(
                f"distributed.coordinator: port {self._address[1]} cannot be used ({error.strerror}); choose"
                " a free one, the same in all processes"
            ) from error
        problem = ""
        with listener:
            while not problem and len(self._connections) < processes - 1:
                listener.settimeout(max(self._deadline - time.monotonic(), 0.01))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    come = set(self._connections)
                    missing = [str(i) for i in range(1, processes) if f"process {i}" not in come]
                    problem = (
                        f"{self._timeout} distributed.process {', '.join(missing)} of {processes} has not"
                        " come; start it with the same command, or raise the timeout"
                    )
                    break
                problem = self._greet(connection, processes)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(problem).encode() + b"\n")
        if problem:
            raise ConfigError(problem)

    def _greet(self, connection: socket.socket, processes: int) -> str:
        """Takes in a process. Returns what is wrong with it, or an empty text."""
        connection.settimeout(5.0)
        try:
            index, its_processes = json.loads(_line(connection))
        except (OSError, ValueError, TypeError):
            connection.close()  # something else has knocked
            return ""
        name = f"process {index}"
        taken = name in self._connections or index == 0
        self._connections[f"{name} again" if taken else name] = connection
        if taken:
            return f"distributed.process: {index} has come twice; every process needs an index of its own"
        if its_processes != processes:
            return (
                f"distributed.processes: {its_processes} in {name}, but {processes} in process 0; all need"
                " the same number"
            )
        return ""

    def _join(self, processes: int, process: int) -> None:
        reason = "it did not answer"
        while True:
            left = self._deadline - time.monotonic()
            try:
                connection = socket.create_connection(self._address, timeout=max(left, 0.01))
                connection.sendall(json.dumps([process, processes]).encode() + b"\n")
                connection.settimeout(max(left, 0.01) + 1.0)  # process 0 says who is missing
                problem = json.loads(_line(connection))
                break
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or reason
            if left < _RETRY:
                raise ConfigError(
                    f"{self._timeout} process 0 is not at distributed.coordinator"
                    f" {self._address[0]}:{self._address[1]} ({reason}); start it with the same command, or"
                    " check the address and firewalls"
                )
            time.sleep(_RETRY)
        if problem:
            raise ConfigError(problem)
        self._connections["process 0"] = connection


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(data) > 4 * _GREETING:
            raise ValueError("no line")
        data += piece
    return data


def _watch(name: str, connection: socket.socket, on_lost: OnLost) -> None:
    try:
        last = connection.recv(1)
    except OSError:
        last = b""
    if last != _DONE:
        on_lost(name, last == _FAILED)
