"""Processes of their own, without the seconds that each would spend on importing.

    python -m tests.fork_server

imports what most need, and reads lines of JSON. For {"code": Python, "arguments": its sys.argv[1:],
"environment": what differs, "output": FILE, "errors": FILE} it forks a process and says its number; for
{"process": its number, "seconds": how long to wait, or null} it says the exit status, negative for a signal,
or null where the process still runs. JAX is imported here but begins in the process, which may so have other
devices: no thread of JAX's is lost by forking.
"""

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0  # seconds to end in


class Process:
    """One that a server has forked.

    Attributes:
      number: of the process.
      status: as by `wait`.
    """

    def __init__(self, server: "ForkServer", number: int) -> None:
        self._server, self.number = server, number
        self.status: int | None = None

    def wait(self, seconds: float | None = None) -> int | None:
        """Returns the exit status, negative for a signal; None where the process runs on after `seconds`."""
        if self.status is None:
            self.status = self._server.ask(process=self.number, seconds=seconds)
        return self.status

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process is known to have ended."""
        if self.status is None:  # else the number may be another's
            os.kill(self.number, number)


class ForkServer:
    """Forks processes that have the modules imported."""

    def __init__(self) -> None:
        strict = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"],
            cwd=ROOT,
            env={**os.environ, **strict, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        code: str,
        arguments: Sequence[object],
        output: Path,
        errors: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts a process.

        Args:
          code: what `python -c` would be given.
          arguments: of the process, `sys.argv[1:]`.
          output, errors: files to append to.
          environment: variables that differ from those of this process when it made the server. JAX has read
            its own by then, but not XLA.
        """
        what = {"code": code, "arguments": [*map(str, arguments)], "environment": dict(environment or {})}
        return Process(self, self.ask(**what, output=str(output), errors=str(errors)))

    def ask(self, **command: object) -> int | None:
        """Returns the answer to a command, see the module's docstring."""
        print(json.dumps(command), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(PATIENCE)


@functools.cache
def shared() -> ForkServer:
    """The one that this process keeps to its end."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def run(code: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
    """Returns the exit status of a process, its output and its errors; see `ForkServer.start`."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        status = shared().start(code, arguments, output, errors, environment).wait()
        return status, output.read_text(), errors.read_text()


def output_of(code: str, *arguments: object, **environment: str) -> str:
    """Returns what a process prints that has to end well; see `ForkServer.start`."""
    status, output, errors = run(code, *arguments, **environment)
    assert status == 0, errors[-4000:]
    return output


def _carry_out(command: dict) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(command["environment"])
    for name, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(command[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv[1:] = command["arguments"]
    try:
        exec(compile(command["code"], "<a test>", "exec"), {"__name__": "__main__"})
        return 0
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()


def _status(process: int, seconds: float | None) -> int | None:
    """The exit status of a process, if it ends within `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, 0 if deadline is None else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


def serve() -> None:
    import tensorboardX  # noqa: F401  (with PyTorch, which takes every run a second)

    import rljax.training.session  # noqa: F401

    # As in `tests/conftest.py`; what is imported stays in every process.
    gc.set_threshold(20_000, 10, 10)
    gc.freeze()
    for line in sys.stdin:
        command = json.loads(line)
        if "code" not in command:
            print(json.dumps(_status(**command)), flush=True)
            continue
        process = os.fork()
        if process == 0:
            os._exit(_carry_out(command))
        print(process, flush=True)


if __name__ == "__main__":
    serve()
