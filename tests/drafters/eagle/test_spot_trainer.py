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
def sequences(variant="eagle3"):
    """(tokens, states, response_mask) of rollouts, all but the first two tokens responses."""
    tokens = [row[:n] for row, n in zip(rollouts(len(LENGTHS), 40), LENGTHS, strict=True)]
    states = policy_states(HeadConfig(variant, POLICY), tokens)
    return [(*pair, np.arange(n) >= 2) for *pair, n in zip(tokens, states, LENGTHS, strict=True)]


def make(head="eagle3", training=None, params=None, pack_length=48, seed=7, dtype="float32", **others):
    """A trainer of a head, or of a fresh one of a variant."""
    head = HeadConfig(head, POLICY) if isinstance(head, str) else head
    training = training or dataclasses.replace(published_training(head.variant), steps=2)
    params = init_head(head, policy_params(), 0) if params is None else params
    given = {"numerics": NUMERICS, "buffer": BufferSettings(dtype=dtype), "pool": POOL} | others
    shape = {"pack_length": pack_length, "rows": 2, "seed": seed, "params": params}
    return HeadTrainer(head, training, head_optimizer(1e-2, clip_norm=1.0), ROPE, **given, **shape)


def fill(trainer, members, step=1):
    trainer.begin_step(step)
    for index in members:
        trainer.add(*sequences(trainer.head.variant)[index])


def add_rollouts(trainer, tokens):
    """Rollouts of the policy, of a step that has begun."""
    for row, states in zip(tokens, policy_states(trainer.head, tokens), strict=True):
        trainer.add(row, states, np.arange(len(row)) >= 2)


def learn(trainer, slices=160):
    """Slices over 32 rollouts, of two steps."""
    for step in range(2):
        trainer.begin_step(step)
        add_rollouts(trainer, rollouts(16, 48, step))
    for _ in range(slices):
        trainer.slice(shared())


def measured(head, params, training=None):
    """Means of the metrics of rollouts that `learn` has not seen: a slice's are from before its update."""
    found = []
    for pair in np.split(rollouts(16, 48, 99), 8):
        trainer = make(head, training, params)
        add_rollouts(trainer, pair)
        found.append(trainer.slice(shared()))
    return {name: np.mean([each[name] for each in found]) for name in found[0]}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def held(trainer):
    return trainer.state()["buffer.lengths"].tolist()


@pytest.mark.default_cases("eagle3")
@pytest.mark.parametrize("variant", ["eagle3", "hass"])
def test_slices_learn_the_policy_and_touch_nothing_else(variant):
    """The next token, and as many behind it as they are trained for. The policy's arrays, the params handed
    out before, and those the trainer was given keep their bits.
    """
    given = init_head(HeadConfig(variant, POLICY), policy_params(), 0)
    before, trainer = jax.tree.map(np.array, (policy_params(), given)), make(variant, params=given)
    handed_out = trainer.params
    learn(trainer)
    same(before, (policy_params(), given))
    same(handed_out, given)
    assert jax.tree.map(jnp.shape, trainer.params) == head_shapes(trainer.head)
    assert trainer.updates == 160 == trainer.metrics()["slices"]
    early, late = (measured(variant, params) for params in (given, trainer.params))
    for name in ("agreement/1", "agreement/2", "accept_length"):
        assert late[name] > early[name] + 0.15


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
    trainer.add(*sequences()[5])
    assert trainer.slice(shared())["tokens"] == 5
    assert trainer.slice(shared())["tokens"] == 85  # the next pass


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
        begun.add([sequences()[0]])
        for _ in range(updates):
            begun.update()
        return begun.copy()

    first = session(None, 2)
    on_the_host = {name: np.asarray(leaf) for name, leaf in first.items()}
    assert int(on_the_host["train.updates"]) == 2
    assert not any(name.endswith(("embed", "lm_head")) for name in on_the_host)  # trained arrays alone
    assert set(on_the_host) == {name for name in make().state() if name.startswith("train.")}
    same(session(on_the_host, 2), session(None, 4))
    with pytest.raises(CheckpointError):
        HeadSession(make("eagle"), shared(), on_the_host)


def test_the_state_of_another_head_is_refused():
    trainer = make("eagle")
    with pytest.raises(CheckpointError, match=r"train\.params\.fc is float32\[32, 64\] in the checkpoint"):
        make().load_state(trainer.state())
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
    tokens, states, mask = sequences()[1]
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
    """Each window is a sequence of its own."""
    trainer = make()  # two steps unrolled: overlaps of 3
    tokens, states, _ = zip(*(sequences()[i] for i in (0, 1, 7)), strict=True)
    tokens, states, mask = np.concatenate(tokens), np.concatenate(states), np.arange(110) >= 2
    trainer.begin_step(1)
    trainer.add(tokens, states, mask)
    state, cut = trainer.state(), windows(110, 48, 3)
    assert held(trainer) == [each.stop - each.start for each in cut] and len(cut) > 2
    for name, whole in ("tokens", tokens), ("response_mask", mask), ("states", states):
        stored = np.concatenate([whole[each].reshape(-1) for each in cut])
        np.testing.assert_array_equal(state[f"buffer.{name}"].view(whole.dtype), stored)
    trainer.begin_step(3)
    trainer.add(tokens, states, np.arange(110) >= 100)  # windows of the prompt alone teach nothing
    assert held(trainer) == [each.stop - each.start for each in cut if each.stop > 100]


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


@pytest.mark.long  # above, in float32
def test_states_in_bfloat16():
    numerics = Numerics(row_invariant=False, compute_dtype="bfloat16")
    trainer = make("eagle", training=HeadTraining(), numerics=numerics, dtype="bfloat16")
    fill(trainer, [0])
    assert trainer.slice(shared())["skipped"] == 0
    assert trainer.metrics()["buffer_bytes"] == 40 * (4 + 1 + 2 * 32)
