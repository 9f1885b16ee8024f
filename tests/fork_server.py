"""Processes of their own, without the seconds that each would spend on importing.

    python -m tests.fork_server [MODULE …]

imports what most need, and these modules, and forks one for every line of JSON that it reads: {"code":
Python, "arguments": its sys.argv[1:], "environment": what differs, "output": FILE, "errors": FILE}. It says
the number of the process, and when that is over its exit status, negative for a signal. JAX is imported here
but begins in the process, which may so have other devices: no thread of JAX's is lost by forking.
"""

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0  # seconds to end in


class ForkServer:
    """One process at a time, which has the modules imported."""

    def __init__(self, *modules: str) -> None:
        strict = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", *modules],
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
    ) -> int:
        """Starts a process, and returns its number.

        Args:
          code: what `python -c` would be given.
          arguments: of the process, `sys.argv[1:]`.
          output, errors: files to append to.
          environment: variables that differ from those of this process when it made the server.
        """
        command = {"code": code, "arguments": [*map(str, arguments)], "environment": dict(environment or {})}
        command |= {"output": str(output), "errors": str(errors)}
        print(json.dumps(command), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def wait(self) -> int:
        """Returns the exit status of the process when it is over."""
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(PATIENCE)


@functools.cache
def _server() -> ForkServer:
    """The one that this process keeps to its end."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def run(code: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
    """Returns the exit status of a process, its output and its errors; see `ForkServer.start`."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        _server().start(code, arguments, output, errors, environment)
        return _server().wait(), output.read_text(), errors.read_text()


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


def serve() -> None:
    import rljax.training.session  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)

    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os._exit(_carry_out(json.loads(line)))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
