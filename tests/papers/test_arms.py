"""Which strategies come into question at which batch size."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rljax.engine.buckets import Buckets
from rljax.errors import ConfigError
from rljax.papers.tlt.arms import arms_by_batch, arms_by_threshold, room_per_slot
from rljax.speculation.strategies import Strategy

NAMES = ("eagle", "srt")


def chain(nodes, drafter="srt"):
    return Strategy(nodes, 1, nodes, drafter)


def nodes_of(arms):
    return [arm.nodes for arm in arms if arm is not None]


def test_with_a_group_for_every_bucket_the_mapping_is_the_papers():
    buckets = Buckets((1, 2, 4, 8), (64,), (1024,), 48)
    strategies = [Strategy(8, 4, nodes, "eagle") for nodes in (8, 48, 16, 32)]
    arms = arms_by_batch(strategies, buckets, max_batch=8, neighbours=0)
    assert {batch: nodes_of(own) for batch, own in arms.items()} == {1: [48], 2: [32], 4: [16], 8: [8]}
    assert all(own[0] is None for own in arms.values())
    # With neighbours, as by default, there is something to choose from.
    arms = arms_by_batch(strategies, buckets, max_batch=8)
    assert {batch: nodes_of(own) for batch, own in arms.items()} == {
        1: [48, 32],
        2: [48, 16, 32],
        4: [8, 16, 32],
        8: [8, 16],
    }


def test_the_rows_of_a_pass_bound_what_a_batch_verifies():
    buckets = Buckets((2, 4, 8, 16, 32), (64,), (8, 16, 32, 64), 15)
    assert [room_per_slot(buckets, batch) for batch in buckets.batch] == [15, 15, 7, 3, 1]
    assert room_per_slot(buckets, 64) == 0  # no pass
    arms = arms_by_batch([chain(15), chain(7), chain(3)], buckets, max_batch=16)
    assert {batch: nodes_of(own) for batch, own in arms.items()} == {
        2: [15, 7],
        4: [15, 7, 3],
        8: [7, 3],
        16: [3],
        32: [],  # above max_batch
    }
    # A pass that has not room for all slots is for the likeliest nodes of the smallest trees.
    arms = arms_by_batch([chain(15), chain(7), chain(3)], buckets, max_batch=32)
    assert nodes_of(arms[32]) == [3]


def test_a_strategy_that_fits_no_pass_is_an_error():
    message = (
        r"^speculation\.strategies: srt 15/1/15 has more nodes than the 3 that a pass over a batch of 2 has"
    )
    with pytest.raises(ConfigError, match=message):
        arms_by_batch([chain(1), chain(15)], Buckets((2, 4), (64,), (8,), 15), max_batch=4)
    # Where nothing is verified at all, nothing is asked of them.
    for buckets, max_batch in ((Buckets((2, 4), (64,)), 4), (Buckets((2, 4), (64,), (8,), 15), 1)):
        assert arms_by_batch([chain(15)], buckets, max_batch) == {2: (None,), 4: (None,)}


def test_thresholds_give_each_group_the_range_of_algorithm_1():
    buckets = Buckets((2, 4, 8, 16, 32), (64,), (128, 256), 63)
    wide, small = Strategy(2, 4, 15, "eagle"), Strategy(3, 2, 6, "eagle")
    strategies = [small, chain(48, "srt"), chain(15), wide]
    arms = arms_by_threshold(strategies, (1, 4, 12), buckets, max_batch=32)
    # Keys are the last number of responses of a range; drafters share a group, neighbours have no part in it.
    assert arms == {3: (None, chain(48, "srt")), 11: (None, chain(15), wide), 32: (None, small)}
    late = arms_by_threshold([small], (4,), buckets, max_batch=8)
    assert late == {3: (None,), 32: (None, small)}  # nothing above 8 asks for it


def test_thresholds_that_do_not_fit_are_errors():
    buckets = Buckets((2, 8, 16), (64,), (64,), 15)
    strategies = [chain(15), chain(3)]
    with pytest.raises(ConfigError, match=r"^speculation\.batch_thresholds: 1 for 2 groups .* 15, 3 nodes"):
        arms_by_threshold(strategies, (1,), buckets, max_batch=16)
    assert list(arms_by_threshold(strategies, (1, 5), buckets, max_batch=16)) == [4, 16]
    message = (
        r"^speculation\.batch_thresholds: 15 nodes of each of 5 responses need a pass over 80 tokens, and"
    )
    with pytest.raises(ConfigError, match=message + r" the largest over a batch of 8 has 64"):
        arms_by_threshold(strategies, (1, 6), buckets, max_batch=16)
    with pytest.raises(ConfigError, match="3 nodes of each of 16 responses need a pass over 64 tokens"):
        arms_by_threshold(strategies, (1, 3), Buckets((2, 8, 16), (64,), (32,), 15), max_batch=16)


@st.composite
def configs(draw):
    """Buckets, a largest batch for speculation, and sizes of chains that the smallest batch has room for."""
    batches = draw(st.sets(st.integers(1, 64), min_size=1, max_size=6))
    rows = draw(st.sets(st.integers(2, 512), min_size=1, max_size=6))
    buckets = Buckets(tuple(sorted(batches)), (64,), tuple(sorted(rows)), draw(st.integers(1, 63)))
    nodes = st.integers(1, max(room_per_slot(buckets, buckets.batch[0]), 1))
    sizes = draw(st.lists(st.tuples(st.sampled_from(NAMES), nodes), max_size=9, unique=True))
    return buckets, draw(st.integers(1, 64)), sizes


@settings(max_examples=100, deadline=None)
@given(config=configs(), neighbours=st.integers(0, 3))
def test_larger_batches_never_verify_more(config, neighbours):
    buckets, max_batch, sizes = config
    batches = [batch for batch in buckets.batch if batch <= max_batch and buckets.passes(batch)]
    assume(not batches or room_per_slot(buckets, batches[0]))
    strategies = [chain(nodes, drafter) for drafter, nodes in sizes]
    arms = arms_by_batch(strategies, buckets, max_batch, neighbours)
    assert list(arms) == list(buckets.batch)
    for batch, own in arms.items():
        assert own[0] is None and len(set(own)) == len(own)
        assert list(own[1:]) == [strategy for strategy in strategies if strategy in own]
        if batch not in batches:
            assert own == (None,)
    for drafter in {drafter for drafter, _ in sizes}:
        all_nodes = {nodes for name, nodes in sizes if name == drafter}
        by_batch = [sorted(s.nodes for s in arms[batch][1:] if s.drafter == drafter) for batch in batches]
        for batch, own in zip(batches, by_batch, strict=True):
            assert own and (own[-1] <= room_per_slot(buckets, batch) or own == [min(all_nodes)])
            assert own == sorted(n for n in all_nodes if own[0] <= n <= own[-1])  # without gaps
        for smaller, larger in itertools.pairwise(by_batch):
            assert smaller[0] >= larger[0] and smaller[-1] >= larger[-1]
        if batches:
            assert set().union(*by_batch) == all_nodes
        if neighbours and len(all_nodes) > 1 and batches:
            more = arms_by_batch(strategies, buckets, max_batch, neighbours - 1)
            assert all(set(more[batch]) <= set(arms[batch]) for batch in buckets.batch)
