"""A tiny policy, the states it would hand over, and packed batches of its own rollouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.drafting import DraftStrategy, append_pairs, compute_pairs, draft, empty_state
from drafters.eagle.model import Head, HeadConfig, init_head, shared_params
from drafters.eagle.unrolling import HeadBatch
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

# Qwen3 in everything in which it differs from the head's Llama layer.
POLICY = ModelConfig("qwen3", 48, 32, 4, 4, 2, 16, 64, qk_norm=True, max_positions=256)
NUMERICS = Numerics(row_invariant=False)
ROPE = jnp.asarray(rope_table(POLICY, 256))


@functools.cache
def policy_params():
    """Random weights: an LM head large enough that the policy has an opinion, layers small enough that a head
    of one layer can learn it within seconds.
    """
    params = transformer.init_params(POLICY, 3)
    layers = [layer | {"o": layer["o"] * 0.3, "down": layer["down"] * 0.3} for layer in params["layers"]]
    return params | {"lm_head": params["lm_head"] * 3.0, "layers": layers}


def shared():
    return shared_params(policy_params(), POLICY)


@functools.cache
def noisy(config: HeadConfig):
    """A head with opinions: noise on everything. Its config and weights."""
    rng = np.random.default_rng(6)
    stir = lambda leaf: np.asarray(leaf + 0.08 * rng.standard_normal(leaf.shape), np.float32)  # noqa: E731
    params = jax.device_get(init_head(config, policy_params(), 5))
    return config, jax.device_put(jax.tree.map(stir, params))


def with_policy(config, params, numerics=NUMERICS):
    """A head with what it shares with the policy."""
    return Head(params, shared(), ROPE, config, numerics)


SEQUENCES, LENGTH = 16, 48
# One shape, for one program of each.
_NUMBERS = jnp.broadcast_to(jnp.arange(LENGTH)[None], (SEQUENCES, LENGTH))
_ALONE = PackedAttention(jnp.ones((SEQUENCES, LENGTH), jnp.int32), NUMERICS)


@jax.jit
def _states(params, tokens):
    layers = range(POLICY.num_layers + 1)
    final, _, residuals = transformer.forward_with_residuals(
        params, POLICY, tokens, _NUMBERS, _ALONE, ROPE, NUMERICS, layers
    )
    return jnp.stack([*residuals, final], axis=2)


def policy_states(config: HeadConfig, sequences) -> list[np.ndarray]:
    """States [T, S, d] of every sequence, as the policy hands them over."""
    tokens = np.zeros((SEQUENCES, LENGTH), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    found = np.asarray(_states(policy_params(), tokens))[:, :, [*config.layers, -1]]
    return [found[row, : len(sequence)] for row, sequence in enumerate(sequences)]


@jax.jit
def _sample(params, tokens, index, key):
    hidden, _ = transformer.forward(params, POLICY, tokens, _NUMBERS, _ALONE, ROPE, NUMERICS)
    logits = transformer.logits(params, POLICY, hidden[:, index], NUMERICS)
    return tokens.at[:, index + 1].set(jax.random.categorical(key, logits).astype(jnp.int32))


@functools.cache
def _rollouts(seed):
    tokens = jnp.asarray(np.arange(SEQUENCES, dtype=np.int32)[:, None] * (np.arange(LENGTH) == 0), jnp.int32)
    for index, key in enumerate(jax.random.split(jax.random.key(seed), LENGTH - 1)):
        tokens = _sample(policy_params(), tokens, np.int32(index), key)
    return np.asarray(tokens)


def rollouts(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens int32 [count, length], sampled from the policy at temperature 1 behind one token."""
    return _rollouts(seed)[:count, :length]


def packed_batch(config: HeadConfig, sequences: list[np.ndarray], rows: list[list[int]], length: int):
    """A HeadBatch with the given sequences in each row, all but their first 2 tokens responses."""
    shape, of_policy = (len(rows), length), policy_states(config, sequences)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask, states = np.zeros(shape, bool), np.zeros((*shape, config.states, POLICY.hidden_size), np.float32)
    for r, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members):
            n = len(sequences[member])
            here = np.s_[r, start : start + n]
            tokens[here], positions[here], segments[here] = sequences[member], np.arange(n), number + 1
            states[here] = of_policy[member]
            mask[r, start + 1 : start + n - 1] = True
            start += n
    return HeadBatch(*map(jnp.asarray, (tokens, positions, segments, mask, states)))


def absorb(head, state, states, tokens, counts):
    """The state with the pairs appended."""
    return append_pairs(state, compute_pairs(head, state, states, tokens, counts), head.numerics)


jitted_absorb = jax.jit(absorb, donate_argnames=("state",))
jitted_draft = jax.jit(draft, static_argnames=("strategy", "sampling"))
PAIRS = 20  # of two slots, the most that one program absorbs


def begun(config, params, tokens, states, counts):
    """The state of two slots behind the first pairs of tokens [2, > PAIRS]."""
    state, counts = empty_state(config, 2, 64, jnp.float32), np.asarray(counts, np.int32)
    return jitted_absorb(
        with_policy(config, params), state, states[:, :PAIRS], tokens[:, 1 : PAIRS + 1], counts
    )


def chain(config, params, state, counts, depth, sampling=None, keys=None):
    """A chain behind every slot, as a `draft` has it: greedy by default."""
    sampling = SamplingParams(temperature=0.0) if sampling is None else sampling
    positions, strategy = np.asarray(counts, np.int32), DraftStrategy(depth, 1, depth)
    return jitted_draft(with_policy(config, params), state, positions, keys, strategy, sampling)
