"""A small model that is trained on the policy's responses: what it learns, when it drafts with it, and that a
checkpoint goes on with the same bits.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.arguments import SmallModelArguments, checked
from drafters.base import Outcome
from drafters.small_model import SmallModelDrafter
from drafters.small_model_training import SmallModelTrainer
from rljax.errors import CheckpointError, ConfigError
from rljax.models import transformer
from rljax.models.huggingface import save_model
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.speculator import Speculator
from tests.engines import stored_pool
from tests.speculation.speculators import FEW, make_engine
from tests.tiny_policy import CONFIG, SLOTS, CheapTimes, assert_same, make_params, make_requests, outcomes

SMALL = dataclasses.replace(CONFIG, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
LENGTH, TEMPERATURE = 64, 0.7


def trainer_of(params=None, rows=1):
    params = init_params(SMALL, 1) if params is None else params
    sampling, numerics = SamplingParams(TEMPERATURE, top_k=3), Numerics(True, "float32")
    return SmallModelTrainer(SMALL, params, numerics, sampling, LENGTH, rows, 1e-2, stored_pool())


def samples_of(count, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda most: rng.integers(0, CONFIG.used_rows, rng.integers(2, most)).tolist()  # noqa: E731
    return [(draw(9), draw(30)) for _ in range(count)]


@jax.jit
def _logprobs(params, ids):
    """Of all tokens behind each of `ids` [LENGTH]."""
    numerics, positions = Numerics(True, "float32"), jnp.arange(LENGTH, dtype=jnp.int32)[None]
    attention = PackedAttention(jnp.ones_like(ids)[None], numerics)
    rope = jnp.asarray(rope_table(SMALL, LENGTH))
    hidden, _ = transformer.forward(params, SMALL, ids[None], positions, attention, rope, numerics)
    return jax.nn.log_softmax(hidden[0] @ transformer.lm_head(params, SMALL).T / TEMPERATURE)


def cross_entropy(params, samples):
    """Of all response tokens, each sample by itself."""
    found = []
    for prompt, response in samples:
        ids = np.pad(np.asarray([*prompt, *response], np.int32), (0, LENGTH - len(prompt) - len(response)))
        logprobs = np.asarray(_logprobs(params, ids))[len(prompt) - 1 :]
        found += [-logprobs[i, token] for i, token in enumerate(response)]
    return np.mean(found)


def test_the_loss_is_the_cross_entropy_of_the_responses_at_the_policys_temperature():
    params, samples = init_params(SMALL, 1), samples_of(3)
    trainer = trainer_of(params, rows=3)
    assert trainer.update() is None  # without samples
    trainer.add(samples)
    metrics = trainer.update()
    assert metrics["loss"] == pytest.approx(cross_entropy(params, samples), rel=1e-4)
    assert metrics["tokens"] == sum(len(response) for _, response in samples) and not metrics["skipped"]
    for _ in range(20):
        last = trainer.update()
    assert last["loss"] < 0.8 * metrics["loss"] and trainer.updates == 21
    assert cross_entropy(trainer.params, samples) < metrics["loss"]


def test_tokens_that_only_the_policy_has_are_not_learned():
    trainer = trainer_of(rows=3)
    trainer.add([([1, 2], [3, SMALL.vocab_size + 1, 4])])
    metrics = trainer.update()
    assert metrics["tokens"] == 2 and np.isfinite(metrics["loss"]) and not metrics["skipped"]


def test_every_row_is_trained_on_once_before_any_is_repeated_and_new_samples_come_first(monkeypatch):
    trainer, seen = trainer_of(), []
    honest = trainer._next_batch

    def next_batch():
        batch = honest()
        seen.append(int(batch.tokens[0, 0]))
        return batch

    monkeypatch.setattr(trainer, "_next_batch", next_batch)
    monkeypatch.setattr(
        trainer, "_compiled", lambda batch: lambda state, *_: (state, {"loss": jnp.float32(0.0)})
    )
    rows = [([first], [0] * (LENGTH - 1)) for first in range(10, 15)]  # each fills a row
    trainer.add(rows[:3])
    for _ in range(2):
        trainer.update()
    trainer.add(rows[3:])
    for _ in range(3 + 5):
        trainer.update()
    assert sorted(seen[:3]) == [10, 11, 12] and sorted(seen[3:5]) == [13, 14]
    assert sorted(seen[5:]) == [10, 11, 12, 13, 14]
    trainer.forget()
    assert honest() is None


def drafter_in(directory, **args):
    given = {"path": str(directory), "rows": 2, "learning_rate": 1e-2, **args}
    return SmallModelDrafter(checked("speculation.args", "small_model", SmallModelArguments, given))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    save_model(directory, SMALL, init_params(SMALL, 1), "float32")
    return directory


def attached(directory, **args):
    drafter, engine = drafter_in(directory, **args), make_engine(None, FEW)
    drafter.reads(CONFIG, None)
    drafter.attach(engine)
    return drafter


def outcomes_of(count, seed=0):
    return [Outcome(tuple(prompt), np.asarray(ids, np.int32), 0.0) for prompt, ids in samples_of(count, seed)]


def same(one, other):
    return all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_rollouts_with_a_model_that_learns_are_those_of_plain_decoding(small):
    """The same requests again and again, of which more and more drafts are accepted."""
    params, requests = make_params(), make_requests((3, 20, 8), (20, 16, 7))
    expected, _ = Scheduler(make_engine(None, FEW), SLOTS, None, None, False).run(params, requests)
    engine, drafter = make_engine(None, FEW), drafter_in(small, slices=20)
    drafter.reads(CONFIG, None)
    speculator = Speculator(engine, {"small_model": drafter}, SLOTS, times=CheapTimes())
    speculator.proposers[0].expected_rate = lambda *_: 1e9
    scheduler, accepted = Scheduler(engine, SLOTS, None, speculator, False), []
    for _ in range(3):
        completions, statistics = scheduler.run(params, requests)
        assert_same(completions, expected)
        accepted.append(statistics.accepted / statistics.drafted)
        speculator.learn(outcomes(requests, completions))
    assert min(accepted[1:]) > accepted[0]
    assert drafter.metrics()["sft/loss"] > 0 and drafter.training.state()["train.updates"] == 60


def test_it_drafts_with_what_it_has_learned_from_the_next_rollout_on(small):
    drafter = attached(small, slices=2)
    companion = drafter._companion
    before = companion.params
    companion.begin(SLOTS, companion.engine.buckets.cache[0])
    companion.enter([0], [[1, 2, 3]])
    assert companion._prefixes
    drafter.learn(outcomes_of(3))
    assert companion.params is before  # its cache is that of the old ones
    drafter.refresh(None)
    assert not same(companion.params, before) and not companion._prefixes
    trained = companion.engine.load_params(drafter.training._trainer.params)
    assert same(companion.params, trained)
    after = companion.params
    drafter.refresh(None)
    assert companion.params is after  # nothing is new


def test_a_checkpoint_goes_on_with_the_same_bits(small):
    drafter, other = attached(small, slices=2), attached(small, slices=2)
    assert drafter.state() == {}
    drafter.learn(outcomes_of(3))
    state = drafter.state()
    other.load_state(state)
    assert all(np.array_equal(leaf, other.state()[name]) for name, leaf in state.items())  # before it trains
    for each in (drafter, other):
        each.learn(outcomes_of(4, seed=1))
        each.refresh(None)
    assert drafter.state().keys() == other.state().keys()
    assert all(np.array_equal(leaf, other.state()[name]) for name, leaf in drafter.state().items())
    assert same(drafter._companion.params, other._companion.params)
    fixed = attached(small)  # trains no further
    fixed.load_state(drafter.state())
    frozen = attached(small, slices=1)  # takes weights and does not train
    frozen.training.freeze()
    weights = drafter.training.weights()
    assert weights and all(name.startswith("train.params.") for name in weights)
    frozen.load_state(weights)
    frozen.learn(outcomes_of(2, seed=1))
    for each in (fixed, frozen):
        each.refresh(None)
        assert same(each._companion.params, drafter._companion.params)
    assert fixed.training is None and frozen.training._trainer is None
    bad = {name: leaf[..., :1] for name, leaf in state.items() if leaf.ndim}
    other.load_state(bad)
    with pytest.raises(CheckpointError, match="of the drafter"):
        other.learn(outcomes_of(1))


def test_on_a_mesh_it_is_not_trained(small):
    drafter = drafter_in(small, slices=1)
    with pytest.raises(
        ConfigError, match=r"^speculation.args.slices: a small model is trained on one device"
    ):
        drafter.training.attach(types.SimpleNamespace(mesh="two devices"), SMALL, None)
