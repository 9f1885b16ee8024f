"""Heads: decoder layers over (hidden state at t, embedding of token t + 1), as pure functions.

EAGLE (Li et al., 2024, arXiv 2401.15077), HASS (Zhang et al., 2025, arXiv 2408.15766), EAGLE-3 (Li et al.,
2025, arXiv 2503.01840); TLT, section 4.1. The policy's embeddings and LM head are passed in wherever they are
needed: never copied, never trained. The layer is the policy's own `decoder_layer`. `block.py` has the layers
and params of the head that drafts a block in one pass, from the same pairs and states as eagle3.

**Pairs.** Pair t is the policy's hidden state at position t with the embedding of token t + 1, at RoPE
position t. Its output predicts token t + 2, so what it should match is the policy at position t + 1. Pairing
hidden t with token t instead silently halves acceptance.

**States.** What the policy hands over for every token (`HeadConfig.states`), [..., S, d]:

    eagle, hass   S = 1: the hidden state after the final norm, which the LM head reads
    eagle3, block S = 4: the residual stream behind `layers` (low, middle, high; no norm), then, for the
                  training target only, the hidden state after the final norm

**Params** (shapes; d = hidden_size, H/Hk = heads, D = head_dim, f = mlp_size). The layer is always a Llama
layer, without biases and query/key norms, whatever the policy is: that is what SGLang and vLLM load.

    eagle, hass   fc [d, 2d] and, in heads from elsewhere, fc_bias [d]
                  layer: q [H*D, d]  k, v [Hk*D, d]  o  mlp_norm  gate  up  down
                  x = fc (e ; h); the layer attends from x itself, without a norm; its output is a hidden
                  state like those it was given, and the LM head reads it as it is
    eagle3        fc [d, 3d]
                  layer: q [H*D, 2d]  k, v [Hk*D, 2d]  o  mlp_norm  gate  up  down  embed_norm [d]
                  hidden_norm [d]
                  norm [d]
                  h = fc (low ; middle ; high), or the head's own output; the layer attends from
                  (norm e ; norm h) and adds to h (norm_before_residual: to norm h); the LM head reads
                  the output after `norm`
                  lm_head [V', d], with a draft vocabulary only: the head's own

**Draft vocabulary.** Published EAGLE-3 heads have logits over V' frequent tokens only, and an LM head of
their own for them. `DraftVocabulary` maps their ids to the policy's. A token outside it is never drafted.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh

from drafters.eagle.objective import VARIANTS, Variant
from rljax.kernels.linear import linear
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.transformer import Attention, Params, decoder_layer
from rljax.numerics.attention import MASKED
from rljax.numerics.rows import Numerics, rms_norm


class DraftVocabulary:
    """The tokens that a head can draft. Immutable; hashed once, as it is a static argument of programs.

    Args:
      tokens: int [V'], the policy's token id for every id of the head.

    Raises:
      ValueError: a token is negative or there twice, or there are none.
    """

    def __init__(self, tokens: Sequence[int] | np.ndarray) -> None:
        tokens = np.array(tokens, np.int32)
        if tokens.ndim != 1 or not tokens.size or tokens.min() < 0 or len(np.unique(tokens)) < tokens.size:
            raise ValueError("tokens: expected at least one token id, each once and not negative")
        tokens.flags.writeable = False
        self.tokens = tokens
        self._digest = hashlib.sha256(tokens.tobytes()).hexdigest()

    @classmethod
    def from_offsets(cls, d2t: np.ndarray) -> "DraftVocabulary":
        """Returns the vocabulary of a checkpoint's `d2t` [V']: id i of the head is token i + d2t[i]."""
        return cls(np.arange(len(d2t)) + np.asarray(d2t, np.int64))

    @classmethod
    def most_frequent(cls, counts: np.ndarray, size: int, always: Sequence[int] = ()) -> "DraftVocabulary":
        """Returns the `size` tokens of the largest counts [V], of equals the first, `always` among them."""
        ranked = np.argsort(-np.asarray(counts, np.int64), kind="stable").tolist()
        return cls(sorted(list(dict.fromkeys([*always, *ranked]))[:size]))

    @property
    def offsets(self) -> np.ndarray:
        """The `d2t` of a checkpoint, int64 [V']."""
        return self.tokens.astype(np.int64) - np.arange(self.tokens.size)

    def __len__(self) -> int:
        return self.tokens.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftVocabulary) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"DraftVocabulary({len(self)} tokens, {self._digest})"


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """The shape of a block head (`block.py`).

    Attributes:
      size: the most tokens of a draft.
      depth: decoder layers.
      width: of the correction; 0 for DFlash's block, which has none.
      mask: the token whose embedding stands in the place of every token to be drafted, in DFlash's block;
        None for ours.
    """

    size: int = 8
    depth: int = 1
    width: int = 128
    mask: int | None = None

    def __post_init__(self) -> None:
        least = {"size": 1, "depth": 1} | ({"width": 1} if self.mask is None else {"mask": 0})
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                raise ValueError(f"{name}: should be at least {smallest}, got {value}")
        if self.mask is not None and self.width:
            raise ValueError(f"width: DFlash's block has no correction, got {self.width}")

    def positions(self, depth: int) -> int:
        """Returns how many positions a pass computes for a draft of `depth` tokens. DFlash's are the last
        token and all masks, since they see each other.
        """
        return depth if self.mask is None else self.size + 1


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """The shape of a head.

    Attributes:
      variant: "eagle", "hass" (the same head, trained otherwise), "eagle3" or "block".
      policy: the policy's architecture.
      layers: for eagle3 and block, behind how many of the policy's layers low, middle and high states are
        taken; empty for SGLang's and vLLM's default (see `default_layers`).
      vocabulary: for eagle3 and block, the tokens that the head can draft; None is the policy's whole
        vocabulary, with the policy's LM head.
      block: for block, its shape; None for the default one.
      norm_before_residual: for eagle3, the layer adds to the normed hidden state, not to the hidden state.
    """

    variant: Variant
    policy: ModelConfig
    layers: tuple[int, ...] = ()
    vocabulary: DraftVocabulary | None = None
    block: BlockShape | None = None
    norm_before_residual: bool = False

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise ValueError(f"variant: {self.variant!r} is unknown; use {', '.join(VARIANTS)}")
        if self.variant == "block":
            object.__setattr__(self, "block", self.block or BlockShape())
        elif self.block is not None:
            raise ValueError(f"block: {self.variant} drafts token by token")
        if not self.fused and self.layers:
            raise ValueError(f"layers: {self.variant} reads the last hidden state only")
        if self.fused:
            most = self.policy.num_layers
            layers = self.layers or default_layers(most)
            number = "some" if self.block is not None and self.block.mask is not None else "3"
            if (number == "3" and len(layers) != 3) or not all(0 <= layer <= most for layer in layers):
                raise ValueError(f"layers: expected {number} from 0 to {most}, got {layers}")
            object.__setattr__(self, "layers", tuple(layers))
        if self.norm_before_residual and self.variant != "eagle3":
            raise ValueError(f"norm_before_residual: {self.variant} has no such norm")
        mask = None if self.block is None else self.block.mask
        if mask is not None and mask >= self.policy.vocab_size:
            raise ValueError(f"mask: token {mask} is outside the policy's {self.policy.vocab_size}")
        if self.vocabulary is not None:
            if not self.fused:
                raise ValueError(f"vocabulary: {self.variant} drafts from the policy's whole vocabulary")
            if self.vocabulary.tokens.max() >= self.policy.vocab_size:
                raise ValueError(
                    f"vocabulary: token {self.vocabulary.tokens.max()} is outside the policy's vocabulary of"
                    f" {self.policy.vocab_size}"
                )

    @property
    def fused(self) -> bool:
        """Reads several states of the policy, fused by a linear layer."""
        return self.variant in ("eagle3", "block")

    @property
    def states(self) -> int:
        """States per token that the policy hands over, S; the last is the one after the final norm."""
        return len(self.layers) + 1 if self.fused else 1

    @property
    def corrected(self) -> bool:
        """Its logits are corrected token by token."""
        return self.block is not None and self.block.mask is None

    def reach(self, depth: int) -> int:
        """Returns how many positions behind the last pair a draft of `depth` tokens stands at."""
        return depth if self.block is None else self.block.positions(depth)

    @property
    def layer(self) -> ModelConfig:
        """The decoder layers as an architecture of its own (also of its KV cache)."""
        layers = 1 if self.block is None else self.block.depth
        return dataclasses.replace(
            self.policy,
            architecture="llama",
            num_layers=layers,
            attention_bias=False,
            qk_norm=self.block is not None and self.block.mask is not None,
            gemma=None,
        )


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high: behind 2, L / 2 and L - 3 layers, as SGLang and vLLM take them; closer to the
    ends in policies with fewer than 7 layers.
    """
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return 1, max(num_layers // 2, 1), max(num_layers - 1, 1)


def head_shapes(config: HeadConfig) -> Params:
    """The params pytree with a shape tuple in the place of every array."""
    d = config.policy.hidden_size
    layer = transformer.param_shapes(config.layer)["layers"][0]
    if config.block is not None:
        return _block_shapes(config, layer)
    del layer["attention_norm"]
    if not config.fused:
        return {"fc": (d, 2 * d), "layer": layer}
    layer |= {name: (layer[name][0], 2 * d) for name in ("q", "k", "v")}
    layer |= {"embed_norm": (d,), "hidden_norm": (d,)}
    shapes = {"fc": (d, 3 * d), "layer": layer, "norm": (d,)}
    return shapes if config.vocabulary is None else shapes | {"lm_head": (len(config.vocabulary), d)}


def _block_shapes(config: HeadConfig, layer: Params) -> Params:
    d, shape = config.policy.hidden_size, config.block
    size = config.policy.vocab_size if config.vocabulary is None else len(config.vocabulary)
    shapes = {
        "fc": (d, (len(config.layers) + config.corrected) * d),
        "context_norm": (d,),
        "norm": (d,),
        "layers": {str(number): dict(layer) for number in range(shape.depth)},
    }
    if config.corrected:
        shapes |= {
            "place": (shape.size, d),
            "state_in": (3 * shape.width, d),
            "state": (3 * shape.width, shape.width),
            "mix": (shape.width, d + shape.width),
            "out": (size, shape.width),
        }
    return shapes if config.vocabulary is None else shapes | {"lm_head": (size, d)}


def head_structs(config: HeadConfig) -> Params:
    """The params pytree with a float32 `jax.ShapeDtypeStruct` in the place of every array."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        head_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def init_head(config: HeadConfig, policy_params: Params, seed: int) -> Params:
    """Float32 weights that start from what is known: the hidden state goes through.

    `fc` passes the hidden state on (eagle3: the mean of all) and adds a little of the embedding, and
    the layer adds little to it, so an untrained EAGLE head answers with the hidden state one token late: the
    L1 loss begins near, not at noise. `norm` begins as the policy's final norm, which the LM head was trained
    behind, an LM head over a draft vocabulary as the rows of the policy's. A block begins without its
    correction, all its positions alike. Everything else is normal with standard deviation input^-0.5.
    """
    rng = np.random.default_rng(seed)
    d = config.policy.hidden_size

    def init(path, leaf):
        name, shape = path[-1].key, leaf.shape
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        scale = shape[1] ** -0.5 * (0.1 if name in ("o", "down") else 1.0)
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    params = jax.tree_util.tree_map_with_path(init, head_structs(config))
    identity = np.eye(d, dtype=np.float32)
    if config.fused:
        states = len(config.layers)
        params["fc"] *= np.float32(0.1)
        params["fc"][:, -states * d :] += np.tile(identity / np.float32(states), states)
        if config.corrected:
            params |= {name: np.zeros_like(params[name]) for name in ("place", "out")}
        # A copy: the head's arrays are given up to its updates, the policy's are not.
        more = 0.0 if config.policy.gemma is None else 1.0  # Gemma's norms multiply by so much more
        params["norm"] = jnp.array(policy_params["final_norm"], jnp.float32, copy=True) + more
        if config.vocabulary is not None:
            rows = transformer.lm_head(policy_params, config.policy)[config.vocabulary.tokens]
            params["lm_head"] = jnp.array(rows, jnp.float32, copy=True)
    else:
        params["fc"][:, d:] = identity
    return jax.device_put(params)


def shared_params(policy_params: Params, config: ModelConfig) -> Params:
    """The policy's own embeddings and LM head, which the head shares: the same arrays."""
    names = ("embed",) if config.tie_embeddings else ("embed", "lm_head")
    return {name: policy_params[name] for name in names}


@struct.dataclass
class Head:
    """A head with all that its functions read; a pytree.

    Attributes:
      params: its weights; None where they come with something else.
      shared: the policy's embeddings and LM head (`shared_params`).
      rope: `rope_table(config.policy, length)`, float32 [length, 2, D/2].
      config: its shape; static.
      numerics: see `Numerics`; static.
      mesh: the devices that it drafts on; None for one; static.
    """

    params: Params | None
    shared: Params
    rope: Array
    config: HeadConfig = struct.field(pytree_node=False)
    numerics: Numerics = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    def embedded(self, tokens: Array | int) -> Array:
        """Returns the policy's embeddings [..., d] of tokens."""
        return self.shared["embed"][tokens].astype(self.numerics.dtype)

    def normed(self, x: Array, weight: Array) -> Array:
        """Returns x [..., d] behind a norm."""
        return rms_norm(x, weight, self.config.policy.norm_epsilon, self.numerics)


def hidden_inputs(head: Head, states: Array) -> Array:
    """Combines the policy's features [..., S, d] into the head's input [..., d]."""
    states = states.astype(head.numerics.dtype)
    if not head.config.fused:
        return states[..., 0, :]
    low_middle_high = states[..., :3, :]
    return linear(low_middle_high.reshape(*states.shape[:-2], -1), head.params["fc"], head.numerics)


def apply_head(
    head: Head, hidden: Array, tokens: Array, angles: Array, attention: Attention
) -> tuple[Array, tuple[Array, Array] | None]:
    """The head over pairs.

    Args:
      hidden: [N, T, d], from `hidden_inputs`, or the head's own outputs.
      tokens: int32 [N, T], the token behind each hidden state.
      angles: rows of the RoPE table for the pairs' positions, float32 [N, T, 2, D/2].
      attention: visibility of pairs.

    Returns:
      the head's outputs [N, T, d]: hidden states for `head_logits` and for further pairs; and what the
      attention kept.
    """
    embedded, hidden = head.embedded(tokens), hidden.astype(head.numerics.dtype)
    layer, params = head.params["layer"], head.params
    if head.config.fused:
        normed = [head.normed(embedded, layer["embed_norm"]), head.normed(hidden, layer["hidden_norm"])]
        attention_input = jnp.concatenate(normed, axis=-1)
        if head.config.norm_before_residual:
            hidden = normed[1]
    else:
        joined = jnp.concatenate([embedded, hidden], axis=-1)
        attention_input = hidden = linear(joined, params["fc"], head.numerics, params.get("fc_bias"))
    shape, numerics = head.config.layer, head.numerics
    return decoder_layer(
        layer, None, hidden, angles, attention, shape, numerics, attention_input=attention_input
    )


def normed_outputs(head: Head, outputs: Array) -> Array:
    """Returns the head's outputs [..., d] as the LM head reads them."""
    return head.normed(outputs, head.params["norm"]) if head.config.fused else outputs


def head_logits(head: Head, outputs: Array) -> Array:
    """Float32 logits [..., V] of the head's outputs [..., d]; [..., V'] with a draft vocabulary. Those of a
    block head with a correction are (x ; correction), [..., d + w].
    """
    if not head.config.corrected:
        return lm_logits(head, outputs)
    x, correction = jnp.split(outputs, [head.config.policy.hidden_size], axis=-1)
    return corrected(head, lm_logits(head, x), correction)


def corrected(head: Head, logits: Array, correction: Array) -> Array:
    """Returns a block head's logits [..., V'] with the correction [..., w]. On a mesh the policy's LM head
    may have more rows (`padded_vocab_size`), which stand for no token.
    """
    change = linear(correction, head.params["out"], head.numerics).astype(jnp.float32)
    padding = logits.shape[-1] - change.shape[-1]
    return logits + jnp.pad(change, [*[(0, 0)] * (change.ndim - 1), (0, padding)])


def lm_logits(head: Head, outputs: Array) -> Array:
    """Returns `head_logits` without a correction."""
    outputs = normed_outputs(head, outputs)
    if head.config.vocabulary is None:
        return policy_logits(head, outputs)
    untied = dataclasses.replace(head.config.policy, tie_embeddings=False)
    return transformer.logits({"lm_head": head.params["lm_head"]}, untied, outputs, head.numerics)


def policy_logits(head: Head, hidden: Array) -> Array:
    """Float32 logits of the policy's LM head. Some of its rows may stand for no token (`padding_rows`, and on
    a mesh `padded_vocab_size`): their logits are so low that no token there has a probability, and finite, so
    that losses stay finite.
    """
    policy = head.config.policy
    logits = transformer.logits(head.shared, policy, hidden, head.numerics)
    if logits.shape[-1] == policy.used_rows:
        return logits
    token = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(token < policy.used_rows, logits, MASKED)
