"""Verification: which token every node of a draft tree samples, and which path the tree got right.

Every rule answers one question at every node: what is sampled behind it? A draft node is accepted when all
its ancestors are and its token is what its parent sampled; the deepest accepted node's path is committed, and
what that node itself sampled comes on top (the bonus token). The rules differ in how a node samples:

- `coupled` (the default): `argmax(logits + G)` with the request's own noise, whatever was drafted. So the
  tokens are those of plain decoding.
- `rejection`: a draft token x of a chain, drawn from the drafter's distribution q, is taken with probability
  min(1, p(x) / q(x)), and otherwise one is drawn from the normalised positive part of p - q (Leviathan et
  al., "Fast Inference from Transformers via Speculative Decoding", 2023, Algorithm 1; Chen et al., 2023). A
  deterministic drafter is a q of one token.
- `target_only`: one uniform number takes a child with its probability under p, and otherwise a token is drawn
  from what p gives to the tokens that are not children (SGLang's tree speculative sampling against the
  target only).

All three sample exactly from p; only the first gives the same tokens as without speculation. The other two
need drafts that do not depend on the request's noise, and draw theirs from the same field.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from rljax.engine.draft_tree import NodeRows, RootedTree
from rljax.engine.sampling import sample
from rljax.numerics.rows import Numerics, log_normalizer
from rljax.sampling.distribution import SamplingParams, first_maximum, token_logprobs, transform_logits
from rljax.sampling.noise import gumbel_rows, uniform

Rule = Literal["coupled", "rejection", "target_only"]


def sample_nodes(
    rule: Rule,
    logits: Array,
    tree: RootedTree,
    rows: NodeRows,
    keys: Array,
    positions: Array,
    params: SamplingParams,
    numerics: Numerics,
    proposal: Array | None = None,
) -> tuple[Array, Array]:
    """The token that every node samples behind itself, and its log-probability.

    Args:
      rule: see the module's docstring.
      logits: float32 [R, V], of the tokens behind each node that was computed.
      tree: the nodes; under `rejection` a chain.
      rows: which of them were computed; what the others sample means nothing.
      keys: request keys, uint32 [B, 2].
      positions: of the sampled tokens, int32 [B, M].
      params: the sampling distribution.
      numerics: see `Numerics`.
      proposal: for `rejection`, the distribution that the token behind each node was drafted from, as
        log-probabilities, float32 [B, M, V]; None for deterministic drafts.

    Returns:
      tokens int32 [B, M], logprobs float32 [B, M] under the sampling distribution.
    """
    if rule == "coupled":
        tokens, logprobs = sample(logits, keys[rows.slots], rows.gather(positions), params, numerics)
        return rows.scatter(tokens), rows.scatter(logprobs)
    shape = (*positions.shape, logits.shape[-1])
    flat = transform_logits(rows.scatter(logits).reshape(-1, shape[-1]), params, numerics)
    keys = jnp.broadcast_to(keys[:, None], (*positions.shape, 2))
    logprobs = (flat - log_normalizer(flat, numerics)).reshape(shape)
    noise = 0.0
    if not params.greedy:
        noise = gumbel_rows(keys.reshape(-1, 2), positions.reshape(-1), shape[-1]).reshape(shape)
    numbers = uniform(keys, positions)
    if rule == "rejection" and proposal is not None:
        tokens = _rejection(logprobs, noise, numbers, tree, proposal)
    else:  # with a child a node and no proposal, `rejection` is the same
        tokens = _target_only(logprobs, noise, numbers, tree)
    logprobs = token_logprobs(flat, tokens.reshape(-1), numerics)
    return tokens, logprobs.reshape(positions.shape)


def _child_probabilities(logprobs: Array, tree: RootedTree) -> Array:
    """The probability of every node's token behind its parent, [B, M]; 0 for node 0 and for what is invalid
    or repeats an earlier sibling.
    """
    nodes = tree.tokens.shape[1]
    behind_parent = jnp.take_along_axis(logprobs, tree.parents[:, :, None], axis=1)
    own = jnp.exp(jnp.take_along_axis(behind_parent, tree.tokens[:, :, None], axis=2)[:, :, 0])
    return jnp.where(tree.valid & _behind_root(nodes) & ~_repeats(tree), own, 0.0)


def _repeats(tree: RootedTree) -> Array:
    """bool [B, M]: a valid sibling before the node has its token."""
    nodes = tree.tokens.shape[1]
    before = (tree.valid & _behind_root(nodes))[:, None] & _earlier(nodes)
    siblings = tree.parents[:, :, None] == tree.parents[:, None]
    return (before & siblings & (tree.tokens[:, :, None] == tree.tokens[:, None])).any(-1)


def _behind_root(nodes: int) -> Array:
    """bool [1, M]: not node 0."""
    return jnp.arange(nodes)[None] > 0


def _earlier(nodes: int) -> Array:
    """bool [1, M, M], [_, i, j]: node j stands before node i."""
    index = jnp.arange(nodes)
    return (index[:, None] > index[None])[None]


def _target_only(logprobs: Array, noise: Array, numbers: Array, tree: RootedTree) -> Array:
    batch, nodes = tree.tokens.shape
    own = _child_probabilities(logprobs, tree)
    earlier = (tree.parents[:, :, None] == tree.parents[:, None]) & _earlier(nodes)
    before = jnp.sum(jnp.where(earlier, own[:, None], 0.0), axis=-1)
    number = jnp.take_along_axis(numbers, tree.parents, axis=1)
    taken = (number >= before) & (number < before + own)  # at most one child of a node
    rest = logprobs + noise
    slots = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, nodes))
    parents = jnp.where(tree.valid & _behind_root(nodes), tree.parents, nodes)  # out of range: skipped
    rest = rest.at[slots, parents, tree.tokens].set(-jnp.inf, mode="drop")
    # Rounding may leave nothing where the children have all of the probability.
    nothing_left = ~jnp.isfinite(rest).any(-1, keepdims=True)
    chosen = first_maximum(jnp.where(nothing_left, logprobs + noise, rest))
    chosen = chosen.at[slots, jnp.where(taken, tree.parents, nodes)].set(tree.tokens, mode="drop")
    # Nodes that stand for the same prefix may have other children and sample other tokens: to go on behind
    # the one that gets further would favour the tokens that were drafted. Nothing goes on behind a repeat.
    return jnp.where(_repeats(tree), -1, chosen)


def _rejection(logprobs: Array, noise: Array, numbers: Array, tree: RootedTree, proposal: Array) -> Array:
    # In a chain the child of node i is node i + 1.
    drafted = jnp.roll(tree.tokens, -1, axis=1)
    is_drafted = jnp.roll(tree.valid, -1, axis=1).at[:, -1].set(False)
    p = jnp.take_along_axis(logprobs, drafted[:, :, None], axis=2)[:, :, 0]
    q = jnp.take_along_axis(proposal, drafted[:, :, None], axis=2)[:, :, 0]
    taken = is_drafted & (jnp.log(numbers) < p - q)
    rest = jnp.log(jnp.maximum(jnp.exp(logprobs) - jnp.exp(proposal), 0.0))
    # Without a draft the node samples from p; and so it does where rounding leaves nothing of p - q.
    nothing_left = ~jnp.isfinite(rest).any(-1, keepdims=True)
    rest = jnp.where(~is_drafted[:, :, None] | nothing_left, logprobs, rest)
    return jnp.where(taken, drafted, first_maximum(rest + noise))


def accepted_path(tree: RootedTree, sampled: Array) -> tuple[Array, Array]:
    """The path of the deepest accepted node.

    Args:
      tree: the nodes.
      sampled: what every node sampled behind itself, int32 [B, M].

    Returns:
      path: int32 [B, M], the path's node at every depth, 0 beyond its end.
      count: int32 [B], nodes on it, node 0 included: as many tokens as were sampled along it.
    """
    nodes = sampled.shape[1]
    right = tree.valid & (tree.tokens == jnp.take_along_axis(sampled, tree.parents, axis=1))
    right |= ~_behind_root(nodes)
    accepted = ~(tree.ancestors & ~right[:, None]).any(-1)
    deepest = jnp.argmax(jnp.where(accepted, tree.depth, -1), axis=1)
    own = jnp.take_along_axis(tree.ancestors, deepest[:, None, None], axis=1)[:, 0]  # [B, M]
    at_depth = own[:, None] & (tree.depth[:, None] == jnp.arange(nodes)[None, :, None])  # [B, depth, M]
    path = jnp.sum(jnp.where(at_depth, jnp.arange(nodes)[None, None], 0), axis=-1, dtype=jnp.int32)
    return path, jnp.sum(own, axis=-1, dtype=jnp.int32)
