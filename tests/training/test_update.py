"""The update step against the same loss without packing, chunks or micro-batches, and against itself, cut."""

import dataclasses
import functools
import os
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax import target
from rljax.algorithms.losses import aggregation_weights
from rljax.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import TrainingSequence, build_batch, microbatch_sizes, pack_sequences
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics import products
from rljax.numerics.cast_weight import CastWeight
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.training.critic import Critic, ValueTargets
from rljax.training.objectives import gradients, policy_objective
from rljax.training.scoring import score_packed
from rljax.training.update import Recipe, Trainer
from rljax.training.weight_copies import weight_copies, with_copies
from tests.engines import scaled_params, stored_pool
from tests.kernels.compilation import HOPPER, absent_mesh, compile_for

CONFIG = ModelConfig("qwen3", 23, 16, 1, 2, 1, 8, 24, tie_embeddings=True, qk_norm=True, max_positions=512)
ALGORITHM = AlgorithmConfig(clip_low=0.2, clip_high=0.3, kl_coefficient=0.1)
PACK_LENGTH = 60
POOL = stored_pool()  # programs are compiled once for the module


@pytest.fixture(scope="module")
def params():
    return scaled_params(CONFIG, 3.0, 1.1)


@pytest.fixture(scope="module")
def sequences():
    """Six responses with rollout logprobs near enough to the policy's that some are clipped and some not."""
    rng = np.random.default_rng(0)
    lengths = [20, 3, 14, 9, 17, 6]
    weights = aggregation_weights(lengths, "sequence_mean")
    return [
        TrainingSequence(
            prompt_ids=rng.integers(0, CONFIG.vocab_size, 4),
            response_ids=rng.integers(0, CONFIG.vocab_size, length),
            rollout_logprobs=-np.log(CONFIG.vocab_size) + 0.3 * rng.standard_normal(length),
            advantage=float(advantage),
            weight=float(weight),
        )
        for length, weight, advantage in zip(lengths, weights, rng.standard_normal(6), strict=True)
    ]


@functools.cache
def optimizer():
    """Its state has the gradients of the last update."""
    rule = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
    return optax.chain(optax.trace(decay=0.0), rule)


def gradients_of(state):
    return optax.tree.get(state.optimizer_state, "trace")


def trainer(rows=4, pool=POOL, config=CONFIG, sampling=None, dtype="float32", form=None, **training):
    training = TrainingConfig(pack_length=PACK_LENGTH, rows_per_microbatch=rows, **training)
    numerics = Numerics(compute_dtype=dtype, measured_form=form)
    recipe = Recipe(sampling or SamplingParams(), ALGORITHM, training, optimizer())
    return Trainer(config, numerics, recipe, pool)


def microbatches(sequences, rows):
    packing = pack_sequences([sequence.length for sequence in sequences], PACK_LENGTH)
    return [build_batch(sequences, packing, batch) for batch in packing.microbatches(rows)]


def assert_close(tree, other, tolerance=1e-5):
    """Leaf by leaf, relative to the leaf's largest entry."""
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(a).max(), 1e-6))


def response_logprobs(params, sequences):
    """Logprobs of each response, a list of float32 [L]: a sequence a row, right-padded, the whole softmax."""
    length = max(sequence.length for sequence in sequences)
    ids = np.zeros((len(sequences), length), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: sequence.length] = np.concatenate([sequence.prompt_ids, sequence.response_ids])
    numerics = Numerics(row_invariant=False)
    attention = PackedAttention(jnp.ones_like(ids), numerics)
    rope = jnp.asarray(rope_table(CONFIG, length))
    positions = jnp.broadcast_to(jnp.arange(length)[None], ids.shape)
    hidden, _ = transformer.forward(params, CONFIG, jnp.asarray(ids), positions, attention, rope, numerics)
    logprobs = jax.nn.log_softmax(transformer.logits(params, CONFIG, hidden, numerics))
    found = []
    for i, sequence in enumerate(sequences):
        first, last = len(sequence.prompt_ids), sequence.length
        found.append(logprobs[i, jnp.arange(first - 1, last - 1), ids[i, first:last]])
    return found


def textbook_loss(params, reference_params, sequences):
    """GRPO (Eq. 3 and 4), written out: mean over responses of means over their tokens; and the logprobs."""
    total = 0.0
    scored = response_logprobs(params, sequences)
    for sequence, logprobs, reference_logprobs in zip(
        sequences, scored, response_logprobs(reference_params, sequences), strict=True
    ):
        ratio = jnp.exp(logprobs - jnp.asarray(sequence.rollout_logprobs, jnp.float32))
        clipped = jnp.clip(ratio, 0.8, 1.3)
        gain = jnp.minimum(ratio * sequence.advantage, clipped * sequence.advantage)
        log_r = reference_logprobs - logprobs
        penalty = jnp.exp(log_r) - log_r - 1.0
        total += jnp.mean(gain - 0.1 * penalty) / len(sequences)
    return -total, jnp.concatenate(scored)


def test_against_the_textbook(params, sequences):
    reference_params = jax.tree.map(lambda leaf: leaf * 0.9, params)
    textbook = jax.value_and_grad(lambda p: textbook_loss(p, reference_params, sequences), has_aux=True)
    (loss, logprobs), expected = jax.jit(textbook)(params)
    update = trainer(logprob_chunk=16)
    batches = microbatches(sequences, 2)
    reference = update.score(reference_params, batches)
    state, metrics = update.update(update.init(params), batches, reference)
    assert metrics["loss/policy"] + 0.1 * metrics["loss/kl"] == pytest.approx(float(loss), rel=1e-5)
    assert_close(expected, gradients_of(state), tolerance=3e-5)
    assert 0 < metrics["policy/clip_fraction_low"] < 1 and 0 < metrics["policy/clip_fraction_high"] < 1
    rollout = np.concatenate([sequence.rollout_logprobs for sequence in sequences])
    assert metrics["update/tokens"] == len(rollout)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(logprobs - rollout).mean(), rel=1e-4)


def test_packing_microbatches_chunks_and_remat_change_nothing(params, sequences):
    packed, before = microbatches(sequences, 4), jax.device_get(params)
    assert len(packed) == 1 and packed[0].segment_ids.max() > 1

    def updated(update, batches):
        state, metrics = update.update(update.init(params), batches)
        assert int(state.updates) == 1
        changes = jax.tree.map(np.subtract, jax.device_get(state.params), before)
        return gradients_of(state), changes, metrics

    gradients, changes, metrics = updated(trainer(), packed)
    one_per_row = [batch for sequence in sequences for batch in microbatches([sequence], 1)]
    for cut in (one_per_row, microbatches(sequences, 1)):
        assert len(cut) > 1
        update = trainer(rows=1, remat=True, logprob_chunk=10)
        other_gradients, other_changes, other_metrics = updated(update, cut)
        assert_close(gradients, other_gradients)
        assert metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-6)
        # Adam's first step is nearly a sign: small gradients decide it.
        assert_close(changes, other_changes, tolerance=1e-2)
    jax.tree.map(np.testing.assert_array_equal, before, params)  # the caller's are left alone


def test_supervised_updates_learn_the_responses(params, sequences):
    update = trainer()
    batches = microbatches(sequences, 4)
    state, losses = update.init(params), []
    scored = jax.jit(lambda params: response_logprobs(params, sequences))(params)
    expected = -sum(
        sequence.weight * float(np.sum(logprobs))
        for sequence, logprobs in zip(sequences, scored, strict=True)
    )
    for _ in range(8):
        state, metrics = update.supervised_update(state, batches)
        losses.append(metrics["loss/supervised"])
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert 0 < metrics["entropy"] < np.log(CONFIG.vocab_size)


class NamingPool(ExecutablePool):
    """Notes which programs it is asked for and compiles none: their results are zeros. Once it is `complete`,
    it refuses others.
    """

    def __init__(self):
        super().__init__()
        self.shapes, self.complete = {}, False

    def get(self, key, function, args, donate_argnums=()):
        if key not in self.shapes:
            assert not self.complete, f"{key[0]} compiles late"
            self.shapes[key] = jax.eval_shape(function, *args)

        def program(*_):
            assert self.complete or key[0] != "begin", "sums of gradients are made before an update"
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.shapes[key])

        program.out_info = self.shapes[key]
        return program

    def number_of(self, kind):
        return sum(key[0] == kind for key in self.shapes)


@pytest.mark.parametrize(("platform", "reference", "programs"), [("cpu", False, 3), ("gpu", True, 2)])
def test_nothing_compiles_after_warm_up(params, sequences, platform, reference, programs):
    """A CPU has programs of 4, 2 and 1 rows; an accelerator, for which compiling takes longer, of 4 and 1."""
    with target.tracing_for(jax.devices()[0], 1, platform):
        pool = NamingPool()
        update = trainer(rows=4, pool=pool)
        state = update.init(params)
        update.warm_up(state, reference)
        if reference:
            update.warm_up_score(state.params, unfiltered=True)
        assert pool.number_of("gradients") == programs
        pool.complete = True
        for rows in microbatch_sizes(4):
            batches = microbatches(sequences, rows)
            logprobs = update.score(state.params, batches) if reference else None
            state, _ = update.update(state, batches, logprobs)
        # With a reference and without are different programs.
        with pytest.raises(AssertionError, match="compiles late"):
            update.update(
                state, batches, None if reference else [batch.rollout_logprobs for batch in batches]
            )


def test_programs_of_several_sizes_compile_side_by_side(params, sequences):
    together = threading.Barrier(min(2, os.cpu_count()), timeout=60)

    class MeetingPool(ExecutablePool):
        def get(self, key, *args, **options):
            if key[0] == "gradients" and threading.current_thread() is not threading.main_thread():
                together.wait()  # for the thread of the other size
            return super().get(key, *args, **options)

    sizes = microbatches(sequences, 4)[:1] + microbatches(sequences, 2)[:1]
    update, alone = trainer(pool=MeetingPool(row_invariant=True)), trainer()
    batches = [*sizes, *sizes]  # each is compiled once
    state, metrics = update.update(update.init(params), batches)
    expected, expected_metrics = alone.update(alone.init(params), batches)
    assert metrics == expected_metrics
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


class WatchedPool(ExecutablePool):
    """Keeps the copies of an update, and sees that they are gone when the optimizer runs."""

    def get(self, key, function, args, donate_argnums=()):
        program = super().get(key, function, args, donate_argnums)

        def begin(*args):
            result = program(*args)
            self.copies = jax.tree.leaves(result[0])
            return result

        if key[0] == "apply":
            assert all(leaf.is_deleted() for leaf in self.copies)
        return begin if key[0] == "begin" else program


@pytest.mark.default_cases("True-True-form0")
@pytest.mark.parametrize(
    ("tied", "remat", "form"),
    [
        (True, True, products.ProductForm(64, 64, slabs=True)),
        (False, True, None),
        (True, False, None),
        (False, False, products.ProductForm(4, 4, float32=True)),
        (False, False, products.ProductForm(64, 64, slabs=True)),
    ],
)
def test_weights_that_are_cast_once_an_update_have_the_bits_of_cast_anew(sequences, tied, remat, form):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params, batches, found = scaled_params(config, 3.0, 1.1), microbatches(sequences, 1), []
    assert len(batches) > 1
    for cast_once in (True, False):
        pool = WatchedPool()
        training = {"remat": remat, "logprob_chunk": 16, "cast_once": cast_once}
        update = trainer(1, pool, config, dtype="bfloat16", form=form, **training)
        state, metrics = update.update(update.init(params), batches)
        assert {leaf.dtype for leaf in pool.copies} == ({jnp.dtype("bfloat16")} if cast_once else set())
        state, more = update.update(state, batches)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        found.append((gradients_of(state), state.params, metrics, more))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert weight_copies(params, Numerics(), TrainingConfig()) == ()  # in float32 there is nothing to copy
    if tied:  # which rounds the loss, and no more
        exact = trainer(1, remat=True, logprob_chunk=10)
        _, expected = exact.update(exact.init(params), batches)
        assert 0 < abs(metrics["loss/policy"] - expected["loss/policy"]) < 0.05


@pytest.mark.long  # above, the policy
def test_a_critic_that_casts_once_an_update_has_the_bits_of_one_that_casts_anew(params, sequences):
    batches, found = microbatches(sequences, 1), []
    returns = [np.where(batch.response_mask, batch.advantages, 0.0) for batch in batches]
    targets = [ValueTargets(each, np.zeros_like(each)) for each in returns]
    for cast_once in (True, False):
        training = TrainingConfig(pack_length=PACK_LENGTH, rows_per_microbatch=1, cast_once=cast_once)
        pool = WatchedPool()
        critic = Critic(CONFIG, Numerics(compute_dtype="bfloat16"), training, 0.2, optimizer(), pool)
        state = critic.init(params)
        for _ in range(2):  # the head, and with it all gradients of the trunk, begin at 0
            state, metrics = critic.update(state, batches, targets)
        assert len(pool.copies) == 7 * cast_once
        found.append((gradients_of(state), state.params, metrics))
    assert np.abs(found[0][0]["trunk"]["layers"][0]["q"]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_copy_is_read_in_its_own_type():
    copy = CastWeight(jnp.ones((2, 3)), jnp.ones((2, 3), jnp.bfloat16))
    with pytest.raises(ValueError, match="a copy in bfloat16 cannot be read in float32"):
        copy.astype(jnp.float32)


def test_tokens_that_a_filter_excludes_leave_gradients_finite(params, sequences):
    update = trainer(sampling=SamplingParams(top_k=3))
    batches = microbatches(sequences, 4)
    reference = update.score(params, batches)
    assert np.isneginf(reference[0][batches[0].response_mask]).any()
    state, metrics = update.update(update.init(params), batches, reference)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients_of(state)))
    assert np.isfinite(metrics["loss/policy"]) and metrics["loss/kl"] == 0


def test_what_cannot_work_is_refused(params, sequences):
    update = trainer()
    with pytest.raises(ValueError, match="at least one micro-batch"):
        update.update(update.init(params), [])
    with pytest.raises(ValueError, match="reference_logprobs for 0 of 1"):
        update.update(update.init(params), microbatches(sequences, 4), [])


def test_of_weights_that_are_cast_once_no_copy_is_cast_again(sequences):
    """In what JAX hands to the compiler: without copies every matrix is cast in each micro-batch, with copies
    only the embedding, of which rows and chunks are read.
    """
    (batch, *_), numerics = microbatches(sequences, 1), Numerics(False, "bfloat16")
    shape = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = jax.tree.map(shape, transformer.param_shapes(CONFIG), is_leaf=lambda node: type(node) is tuple)

    def step(params, copies, batch, rope):
        def score(params, batch):
            read = with_copies(params, *copies)
            return score_packed(read, CONFIG, batch, rope, numerics, SamplingParams(), True)

        return gradients(params, batch, None, score, functools.partial(policy_objective, algorithm=ALGORITHM))

    matrices = {"x".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1}
    for cast_once, expected in ((False, matrices), (True, {f"{CONFIG.vocab_size}x{CONFIG.hidden_size}"})):
        training = TrainingConfig(cast_once=cast_once)
        copies = jax.eval_shape(lambda params: weight_copies(params, numerics, training), params)  # noqa: B023
        text = jax.jit(step).lower(params, copies, batch, rope_table(CONFIG, PACK_LENGTH)).as_text()
        cast = re.findall(r"convert %\S+ : \(tensor<([\dx]+)xf32>\) -> tensor<[\dx]+xbf16>", text)
        assert matrices & set(cast) == expected


@pytest.mark.long  # above, what the compiler gets
@pytest.mark.parametrize("copied", [True, False])
def test_an_accelerator_casts_each_matrix_once_and_where_a_layer_is_computed_again(sequences, copied):
    """The compiler merges the casts of float32 weights in a micro-batch's gradients. Of copies nothing is
    cast.
    """
    length = 640  # no activation has the shape of a matrix
    config = ModelConfig("qwen3", 1104, 512, 1, 8, 4, 64, 1536, tie_embeddings=True, qk_norm=True)
    packing = pack_sequences([sequence.length for sequence in sequences], length)
    batch = build_batch(sequences, packing, *packing.microbatches(1))
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        transformer.param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )

    numerics = Numerics(row_invariant=False, compute_dtype="bfloat16")
    copied_by = functools.partial(weight_copies, numerics=numerics, training=TrainingConfig(cast_once=copied))
    copies = jax.eval_shape(copied_by, params)

    def step(params, copies, batch, rope):
        def score(params, batch):
            read = with_copies(params, *copies)
            return score_packed(read, config, batch, rope, numerics, SamplingParams(), True)

        objective = functools.partial(policy_objective, algorithm=AlgorithmConfig())
        return gradients(params, batch, None, score, objective)

    with absent_mesh(HOPPER):
        text = compile_for(HOPPER, step, params, copies, batch, rope_table(config, length)).as_text()
    matrices = [leaf.shape for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1]
    cast = [
        tuple(map(int, sizes.split(","))) for sizes in re.findall(r"= bf16\[([\d,]+)\]\S* convert\(", text)
    ]
    found = sum(sizes in matrices for sizes in cast)
    assert found == (1 if copied else len(matrices) + len(matrices) - 1)  # the embedding's is cast once
