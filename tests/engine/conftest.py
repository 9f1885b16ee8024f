"""Programs that come late."""

from tests.engines import held_back  # noqa: F401  a fixture
