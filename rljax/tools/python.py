"""Python in a sandbox: what a call prints is its answer (ReTool's code interpreter).

The code runs in `rljax/sandbox`: processes and a file system of its own, no network, limits. Every call
begins anew: nothing of an earlier one is left.
"""

from rljax.errors import ConfigError
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, missing_isolation
from rljax.tools.base import ToolError

_MOST_OUTPUT = 1 << 16  # bytes
_END = b"\0"  # comes last, before what an exception says

_RUNNER = r"""
import atexit, sys
end, stdout = "\0", sys.stdout
def finish():
    stdout.write(end)
    stdout.flush()
atexit.register(finish)  # the first to be registered is the last to be called
code = sys.stdin.read()
try:
    exec(compile(code, "call", "exec"), {"__name__": "__main__"})
except SystemExit:
    pass
except BaseException as error:
    end += f"{type(error).__name__}: {error}"
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
                " it takes Linux 5.12 with user namespaces and seccomp"
            )
        self._seconds = seconds
        self._sandbox = Sandbox(Limits())

    def call(self, text: str) -> str:
        """Output of a program, without white space at the end; an exception or a kill is reported in it.

        Raises:
          ToolError: it raised, was killed, or took too long.
          SandboxError: this machine could not start it.
        """
        finished = self._sandbox.run(_RUNNER, text.encode(), self._seconds, _MOST_OUTPUT)
        if finished.ending == "timeout":
            raise ToolError(f"no answer after {self._seconds:g} s")
        output, ended, error = finished.output.rpartition(_END)
        if finished.ending == "too much output":
            output = finished.output
        elif not ended:
            raise ToolError("the program was killed")
        elif error:
            raise ToolError(error.decode("utf-8", "replace"))
        return output.decode("utf-8", "replace").rstrip()
