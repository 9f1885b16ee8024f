"""Python in a sandbox: what a call prints is its answer (ReTool's code interpreter).

The code runs in `rljax/sandbox`: processes and a file system of its own, no network, limits. Every call
begins anew: nothing of an earlier one is left.
"""

from rljax.errors import ConfigError
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, missing_isolation
from rljax.tools.base import ToolError

_MOST_OUTPUT = 1 << 16  # bytes
_FAILED = b"\0"  # comes before what an exception says

_RUNNER = r"""
import sys
code = sys.stdin.read()
try:
    exec(compile(code, "call", "exec"), {"__name__": "__main__"})
except SystemExit:
    pass
except BaseException as error:
    sys.stdout.write(f"\0{type(error).__name__}: {error}")
sys.stdout.flush()
"""


class Python:
    """The tool.

    Args:
      seconds: for a call.

    Raises:
      ConfigError: this machine cannot isolate programs.
    """

    def __init__(self, seconds: float) -> None:
        reason = missing_isolation()
        if reason is not None:
            raise ConfigError(
                f"tools.names: python needs programs to be isolated, which this machine cannot do ({reason});"
                " it takes Linux 5.12 with user namespaces"
            )
        self._seconds = seconds
        self._sandbox = Sandbox(Limits())

    def call(self, text: str) -> str:
        """What a program prints, without white space at the end. Where it raises, that is said."""
        finished = self._sandbox.run(_RUNNER, text.encode(), self._seconds, _MOST_OUTPUT)
        if finished.ending == "timeout":
            raise ToolError(f"no answer after {self._seconds:g} s")
        _, failed, error = finished.output.rpartition(_FAILED)
        if failed and finished.ending == "exited":
            raise ToolError(error.decode("utf-8", "replace"))
        return finished.output.decode("utf-8", "replace").rstrip()
