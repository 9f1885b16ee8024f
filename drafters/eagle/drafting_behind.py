"""Drafting behind a chain that the policy has not answered yet, as a pure function.

A head that drafts ahead of the policy (SpecActor, section 4.1) has the policy's features up to the last
verified token only. It reads the unanswered chain from its own outputs, as it would in drafting, but without
an LM head, which takes most of a step: one layer a token. Nothing of that is kept: once the features of the
accepted tokens are there, the next chain is drafted from them.

    tree = draft_behind(params, config, shared, state, chains, positions, noise_keys, rope, steps, ...)
"""

import jax.numpy as jnp
from jax import Array

from drafters.eagle.drafting import DrafterState, HeadAttention, likeliest_children
from drafters.eagle.model import HeadConfig, apply_head, head_logits
from rljax.engine.draft_tree import DraftTree, ScoredTree
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams


def draft_behind(
    params: Params,
    config: HeadConfig,
    shared: Params,
    state: DrafterState,
    chains: Array,
    positions: Array,
    noise_keys: Array,
    rope: Array,
    steps: int,
    sampling: SamplingParams,
    numerics: Numerics,
    attended: int | None = None,
    vocab_parts: int = 1,
) -> ScoredTree:
    """A chain behind an unanswered one of every slot.

    Args:
      params, config, shared, rope, sampling, numerics, attended, vocab_parts: as for `draft`.
      state: all pairs up to the slot's last verified token absorbed. Slots without any get no nodes.
      chains: int32 [B, F], the unanswered drafts, the last of each slot in the last column, -1 before the
        first.
      positions: int32 [B], of the slots' last verified tokens.
      noise_keys: request keys, uint32 [B, 2].
      steps: static; tokens to draft.

    Returns:
      Chains of `steps` nodes below the last unanswered drafts.
    """
    batch, given = chains.shape
    counts = jnp.sum(chains >= 0, axis=1, dtype=jnp.int32)
    known = state.lengths > 0
    parts = vocab_parts if config.vocabulary is None else 1  # an LM head of its own is whole everywhere
    outputs = state.outputs.astype(numerics.dtype)[:, None]
    cached = state.cache.values[0]
    keys = values = jnp.zeros((batch, 0, config.layer.num_kv_heads, config.layer.head_dim), cached.dtype)
    seen = jnp.zeros((batch, 0), bool)  # which of these entries are of tokens
    tokens, scores = [], []
    for column in range(given + steps):
        if column < given:
            token = chains[:, column, None]
            here = token >= 0
        else:
            logits = head_logits(params, config, shared, outputs, numerics)
            place = positions + counts + (column - given) + 1
            token, score = likeliest_children(
                logits, place, noise_keys, sampling, numerics, 1, config.vocabulary, parts
            )
            token, here = token[:, 0], known[:, None]
            tokens.append(token)
            scores.append(score[:, 0])
        if column == given + steps - 1:
            break
        # The pair of the token: the output above it, and itself.
        place = jnp.maximum(state.lengths + counts + (column - given), 0)
        visible = jnp.concatenate([seen, jnp.ones((batch, 1), bool)], axis=1)[:, None]
        attention = HeadAttention(state.cache, state.lengths, keys, values, visible, numerics, attended)
        below, (k, v) = apply_head(
            params, config, shared, outputs, jnp.maximum(token, 0), rope[place][:, None], attention, numerics
        )
        outputs = jnp.where(here[..., None], below, outputs)
        keys, values = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
        seen = jnp.concatenate([seen, here], axis=1)
    found = jnp.where(known[:, None], jnp.concatenate(tokens, axis=1), -1)
    parents = jnp.broadcast_to(jnp.arange(-1, steps - 1, dtype=jnp.int32)[None], found.shape)
    tree = DraftTree(tokens=found, parents=parents, valid=found >= 0)
    scores = jnp.cumsum(jnp.concatenate(scores, axis=1), axis=1)
    return ScoredTree(tree=tree, log_probability=jnp.where(tree.valid, scores, -jnp.inf))
