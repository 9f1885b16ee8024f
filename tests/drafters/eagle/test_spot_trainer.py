"""The head's trainer: what a slice takes, what it leaves alone, resuming, windows, bad numbers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle.data import pack_next, windows
from drafters.eagle.model import HeadConfig, head_shapes, init_head
from drafters.eagle.objective import HeadTraining, published_training
from drafters.eagle.spot_trainer import BufferSettings, HeadSession, HeadTrainer, head_optimizer
from rljax.engine.executables import ExecutablePool
from rljax.errors import CheckpointError
from rljax.numerics.rows import Numerics
from tests.drafters.eagle.test_data import filled
from tests.drafters.eagle.tiny import NUMERICS, POLICY, ROPE, policy_params, policy_states, rollouts, shared

POOL = ExecutablePool(row_invariant=False)
LENGTHS = (40, 33, 21, 40, 12, 5, 28, 37)


@functools.cache
def sequences(variant):
    """(tokens, states, response_mask) of rollouts, all but the first two tokens responses."""
    tokens = [row[:n] for row, n in zip(rollouts(len(LENGTHS), 40), LENGTHS, strict=True)]
    states = policy_states(HeadConfig(variant, POLICY), tokens)
    return [(*pair, np.arange(n) >= 2) for *pair, n in zip(tokens, states, LENGTHS, strict=True)]


def long_sequence():
    """As long as three of them, and longer than two rows."""
    tokens, states, _ = zip(*(sequences("eagle")[i] for i in (0, 1, 7)), strict=True)
    return np.concatenate(tokens), np.concatenate(states)


def make(
    variant="eagle", pack_length=48, training=None, seed=7, numerics=NUMERICS, pool=POOL, dtype="float32"
):
    head = HeadConfig(variant, POLICY)
    training = training or dataclasses.replace(published_training(variant), steps=2)
    settings, params = BufferSettings(dtype=dtype), init_head(head, policy_params(), 0)
    return HeadTrainer(
        head, training, head_optimizer(1e-2), ROPE, numerics, settings, pack_length, 2, seed, params, pool
    )


def fill(trainer, members, step=1):
    trainer.begin_step(step)
    for index in members:
        trainer.add(*sequences(trainer.head.variant)[index])


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def held(trainer):
    return trainer.state()["buffer.lengths"].tolist()


def test_slices_learn_and_touch_nothing_else():
    """The policy's arrays, the params handed out before, and those the trainer was given keep their bits."""
    policy, given = policy_params(), init_head(HeadConfig("eagle", POLICY), policy_params(), 0)
    before = jax.tree.map(np.array, policy)
    trainer = make()
    fill(trainer, range(len(LENGTHS)))
    handed_out = trainer.params
    losses = [trainer.slice(shared())["loss"] for _ in range(30)]
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    same(before, policy)
    same(handed_out, given)
    assert jax.tree.map(jnp.shape, trainer.params) == head_shapes(trainer.head)
    assert trainer.updates == 30 and trainer.metrics()["slices"] == 30


def test_a_pass_takes_every_sequence_once_and_what_finishes_meanwhile_joins_it():
    trainer = make()
    assert trainer.slice(shared()) is None  # nothing to train on
    fill(trainer, range(len(LENGTHS)))
    tokens = 0
    while tokens < sum(LENGTHS):
        metrics = trainer.slice(shared())
        assert metrics["padding"] == pytest.approx(1 - metrics["tokens"] / 96)
        tokens += metrics["tokens"]
    assert tokens == sum(LENGTHS) and len(trainer.state()["trained"]) == len(LENGTHS)
    trainer = make()
    fill(trainer, [0, 3])
    assert trainer.slice(shared())["tokens"] == 80
    trainer.add(*sequences("eagle")[5])
    assert trainer.slice(shared())["tokens"] == 5
    assert trainer.slice(shared())["tokens"] == 85  # the next pass


def test_the_step_before_comes_first_with_its_long_ones():
    trainer = make()
    fill(trainer, [4, 1, 0, 7], step=1)
    trainer.begin_step(2)
    assert held(trainer) == [12, 33, 40, 37]
    assert trainer.slice(shared())["tokens"] == 40 + 37  # 33 and 12 fit behind neither
    assert trainer.slice(shared())["tokens"] == 33 + 12
    trainer.begin_step(3)
    assert trainer.slice(shared()) is None


def test_a_resumed_trainer_continues_bit_for_bit(tmp_path):
    trainer = make()
    fill(trainer, range(4))
    for _ in range(2):
        trainer.slice(shared())
    fill(trainer, range(4, 8), step=2)
    trainer.slice(shared())  # in the middle of a pass
    np.savez(tmp_path / "state.npz", **trainer.state())
    resumed = make(seed=0)
    with np.load(tmp_path / "state.npz") as arrays:
        resumed.load_state(dict(arrays))
    for _ in range(6):
        assert trainer.slice(shared()) == resumed.slice(shared())
    state = trainer.state()
    same(state, resumed.state())
    assert all(array.flags.writeable for array in state.values())  # not a view of what slices give up
    before = {name: array.copy() for name, array in state.items()}
    for each in (trainer, resumed):
        fill(each, [0], step=3)
    assert trainer.slice(shared()) == resumed.slice(shared())
    same(trainer.params, resumed.params)
    same(before, state)


def test_a_session_goes_on_with_weights_and_moments_of_another_one():
    def session(saved, updates):
        begun = HeadSession(make(), shared(), saved)
        begun.add([sequences("eagle")[0]])
        for _ in range(updates):
            begun.update()
        return begun.copy()

    first = session(None, 2)
    on_the_host = {name: np.asarray(leaf) for name, leaf in first.items()}
    assert int(on_the_host["train.updates"]) == 2
    assert not any("embed" in name or "lm_head" in name for name in on_the_host)  # trained arrays alone
    assert set(on_the_host) == {name for name in make().state() if name.startswith("train.")}
    same(session(on_the_host, 2), session(None, 4))
    with pytest.raises(CheckpointError):
        HeadSession(make("eagle3"), shared(), on_the_host)


def test_the_state_of_another_head_is_refused():
    trainer = make("eagle")
    with pytest.raises(CheckpointError, match=r"train\.params\.fc is float32\[32, 64\] in the checkpoint"):
        make("eagle3").load_state(trainer.state())
    for change, told in (("pop", "absent in the checkpoint"), ("add", "but absent in this run")):
        state = trainer.state()
        if change == "pop":
            del state["train.params.layer.q"]
        else:
            state["train.params.norm"] = np.zeros(3)
        with pytest.raises(CheckpointError, match=told):
            trainer.load_state(state)


def test_bad_numbers_are_skipped_and_counted():
    trainer = make()
    fill(trainer, [0])
    trainer.slice(shared())
    tokens, states, mask = sequences("eagle")[1]
    before = {name: array for name, array in trainer.state().items() if name.startswith("train.")}
    trainer.begin_step(3)  # forgets the good ones
    trainer.add(tokens, np.full_like(states, np.nan), mask)
    metrics = trainer.slice(shared())
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["loss"])
    same(before, {name: trainer.state()[name] for name in before})
    assert trainer.metrics()["skipped"] == 1 and trainer.updates == 1
    fill(trainer, [0], step=5)
    assert trainer.slice(shared())["skipped"] == 0 and trainer.updates == 2


def test_one_shape_is_compiled():
    pool = ExecutablePool(row_invariant=False)
    trainer = make(pool=pool)
    before = trainer.state()
    assert trainer.warm_up(shared()) > 0  # seconds
    same(before, trainer.state())
    assert pool.compilations == 1 and trainer.updates == 0
    for members in ([5], range(8), [0, 1]):
        fill(trainer, members)
        trainer.slice(shared())
    assert pool.compilations == 1 and trainer.updates == 3


@pytest.mark.parametrize(
    ("length", "pack_length", "overlap"), [(40, 16, 3), (17, 16, 2), (100, 9, 8), (33, 32, 4)]
)
def test_windows_hold_every_start_with_all_its_steps(length, pack_length, overlap):
    """With overlap k + 1, start s lies in a window with token s + k + 1, the last that its step k needs."""
    cut = windows(length, pack_length, overlap)
    sizes = [each.stop - each.start for each in cut]
    assert max(sizes) <= pack_length and cut[0].start == 0 and cut[-1].stop == length
    for start in range(length - overlap):
        assert any(each.start <= start and start + overlap < each.stop for each in cut)
    for a, b in itertools.pairwise(cut):
        assert a.stop - b.start == overlap
    assert min(sizes[:-1]) == max(sizes) and sizes[0] - sizes[-1] < len(cut)


def test_a_long_sequence_is_cut():
    trainer = make()  # two steps unrolled: overlaps of 3
    tokens, states = long_sequence()
    trainer.begin_step(1)
    trainer.add(tokens, states, np.arange(110) >= 2)
    state, cut = trainer.state(), windows(110, 48, 3)
    assert held(trainer) == [each.stop - each.start for each in cut] and len(cut) > 2
    np.testing.assert_array_equal(state["buffer.tokens"], np.concatenate([tokens[each] for each in cut]))
    stored = np.concatenate([states[each].reshape(-1) for each in cut])
    np.testing.assert_array_equal(state["buffer.states"].view(np.float32), stored)
    trainer.begin_step(3)
    trainer.add(tokens, states, np.arange(110) >= 100)  # windows of the prompt alone teach nothing
    assert held(trainer) == [each.stop - each.start for each in cut if each.stop > 100]


def test_a_window_is_a_sequence_of_its_own():
    """Of the later part, a trainer with short rows learns what one that is given only that part learns."""
    tokens, states = long_sequence()
    _, late, last = windows(110, 48, 3)
    mask = (np.arange(110) >= 48) & (np.arange(110) < last.start + 2)  # only `late` can predict these
    whole, part = make(), make()
    whole.begin_step(1)
    whole.add(tokens, states, mask)
    part.begin_step(1)
    part.add(tokens[late], states[late], mask[late])
    assert held(whole) == held(part)
    assert whole.slice(shared()) == part.slice(shared())
    same(whole.params, part.params)


def test_batches_follow_the_order():
    drawn = filled({1: [6, 9, 4, 3, 2]}).draw(0)
    drawn.sort(key=lambda sequence: sequence.number)
    packed = pack_next(drawn, 10, 2)
    assert [each.length for each in packed.sequences] == [6, 9, 4]  # 3 and 2 fit nowhere
    (batch,) = packed.batches(2)
    assert batch.tokens.shape == (2, 10) and int((batch.segment_ids > 0).sum()) == 19
    assert [each.length for each in pack_next(drawn[3:], 10, 2).sequences] == [3, 2]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="rope: 256 positions, but 2 steps need 257"):
        make(pack_length=256)
    with pytest.raises(ValueError, match="pack_length: 3 is too short"):
        make(pack_length=3)


def test_states_in_bfloat16():
    numerics = Numerics(row_invariant=False, compute_dtype="bfloat16")
    trainer = make(training=HeadTraining(), numerics=numerics, dtype="bfloat16")
    fill(trainer, [0])
    assert trainer.slice(shared())["skipped"] == 0
    assert trainer.metrics()["buffer_bytes"] == 40 * (4 + 1 + 2 * 32)
