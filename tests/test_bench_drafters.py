"""scripts/bench_drafters.py: the rows of its sections at sizes that take seconds."""

import zlib

import jax
import numpy as np
import pytest

from drafters.eagle.data import HeadSequence
from drafters.quantized import WeightFormat, rtn
from rljax.config import load_config
from rljax.errors import UserError
from rljax.numerics.quantized import dequantize
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.training.drafter_warm_up import WarmUp
from tests.scripts import load_script
from tests.training.tiny_run import write_config

heads = load_script("drafter_benchmarks.heads")
rl = load_script("drafter_benchmarks.rl")
self_draft = load_script("drafter_benchmarks.self_draft")
workloads = load_script("workloads")

SETTINGS = WarmUp("eagle", steps=2, slices_per_round=1, heldout=3, depth=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_config(write_config(tmp_path_factory.mktemp("bench")), [])


def by_name(rows):
    for row in rows:
        assert row.value > 0 and row.ratio > 0
    return {row.name: row for row in rows}


def test_rows_of_samples_that_agree_are_counted_once():
    """Three begin alike, two have the same first token, and one of these ends there."""
    assert self_draft.shared_states([[1, 2, 3], [1], [4, 2]]) == (6, 1 + 1 + 1 + 1, 0)
    assert self_draft.shared_states([[1, 2, 3], [1, 2, 4]]) == (6, 3, 4)


@pytest.mark.long
def test_objective_rows(config):
    rows = by_name(heads.objective_rows(config, SETTINGS, 1, ("EAGLE", "HASS")))
    assert len(rows) == 4 and rows["training/EAGLE/accept length"].ratio == 1
    for name in ("EAGLE", "HASS"):
        row = rows[f"training/{name}/accept length"]
        assert 1 < row.value < 3 and len(row.details["acceptance_by_position"]) == 2
        assert row.value != row.details["untrained"]


def test_objectives_are_the_published_ones():
    from drafters.eagle.objective import published_training

    for name, variant in (("EAGLE", "eagle"), ("HASS", "hass"), ("EAGLE-3", "eagle3")):
        assert heads.OBJECTIVES[name] == (variant, published_training(variant))


@pytest.mark.long
def test_packing_rows(config):
    rows = heads.packing_rows(config, SETTINGS, 1)
    for row in rows:
        assert row.details["sequences"] == 8
        assert row.details["tokens"] <= row.details["positions"]
    assert rows[0].details["baseline_positions"] >= rows[1].details["tokens"]


def test_padded_batches_hold_every_sequence():
    lengths = (5, 70, 9, 130, 3)
    sequences = [
        HeadSequence(np.full(n, n, np.int32), np.zeros((n, 1, 2)), np.ones(n, bool), step=0) for n in lengths
    ]
    by_batch = list(heads.padded(sequences, 2))
    assert [batch.tokens.shape for batch in by_batch] == [(2, 128), (2, 192), (2, 64)]
    whole = list(heads.padded(sequences, 2, 130))
    assert [batch.tokens.shape for batch in whole] == [(2, 130)] * 3
    for batches in (by_batch, whole):
        assert sum(int((batch.segment_ids > 0).sum()) for batch in batches) == sum(lengths)
        assert sum(int((batch.tokens == 9).sum()) for batch in batches) == 9


@pytest.fixture
def luck(monkeypatch):
    """Every response has a reward of its own: else nothing would be learned here."""
    reward = lambda self, problem, text: {"reward": zlib.crc32(text.encode()) % 1000 / 1000}  # noqa: E731
    monkeypatch.setattr(ChainArithmetic, "reward", reward)


@pytest.mark.long
def test_rl_rows(config, luck):
    rows = rl.rl_rows(config, SETTINGS, rl_steps=2, slices=2)
    names = [
        "quantized W8, 5 drafts",
        "quantized W4, 5 drafts",
        "frozen head",
        "head, policy just updated",
        "head, trained since",
    ]
    assert [row.name for row in rows] == [f"rl/step {step}/{name}" for step in (0, 1) for name in names]
    first, second = rows[:5], rows[5:]
    assert len({row.details["entropy"] for row in first}) == 1
    assert 0 < second[0].details["entropy"] != first[0].details["entropy"]  # another policy
    for eight, four in (first[:2], second[:2]):
        assert 2 < four.value < eight.value < 6  # of 5 drafts
        by_length = eight.details["block_efficiency_by_length"]
        assert by_length["2"] < by_length["5"] == eight.value < by_length["11"]
    frozen, updated, trained = (row.details["accept_length"] for row in first[2:])
    assert frozen == updated != trained  # nobody has been trained before the first step's slices
    frozen, updated, trained = (row.details["accept_length"] for row in second[2:])
    assert len({frozen, updated, trained}) == 3
    assert second[3].baseline_value == first[4].value and second[4].baseline_value == second[3].value


def test_self_drafts_by_a_plain_loop():
    """Two sequences; drafts agree with the policy but at one token, where they share nothing."""
    embed = 50.0 * np.eye(4, dtype=np.float32)  # a state is one token's logits
    policy = workloads.qwen3(vocab=4, hidden=4, layers=1, heads=1, kv_heads=1, mlp=4)
    target, drafted = [], []
    for length, prompt, wrong in ((5, 2, 3), (4, 1, None)):
        states = np.eye(4, dtype=np.float32)[np.arange(length) % 4][:, None]
        response = np.arange(length) >= prompt
        target.append((np.zeros(length, np.int32), states, response))
        drafted_states = states.copy()
        if wrong is not None:
            drafted_states[wrong] = np.roll(drafted_states[wrong], 1)
        drafted.append((np.zeros(length, np.int32), drafted_states, response))
    acceptance = rl.self_drafts({"embed": embed}, policy, target, drafted, (1, 2))
    # Tokens behind 1, 2 and 3 in the first, the last one wrong; behind 0, 1 and 2 in the second.
    assert acceptance.by_length[1] == pytest.approx(np.mean([2, 2, 1, 2, 2, 2]))
    assert acceptance.by_length[2] == pytest.approx(np.mean([3, 2, 1, 3, 3, 2]))
    assert acceptance.entropy == pytest.approx(0, abs=1e-6)


# --- losses ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_losses_are_compared_on_the_same_rollouts_and_kept(config, tmp_path, monkeypatch):
    names = ("LK", "block sampled")
    settings = WarmUp(steps=2, slices_per_round=1, heldout=3, depth=2, draft_vocabulary=40)
    rows = heads.acceptance_rows(config, settings, 2, names, tmp_path / "work")
    monkeypatch.setattr(heads, "make_trainer", None)  # everything is there
    again = heads.acceptance_rows(config, settings, 2, names, tmp_path / "work")
    with pytest.raises(UserError, match="--losses: 'lk' is not one"):
        heads.acceptance_rows(config, settings, 2, ("lk",), tmp_path / "work")
    assert [row.as_json() for row in again] == [row.as_json() for row in rows]
    assert [row.name for row in rows] == [f"losses/{name}" for name in names]
    assert rows[0].ratio == 1.0 and rows[1].baseline_value == rows[0].value
    for row in rows:
        first, second = row.details["coupled_by_position"]
        assert 0 < second < first < 1 and row.value == pytest.approx(1 + first + second)
        assert row.value <= row.details["rejection_sampling"] + 0.05


# --- the policy in fewer bits ----------------------------------------------------------------------------

DRAFTERS = {
    name: self_draft.BITS[name]
    for name in ("8 bits by output, integers", "8 bits by output", "4 bits by output")
}
DRAFTERS["4 bits, activation-aware"] = self_draft.QUANTIZERS[4]["4 bits, activation-aware"]
RESPONSES, DEPTH = 4, 3


@pytest.mark.long
def test_rows_of_bits_and_quantizers(config):
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


def test_the_policy_itself_is_always_right_and_other_tokens_are_an_error(config, monkeypatch):
    """So a response takes a pass for every `DEPTH` + 1 of its tokens."""
    decode, runs = self_draft._decode, []

    def decoded(*given):
        found = decode(*given)
        found.responses[0][-1] += len(runs) == 2
        runs.append(found)
        return found

    monkeypatch.setattr(self_draft, "_rounded", lambda engine, params, *rest: (params, (1, 1)))
    monkeypatch.setattr(self_draft, "_decode", decoded)
    first, second, third, _ = DRAFTERS.items()
    (row,) = self_draft.self_draft_rows(config, dict([first]), RESPONSES, DEPTH)
    lengths = np.array([len(response) for response in runs[0].responses])
    np.testing.assert_array_equal(runs[0].passes, -(-lengths // (DEPTH + 1)))
    assert row.value == lengths.sum() / runs[0].passes.sum()
    with pytest.raises(UserError, match="4 bits by output: sampled other tokens"):
        self_draft.self_draft_rows(config, dict([second, third]), RESPONSES, DEPTH)


def test_scales_follow_the_inputs_that_matter():
    rng = np.random.default_rng(0)
    fmt = WeightFormat(4, 0)
    weight, inputs = rng.normal(size=(8, 64)), rng.normal(size=(32, 64))
    inputs[:, 5] *= 100
    weight, inputs = (each.astype(np.float32) for each in (weight, inputs))
    rounded = self_draft._activation_aware(jax.numpy.asarray(weight), fmt, inputs)
    nearest = jax.jit(lambda weight: dequantize(rtn(weight, fmt)))(weight)
    errors = [np.square(inputs @ (each - weight).T).sum() for each in (rounded, nearest)]
    assert errors[0] < 0.2 * errors[1]


def test_the_error_of_a_ratio_is_paired():
    responses = [[0] * 12, [0] * 24]
    two, same = (self_draft.Decoded(responses, np.array(passes), np.ones(1)) for passes in ([6, 12], [3, 6]))
    assert same.ratio_error(two) == 0
    other = self_draft.Decoded(responses, np.array([4, 5]), np.ones(1))
    # Of the differences 6 - 2 * 4 = -2 and 12 - 2 * 5 = 2.
    assert other.ratio_error(two) == pytest.approx(np.sqrt(8) * np.sqrt(2) / 9)
