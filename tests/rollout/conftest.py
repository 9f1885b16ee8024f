"""The policy whose requests are decoded, and requests to it; files with others have their own."""

import pytest

from tests.tiny_policy import make_params, make_requests


@pytest.fixture(scope="session")
def params():
    return make_params()


@pytest.fixture(scope="session")
def requests():
    return make_requests()
