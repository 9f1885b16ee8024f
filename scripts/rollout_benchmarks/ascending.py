"""A reward that a policy with random weights finds by chance, and from which it soon grows sure."""

import itertools


def ascending(response: str) -> float:
    """The share of a response's characters, the first one aside, that are the digit after the one before."""
    follows = sum(a + b in "01234567890" for a, b in itertools.pairwise(response))
    return follows / max(len(response) - 1, 1)
