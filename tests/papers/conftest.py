"""The policy and its requests, and the runs that those with workers must equal."""

from tests.cluster.conftest import alone, stale_alone, verifies_always, world  # noqa: F401  fixtures
from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures
