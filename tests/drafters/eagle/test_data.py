"""The buffer: what it keeps, in which order it is trained on, restore, packing."""

import numpy as np
import pytest

from drafters.eagle.data import DataBuffer, pack
from rljax.errors import UserError

SHAPE = (2, 4)
BYTES = 4 + 2 * 4 * 4 + 1  # a token in float32


def filled(lengths_by_step, max_bytes=10**6, **args):
    """A buffer whose sequences are told apart by their first token: step * 100 + number."""
    buffer = DataBuffer(max_bytes, SHAPE, args.pop("dtype", "float32"), **args)
    rng = np.random.default_rng(0)
    for step, lengths in lengths_by_step.items():
        buffer.begin_step(step)
        for number, length in enumerate(lengths):
            tokens = rng.integers(0, 50, length)
            tokens[0] = step * 100 + number
            buffer.add(tokens, rng.standard_normal((length, *SHAPE)), np.arange(length) >= 2)
    return buffer


def names(sequences):
    return [int(each.tokens[0]) for each in sequences]


def test_one_step_offset():
    """The step before stays, longest first; the one before that is gone."""
    buffer = filled({1: [9], 2: [3, 8, 5], 3: [4, 4]}, previous_share=1.0)
    assert names(buffer.draw(0)) == [201, 202, 200, *names(buffer.draw(0))[3:]]
    assert sorted(names(buffer.draw(0))[3:]) == [300, 301]
    buffer.begin_step(4)
    assert sorted(names(buffer.draw(0))) == [300, 301]


def test_steps_are_mixed_by_tokens():
    """Half the tokens from each, while both last: 8 | 4 4 | 5 | 4 | 3."""
    buffer = filled({2: [3, 8, 5], 3: [4, 4, 4]})
    drawn = names(buffer.draw(0))
    assert [name // 100 for name in drawn] == [2, 3, 3, 2, 3, 2]
    assert [name for name in drawn if name < 300] == [201, 202, 200]
    assert [n // 100 for n in names(filled({2: [3], 3: [4, 4]}, previous_share=0.0).draw(0))] == [3, 3, 2]


def test_order_follows_from_the_seed():
    first, second = (filled({2: [3, 8], 3: list(range(2, 20))}) for _ in range(2))
    assert names(first.draw(1)) == names(second.draw(1)) == names(first.draw(1))
    assert names(first.draw(1)) != names(first.draw(2))


@pytest.mark.parametrize(
    ("lengths", "room", "left", "refused"),
    [
        ({2: [9, 5], 3: [2, 7, 3]}, 12, [300, 301, 302], 0),  # all of the previous step had to go
        ({3: [2, 7, 3]}, 10, [301, 302], 0),
        ({3: [2, 70]}, 10, [300], 1),
    ],
)
def test_memory_is_bounded_and_long_sequences_stay(lengths, room, left, refused):
    buffer = filled(lengths, max_bytes=room * BYTES)
    assert buffer.bytes <= room * BYTES
    assert sorted(names(buffer.draw(0))) == left and buffer.refused == refused


def test_what_is_reserved_is_left_free():
    buffer = filled({2: [9], 3: [5, 3]}, max_bytes=20 * BYTES)
    buffer.reserve(10 * BYTES)
    assert sorted(names(buffer.draw(0))) == [300, 301]
    buffer.add(np.full(4, 7), np.zeros((4, *SHAPE)), np.ones(4, bool))
    assert sorted(names(buffer.draw(0))) == [7, 300]  # the shortest went for it
    buffer.add(np.zeros(11), np.zeros((11, *SHAPE)), np.ones(11, bool))
    assert buffer.refused == 1
    assert buffer.dropped_finished == 2  # not the one that was refused
    buffer.reserve(0)
    buffer.add(np.zeros(11), np.zeros((11, *SHAPE)), np.ones(11, bool))
    assert buffer.bytes == 20 * BYTES


def test_only_sequences_dropped_for_memory_are_counted():
    buffer = filled({1: [4, 4], 2: [5], 3: [5, 3]}, max_bytes=20 * BYTES)
    assert buffer.dropped_finished == 0  # the first step's have left with their step
    buffer.reserve(13 * BYTES)
    assert names(buffer.draw(0)) == [300] and buffer.dropped_finished == 2
    resumed = DataBuffer(20 * BYTES, SHAPE, "float32")
    resumed.load_state(buffer.state())
    resumed.reserve(16 * BYTES)
    assert resumed.dropped_finished == 3
    older = {name: array for name, array in buffer.state().items() if name != "dropped_finished"}
    resumed.load_state(older)  # a checkpoint from before they were counted
    assert resumed.dropped_finished == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_restore(dtype, tmp_path):
    buffer = filled({2: [3, 8, 5], 3: [4, 6]}, dtype=dtype)
    np.savez(tmp_path / "arrays.npz", **buffer.state())
    restored = DataBuffer(10**6, SHAPE, dtype)
    with np.load(tmp_path / "arrays.npz") as arrays:
        restored.load_state(dict(arrays))
    assert names(restored.draw(5)) == names(buffer.draw(5))
    for a, b in zip(restored.draw(5), buffer.draw(5), strict=True):
        assert a.states.dtype == b.states.dtype and a.step == b.step
        for name in ("tokens", "states", "response_mask"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    empty = DataBuffer(10**6, SHAPE, dtype)
    empty.load_state(DataBuffer(10**6, SHAPE, dtype).state())
    assert len(empty) == 0
    with pytest.raises(ValueError, match="another policy"):
        DataBuffer(10**6, (2, 5), dtype).load_state(buffer.state())


def test_packing_lays_every_sequence_out_once():
    sequences, found = filled({1: [6, 3, 7, 2, 2, 5]}).draw(0), {}
    for batch in pack(sequences, 10).batches(2):
        assert batch.tokens.shape == (2, 10) and batch.states.shape == (2, 10, *SHAPE)
        for row in range(2):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                here = batch.segment_ids[row] == segment
                assert np.all(np.diff(np.flatnonzero(here)) == 1)
                np.testing.assert_array_equal(batch.positions[row][here], np.arange(here.sum()))
                found[int(batch.tokens[row][here][0])] = (row, here, batch)
    assert sorted(found) == sorted(names(sequences))
    for sequence in sequences:
        row, here, batch = found[int(sequence.tokens[0])]
        np.testing.assert_array_equal(batch.tokens[row][here], sequence.tokens)
        np.testing.assert_array_equal(batch.states[row][here], sequence.states)
        # the mask is about the token behind a position
        np.testing.assert_array_equal(batch.response_mask[row][here][:-1], sequence.response_mask[1:])
        assert not batch.response_mask[row][here][-1]


def test_packing_against_padding():
    packed = pack(filled({1: [6, 4, 8, 2]}).draw(0), 10)
    assert packed.packing.num_rows == 2
    assert packed.packing.padding_fraction() == 0.0  # 6 + 4 and 8 + 2


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="less than a sequence of 12"):
        pack(filled({1: [12]}).draw(0), 10)
    with pytest.raises(ValueError, match="states"):
        DataBuffer(10**6, SHAPE).add(np.arange(3), np.zeros((3, 1, 4)), np.ones(3, bool))
