"""Starts programs in the sandbox, exchanges data with them, and ends them with all their descendants."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

from rljax.errors import UserError
from rljax.sandbox.limits import Limits

_JAIL = Path(__file__).with_name("jail.py")
_START_SECONDS = 60.0  # a jail takes about 30 ms, but far longer on a machine under load

Ending = Literal["exited", "timeout", "too much output"]


class SandboxError(UserError):
    """A program cannot be started in the sandbox, as when this machine has no strong isolation."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """Result of a program.

    Attributes:
      output: standard output, as far as it was read.
    """

    output: bytes
    ending: Ending


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """Runs untrusted Python source.

    Attributes:
      limits: resources that a program may use.
      allow_weak: whether to run under resource limits alone where the strong jail cannot be built; otherwise
        that is a `SandboxError`.
      readable: files and directories that a program may read, in addition to Python and the system's
        libraries.
      packages: directories for the program's `sys.path`; they must be readable.
    """

    limits: Limits = dataclasses.field(default_factory=Limits)
    allow_weak: bool = False
    readable: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def strong(self) -> bool:
        """Whether programs run in the strong jail; `SandboxError` if that is required but impossible."""
        reason = missing_isolation()
        if reason is not None and not self.allow_weak:
            raise SandboxError(
                f"task.sandbox: this machine cannot isolate programs ({reason}); it takes Linux 5.12 with"
                " user namespaces and seccomp. task.sandbox.allow_weak: true runs them under resource limits"
                " alone, where they can read your files and use the network"
            )
        return reason is None

    def start(self, source: str) -> "Process":
        """Starts a program; see `Process`."""
        return _start(self, source, self.strong)

    def run(self, source: str, stdin: bytes, seconds: float, max_output: int = 1 << 20) -> Finished:
        """Runs a program to its end, and then ends all its descendants.

        Args:
          seconds: limit on the wall time.
          max_output: limit on the bytes of standard output; a program that exceeds it is ended.
        """
        with self.start(source) as process:
            return process.exchange(stdin, seconds, max_output)


class Process:
    """A program with all its descendants; `close` or the `with` statement ends them."""

    def __init__(self, launcher: subprocess.Popen, directory: str | None = None) -> None:
        self._launcher = launcher
        self._directory = directory
        self._unread = b""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the program now. Its descendants end with the launcher; see jail.py."""
        for stream in (self._launcher.stdin, self._launcher.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        if self._directory is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
        else:  # the launcher of the weak jail ends the descendants
            self._launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(5)
            self._launcher.kill()
            shutil.rmtree(self._directory, ignore_errors=True)
        self._launcher.wait()

    def exchange(self, data: bytes, seconds: float, max_output: int, line: bool = False) -> Finished:
        """Writes to the program and reads its answer.

        Args:
          data: bytes for standard input.
          seconds: time limit for the whole answer.
          max_output: largest number of bytes of an answer.
          line: whether the answer is one line, and the input stays open. Otherwise the input is closed, and
            the answer ends with the program. A line without a line break means that the program has ended.
        """
        stdin, stdout = self._launcher.stdin, self._launcher.stdout
        for stream in (stdin, stdout):
            os.set_blocking(stream.fileno(), False)
        deadline = time.monotonic() + seconds
        output, self._unread = self._unread, b""
        pending = memoryview(data)
        if not pending and not line:
            stdin.close()
        while True:
            if line and b"\n" in output:
                output, _, self._unread = output.partition(b"\n")
                return Finished(output + b"\n", "exited")
            left = deadline - time.monotonic()
            if left <= 0:
                return Finished(output, "timeout")
            if len(output) > max_output:
                return Finished(output[:max_output], "too much output")
            ready = _ready(stdout, stdin if pending else None, left)
            if stdin in ready:
                try:
                    pending = pending[os.write(stdin.fileno(), pending[:65536]) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    pending = pending[:0]
                if not pending and not line:
                    stdin.close()
            if stdout in ready:
                read = os.read(stdout.fileno(), 65536)
                if not read:
                    return Finished(output, "exited")
                output += read


def start_unconfined(argv: Sequence[str], env: dict[str, str]) -> Process:
    """Starts a trusted program that may hang, in a separate session, as a `Process` without a sandbox."""
    return Process(
        subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
    )


@functools.cache
def missing_isolation() -> str | None:
    """Returns the reason why the strong jail cannot be built here, or None if it can. Tries once."""
    if not sys.platform.startswith("linux"):
        return f"it runs {sys.platform}"
    try:
        with _start(Sandbox(), "print(6 * 7)", strong=True) as process:
            finished = process.exchange(b"", _START_SECONDS, 100)
    except SandboxError as error:
        return str(error).removeprefix("sandbox: ")
    return None if finished.output == b"42\n" else "a first program gave no answer"


def _ready(readable: IO[bytes], writable: IO[bytes] | None, seconds: float) -> list[IO[bytes]]:
    """Waits up to `seconds`, and returns the streams that can then be used without blocking."""
    poll = select.poll()
    poll.register(readable, select.POLLIN)
    if writable is not None:
        poll.register(writable, select.POLLOUT)
    descriptors = [descriptor for descriptor, _ in poll.poll(max(1, math.ceil(seconds * 1000)))]
    return [stream for stream in (readable, writable) if stream and stream.fileno() in descriptors]


def _start(sandbox: Sandbox, source: str, strong: bool) -> Process:
    python = os.path.realpath(sys._base_executable)
    before = "import builtins, sys\nbuiltins.exit = builtins.quit = sys.exit\n"  # names that -S leaves out
    before += f"sys.path += {list(sandbox.packages)!r}\n" if sandbox.packages else ""
    spec = {
        "argv": [python, "-I", "-S", "-B", "-X", "utf8", "-c", before + source],
        "env": {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        "readable": [os.path.realpath(sys.base_prefix), *map(os.path.realpath, sandbox.readable)],
        "limits": dataclasses.asdict(sandbox.limits),
        "strong": strong,
    }
    directory = None if strong else tempfile.mkdtemp(prefix="rljax-sandbox-")
    status_read, status_write = os.pipe()
    try:
        launcher = subprocess.Popen(
            [python, "-I", "-S", "-B", str(_JAIL), json.dumps(spec), str(status_write)],
            env={},
            cwd=directory or "/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(status_write,),
            start_new_session=True,
        )
    except OSError as error:
        os.close(status_read)
        raise SandboxError(f"sandbox: cannot start its launcher: {error}") from error
    finally:
        os.close(status_write)
    process = Process(launcher, directory)
    with os.fdopen(status_read, "rb") as status:
        in_time = _ready(status, None, _START_SECONDS)
        message = status.read() if in_time else b"no answer from the launcher"
    if message:
        process.close()
        raise SandboxError(f"sandbox: {message.decode(errors='replace').strip()}")
    return process
