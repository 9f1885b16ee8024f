"""The policy, its requests, the responses of plain decoding, and programs that come late."""

from tests.speculation.speculators import expected, held_back, params, requests  # noqa: F401  fixtures
