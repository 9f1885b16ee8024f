"""The policy and its requests."""

from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures
