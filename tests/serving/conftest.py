"""The policy of `tests/tiny_policy.py`, requests to it, and their responses by plain decoding."""

from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures
