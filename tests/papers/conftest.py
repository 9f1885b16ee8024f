"""The policy and its requests, the runs that those with workers must equal, and a small model for them."""

import pytest

from rljax.models.config import ModelConfig
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from tests.cluster.conftest import (  # noqa: F401  fixtures
    alone,
    drafts_always,
    stale_alone,
    verifies_always,
    world,
)
from tests.speculation.speculators import expected, params, requests  # noqa: F401  fixtures


@pytest.fixture
def small_model(tmp_path):
    """The directory of a model of the tiny run's vocabulary."""
    config, path = ModelConfig("llama", 320, 32, 1, 2, 1, 32, 64), tmp_path / "small"
    save_model(path, config, init_params(config, seed=3), "float32", tokenizer_source=None)
    return path
