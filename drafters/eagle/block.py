"""The block head: one pass drafts a block of tokens, and a small correction makes them follow each other.

DFlash (2026, arXiv 2602.06036): the layers of the head see the policy's features of every verified token as
keys and values, and compute all positions of a block at once. Domino (2026, arXiv 2605.29707): a recurrent
state over the tokens drafted so far corrects the logits of each position. Here every step of the correction
draws with the request's noise, which is known for all positions beforehand; the pass is the same whatever is
drawn, and the draft is the policy's sample if the corrected logits are the policy's.

    a[t] = fc (embedding of token t + 1 ; low ; middle ; high of token t)
    layer l   keys and values: k, v of norm a[t] at position t, for every pair t, and of the block itself
    block     x[i] = a[t] + place[i] at position t + 1 + i behind the last pair t; causal, so that the same
              block may be cut short
    state     c[0] = 0, c[i] = GRU(c[i - 1], embedding of the i-th drafted token)
    logits    LM head (norm x[i]) + out silu(mix (norm x[i] ; c[i]))

`a` is the pair of `model.py`, so what the head knows of a slot is appended as that of an EAGLE head is.

**DFlash's own block** (`BlockShape.mask`; published heads, `speculators.py`) has a[t] = fc (features of
token t), from any number of layers, and no correction. Its positions are the embedding of token t + 1 itself,
and behind it that of the mask token for every token to be drafted; all of them see each other, so that all
are computed always. Queries and keys have norms. Its params are fc, context_norm, norm, layers and lm_head.

**Params** (shapes; as in `model.py`, and L = depth, k = size, w = width):

    fc [d, 4d]   context_norm [d]   place [k, d]   norm [d]   layers: "0" .. "L - 1", Llama layers
    state_in [3w, d]   state [3w, w]   mix [w, d + w]   out [V', w]
    lm_head [V', d], with a draft vocabulary
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters.eagle.model import Head, HeadConfig, normed_outputs
from rljax.kernels.linear import linear
from rljax.models.transformer import Attention, Params, decoder_layer
from rljax.numerics.rows import apply_rope


def pair_vectors(head: Head, states: Array, tokens: Array) -> Array:
    """Returns a [..., d] of pairs: the policy's features [..., S, d], and the tokens int32 [...] behind."""
    joined = states[..., :-1, :].astype(head.numerics.dtype).reshape(*tokens.shape, -1)
    if head.config.corrected:
        joined = jnp.concatenate([head.embedded(tokens), joined], axis=-1)
    return linear(joined, head.params["fc"], head.numerics)


def block_starts(head: Head, pairs: Array, tokens: Array) -> Array:
    """Returns what a block behind each pair begins with [..., d]: a, or DFlash's embedding of the token."""
    return pairs if head.config.corrected else head.embedded(tokens)


def context_entries(head: Head, pairs: Array, angles: Array) -> list[tuple[Array, Array]]:
    """Returns keys and values [N, T, Hk, D] of pairs a [N, T, d] for every layer; `angles` [N, T, 2, D/2]."""
    normed = head.normed(pairs, head.params["context_norm"])
    heads = (*pairs.shape[:2], -1, head.config.layer.head_dim)
    entries = []
    for layer in _layers(head):
        k, v = (linear(normed, layer[name], head.numerics).reshape(heads) for name in ("k", "v"))
        if head.config.layer.qk_norm:
            k = head.normed(k, layer["k_norm"])
        entries.append((apply_rope(k, angles), v))
    return entries


def _layers(head: Head) -> list[Params]:
    """Returns the weights of the layers, in order."""
    return [head.params["layers"][str(number)] for number in range(head.config.layer.num_layers)]


def block_pass(head: Head, starts: Array, size: int, angles: Array, attentions: list[Attention]) -> Array:
    """Computes blocks behind pairs.

    Args:
      starts: [N, T, d], from `block_starts`, of the last pair in front of each block.
      size: tokens to draft, at most `config.block.size`; they take P = `config.block.positions(size)`.
      angles: rows of the RoPE table, float32 [N, T * P, 2, D/2], block after block.
      attentions: one for each layer, over T * P entries.

    Returns:
      x [N, T, size, d] after the layers.
    """
    config, numerics = head.config, head.numerics
    if config.corrected:
        x = starts[:, :, None] + head.params["place"][:size].astype(numerics.dtype)[None, None]
    else:
        mask = head.embedded(config.block.mask)
        masks = jnp.broadcast_to(mask, (*starts.shape[:2], config.block.size, len(mask)))
        x = jnp.concatenate([starts[:, :, None], masks], axis=2)
    shape = x.shape
    x = x.reshape(shape[0], -1, shape[-1])
    for layer, attention in zip(_layers(head), attentions, strict=True):
        x, _ = decoder_layer(layer, None, x, angles, attention, config.layer, numerics)
    x = x.reshape(shape)
    return x if config.corrected else x[:, :, 1 : 1 + size]


def seen_in_block(config: HeadConfig, size: int) -> np.ndarray:
    """Returns which positions of a block see which, bool [P, P]: ours those before them, DFlash's all."""
    positions = config.block.positions(size)
    everything = np.ones((positions, positions), bool)
    return np.tril(everything) if config.corrected else everything


def next_state(head: Head, state: Array, tokens: Array) -> Array:
    """Returns the correction's state float32 [..., w] behind one more token, int32 [...] (GRU, Cho et al.,
    2014, "Learning Phrase Representations using RNN Encoder-Decoder", section 2.3).
    """
    params, numerics = head.params, head.numerics
    given = linear(head.embedded(tokens), params["state_in"], numerics).astype(jnp.float32)
    own = linear(state.astype(numerics.dtype), params["state"], numerics).astype(jnp.float32)
    (reset, update, new), (own_reset, own_update, own_new) = (jnp.split(x, 3, axis=-1) for x in (given, own))
    new = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
    update = jax.nn.sigmoid(update + own_update)
    return update * state + (1.0 - update) * new


def corrections(head: Head, x: Array, state: Array) -> Array:
    """Returns what `out` reads [..., w], of block positions x [..., d] and states [..., w]."""
    joined = jnp.concatenate([normed_outputs(head, x), state.astype(head.numerics.dtype)], axis=-1)
    return jax.nn.silu(linear(joined, head.params["mix"], head.numerics))
