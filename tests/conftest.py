"""Strict JAX for every test: no silent rank or dtype promotion. And no process with too many programs."""

import gc
from pathlib import Path

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


_MANY_MAPPINGS = 20_000  # of 65,530 that Linux allows a process; beyond them, loading a program crashes


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Every compiled program takes some memory mappings, and a whole suite's are too many."""
    yield
    gc.collect()
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()
