"""Strict JAX for every test: no silent rank or dtype promotion."""

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items):
    """Tests marked `accelerator` skip where there is none."""
    if jax.default_backend() in ("gpu", "tpu"):
        return
    skip = pytest.mark.skip(reason="needs a GPU or TPU")
    for item in items:
        if "accelerator" in item.keywords:
            item.add_marker(skip)
