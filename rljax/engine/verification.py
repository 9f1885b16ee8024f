"""Verification: samples a token after every node of a draft tree, and finds the accepted path.

A draft node is accepted if all its ancestors are and its token equals the one that was sampled after its
parent. The path of the deepest accepted node is committed, and the token sampled after that node is added to
it (the bonus token). The rules differ in how a token is sampled after a node:

- `coupled` (the default): `argmax(logits + G)` with the noise of the request, whatever was drafted. The
  tokens are therefore those of plain decoding.
- `rejection`: a draft token x of a chain, drawn from the drafter's distribution q, is taken with probability
  min(1, p(x) / q(x)), and otherwise one is drawn from the normalised positive part of p - q (Leviathan et
  al., "Fast Inference from Transformers via Speculative Decoding", 2023, Algorithm 1; Chen et al., 2023). For
  a deterministic drafter, q has all its probability on one token.
- `target_only`: one uniform number selects a child with its probability under p; otherwise a token is drawn
  from p without the tokens of the children (SGLang's tree speculative sampling against the target only).

All three sample exactly from p; only `coupled` gives the same tokens as plain decoding. The other two need
drafts that do not depend on the noise of the request, and draw their numbers from the same noise field.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from rljax.engine.draft_tree import NodeRows, RootedTree
from rljax.engine.sampling import sample
from rljax.numerics.rows import Numerics, log_normalizer
from rljax.sampling.distribution import SamplingParams, first_maximum, token_logprobs, transform_logits
from rljax.sampling.noise import gumbel_rows, uniform
from rljax.sampling.slots import SlotSampling

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
    mesh: Mesh | None = None,
    settings: SlotSampling | None = None,
) -> tuple[Array, Array]:
    """Samples a token after every node.

    Args:
      rule: see the docstring of the module.
      logits: float32 [R, V], logits after each computed node.
      tree: the nodes; under `rejection` a chain.
      rows: the computed nodes; the results of other nodes are undefined.
      keys: request keys, uint32 [B, 2].
      positions: positions of the sampled tokens, int32 [B, M].
      proposal: for `rejection`, log-probabilities of the distribution that the token after each node was
        drafted from, float32 [B, M, V]; None for deterministic drafts.
      mesh: under `coupled`, devices over whose tensor axis V is split. Other rules take whole rows.
      settings: under `coupled`, temperature and filters of each computed node, in place of those of `params`.

    Returns:
      tokens: int32 [B, M].
      logprobs: float32 [B, M], under the sampling distribution.
    """
    if rule == "coupled":
        keys, positions = keys[rows.slots], rows.take(positions)
        tokens, logprobs = sample(logits, keys, positions, params, numerics, mesh, settings)
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
    else:  # for a chain without a proposal, `rejection` is the same
        tokens = _target_only(logprobs, noise, numbers, tree)
    logprobs = token_logprobs(flat, tokens.reshape(-1), numerics)
    return tokens, logprobs.reshape(positions.shape)


def _child_probabilities(logprobs: Array, tree: RootedTree) -> Array:
    """Returns the probability of every node's token after its parent, [B, M]; 0 for node 0, for invalid
    nodes, and for nodes with the token of an earlier sibling.
    """
    nodes = tree.tokens.shape[1]
    behind_parent = jnp.take_along_axis(logprobs, tree.parents[:, :, None], axis=1)
    probabilities = jnp.exp(jnp.take_along_axis(behind_parent, tree.tokens[:, :, None], axis=2)[:, :, 0])
    return jnp.where(tree.valid & _behind_root(nodes) & ~_repeats(tree), probabilities, 0.0)


def _repeats(tree: RootedTree) -> Array:
    """Whether an earlier valid sibling has the token of the node, bool [B, M]."""
    nodes = tree.tokens.shape[1]
    before = (tree.valid & _behind_root(nodes))[:, None] & _earlier(nodes)
    siblings = tree.parents[:, :, None] == tree.parents[:, None]
    return (before & siblings & (tree.tokens[:, :, None] == tree.tokens[:, None])).any(-1)


def _behind_root(nodes: int) -> Array:
    """Whether a node is not node 0, bool [1, M]."""
    return jnp.arange(nodes)[None] > 0


def _earlier(nodes: int) -> Array:
    """Whether node j precedes node i, at [_, i, j] of bool [1, M, M]."""
    index = jnp.arange(nodes)
    return (index[:, None] > index[None])[None]


def _target_only(logprobs: Array, noise: Array, numbers: Array, tree: RootedTree) -> Array:
    # Each child of a node takes an interval of the unit interval; the node's number selects one at most.
    batch, nodes = tree.tokens.shape
    share = _child_probabilities(logprobs, tree)
    earlier = (tree.parents[:, :, None] == tree.parents[:, None]) & _earlier(nodes)
    before = jnp.sum(jnp.where(earlier, share[:, None], 0.0), axis=-1)
    number = jnp.take_along_axis(numbers, tree.parents, axis=1)
    taken = (number >= before) & (number < before + share)

    # Otherwise sample among the tokens that are not children.
    rest = logprobs + noise
    slots = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, nodes))
    parents = jnp.where(tree.valid & _behind_root(nodes), tree.parents, nodes)  # out of range: skipped
    rest = rest.at[slots, parents, tree.tokens].set(-jnp.inf, mode="drop")
    # Rounding may leave no token where the children have all of the probability.
    nothing_left = ~jnp.isfinite(rest).any(-1, keepdims=True)
    chosen = first_maximum(jnp.where(nothing_left, logprobs + noise, rest))
    chosen = chosen.at[slots, jnp.where(taken, tree.parents, nodes)].set(tree.tokens, mode="drop")
    # Nodes with the same prefix may have other children and sample other tokens. Continuing after the one
    # that gets further would favour drafted tokens, so no path continues after a repeated node.
    return jnp.where(_repeats(tree), -1, chosen)


def _rejection(logprobs: Array, noise: Array, numbers: Array, tree: RootedTree, proposal: Array) -> Array:
    # In a chain the child of node i is node i + 1.
    drafted = jnp.roll(tree.tokens, -1, axis=1)
    is_drafted = jnp.roll(tree.valid, -1, axis=1).at[:, -1].set(False)
    p = jnp.take_along_axis(logprobs, drafted[:, :, None], axis=2)[:, :, 0]
    q = jnp.take_along_axis(proposal, drafted[:, :, None], axis=2)[:, :, 0]
    taken = is_drafted & (jnp.log(numbers) < p - q)
    rest = jnp.log(jnp.maximum(jnp.exp(logprobs) - jnp.exp(proposal), 0.0))
    # A node without a draft samples from p, as does one where rounding leaves no token of p - q.
    nothing_left = ~jnp.isfinite(rest).any(-1, keepdims=True)
    rest = jnp.where(~is_drafted[:, :, None] | nothing_left, logprobs, rest)
    return jnp.where(taken, drafted, first_maximum(rest + noise))


def accepted_path(tree: RootedTree, sampled: Array) -> tuple[Array, Array]:
    """Returns the path of the deepest accepted node.

    Args:
      sampled: token sampled after every node, int32 [B, M].

    Returns:
      path: int32 [B, M], node of the path at every depth; 0 beyond its end.
      count: int32 [B], number of its nodes, node 0 included, which is the number of tokens sampled along it.
    """
    nodes = sampled.shape[1]
    right = tree.valid & (tree.tokens == jnp.take_along_axis(sampled, tree.parents, axis=1))
    right |= ~_behind_root(nodes)
    accepted = ~(tree.ancestors & ~right[:, None]).any(-1)
    deepest = jnp.argmax(jnp.where(accepted, tree.depth, -1), axis=1)
    on_path = jnp.take_along_axis(tree.ancestors, deepest[:, None, None], axis=1)[:, 0]  # [B, M]
    at_depth = on_path[:, None] & (tree.depth[:, None] == jnp.arange(nodes)[None, :, None])  # [B, depth, M]
    path = jnp.sum(jnp.where(at_depth, jnp.arange(nodes)[None, None], 0), axis=-1, dtype=jnp.int32)
    return path, jnp.sum(on_path, axis=-1, dtype=jnp.int32)
