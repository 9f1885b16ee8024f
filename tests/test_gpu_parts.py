"""Functions of the parts of the report on a GPU; `test_gpu_report.py` runs the parts themselves."""

import pytest

from rljax.models.transformer import num_params
from tests.scripts import load_script

engines = load_script("gpu_parts.engines")
SHAPES = load_script("workloads").SHAPES


def test_shapes_are_those_of_the_models():
    """As published, in billions of parameters."""
    counts = {name: num_params(SHAPES[name]) / 1e9 for name in SHAPES if name.startswith("Qwen")}
    published = {"Qwen3-1.7B": 1.72, "Qwen3-8B": 8.19, "Qwen2.5-0.5B": 0.49, "Qwen2.5-1.5B": 1.54}
    assert counts == pytest.approx(published, abs=0.01)


def test_bytes_that_a_step_reads():
    params = engines.random_params(SHAPES["tiny"])
    every = engines.read_bytes(params)
    assert engines.read_bytes(params | {"lm_head": params["embed"]}) == every
    assert engines.cache_bytes(SHAPES["tiny"], 3) == 3 * 2 * 128 * 2
