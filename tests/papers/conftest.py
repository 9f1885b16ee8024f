"""The policy and its requests, and the runs that those with workers must equal."""

from tests.cluster.conftest import (  # noqa: F401  fixtures
    alone,
    drafts_always,
    stale_alone,
    verifies_always,
    world,
)
from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures
