"""Log-probabilities of whole sequences, with the likeliest alternatives to every token.

Decoding keeps the log-probability of the sampled token alone. Who wants alternatives, or for a
prompt's, gets them from one forward pass over the finished sequence: the pass of training, whose
log-probabilities have the bits of decoding wherever a run's do (docs/row-invariance.md). Its programs, one a
cache length, are compiled when first needed.
"""

import dataclasses
import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.engine.engine import DecodeEngine
from rljax.engine.kv_cache import KEY_BLOCK
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics, log_normalizer
from rljax.sampling.distribution import Responses, SamplingParams, penalized_logits, without_padding
from rljax.sampling.slots import SlotSampling, kept_from
from rljax.serving.protocol import MOST_ALTERNATIVES

_ROWS = KEY_BLOCK  # positions whose logits exist together; cache lengths are multiples


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a policy says of a sequence of T tokens; nothing of the first, which has no token before it.

    Attributes:
      logprobs: float32 [T - 1], of the tokens from the second on.
      alternatives: int32 [T - 1, K], the K likeliest tokens at each place, the likeliest first.
      alternative_logprobs: float32 [T - 1, K]; -inf where filters leave fewer than K.
      greedy: whether the response is greedy, and so not sampled from the scored distribution.
    """

    logprobs: np.ndarray
    alternatives: np.ndarray
    alternative_logprobs: np.ndarray
    greedy: bool

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        """Returns up to `count` of the likeliest tokens for token `row` + 1, with logprobs."""
        alternatives, logprobs = self.alternatives[row, :count], self.alternative_logprobs[row, :count]
        finite = np.isfinite(logprobs)
        return list(zip(alternatives[finite].tolist(), logprobs[finite].tolist(), strict=True))


class Scorer:
    """Scores sequences, one at a time, from any thread."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine, self._lock = engine, threading.Lock()

    def score(
        self, params: Params, tokens: Sequence[int], prompt_length: int, sampling: SamplingParams
    ) -> Scores:
        """Scores a prompt and its response.

        Args:
          params: weights from `engine.load_params`.
          tokens: token ids.
          prompt_length: number of those that are the prompt, which was not sampled: its log-probabilities are
            those of temperature 1 without filters and penalties.
          sampling: distribution of the response. A greedy one, in which the likeliest token has probability 1
            and there are no others, is scored as temperature 1 without filters.
        """
        engine = self._engine
        length = engine.buckets.cache_for(len(tokens))
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        plain = SamplingParams()
        of_response = plain if sampling.greedy else sampling
        settings = SlotSampling.of([plain, of_response], engine.config.vocab_size)
        rope = rope_table(engine.config, engine.buckets.cache[-1])
        counts = np.int32(len(tokens)), np.int32(prompt_length)
        arguments = jax.tree.map(jnp.asarray, (padded, *counts, settings, rope))
        static = engine.config, engine.numerics, engine.sampling
        with self._lock:
            args = (params, *arguments)
            program = engine.pool.get(
                ("score", length, len(rope), *static), functools.partial(_score, *static), args
            )
            logprobs, alternatives, their_logprobs = jax.device_get(program(*args))
        last = len(tokens) - 1
        return Scores(logprobs[:last], alternatives[:last], their_logprobs[:last], sampling.greedy)


def _score(
    config: ModelConfig,
    numerics: Numerics,
    penalties: SamplingParams,
    params: Params,
    tokens: Array,
    num_tokens: Array,
    prompt_length: Array,
    settings: SlotSampling,
    rope: Array,
) -> tuple[Array, Array, Array]:
    """As `Scores`, for T padded tokens, int32 [T]. `settings` are those of the prompt and the response."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    segment = (positions < num_tokens).astype(jnp.int32)[None]
    attention = PackedAttention(segment, numerics)
    hidden, _ = transformer.forward(params, config, tokens[None], positions[None], attention, rope, numerics)
    targets = jnp.roll(tokens, -1)
    sampled = positions >= prompt_length - 1  # whether the target is
    responses = Responses(segment, sampled[None])

    def of_rows(start: Array) -> tuple[Array, Array, Array]:
        rows = start + jnp.arange(_ROWS, dtype=jnp.int32)
        logits = transformer.logits(params, config, hidden[0, rows], numerics)
        logits = without_padding(logits, config.used_rows)
        if penalties.penalizes:
            counts = responses.counts(targets[None], rows, config.vocab_size)[0]
            logits = penalized_logits(logits, counts, penalties)
        here = settings.take(sampled[rows].astype(jnp.int32))
        scaled = logits * here.factor[:, None]
        lowest = lax.cond(
            here.filtered.any(),
            lambda: jnp.where(here.filtered[:, None], kept_from(scaled, here, numerics), -jnp.inf),
            lambda: jnp.full((_ROWS, 1), -jnp.inf, scaled.dtype),
        )
        kept = jnp.where(scaled >= lowest, scaled, -jnp.inf)
        normalizer = log_normalizer(kept, numerics)
        of_targets = jnp.take_along_axis(kept, targets[rows][:, None], axis=-1) - normalizer
        largest, alternatives = lax.top_k(kept, min(MOST_ALTERNATIVES, config.vocab_size))
        return of_targets[:, 0], alternatives, largest - normalizer

    scores = lax.map(of_rows, jnp.arange(0, len(tokens), _ROWS, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(len(tokens), *x.shape[2:]), scores)
