"""The sections `bits` and `quantizers` of scripts/bench_drafters.py, at sizes that take seconds."""

import jax
import numpy as np
import pytest

from drafters.quantized import WeightFormat, rtn
from rljax.config import load_config
from rljax.errors import UserError
from rljax.numerics.quantized import dequantize
from tests.scripts import load_script
from tests.training.tiny_run import write_config

self_draft = load_script("drafter_benchmarks.self_draft")
DRAFTERS = {
    name: self_draft.BITS[name]
    for name in ("8 bits by output, integers", "8 bits by output", "4 bits by output")
}
DRAFTERS["4 bits, activation-aware"] = self_draft.QUANTIZERS[4]["4 bits, activation-aware"]
RESPONSES, DEPTH = 4, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield load_config(write_config(tmp_path_factory.mktemp("bench")), [])


def test_rows(config):
    rows = {
        row.name.removeprefix("self_draft/"): row
        for row in self_draft.self_draft_rows(config, DRAFTERS, RESPONSES, DEPTH)
    }
    assert list(rows) == list(DRAFTERS)
    for row in rows.values():
        accepted = row.details["accepted_by_position"]
        assert 1 >= accepted[0] >= accepted[1] >= accepted[2] > 0
        assert row.value == pytest.approx(1 + sum(accepted))
        price = row.details["mb_read_by_a_draft"] / row.details["mb_of_the_policy"]
        assert row.details["break_even"] == pytest.approx(1 + DEPTH * price)
    integers, eight, four, aware = rows.values()
    assert integers.ratio == 1 and integers.details["ratio_error"] == 0
    assert eight.value > four.value
    assert (
        four.details["mb_read_by_a_draft"]
        < eight.details["mb_read_by_a_draft"]
        < four.details["mb_of_the_policy"]
    )
    assert aware.value != four.value


def test_the_policy_itself_is_always_right(config, monkeypatch):
    """So a response takes a pass for every `DEPTH` + 1 of its tokens."""
    monkeypatch.setattr(self_draft, "_rounded", lambda engine, params, *rest: (params, (1, 1)))
    decoded, decode = [], self_draft._decode
    monkeypatch.setattr(self_draft, "_decode", lambda *given: decoded.append(decode(*given)) or decoded[-1])
    names = list(DRAFTERS)[:1]
    (row,) = self_draft.self_draft_rows(config, {name: DRAFTERS[name] for name in names}, RESPONSES, DEPTH)
    lengths = np.array([len(response) for response in decoded[0].responses])
    np.testing.assert_array_equal(decoded[0].passes, -(-lengths // (DEPTH + 1)))
    assert row.value == lengths.sum() / decoded[0].passes.sum()


def test_other_tokens_are_an_error(config, monkeypatch):
    decode, count = self_draft._decode, iter(range(2))

    def decoded(*given):
        found = decode(*given)
        found.responses[0][-1] += next(count)
        return found

    monkeypatch.setattr(self_draft, "_decode", decoded)
    two = {name: DRAFTERS[name] for name in list(DRAFTERS)[1:3]}
    with pytest.raises(UserError, match="4 bits by output: sampled other tokens"):
        self_draft.self_draft_rows(config, two, RESPONSES, DEPTH)


def test_scales_follow_the_inputs_that_matter():
    rng = np.random.default_rng(0)
    fmt = WeightFormat(4, 0)
    weight, inputs = rng.normal(size=(8, 64)), rng.normal(size=(32, 64))
    inputs[:, 5] *= 100
    weight, inputs = (each.astype(np.float32) for each in (weight, inputs))
    rounded = self_draft._activation_aware(jax.numpy.asarray(weight), fmt, inputs)
    errors = [np.square(inputs @ (each - weight).T).sum() for each in (rounded, dequantize(rtn(weight, fmt)))]
    assert errors[0] < 0.2 * errors[1]


def test_the_error_of_a_ratio_is_paired():
    responses = [[0] * 12, [0] * 24]
    two, same = (self_draft.Decoded(responses, np.array(passes), np.ones(1)) for passes in ([6, 12], [3, 6]))
    assert same.ratio_error(two) == 0
    other = self_draft.Decoded(responses, np.array([4, 5]), np.ones(1))
    # Of the differences 6 - 2 * 4 = -2 and 12 - 2 * 5 = 2.
    assert other.ratio_error(two) == pytest.approx(np.sqrt(8) * np.sqrt(2) / 9)
