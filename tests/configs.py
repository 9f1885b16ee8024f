"""The smallest config of an experiment, as text and as an object, and tables of what is refused."""

from typing import Any

import pytest

from rljax.config import ExperimentConfig
from rljax.config.wing import ABSENT, MECHANISMS

MINIMAL = """
run_dir: runs/x
policy:
  shape: {hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16, mlp_size: 128}
task: {name: chain_arithmetic}
"""

NEEDS_PAPERS = pytest.mark.skipif(not MECHANISMS, reason=f"needs {ABSENT}")


def experiment(**sections: Any) -> ExperimentConfig:
    """Returns a valid experiment with these sections in the place of its own, or raises ValidationError."""
    least = {"run_dir": "runs/x", "policy": {"path": "base"}, "task": {"name": "chain_arithmetic"}}
    return ExperimentConfig.model_validate({**least, **sections})


def table(text: str) -> list[list[str]]:
    """Returns the rows of a table in text: a line each, cells between " -> "; an indented line goes on."""
    lines = text.strip("\n").replace("\n    ", " ").splitlines()
    return [[cell.strip() for cell in line.split(" -> ")] for line in lines]
