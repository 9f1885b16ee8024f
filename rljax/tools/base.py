"""The protocol of tools: text in, text out."""

from typing import Protocol


class ToolError(Exception):
    """An error of a call, in a few words for the policy that made the call."""


class Tool(Protocol):
    """A program that a policy may call.

    Several threads call it in parallel. Calls are model output: a tool never evaluates them in this process,
    and bounds the time and memory of a call. The same call should always get the same answer; otherwise a
    repeated or resumed run gets other numbers.
    """

    def call(self, text: str) -> str:
        """Answers a call.

        Args:
          text: text between the markers.

        Raises:
          ToolError: there is no answer; other exceptions count as errors of the call as well.
          UserError: this machine is at fault; it stops the run.
        """
        ...
