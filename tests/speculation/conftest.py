"""The policy, its requests, and the responses of plain decoding."""

from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures
