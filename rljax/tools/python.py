"""Python in a sandbox: the printed output is the answer (ReTool's code interpreter).

The code runs in `rljax/sandbox`: separate processes and file system, no network, limits. Every call starts a
new interpreter, without the state of earlier calls.
"""

from rljax.errors import ConfigError
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, missing_isolation
from rljax.tools.base import ToolError

_MOST_OUTPUT = 1 << 16  # bytes
_END = b"\0"  # ends the output; the text of an exception follows it

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
        """Returns the output of a program, without white space at the end.

        Raises:
          ToolError: the program raised, was killed, or took too long.
          SandboxError: this machine could not start the program.
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
