"""Numerics that were measured to be exact on the processor that the tests run on."""

import dataclasses

import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.invariance import measured, row_counts
from rljax.models.config import ModelConfig
from rljax.numerics.rows import Numerics
from rljax.provenance import machine_facts


def exact_numerics(
    config: ModelConfig, dtype: str, buckets: Buckets, others: tuple[int, ...] = ()
) -> Numerics:
    """As a run measures them; skips the test, by the processor's name, where nothing is exact."""
    numerics = Numerics(compute_dtype=dtype)
    invariance = measured(config, numerics, row_counts(buckets, others), None)
    if not invariance.exact:
        pytest.skip(f"{machine_facts()['cpu']}: {'; '.join(invariance.failures)}")
    return dataclasses.replace(numerics, measured_form=invariance.form)
