"""Drafting behind a chain that the policy has not answered yet, as a pure function.

A head that drafts ahead of the policy (SpecActor, section 4.1) has the policy's features up to the last
verified token only. It reads the unanswered chain from its own outputs, as it would in drafting, but without
an LM head, which takes most of a step: one layer a token. Nothing of that is kept: once the features of the
accepted tokens are there, the next chain is drafted from them.

    tree = draft_behind(head, state, chains, positions, noise_keys, steps, sampling)
"""

import jax.numpy as jnp
from jax import Array

from drafters.eagle.drafting import DrafterState, HeadAttention, likeliest_children, no_entries
from drafters.eagle.model import Head, apply_head, head_logits
from rljax.engine.draft_tree import DraftTree, ScoredTree
from rljax.sampling.distribution import SamplingParams


def draft_behind(
    head: Head,
    state: DrafterState,
    chains: Array,
    positions: Array,
    noise_keys: Array,
    steps: int,
    sampling: SamplingParams,
) -> ScoredTree:
    """A chain behind an unanswered one of every slot.

    Args:
      head, sampling: as for `draft`.
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
    outputs = state.outputs.astype(head.numerics.dtype)[:, None]
    keys = values = no_entries(state, head.config)
    seen = jnp.zeros((batch, 0), bool)  # which of these entries are of tokens
    tokens, scores = [], []
    for column in range(given + steps):
        if column < given:
            token = chains[:, column, None]
            here = token >= 0
        else:
            logits = head_logits(head, outputs)
            place = positions + counts + (column - given) + 1
            token, score = likeliest_children(head, logits, place, noise_keys, sampling, 1)
            token, here = token[:, 0], known[:, None]
            tokens.append(token)
            scores.append(score[:, 0])
        if column == given + steps - 1:
            break
        # The pair of the token: the output above it, and itself.
        place = jnp.maximum(state.lengths + counts + (column - given), 0)
        visible = jnp.concatenate([seen, jnp.ones((batch, 1), bool)], axis=1)[:, None]
        attention = HeadAttention(state, keys, values, visible, head.numerics)
        angles = head.rope[place][:, None]
        below, (k, v) = apply_head(head, outputs, jnp.maximum(token, 0), angles, attention)
        outputs = jnp.where(here[..., None], below, outputs)
        keys, values = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
        seen = jnp.concatenate([seen, here], axis=1)
    found = jnp.where(known[:, None], jnp.concatenate(tokens, axis=1), -1)
    parents = jnp.broadcast_to(jnp.arange(-1, steps - 1, dtype=jnp.int32)[None], found.shape)
    tree = DraftTree(tokens=found, parents=parents, valid=found >= 0)
    scores = jnp.cumsum(jnp.concatenate(scores, axis=1), axis=1)
    return ScoredTree(tree=tree, log_probability=jnp.where(tree.valid, scores, -jnp.inf))
