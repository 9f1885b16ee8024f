"""The roofline: counts against real weights, fits against known constants, gates, and the toggle."""

import dataclasses

import jax
import numpy as np
import pytest

from drafters.quantized import QuantizedPolicy, WeightFormat
from rljax.engine.buckets import Buckets
from rljax.engine.kv_cache import cache_dtype, empty_cache
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics, tree_cast
from rljax.papers.efficient_rollout.fit import fit, gates, held_out, non_negative_least_squares
from rljax.papers.efficient_rollout.manager import Toggle
from rljax.papers.efficient_rollout.roofline import Point, Roofline, policy_costs
from rljax.speculation.draft_length import expected_tokens

TINY = ModelConfig("qwen3", 64, 48, 2, 4, 2, 16, 80, tie_embeddings=True, qk_norm=True)
UNTIED = dataclasses.replace(TINY, tie_embeddings=False, attention_bias=True, qk_norm=False)
LARGE = ModelConfig("qwen2", 150_000, 3584, 28, 28, 4, 128, 18_944)
SIZES = tuple(2**n for n in range(10))
EVERY_SIZE = Buckets(SIZES, (2048,), tuple(8 * size for size in SIZES), max_drafts=7)  # nothing is rounded up
W4, W8 = WeightFormat(4, 128), WeightFormat(8, 0, "int8")


# -- counts ------------------------------------------------------------------------------------------------


@pytest.mark.default_cases("bfloat16-config1-fmt1")
@pytest.mark.parametrize(
    ("dtype", "config", "fmt"),
    [
        ("float32", TINY, W4),
        ("bfloat16", UNTIED, WeightFormat(4, 32)),
        ("bfloat16", TINY, W8),
        ("float32", UNTIED, WeightFormat(8, 0)),
    ],
)
def test_bytes_are_those_of_the_arrays(dtype, config, fmt):
    numerics = Numerics(compute_dtype=dtype)
    params = tree_cast(init_params(config, seed=0), numerics.dtype)
    costs = policy_costs(config, numerics, fmt)
    unread = 0 if config.tie_embeddings else params["embed"].nbytes
    assert costs.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - unread
    policy = QuantizedPolicy(fmt)
    policy.refresh(params)
    assert costs.draft_bytes == policy.read_bytes
    cache = empty_cache(config, batch=3, length=64, dtype=cache_dtype(numerics))
    assert 3 * 64 * costs.kv_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_operations_of_a_token():
    costs = policy_costs(TINY, Numerics(), W4)
    # Two layers: q and o 64 x 48, k and v 32 x 48, three of 80 x 48.
    assert costs.projection_flops == 2 * 2 * (2 * 64 * 48 + 2 * 32 * 48 + 3 * 80 * 48)
    assert costs.head_flops == 2 * 64 * 48
    assert costs.attention_flops == 2 * 4 * 16 * (2 + 2)  # layers, heads, size; score and value
    assert policy_costs(UNTIED, Numerics(), W4).head_flops == costs.head_flops


# -- predictions -------------------------------------------------------------------------------------------


def roofline(costs=None, **constants):
    """An accelerator's, as in the paper, unless told otherwise."""
    given = {
        "byte": 1 / 1.6e12,
        "kv_byte": 0.7 / 1.6e12,
        "flop": 1 / 2.5e14,
        "attention_flop": 1 / 2.5e14,
        "slot": 4e-6,
        "verified_slot": 1e-5,
        "verifying": 0.0,
        "draft_byte": 1.3 / 1.6e12,
        "draft_flop": 1 / 2.5e14,
        "draft_slot": 6e-6,
        "overlap": 1.0,
    }
    if costs is None:
        costs = policy_costs(LARGE, Numerics(compute_dtype="bfloat16"), W4)
    return Roofline(costs=costs, **{**given, **constants})


def test_the_papers_equations():
    known = roofline()
    costs, batch, context, chain = known.costs, 64, 2048, 5
    kv = 0.7 * costs.kv_bytes * batch * context
    memory, draft_memory = (costs.weight_bytes + kv) / 1.6e12, (1.3 * costs.draft_bytes + kv) / 1.6e12
    computing = batch * (costs.dense_flops + context * costs.attention_flops) / 2.5e14
    assert computing < memory < 6 * computing  # so that both branches are seen
    target, draft = memory + 4e-6 * batch, max(draft_memory, computing) + 6e-6 * batch
    verify = (chain + 1) * computing + 1e-5 * batch
    assert known.target_seconds(batch, context) == pytest.approx(target)
    assert known.draft_seconds(batch, context) == pytest.approx(draft)
    assert known.verify_seconds(batch, context, batch * 6) == pytest.approx(verify)
    tokens = expected_tokens(0.9, chain)
    assert tokens == pytest.approx((1 - 0.9**6) / (1 - 0.9))
    speedup = known.speedup(batch, context, chain, 0.9)
    assert speedup == pytest.approx(tokens * target / (chain * draft + verify))


def test_what_does_not_overlap_adds_up():
    apart, hidden = roofline(overlap=0.0), roofline(overlap=1.0)
    memory, computing = (
        seconds.verify_seconds(8, 512, 64)
        for seconds in (roofline(flop=0.0, attention_flop=0.0), roofline(byte=0.0, kv_byte=0.0))
    )
    slots = 8 * apart.verified_slot
    assert apart.verify_seconds(8, 512, 64) == pytest.approx(memory + computing - slots)
    assert hidden.verify_seconds(8, 512, 64) == pytest.approx(max(memory, computing))


# -- fitting -----------------------------------------------------------------------------------------------


def synthetic(known, batches=(1, 4, 16, 64, 256), contexts=(512, 2048, 8192), chains=(3, 7, 11, 15)):
    """Points as they would be measured if the constants were true; chains as in appendix E.3."""
    points = []
    for batch in batches:
        for context in contexts:
            points += [Point(kind, batch, context, batch, batch, 0.0) for kind in ("plain", "draft")]
            rows = [batch * (chain + 1) for chain in chains]
            points += [Point("verify", batch, context, size, size, 0.0) for size in rows]
    return [dataclasses.replace(point, seconds=known.seconds(point)) for point in points]


CPU = {
    "byte": 1 / 13e9,
    "kv_byte": 1 / 12e9,
    "flop": 1 / 200e9,
    "attention_flop": 1 / 45e9,
    "slot": 3e-4,
    "verified_slot": 5e-4,
    "verifying": 2e-3,
    "draft_byte": 1.2 / 13e9,
    "draft_slot": 0.0,
}


@pytest.mark.parametrize(("device", "overlap"), [("accelerator", 0.45), ("cpu", 0.0), ("cpu", 1.0)])
def test_known_constants_are_recovered(device, overlap):
    if device == "cpu":
        small = ModelConfig("qwen3", 320, 768, 12, 6, 2, 64, 3072, tie_embeddings=True, qk_norm=True)
        known = roofline(policy_costs(small, Numerics(), W8), **CPU, draft_flop=1 / 700e9, overlap=overlap)
        # Up to a batch whose draft steps arithmetic limits: what is hidden behind memory cannot be known.
        points = synthetic(known, (1, 2, 4, 8, 32, 128), (128, 512, 4096))
    else:
        known = roofline(overlap=overlap)
        points = synthetic(known)
    found = fit(known.costs, points)
    assert Roofline.from_json(found.as_json()) == found
    for name, value in known.as_json().items():
        if name != "costs":
            assert getattr(found, name) == pytest.approx(value, rel=1e-3, abs=0 if value else 1e-9), name


def test_no_constant_is_negative_even_where_that_would_fit_better():
    known = roofline(slot=-1e-4)
    found = fit(known.costs, synthetic(known))
    assert found.slot == 0
    assert all(value >= 0 for name, value in found.as_json().items() if name != "costs")


def test_non_negative_least_squares_is_the_best_of_all_non_negative():
    rng = np.random.default_rng(1)
    for _ in range(200):
        # Positive, as times are: whoever joins later makes earlier ones negative in one case of ten.
        matrix, target = rng.uniform(size=(6, 5)) * [1, 1e9, 1, 1e-6, 1], rng.uniform(size=6)
        found = non_negative_least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ found - target) / np.linalg.norm(matrix, axis=0)
        assert (found >= 0).all()
        assert np.abs(gradient[found > 0]).max(initial=0) < 1e-9  # Karush, Kuhn and Tucker
        assert gradient[found == 0].min(initial=0) > -1e-9


# -- gates -------------------------------------------------------------------------------------------------


def test_true_constants_pass_their_gates():
    reached = gates(roofline(), synthetic(roofline()))
    assert (reached.sign, reached.sign_by_acceptance, reached.cases) == (1.0, 1.0, 5 * 3 * 4)
    assert 0 < reached.paying < reached.cases  # the sign is worth something
    assert reached.target_error == pytest.approx(0) and reached.passed


def test_wrong_constants_fail_the_gate_they_are_about():
    points = synthetic(roofline())
    slow_arithmetic = gates(roofline(flop=2e-14, attention_flop=2e-14), points)
    assert slow_arithmetic.sign < 0.9 and not slow_arithmetic.passed
    # Everything a fifth slower changes no ratio, so no sign.
    names = ("byte", "kv_byte", "flop", "attention_flop", "slot", "verified_slot")
    names += ("draft_byte", "draft_flop", "draft_slot")
    slower = roofline(**{name: 1.2 * getattr(roofline(), name) for name in names})
    reached = gates(slower, points)
    assert reached.sign == 1.0
    assert reached.target_error == pytest.approx(0.2)
    assert reached.target_median_error == pytest.approx(0.2)
    assert not reached.passed


def test_what_cannot_be_judged_has_not_passed():
    points = synthetic(roofline())
    reached = gates(roofline(), [point for point in points if point.kind == "plain"])
    assert reached.sign is None and reached.cases == 0 and not reached.passed
    # A drafter on the host is judged without draft steps, of which nothing can be fitted.
    points = [point for point in points if point.kind != "draft"]
    with pytest.raises(ValueError, match="draft"):
        fit(roofline().costs, points)
    assert gates(roofline(), points).cases == 0
    free = gates(roofline(), points, drafts_itself=False)
    assert free.cases == 5 * 3 * 4 and free.sign == 1.0


def test_a_third_is_held_out_by_whole_shapes():
    points = synthetic(roofline(), batches=(1, 2, 4), contexts=(64, 128, 256))
    to_fit, kept = held_out(points)
    shapes = {(point.batch, point.context) for point in kept}
    batches, contexts = (set(sizes) for sizes in zip(*shapes, strict=True))
    assert len(to_fit) + len(kept) == len(points) and len(kept) == len(points) / 3
    assert batches == {1, 2, 4} and contexts == {64, 128, 256}
    assert not shapes & {(point.batch, point.context) for point in to_fit}


# -- the toggle --------------------------------------------------------------------------------------------


def test_off_while_the_batch_is_large_and_on_from_where_it_pays():
    toggle = Toggle(roofline(), EVERY_SIZE, chain=7)
    decisions = {batch: toggle(batch, 2048, 0.9) for batch in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)}
    for batch, decision in decisions.items():
        assert decision.on == (roofline().speedup(batch, 2048, 7, 0.9) >= 1.05), batch
    assert not decisions[512].on and decisions[1].on
    # The margin is between what is predicted and on.
    speedup = toggle.predicted(8, 2048, 0.9)
    for margin, on in ((speedup - 1.001, True), (speedup - 0.999, False)):
        assert Toggle(roofline(), EVERY_SIZE, chain=7, margin=margin)(8, 2048, 0.9).on == on


def test_once_on_it_stays_on_until_the_next_rollout():
    toggle = Toggle(roofline(), EVERY_SIZE, chain=7)
    assert not toggle(512, 2048, 0.9).on
    first = toggle(1, 2048, 0.9)
    assert first.on and "1 active at 2048 positions, acceptance 0.90" in first.reason
    # A larger batch, nothing accepted: alone, either would turn it off.
    assert toggle(512, 2048, 0.9) == first and toggle(1, 2048, 0.0) == first
    toggle.begin(chain=7)
    decision = toggle(512, 2048, 0.9)
    assert not decision.on and "needed 1.05" in decision.reason
    assert not toggle(1, 2048, 0.0).on


def test_with_buckets_it_predicts_what_the_engine_computes():
    buckets = Buckets((4, 8), (256, 512), (8, 32, 64), max_drafts=15)
    apart = roofline(overlap=0.0)  # so that nothing is hidden
    toggle = Toggle(apart, buckets, chain=7)
    # Three slots with 8 tokens each are 24 rows of 32, over 4 slots of up to 2 * 32 / 4 = 16 nodes each.
    expected = apart.speedup(4, 512, 7, 0.8, rows=32, attended=4 * 16)
    assert toggle.predicted(3, 300.5, 0.8) == expected
    # Eight slots with 8 tokens each need 64 rows; there is no room for chains of 15.
    expected = apart.speedup(8, 256, 7, 0.8, rows=64, attended=8 * 16)
    toggle.begin(chain=15)
    assert toggle.predicted(8, 256, 0.8) == expected
    # Four of eight in 32 rows, while the other four wait: half the tokens of a plain step of all.
    toggle.begin(chain=7)
    expected = apart.speedup(8, 256, 7, 0.8, rows=32, attended=8 * 8) / 2
    assert toggle.predicted(4, 256, 0.8, inactive=4) == expected


def test_no_room_for_a_draft_is_off():
    toggle = Toggle(roofline(), Buckets((4, 8), (256,), (12,), max_drafts=15), chain=7)
    assert toggle(8, 100, 1.0) == (False, toggle(8, 100, 1.0).reason)
    assert toggle.predicted(8, 100, 1.0) == 0.0
    assert toggle(4, 100, 1.0).on
