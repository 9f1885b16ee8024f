"""scripts/bench_decoupled.py: what it needs, and that it compares what it measures."""

import dataclasses

import jax
import numpy as np
import pytest

from rljax.requests import Completion
from tests.scripts import load_script

bench_decoupled = load_script("bench_decoupled")


def test_one_device_is_too_few(monkeypatch, capsys):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    benchmark = bench_decoupled.BENCHMARK
    assert benchmark.run(benchmark.parser().parse_args([])) == 2
    assert "--xla_force_host_platform_device_count=2" in capsys.readouterr().err


def test_a_token_or_logprob_that_differs_ends_it():
    one = Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), "length")
    bench_decoupled.check_equal([one], [one])
    for changes in ({"response_ids": one.response_ids + 1}, {"logprobs": one.logprobs - 1}):
        with pytest.raises(AssertionError):
            bench_decoupled.check_equal([dataclasses.replace(one, **changes)], [one])
