"""Failures of one reward of one response, and what a line for the user shows of long texts."""

import json

_SHOWN = 160  # characters of a prompt, response or answer in an error


class CheckerError(Exception):
    """A reward raised or died; the message says which, and does not name the problem."""


class CheckerTimeout(CheckerError):
    """A reward took longer than `task.reward_timeout`, so many seconds, over a response."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"took more than {seconds:g} seconds (task.reward_timeout)")


def shown(text: str) -> str:
    """Returns a text in quotes on one line; a long one without its middle."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
    return json.dumps(text, ensure_ascii=False)
