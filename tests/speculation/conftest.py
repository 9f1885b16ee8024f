"""The policy, its requests, the responses of plain decoding, and programs that come late."""

from tests.engines import held_back  # noqa: F401  a fixture
from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures
