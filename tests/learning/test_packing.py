"""Packing: the chunk rule as a property, the layout of a batch by hand, and the share of padding."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax import target
from rljax.errors import UserError
from rljax.learning.packing import (
    TrainingSequence,
    build_batch,
    empty_batches,
    microbatch_sizes,
    pack_groups,
    pack_sequences,
)


@st.composite
def problems(draw):
    chunk = 8 * draw(st.integers(1, 3))
    pack_length = draw(st.integers(1, 5 * chunk))  # often not a multiple of chunk
    lengths = draw(st.lists(st.integers(1, pack_length), max_size=40))
    return lengths, pack_length, chunk


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_packing_keeps_the_rules(problem):
    lengths, pack_length, chunk = problem
    packing = pack_sequences(lengths, pack_length, chunk)
    taken = np.zeros((packing.num_rows, pack_length), int)
    for length, row, start in zip(lengths, packing.row, packing.start, strict=True):
        assert start >= 0 and start + length <= pack_length
        taken[row, start : start + length] += 1
        if length <= chunk:  # a short sequence crosses no chunk boundary
            assert start // chunk == (start + length - 1) // chunk
        else:  # a long one starts at one
            assert start % chunk == 0
    assert taken.max(initial=0) <= 1, "overlap"
    assert taken.sum() == sum(lengths)
    assert np.all(taken.any(axis=1)), "an empty row is counted"
    expected = 1 - sum(lengths) / max(taken.size, 1) if lengths else 0
    assert packing.padding_fraction() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 2**31), st.sampled_from([(1, 1), (3, 1), (4, 1), (4, 2), (4, 4)]))
def test_batches_round_trip(problem, seed, microbatching):
    lengths, pack_length, chunk = problem
    rng = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        prompt, response = np.split(rng.integers(1, 1000, length), [int(rng.integers(1, length + 1))])
        logprobs = rng.normal(size=len(response)).astype(np.float32)
        advantage, weight = np.float32(rng.normal()), np.float32(rng.uniform(0.1, 1))
        sampled = rng.random(len(response)) < 0.8  # between them, what tools answered
        rest = (logprobs, float(advantage), float(weight), sampled)
        sequences.append(TrainingSequence(prompt, response, *rest))
    packing = pack_sequences(lengths, pack_length, chunk)
    microbatches = packing.microbatches(*microbatching)
    batches = [build_batch(sequences, packing, rows) for rows in microbatches]
    if not batches:
        assert not lengths
        return
    # Micro-batches in order are all rows in order.
    batch = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    for i, sequence in enumerate(sequences):
        where = np.s_[packing.row[i], packing.start[i] : packing.start[i] + lengths[i]]
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        np.testing.assert_array_equal(batch.tokens[where], ids)
        np.testing.assert_array_equal(batch.positions[where], np.arange(lengths[i]))
        np.testing.assert_array_equal(batch.targets[where][:-1], ids[1:])
        segment = batch.segment_ids[where][0]
        assert segment > 0
        # Nobody else in the row has the id.
        assert np.sum(batch.segment_ids[packing.row[i]] == segment) == lengths[i]
        mask, sampled = batch.response_mask[where], sequence.sampled_mask
        np.testing.assert_array_equal(mask, [*[False] * (len(sequence.prompt_ids) - 1), *sampled, False])
        np.testing.assert_array_equal(batch.targets[where][mask], sequence.response_ids[sampled])
        np.testing.assert_array_equal(batch.rollout_logprobs[where][mask], sequence.rollout_logprobs[sampled])
        np.testing.assert_array_equal(batch.advantages[where][mask], np.float32(sequence.advantage))
        np.testing.assert_array_equal(batch.weights[where][mask], np.float32(sequence.weight))
    assert np.sum(batch.segment_ids > 0) == sum(lengths)
    for outside in (batch.rollout_logprobs, batch.advantages, batch.weights):
        assert np.all(outside[~batch.response_mask] == 0)
    for nothing in (batch.tokens, batch.positions, batch.targets, batch.response_mask):
        assert np.all(nothing[batch.segment_ids == 0] == 0)


def test_a_batch_by_hand():
    sequences = [
        TrainingSequence([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3], advantage=2.0, weight=0.25),
        TrainingSequence([6], [7], None, advantage=-1.0, weight=0.5),
    ]
    packing = pack_sequences([5, 2], pack_length=8, chunk=8)
    np.testing.assert_array_equal(packing.start, [0, 5])
    batch = build_batch(sequences, packing, range(2))
    assert batch.tokens.shape == (2, 8)
    np.testing.assert_array_equal(batch.tokens[0], [1, 2, 3, 4, 5, 6, 7, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 0, 1, 0])
    np.testing.assert_array_equal(batch.segment_ids[0], [1, 1, 1, 1, 1, 2, 2, 0])
    np.testing.assert_array_equal(batch.targets[0], [2, 3, 4, 5, 0, 7, 0, 0])
    np.testing.assert_array_equal(batch.response_mask[0], [0, 1, 1, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(batch.rollout_logprobs[0], np.float32([0, -0.1, -0.2, -0.3, 0, 0, 0, 0]))
    np.testing.assert_array_equal(batch.advantages[0], np.float32([0, 2, 2, 2, 0, -1, 0, 0]))
    np.testing.assert_array_equal(batch.weights[0], np.float32([0, 0.25, 0.25, 0.25, 0, 0.5, 0, 0]))
    assert not any(np.any(field[1]) for field in jax.tree.leaves(batch))  # nothing was packed into it
    assert {field.dtype.name for field in jax.tree.leaves(batch)} == {"int32", "float32", "bool"}


def test_short_sequences_fill_the_tail_of_a_long_one():
    packing = pack_sequences([300, 200, 12, 256], pack_length=768, chunk=256)
    assert packing.num_rows == 1
    np.testing.assert_array_equal(packing.start, [0, 300, 500, 512])


def test_micro_batches_leave_hardly_a_row_empty():
    packing = pack_sequences([8] * 10, pack_length=8, chunk=8)
    assert packing.microbatches(4) == [range(4), range(4, 8), range(8, 10)]
    assert packing.microbatches(6) == [range(6), range(6, 9), range(9, 10)]
    assert packing.microbatches(4, row_multiple=4) == [range(4), range(4, 8), range(8, 12)]
    with target.tracing_for(None, 1, "gpu"):  # every other size, so that half as many programs are compiled
        assert packing.microbatches(4) == [range(4), range(4, 8), range(8, 9), range(9, 10)]
        assert microbatch_sizes(8) == [8, 2]
        assert packing.microbatches(8) == [range(8), range(8, 10)]
    assert microbatch_sizes(8) == [8, 4, 2, 1]
    assert packing.padding_fraction(12) == pytest.approx(2 / 12)
    with pytest.raises(ValueError, match="multiple"):
        packing.microbatches(4, row_multiple=3)


def test_padding_of_a_long_tail_is_small():
    """256 lengths, lognormal with a 75th percentile of 100, at most 500; micro-batches of 4 rows."""
    fractions = []
    for seed in range(5):
        lengths = np.random.default_rng(seed).lognormal(np.log(100) - 0.674 * 0.8, 0.8, 256)
        packing = pack_sequences(np.clip(lengths, 1, 500).astype(int), 768)
        fractions.append(packing.padding_fraction(packing.microbatches(4)[-1].stop))
    assert np.mean(fractions) < 0.05
    assert max(fractions) < 0.1


GOOD = TrainingSequence([1], [2], [0.0], 0.0, 1.0)


def test_bad_sequences_and_impossible_lengths_are_named():
    """A sequence that is longer than a row is the user's to mend."""
    for sequences, message in (
        ([GOOD, GOOD], "2 sequences"),
        ([TrainingSequence([1], [2, 3], [0.0, 0.0], 0.0, 1.0)], "sequence 0: 3 tokens"),
        ([TrainingSequence([], [2, 3], [0.0, 0.0], 0.0, 1.0)], "sequence 0: the prompt is empty"),
        ([TrainingSequence([1], [2], [0.0, 0.0], 0.0, 1.0)], "sequence 0: 2 rollout_logprobs for 1"),
        ([TrainingSequence([1], [2], [0.0], 0.0, 1.0, [True] * 3)], "sampled_mask has 3 entries for 1 resp"),
    ):
        with pytest.raises(ValueError, match=message):
            build_batch(sequences, pack_sequences([2], 8, chunk=8), range(1))
    with pytest.raises(ValueError, match="at least 1"):
        pack_sequences([2, 0], 8)
    with pytest.raises(UserError, match=r"training\.pack_length: 512 is less than a sequence of 513 tokens"):
        pack_sequences([3, 513], 512)


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 5), st.integers(0, 2**31))
def test_groups_lie_side_by_side_behind_their_prompt_and_in_one_microbatch(problem, rows, seed):
    lengths, pack_length, chunk = np.asarray(problem[0], int), *problem[1:]
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 6, len(lengths))
    num_prompt = {group: rng.integers(1, lengths[groups == group].min() + 1) for group in set(groups)}
    prompts = [[group] * num_prompt[group] for group in groups]
    packing = pack_groups(lengths, prompts, pack_length, rows, chunk)
    own = lengths - packing.shared
    taken = np.zeros((packing.num_rows, pack_length), int)
    for row, start, count in zip(packing.row, packing.start, own, strict=True):
        taken[row, start : start + count] += 1
    assert taken.max(initial=0) <= 1 and taken.sum() == own.sum()
    order, first = np.lexsort((packing.start, packing.row)), None
    for before, i in zip([None, *order], order, strict=False):
        start, end = packing.start[i], packing.start[i] + own[i]
        if packing.shared[i]:
            common = num_prompt[groups[i]] - 1
            assert packing.shared[i] == common and groups[before] == groups[i]
            assert (packing.row[before], packing.start[before] + own[before]) == (packing.row[i], start)
            assert (first + common) // chunk == (end - 1) // chunk
        else:
            first = start
            assert start // chunk == (end - 1) // chunk if own[i] <= chunk else start % chunk == 0
    for group in set(groups):
        members = np.flatnonzero(groups == group)
        alone = pack_groups(lengths[members], [prompts[i] for i in members], pack_length, rows, chunk)
        if alone.num_rows <= rows:
            assert len(set(packing.row[members] // rows)) == 1


def test_as_many_responses_as_a_chunk_holds_read_one_copy_of_their_prompt():
    prompt = list(range(300))  # its last token is computed for each response
    lengths = [300 + 50, 300 + 50, 300 + 50, 300 + 50, 300 + 200, 300 + 400]
    packing = pack_groups(lengths, [prompt] * 6, 1024, 4, 256)
    assert packing.shared.tolist() == [0, 299, 299, 299, 0, 0]
    assert (packing.start[1:4] - packing.start[0]).tolist() == [350, 401, 452]
    assert packing.padding_fraction() == 1 - (299 + 4 * 51 + 500 + 700) / (packing.num_rows * 1024)


def test_a_batch_for_an_accelerator_says_how_many_chunks_its_sequences_lie_in():
    def span_of(*lengths):
        packing = pack_sequences(lengths, 4096)
        sequences = [
            TrainingSequence(np.zeros(1), np.zeros(length - 1), None, 0.0, 0.0) for length in lengths
        ]
        return build_batch(sequences, packing, range(packing.num_rows)).span

    assert span_of(2000) is None
    with target.tracing_for(None, 1, "gpu"):
        found = [span_of(*each) for each in ([200, 256], [257], [200, 1024], [1025], [4000])]
        spans = [batch.span for batch in empty_batches([2], 5 * 256)]
    assert found == [1, 4, 4, 16, 16] and spans == [1, 4, 5]
