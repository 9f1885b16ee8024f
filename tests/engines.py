"""A decode engine driven step by step: policies of every grouping of heads, plain and drafted decoding.

Files that use these policies and buckets share compiled programs.
"""

import dataclasses
import functools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.background import BackgroundCompiler
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftTree, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool, row_invariant_compiler_options
from rljax.engine.host_sync import Assignment
from rljax.engine.invariance import row_counts
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models import transformer
from rljax.models.config import ModelConfig, RopeScaling
from rljax.models.rope import rope_table
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.training.scoring import score_packed
from tests.exactness import exact_numerics

VOCAB, LONGEST = 96, 512
SAMPLING = SamplingParams(temperature=0.8)
BUCKETS = Buckets((2, 5), (64, LONGEST), (20, 40), 7)
CONFIGS = {  # by the number of queries a key; one of them with several layers
    "three": ModelConfig("qwen3", VOCAB, 64, 1, 6, 2, 64, 160, tie_embeddings=True, qk_norm=True),
    "one": ModelConfig("qwen2", VOCAB, 64, 2, 2, 2, 64, 160, attention_bias=True),
    "two": ModelConfig("llama", VOCAB, 64, 1, 4, 2, 64, 160, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
    "all": ModelConfig("llama", VOCAB, 64, 1, 8, 1, 32, 160),
}


def stored_pool():
    """A pool whose programs other workers, and later runs of the same sources, load without tracing them.

    Not for tests that put functions of their own into programs, whose names do not tell.
    """
    return ExecutablePool(directory=os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture
def held_back(monkeypatch):
    """Nothing is compiled in the background before this event is set."""
    go_on, compile_shape = threading.Event(), BackgroundCompiler.compile

    def wait(self, shape):
        assert go_on.wait(60)
        compile_shape(self, shape)

    monkeypatch.setattr(BackgroundCompiler, "compile", wait)
    yield go_on
    go_on.set()


@functools.lru_cache
def engine_of(config, buckets=BUCKETS, dtype="float32", sampling=SAMPLING, eos=(), rule="coupled"):
    """The same engine for all tests that ask for it."""
    shared = set(row_counts(buckets).products) <= set(row_counts(BUCKETS).products)
    numerics = exact_numerics(config, dtype, BUCKETS if shared else buckets)  # a measurement less
    return DecodeEngine(config, numerics, sampling, buckets, eos, 64, stored_pool(), verification=rule)


def lively_params(config, seed=0):
    """Weights whose policy is far from uniform, with no norm at 1 and no bias at 0."""
    rng = np.random.default_rng(seed)

    def stir(leaf):
        if leaf.ndim > 1:
            return leaf * 3
        return leaf + np.float32(0.2) * rng.standard_normal(leaf.shape, dtype=np.float32)

    return jax.device_put(jax.tree.map(stir, jax.device_get(transformer.init_params(config, seed))))


def scaled_params(config, matrices, others=1.0, seed=0):
    """Fresh weights times these, so that some tokens are much likelier than others. On a device, each shape
    would take a program.
    """
    scaled = lambda leaf: leaf * np.float32(matrices if leaf.ndim > 1 else others)  # noqa: E731
    return jax.device_put(jax.tree.map(scaled, jax.device_get(transformer.init_params(config, seed))))


@dataclasses.dataclass(frozen=True)
class Asked:
    prompt: list[int]
    key: np.ndarray
    limit: int


def ask(prompt_lengths, limits, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Asked(rng.integers(2, VOCAB, length).tolist(), request_key(seed, i), limit)
        for i, (length, limit) in enumerate(zip(prompt_lengths, limits, strict=True))
    ]


def decode(engine, params, asked, order=None, capacity=0, one_by_one=False, visit_steps=None):
    """Decodes requests to the end, compacting and growing on the way.

    Args:
      order: the slot of each request; the order of insertion where inserted one by one.
      capacity: positions that the cache starts with, at least.

    Returns:
      a list of (tokens, logprobs), one per request.
    """
    order = list(range(len(asked))) if order is None else order
    prefix = engine.prefill(params, [each.prompt for each in asked])
    state = engine.init_state(max(order) + 1, max(capacity, *(len(each.prompt) for each in asked)))
    assignments = [Assignment(i, order[i], each.key, each.limit) for i, each in enumerate(asked)]
    slots = {order[i]: i for i in range(len(asked))}
    outputs = [([], []) for _ in asked]

    def visit(state):
        state, result = engine.generate(params, state, visit_steps)
        for slot, i in slots.items():
            valid = result.tokens[slot] >= 0
            outputs[i][0].extend(result.tokens[slot][valid].tolist())
            outputs[i][1].extend(result.logprobs[slot][valid].tolist())
        return state, result

    if one_by_one:  # each joins while those before it are decoding
        for assignment in sorted(assignments, key=lambda assignment: assignment.slot):
            state = engine.bulk_insert(prefix, state, [assignment])
            state, result = visit(state)
    else:
        state = engine.bulk_insert(prefix, state, assignments)
        state, result = visit(state)
    while result.active.any():
        active = [slot for slot in slots if result.active[slot]]
        longest = result.lengths[active].max()
        if engine.buckets.batch_for(len(active)) < state.batch:
            state = engine.compact(state, active)
            slots = {new: slots[old] for new, old in enumerate(active)}
        if longest >= state.cache.length:
            state = engine.grow(state)
        state, result = visit(state)
    return outputs


@functools.lru_cache
def _scoring(config, numerics, sampling, length, gradients):
    def score(params, batch):
        rope = jnp.asarray(rope_table(config, length))
        logprobs, _ = score_packed(params, config, batch, rope, numerics, sampling)
        return jnp.mean(logprobs), logprobs

    function = jax.value_and_grad(score, has_aux=True) if gradients else score
    return jax.jit(function, compiler_options=row_invariant_compiler_options())


def trained_logprobs(engine, params, asked, outputs, gradients=False, length=None):
    """Log-probabilities of every response as training computes them: by the pass that scores, or inside the
    one that computes gradients.

    Args:
      outputs: (tokens, logprobs) of each request, as from `decode`.
      length: tokens of a packed row; None for the longest cache.
    """
    length = length or engine.buckets.cache[-1]
    sequences = [
        TrainingSequence(each.prompt, np.asarray(tokens), np.asarray(logprobs, np.float32), 0.0, 1.0)
        for each, (tokens, logprobs) in zip(asked, outputs, strict=True)
    ]
    packing = pack_sequences([sequence.length for sequence in sequences], length)
    assert packing.num_rows < len(asked) or len(asked) == 1  # some do share a row
    batch = build_batch(sequences, packing, range(packing.num_rows))
    score = _scoring(engine.config, engine.numerics, engine.sampling, length, gradients)
    found = score(params, batch)
    logprobs = np.asarray(found[0][1] if gradients else found[1])
    first = packing.start + [len(each.prompt) - 1 for each in asked]
    return [
        logprobs[row, start : start + len(tokens)].tolist()
        for row, start, (tokens, _) in zip(packing.row, first, outputs, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class World:
    """A policy's engine, its weights, and requests to it."""

    engine: DecodeEngine
    params: dict
    asked: list[Asked]

    @functools.cached_property
    def plain(self):
        """What the requests get by plain decoding, together from the start: (tokens, logprobs) of each."""
        return decode(self.engine, self.params, self.asked, capacity=LONGEST)

    @property
    def truth(self):
        """The tokens of `plain`."""
        return [tokens for tokens, _ in self.plain]

    def state(self, members=None, slots=5, capacity=LONGEST):
        """A state with the requests in its first slots."""
        asked = self.asked if members is None else [self.asked[i] for i in members]
        prefix = self.engine.prefill(self.params, [each.prompt for each in asked])
        state = self.engine.init_state(slots, capacity)
        placed = [Assignment(i, i, each.key, each.limit) for i, each in enumerate(asked)]
        return self.engine.bulk_insert(prefix, state, placed)


# Lengths on both sides of the 256 keys that attention sums at a time.
PROMPTS, LIMITS = (3, 200, 63, 40), (280, 80, 60, 30)


@functools.lru_cache
def world_of(name, dtype="float32", prompts=PROMPTS, limits=LIMITS, sampling=SAMPLING, **others):
    """The same world for all tests that ask for it."""
    engine = engine_of(CONFIGS[name], BUCKETS, dtype, sampling, **others)
    return World(engine, engine.load_params(lively_params(CONFIGS[name])), ask(prompts, limits))


def poison(state, value=1e4):
    """Fills what no slot may see: all of inactive slots, and every position from a slot's length on."""
    visible = np.arange(state.cache.length)[None] < np.asarray(state.lengths)[:, None]
    visible &= np.asarray(state.active)[:, None]
    cache = state.cache
    blocks = cache.keys[0].shape[2]
    in_keys = jnp.asarray(visible.reshape(state.batch, 1, blocks, 1, -1))
    in_values = jnp.asarray(visible[:, None, :, None])

    def filled(entries, seen):
        return [jnp.where(jnp.broadcast_to(seen, x.shape), x, jnp.full_like(x, value)) for x in entries]

    cache = cache.replace(keys=filled(cache.keys, in_keys), values=filled(cache.values, in_values))
    return state.replace(cache=cache)


def tangled(truth, seed=0, right=0.95):
    """Random trees in which the true continuation is embedded, here and there with a wrong token."""
    rng = np.random.default_rng(seed)

    def draft(row, request, emitted):
        ahead, tip, depth = truth[request][len(emitted) :], -1, 0
        for node in range(len(row.tokens)):
            row.tokens[node] = rng.integers(VOCAB)
            row.parents[node] = rng.integers(-1, node) if node else -1
            row.valid[node] = rng.random() < 0.98
            if rng.random() < 0.7 and depth < len(ahead):
                row.parents[node] = tip
                if rng.random() < right:
                    row.tokens[node] = ahead[depth]
                tip, depth = node, depth + 1

    return draft


@dataclasses.dataclass(frozen=True)
class Emitted:
    """What requests got: outputs as from `decode`, passes, and tokens emitted by each slot in each pass."""

    outputs: list
    passes: int
    counts: list[int]


def speculate(
    engine,
    params,
    asked,
    draft,
    nodes,
    order=None,
    capacity=0,
    compacting=True,
    poisoned=None,
    most=None,
    take=None,
):
    """`decode` by verifying passes over `draft`'s trees.

    Args:
      draft: (a request's row of the tree, the request, the tokens it has emitted) -> None; fills in the row.
      take: (active slots, the tree) -> (slots that take part, rows), and makes nodes invalid that have no
        room; None computes all nodes of all slots.
      poisoned: what everything that no slot may see is filled with before every pass; None for nothing.
      most: passes; None for as many as it takes.
    """
    order = list(range(len(asked))) if order is None else order
    prefix = engine.prefill(params, [each.prompt for each in asked])
    state = engine.init_state(max(order) + 1, max(capacity, *(len(each.prompt) for each in asked)))
    assignments = [Assignment(i, order[i], each.key, each.limit) for i, each in enumerate(asked)]
    state = engine.bulk_insert(prefix, state, assignments)
    slots = {order[i]: i for i in range(len(asked))}
    outputs, passes, counts = [([], []) for _ in asked], 0, []
    active = np.isin(np.arange(state.batch), order)
    while active.any() and passes != most:
        if poisoned is not None:
            state = poison(state, poisoned)
        tree = empty_tree(state.batch, nodes)
        tree.tokens[:] = 1
        tree.valid[:] = True  # nor must what stands in slots without a request matter
        for slot, i in slots.items():
            row = DraftTree(tree.tokens[slot], tree.parents[slot], tree.valid[slot])
            row.valid[:] = False
            draft(row, i, outputs[i][0])
        rows, part = None, np.flatnonzero(active)
        if take is not None:
            part, size = take(part, tree)
            rows = pack_rows(tree, part, size)
        state, pending = engine.verify(params, state, tree, rows)
        result = pending.result()
        passes += 1
        for slot in range(state.batch):
            emitted = result.tokens[slot] >= 0
            count = int(emitted.sum())
            assert emitted[:count].all() and (count > 0) == (slot in part)
            if count:
                i = slots[slot]
                outputs[i][0].extend(result.tokens[slot][:count].tolist())
                outputs[i][1].extend(result.logprobs[slot][:count].tolist())
                assert result.lengths[slot] == len(asked[i].prompt) - 1 + len(outputs[i][0])
                counts.append(count)
        going = [slot for slot in slots if result.active[slot]]
        active = result.active
        if going and compacting and engine.buckets.batch_for(len(going)) < state.batch:
            state = engine.compact(state, going)
            slots = {new: slots[old] for new, old in enumerate(going)}
            active = np.arange(state.batch) < len(going)
        if going and max(result.lengths[going]) >= state.cache.length:
            state = engine.grow(state)
    return Emitted(outputs, passes, counts)
