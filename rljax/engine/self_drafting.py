"""Drafting with the policy's own architecture on the target's own KV cache (EfficientRollout, appendix E.2).

The drafter has other weights, quantized ones, and no cache of its own: it reads the keys and values that the
target committed, and writes those of what it drafts provisionally behind them. Nobody reads these once the
drafting is over: decoding and verification overwrite them before they read there, or never read. So the
state that comes back decodes as if nothing had been drafted.

Under `engine.verification: coupled` a draft is sampled with the request's own noise at its own position,
exactly as decoding samples: the better the drafter knows the policy, the more drafts are the very tokens. The
other rules need drafts that do not depend on that noise, which come from a stream of their own.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh

from rljax.engine.draft_tree import DraftTree
from rljax.engine.kv_cache import CachedAttention, KVCache
from rljax.engine.sampling import decode_logits, whole_logits
from rljax.engine.state import DecodeState, counted
from rljax.engine.verification import Rule
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.sharding import GatheredWeights
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics, log_normalizer, row_max
from rljax.sampling import distribution, split
from rljax.sampling.distribution import SamplingParams, first_maximum, penalized_logits
from rljax.sampling.noise import gumbel_rows, threefry2x32
from rljax.sharding import splits_vocab

# The second word of a position's counter is 0 (`noise.token_bits`): no position has this key.
_DRAFT_STREAM = np.uint32(0x64726166)
_SURE = 64.0  # the margin where nothing else could have been sampled; a request's noise spans less
_HALF_SURE = 0.25  # the margin of a draft that is as likely right as wrong


def margin_log_probability(margins: Array | np.ndarray) -> Array | np.ndarray:
    """A first guess of how likely drafts are accepted if those before them are, from `SelfDrafts.margins`: to
    be corrected by how often such drafts were.
    """
    xp = np if isinstance(margins, np.ndarray) else jnp
    return xp.log(xp.maximum(margins, 1e-9) / (margins + _HALF_SURE))


@struct.dataclass
class SelfDrafts:
    """Chains drafted for the B slots of a state, on the device, T columns wide.

    Attributes:
      tokens: int32 [B, T], -1 after a chain's end. A chain ends after EOS, and where a verifying pass could
        not take more: at the response's limit, or at the end of the cache.
      logprobs: float32 [B, T], of the tokens under the drafter's distribution; 0 where there is none.
      margins: float32 [B, T], by how much each token won: its logit, with the noise if there is any, above
        the next. The drafter's logits must be that far from the policy's for another token to be sampled, so
        under shared noise it foretells acceptance far better than `logprobs`. 0 where there is no token.
      proposal: float32 [B, T + 1, V], what `verification.sample_nodes` takes for a tree of T nodes; None
        unless asked for.
    """

    tokens: Array
    logprobs: Array
    margins: Array
    proposal: Array | None

    def tree(self, nodes: int) -> DraftTree:
        """The first `nodes` of every chain, to be verified with `proposal[:, : nodes + 1]`."""
        tokens = self.tokens[:, :nodes]
        parents = jnp.broadcast_to(jnp.arange(-1, nodes - 1, dtype=jnp.int32)[None], tokens.shape)
        return DraftTree(tokens=jnp.maximum(tokens, 0), parents=parents, valid=tokens >= 0)


@dataclasses.dataclass(frozen=True)
class SelfDrafting:
    """The device side of `DecodeEngine.draft`.

    Attributes:
      eos_token_ids: nothing is drafted after one.
      rule: rule by which drafts will be verified.
      columns: width of the chains, at least the steps asked for.
      with_proposal: return the distributions that the tokens were drafted from.
      mesh: devices; None for one.
      gathered: see `Programs.gathered`.
    """

    config: ModelConfig
    numerics: Numerics
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    rule: Rule
    columns: int
    with_proposal: bool
    mesh: Mesh | None = None
    gathered: GatheredWeights | None = None

    def __call__(
        self, params: Params, state: DecodeState, rope: Array, steps: Array
    ) -> tuple[DecodeState, SelfDrafts]:
        """Up to `steps` drafts for every active slot; the state as it was, but for what its cache holds
        after the committed tokens.
        """
        batch, vocab_size = state.batch, self.config.vocab_size
        # A verifying pass samples a token besides those it accepts: the last one it has room for needs no
        # draft.
        room = jnp.minimum(state.remaining, state.cache.length - state.lengths) - 1
        limits = jnp.where(state.active, jnp.clip(room, 0, steps), 0)
        keys = state.noise_keys if self.rule == "coupled" else draft_keys(state.noise_keys)

        def drafting(step: Array, ended: Array) -> Array:
            return (step < limits) & ~ended

        def more(carry):
            step, _, _, _, ended, _ = carry
            return drafting(step, ended).any()

        def body(carry):
            step, cache, counts, last, ended, drafts = carry
            going = drafting(step, ended)
            positions = state.lengths + jnp.minimum(step, limits)  # what has ended computes along after it
            cache, logits = self._forward(params, cache, last, positions, rope)
            logits = penalized_logits(logits, counts, self.sampling)
            tokens, logprobs, margins, transformed = self._choose(logits, keys, positions + 1)
            counts = counted(counts, tokens[:, None], going[:, None])
            for eos in self.eos_token_ids:
                ended |= tokens == eos
            new = SelfDrafts(
                tokens=_set_column(drafts.tokens, step, jnp.where(going, tokens, -1)),
                logprobs=_set_column(drafts.logprobs, step, jnp.where(going, logprobs, 0.0)),
                margins=_set_column(drafts.margins, step, jnp.where(going, margins, 0.0)),
                proposal=None,
            )
            if self.with_proposal:
                q = transformed - log_normalizer(transformed, self.numerics)
                q = whole_logits(q, self.config, self.mesh)  # as rejection reads it
                new = new.replace(
                    proposal=lax.dynamic_update_slice(drafts.proposal, q[:, None], (0, step, 0))
                )
            return step + 1, cache, counts, jnp.where(going, tokens, last), ended, new

        shape = (batch, self.columns)
        nothing = SelfDrafts(
            tokens=jnp.full(shape, -1, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            margins=jnp.zeros(shape, jnp.float32),
            proposal=jnp.zeros((batch, self.columns + 1, vocab_size)) if self.with_proposal else None,
        )
        start = (jnp.int32(0), state.cache, state.counts, state.tokens, jnp.zeros(batch, bool), nothing)
        _, cache, _, _, _, drafts = lax.while_loop(more, body, start)
        return state.replace(cache=cache), drafts

    def _forward(
        self, params: Params, cache: KVCache, tokens: Array, positions: Array, rope: Array
    ) -> tuple[KVCache, Array]:
        """A plain decode step: the cache with these tokens, and logits [B, V] of the next ones."""
        attention = CachedAttention(positions, self.numerics)
        hidden, kept = transformer.forward(
            params,
            self.config,
            tokens[:, None],
            positions[:, None],
            attention,
            rope,
            self.numerics,
            caches=cache.layers(),
            gathered=self.gathered,
        )
        logits = decode_logits(params, self.config, hidden[:, 0], self.numerics, self.mesh, self.gathered)
        return KVCache.of_layers(kept), logits

    def _choose(self, logits: Array, keys: Array, positions: Array) -> tuple[Array, Array, Array, Array]:
        """Samples like `sampling.sample`; returns tokens, logprobs, margins [B], and transformed logits [B,
        V].
        """
        source = split if splits_vocab(self.mesh) else distribution
        transformed = source.transform_logits(logits, self.sampling, self.numerics)
        noisy = logits
        if not self.sampling.greedy:
            noisy = transformed + gumbel_rows(keys, positions, logits.shape[-1])
        tokens = first_maximum(noisy)
        is_token = lax.broadcasted_iota(jnp.int32, noisy.shape, 1) == tokens[:, None]
        margins = row_max(noisy) - row_max(jnp.where(is_token, -jnp.inf, noisy))
        margins = jnp.minimum(margins[:, 0], _SURE)
        return tokens, source.token_logprobs(transformed, tokens, self.numerics), margins, transformed


def draft_keys(keys: Array) -> Array:
    """Keys of a noise field that drafts are sampled from and nothing else: uint32 [B, 2] -> [B, 2]."""
    zero = jnp.zeros_like(keys[:, 0])
    return jnp.stack(threefry2x32(keys[:, 0], keys[:, 1], zero, zero + _DRAFT_STREAM), axis=1)


def _set_column(array: Array, column: Array, values: Array) -> Array:
    return lax.dynamic_update_slice(array, values[:, None], (0, column))
