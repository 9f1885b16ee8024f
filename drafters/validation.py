"""Checks of what drafters return: draft trees, metrics and the state for checkpoints."""

from collections.abc import Collection
from typing import Any

import numpy as np

from drafters.base import Drafts, Queries


class ProtocolError(ValueError):
    """A drafter returned a value that breaks the protocol. The message continues "METHOD returned"."""


_KINDS = {
    "tokens": (np.integer, "integers"),
    "parents": (np.signedinteger, "signed integers"),  # -1 is one of them
    "log_probability": (np.floating, "floats"),
    "counts": (np.integer, "integers"),
}


def usable_nodes(drafts: Any, queries: Queries, vocab_size: int) -> np.ndarray:
    """Returns which nodes can be verified: bool [n, nodes].

    Left out are nodes beyond count or budget, nodes whose token is outside the vocabulary, nodes whose parent
    does not precede them, and everything below such a node.

    Raises:
      ValueError: `drafts` does not have the fields, shapes or types of `Drafts` for these queries.
    """
    shape = (len(queries.requests), queries.nodes)
    for name, expected in (
        ("tokens", shape),
        ("parents", shape),
        ("log_probability", shape),
        ("counts", shape[:1]),
    ):
        array = getattr(drafts, name, None)
        if not isinstance(array, np.ndarray) or array.shape != expected:
            actual = array.shape if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} should be an array {list(expected)}, got {actual}")
        kind, noun = _KINDS[name]
        if not np.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} should be {noun}, got {array.dtype}")
    order = np.arange(queries.nodes)
    tokens, parents = drafts.tokens.astype(np.int64), drafts.parents.astype(np.int64)
    usable = order < np.minimum(drafts.counts, queries.budgets)[:, None]
    usable &= (tokens >= 0) & (tokens < vocab_size)
    usable &= (parents >= -1) & (parents < order)
    for node in range(queries.nodes):
        parent = parents[:, node]
        has_parent = usable[:, node] & (parent >= 0)
        rows = np.flatnonzero(has_parent)
        usable[rows, node] = usable[rows, parent[rows]]
    return usable


def usable_metrics(metrics: Any, taken: Collection[str] = ()) -> dict[str, float]:
    """Returns `metrics`, from `Drafter.metrics`, after checking that they are numbers by name.

    Args:
      metrics: the value to check.
      taken: names that the metrics line uses already.

    Raises:
      ProtocolError: they are not, or a name is taken.
    """
    for name, value in _named(metrics, "numbers").items():
        if name in taken:
            raise ProtocolError(f"{name!r}, which says something else already: give it another name")
        if not isinstance(value, int | float) and (
            getattr(value, "ndim", None) != 0 or np.dtype(value.dtype).kind not in "biuf"
        ):
            raise ProtocolError(f"{name!r} as {_described(value)}, expected a number")
    return metrics


def usable_state(state: Any) -> dict[str, np.ndarray]:
    """Returns `state`, from `Drafter.state`, after checking that a checkpoint restores it exactly.

    Raises:
      ProtocolError: it would not.
    """
    for name, array in _named(state, "numpy arrays").items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufcSU":
            raise ProtocolError(f"{name!r} as {_described(array)}, expected a numpy array of numbers or text")
    return state


def _named(value: Any, content: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ProtocolError(f"{_described(value)}, expected a dict of {content} by name")
    return value


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the key {next(name for name in value if not isinstance(name, str))!r}"
    return " ".join(f"{type(value).__name__} {value!r}".split())[:80]


def chains(drafts: Drafts, usable: np.ndarray) -> tuple[Drafts, np.ndarray]:
    """Cuts every tree to its path of first children, the chain that `rejection` verifies.

    Args:
      drafts: draft trees.
      usable: from `usable_nodes`, bool [n, nodes].

    Returns:
      Drafts in which node i continues node i - 1, and which of their nodes are usable, bool [n, nodes].
    """
    rows, width = drafts.tokens.shape
    last = np.full(rows, -1)  # the node that the chain has reached
    length = np.zeros(rows, np.int32)
    tokens = np.zeros_like(drafts.tokens)
    scores = np.full_like(drafts.log_probability, -np.inf)
    for node in range(width):
        grown = np.flatnonzero(usable[:, node] & (drafts.parents[:, node] == last))
        tokens[grown, length[grown]] = drafts.tokens[grown, node]
        scores[grown, length[grown]] = drafts.log_probability[grown, node]
        last[grown] = node
        length[grown] += 1
    order = np.arange(width, dtype=drafts.parents.dtype)
    parents = np.broadcast_to(order - 1, (rows, width)).copy()
    return Drafts(tokens, parents, scores, length), order < length[:, None]
