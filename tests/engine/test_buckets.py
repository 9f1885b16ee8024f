"""Shape buckets: ascending, holding what they must, and refused where the arithmetic could not use them."""

import dataclasses

import pytest

from rljax import target
from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.kv_cache import KEY_BLOCK
from rljax.errors import ConfigError
from rljax.numerics.rows import KEY_CHUNK


@pytest.mark.parametrize(
    ("max_slots", "max_length"), [(1, 5000), (2, 129), (3, 1), (8, 128), (13, 1000), (64, 300)]
)
def test_made_buckets_hold_everything_and_fit_the_arithmetic(max_slots, max_length):
    buckets = make_buckets(max_slots, max_length, row_invariant=True)
    for sizes in (buckets.batch, buckets.cache):
        assert list(sizes) == sorted(set(sizes))
    assert buckets.batch[0] == 2  # a lone row would take other kernels
    assert buckets.batch[-1] == max(max_slots, 2)
    assert max_length <= buckets.cache[-1] < 2 * max(max_length, 2 * KEY_BLOCK)
    for size in buckets.cache:
        assert size % (KEY_BLOCK if size <= KEY_CHUNK else KEY_CHUNK) == 0


def test_one_slot_is_enough_without_row_invariance_and_explicit_buckets_are_taken_in_order_and_once():
    assert make_buckets(4, 100, row_invariant=False).batch == (1, 2, 4)
    assert make_buckets(1, 100, row_invariant=False).batch == (1,)
    buckets = make_buckets(6, 500, True, batch_buckets=(8, 1, 4, 4), cache_buckets=(512, 64, 512))
    assert buckets == Buckets(batch=(2, 4, 8), cache=(64, 512))


def test_rounding_up():
    buckets = Buckets(batch=(2, 4, 12), cache=(64, 128, 512))
    assert [buckets.batch_for(slots) for slots in (1, 2, 3, 5, 12)] == [2, 2, 4, 12, 12]
    assert [buckets.cache_for(length) for length in (1, 64, 65, 512)] == [64, 64, 128, 512]
    assert [buckets.next_cache(length) for length in (64, 128)] == [128, 512]
    for ask, size in (buckets.batch_for, 13), (buckets.cache_for, 513), (buckets.next_cache, 512):
        with pytest.raises(ValueError, match="exceed the largest bucket"):
            ask(size)


def test_a_slot_gets_at_most_twice_its_share_of_a_pass():
    buckets = Buckets((2, 4), (128,), verify=(4, 8, 16, 64), max_drafts=7)
    assert buckets.passes(2) == [(4, 3), (8, 7), (16, 7)]  # (rows, drafts of a slot, beside its last token)
    assert buckets.passes(4) == [(8, 3), (16, 7), (32, 7)]
    buckets.too_large.add((4, 16))
    assert buckets.passes(4) == [(8, 3), (32, 7)]


def test_no_more_prompts_are_prefilled_together_than_a_step_has():
    buckets = Buckets((2, 4, 8, 16, 64), (128,))
    assert buckets.prefill()[0] == (2, 8, 64)
    for prompts, rows in ((1, (2,)), (2, (2,)), (3, (2, 8)), (8, (2, 8)), (9, (2, 8, 64)), (99, (2, 8, 64))):
        assert dataclasses.replace(buckets, prompts=prompts).prefill()[0] == rows


@pytest.mark.parametrize(
    ("batch", "cache", "message"),
    [
        ((2, 4), None, r"engine\.batch_buckets: the largest, 4, .* engine\.max_slots = 6"),
        (None, (128, 256), r"engine\.cache_buckets: the largest, 256, .* 500"),
        (None, (100, 512), r"engine\.cache_buckets: no cache has 100 positions; .*: write 128 in its place"),
        (None, (320, 512), r"engine\.cache_buckets: no cache has 320 positions; .*: write 512 in its place"),
    ],
)
def test_explicit_buckets_that_cannot_serve_are_refused(batch, cache, message):
    with pytest.raises(ConfigError, match=message):
        make_buckets(6, 500, True, batch, cache)


@pytest.mark.parametrize(
    ("max_slots", "row_multiple", "batch"),
    [(64, 1, (8, 32, 64)), (256, 1, (8, 32, 128, 256)), (8, 1, (8,)), (1, 1, (2,)), (24, 6, (12, 24))],
)
def test_accelerators_have_few(max_slots, row_multiple, batch):
    with target.tracing_for(None, row_multiple, "gpu"):
        buckets = make_buckets(max_slots, 2000, True, row_multiple=row_multiple)
        assert buckets.batch == batch and buckets.cache == (128, 256, 512, 1024, 2048)
        assert make_buckets(8, 500, True, (2, 8), (128, 512)).batch == (2, 8)  # as was asked
