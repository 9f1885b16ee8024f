"""The tools of a run, with the syntax of calls and the threads that make them."""

import dataclasses

from rljax.config.tools import ToolsConfig
from rljax.models.tokenizer import Tokenizer
from rljax.tools.base import Tool
from rljax.tools.markup import Markup, make_markup
from rljax.tools.registry import make_tools
from rljax.tools.workers import ToolWorkers


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """Settings of a run's tools.

    Attributes:
      tools: tools by name.
      max_calls: most calls in a response; further ones are ordinary text (ToRL, arXiv 2503.23383, section
        2.2).
      workers: threads that call the tools.
    """

    tools: dict[str, Tool]
    markup: Markup
    max_calls: int
    workers: ToolWorkers


def make_tool_use(config: ToolsConfig, tokenizer: Tokenizer) -> ToolUse:
    """Returns the tools of a config; a ConfigError for a tool that is unknown or cannot work here."""
    return ToolUse(
        make_tools(config.names, config.time_limit),
        make_markup(
            config.names,
            (config.opening, config.closing),
            (config.answer_opening, config.answer_closing),
            config.max_answer_length,
            tokenizer,
        ),
        config.max_calls,
        ToolWorkers(config.max_running, config.time_limit),
    )
