"""Failures of one reward of one response."""


class CheckerError(Exception):
    """A reward raised or died; the message says which, and does not name the problem."""


class CheckerTimeout(CheckerError):
    """A reward took longer than `task.reward_timeout` over a response."""
