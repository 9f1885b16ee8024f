"""A tiny policy, the states it would hand over, and packed batches of its own rollouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.drafting import append_pairs, compute_pairs
from drafters.eagle.model import HeadConfig, shared_params
from drafters.eagle.unrolling import HeadBatch
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics

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


@functools.partial(jax.jit, static_argnames=("config",))
def policy_states(params, tokens, positions, segment_ids, config: HeadConfig):
    """States [R, T, S, d] as the policy hands them over."""
    attention = PackedAttention(segment_ids, NUMERICS)
    final, _, residuals = transformer.forward_with_residuals(
        params, POLICY, tokens, positions, attention, ROPE, NUMERICS, config.layers
    )
    return jnp.stack([*residuals, final], axis=2)


@functools.cache
def rollouts(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens int32 [count, length], sampled from the policy at temperature 1 behind one random token."""
    params = policy_params()
    positions = jnp.broadcast_to(jnp.arange(length)[None], (count, length))
    ones = jnp.ones((count, length), jnp.int32)

    @jax.jit
    def step(tokens, index, key):
        attention = PackedAttention(ones, NUMERICS)
        hidden, _ = transformer.forward(params, POLICY, tokens, positions, attention, ROPE, NUMERICS)
        logits = transformer.logits(params, POLICY, hidden[:, index], NUMERICS)
        return tokens.at[:, index + 1].set(jax.random.categorical(key, logits).astype(jnp.int32))

    tokens = jnp.zeros((count, length), jnp.int32)
    tokens = tokens.at[:, 0].set(jnp.arange(count, dtype=jnp.int32) % POLICY.vocab_size)
    for index in range(length - 1):
        tokens = step(tokens, index, jax.random.fold_in(jax.random.key(seed), index))
    return np.asarray(tokens)


def packed_batch(config: HeadConfig, sequences: list[np.ndarray], rows: list[list[int]], length: int):
    """A HeadBatch with the given sequences in each row, all but their first 2 tokens responses."""
    shape = (len(rows), length)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for r, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members):
            n = len(sequences[member])
            here = np.s_[r, start : start + n]
            tokens[here], positions[here], segments[here] = sequences[member], np.arange(n), number + 1
            mask[r, start + 1 : start + n - 1] = True
            start += n
    states = policy_states(policy_params(), tokens, positions, segments, config)
    return HeadBatch(*(jnp.asarray(x) for x in (tokens, positions, segments, mask)), states)


def absorb(params, config, shared, state, states, tokens, counts, rope, numerics, attended=None):
    """The state with the pairs appended."""
    args = (states, tokens, counts, rope, numerics, attended)
    return append_pairs(state, compute_pairs(params, config, shared, state, *args), numerics)
