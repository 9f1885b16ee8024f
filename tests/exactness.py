"""Numerics and comparisons of tests that demand the same tokens: all on a CPU, most on an accelerator."""

import dataclasses
import os
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.invariance import measured, row_counts
from rljax.models.config import ModelConfig
from rljax.numerics.rows import Numerics
from rljax.provenance import machine_facts

Outputs = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Tokens and logprobs of every response."""

MOST_FLIPS = 0.02
"""Share of tokens that may be others on an accelerator, where near-ties flip. A wrong mask or cache changes
most of the first few tokens.
"""
_TOLERANCE = 0.1  # of logprobs there: activations in bfloat16 have errors of 2^-9


def exact_numerics(
    config: ModelConfig, dtype: str, buckets: Buckets, others: tuple[int, ...] = ()
) -> Numerics:
    """As a run measures them. Where nothing is exact, a CPU skips the test, by the processor's name; on an
    accelerator `check_same` counts flips.
    """
    numerics = Numerics(compute_dtype=dtype)
    kept = os.environ["JAX_COMPILATION_CACHE_DIR"]
    invariance = measured(config, numerics, row_counts(buckets, others), kept)
    if not invariance.exact and jax.default_backend() == "cpu":
        pytest.skip(f"{machine_facts()['cpu']}: {'; '.join(invariance.failures)}")
    return dataclasses.replace(numerics, measured_form=invariance.form)


def check_same(
    outputs: Outputs, expected: Outputs, tolerance: float = 0.0, platform: str | None = None
) -> None:
    """Asserts that responses are the expected ones.

    On a CPU all tokens are equal, and logprobs up to `tolerance`. On an accelerator a response is compared up
    to its first other token: these flips are at most a share of `MOST_FLIPS` of the tokens that were
    compared, or one, and logprobs before them are equal up to rounding.

    Args:
      platform: "cpu", "gpu" or "tpu"; by default the tests'.
    """
    strict = (platform or jax.default_backend()) == "cpu"
    compared = flips = 0
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(outputs, expected, strict=True):
        assert len(tokens) == len(logprobs)
        if strict:
            assert list(tokens) == list(true_tokens)
        same = next(
            (i for i, pair in enumerate(zip(tokens, true_tokens, strict=False)) if pair[0] != pair[1]),
            min(len(tokens), len(true_tokens)),
        )
        flipped = same < max(len(tokens), len(true_tokens))
        compared, flips = compared + same + flipped, flips + flipped
        np.testing.assert_allclose(
            logprobs[:same], true_logprobs[:same], rtol=0, atol=tolerance if strict else _TOLERANCE
        )
    assert flips <= max(1, MOST_FLIPS * compared), f"{flips} flips in {compared} tokens"
