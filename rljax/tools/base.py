"""The protocol of tools: text in, text out."""

from typing import Protocol


class ToolError(Exception):
    """Error of a call, in a few words for the policy that made it."""


class Tool(Protocol):
    """Something that a policy may call.

    Calls come from several threads at once. What comes in is model output: a tool never evaluates it in this
    process, and bounds the time and the memory that it spends on it. The same call should always get the same
    answer: a run can be repeated, and a resumed one goes on with the same numbers, as far as that holds.
    """

    def call(self, text: str) -> str:
        """Answers a call; raises `ToolError` where there is no answer. Anything else that it raises is an
        error of the call as well, but for a `UserError`, which stops the run: the machine's fault.

        Args:
          text: text between the markers.
        """
        ...
