"""The engine under JetStream 0.3.0's interface: one prompt at a time, slots by number, one token per call.

    prefix, first = slots.prefill(params=params, padded_tokens=tokens, true_length=n)
    state = slots.insert(prefix, state, slot)            # or bulk_insert(prefix, state, the slots of a group)
    state, result = slots.generate(params, state)        # result.get_result_at_slot(slot).tokens
    slots.free_resource(slot)

Method names, arguments and results are those of `jetstream.engine.engine_api.Engine` in google/JetStream, so
an orchestrator written for it can drive the engine; `adapter.py` has a subclass of that abstract class. rljax
itself uses the wider calls of `DecodeEngine`: many prompts per prefill, many steps per host sync, drafts.

JetStream returns the first token with the prefill, where the engine samples none (see `DecodeEngine`). So the
prompt takes its first decode step in a separate decode state, which is then inserted. The programs that
sample are those of training, and the tokens are the same bits.
"""

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.engine.state import DecodeState, Prefix
from rljax.models.transformer import Params
from rljax.sampling.noise import request_key

_PURPOSE = 3  # of the noise; 0 is training, 1 evaluation, 2 serving


@struct.dataclass
class SlotTokens:
    """Tokens of one slot.

    Attributes:
      tokens: int32 [samples, columns].
      valid: int32 [samples, columns], 0 where there is no token.
      lengths: int32 [samples], response tokens so far.
      log_prob: float32 [samples, columns], under the sampling distribution.
    """

    tokens: Any
    valid: Any
    lengths: Any
    log_prob: Any = None


@struct.dataclass
class ResultTokens:
    """Tokens of a call in JetStream's format: one array, and the column ranges of its parts.

    Attributes:
      data: int32 [rows, 2 * columns + 1]: tokens, their validity (0 or 1), and response tokens so far.
      tokens_idx, valid_idx, length_idx: ranges of columns of `data`.
      samples_per_slot: number of rows per slot.
      log_prob: float32 [rows, columns].
    """

    data: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)
    log_prob: Any = None

    def copy_to_host_async(self) -> None:
        """Does nothing: the host sync has copied the data."""

    def convert_to_numpy(self) -> "ResultTokens":
        """Returns the same results as NumPy arrays."""
        return self.replace(data=np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> SlotTokens:
        """Returns the tokens of `slot`."""
        first = slot * self.samples_per_slot
        return self.get_result_at_slots(tuple(range(first, first + self.samples_per_slot)))

    def get_result_at_slots(self, slots: Sequence[int]) -> SlotTokens:
        """Returns the tokens of several rows."""
        rows = np.asarray(slots)
        part = lambda columns: self.data[rows, slice(*columns)]  # noqa: E731
        log_prob = None if self.log_prob is None else self.log_prob[rows]
        return SlotTokens(part(self.tokens_idx), part(self.valid_idx), part(self.length_idx)[:, 0], log_prob)


@struct.dataclass
class SlotPrefix:
    """A prefilled prompt with the progress of its samples.

    Attributes:
      prefix: KV cache and last tokens, one row per sample (more where shapes are rounded up).
      noise_keys: uint32 [G, 2], noise keys of the samples.
      sampled: int32 [G], response tokens so far: 0 or 1.
      ended: bool [G], whether that token ended the response.
    """

    prefix: Prefix
    noise_keys: Array
    sampled: Array
    ended: Array


@struct.dataclass
class SlotState:
    """Decode state between calls.

    Attributes:
      decode: decode state of the engine, with the largest cache bucket.
      sampled: int32 [B], response tokens of each slot so far.
    """

    decode: DecodeState
    sampled: Array


class SlotEngine:
    """A `DecodeEngine` with JetStream's method names and shapes.

    A slot decodes until an EOS token or the end of its cache. The caller enforces shorter limits and stop
    strings, and ends a slot early by `free_resource`.

    Args:
      slots: requests decoded at a time, rounded up to a batch bucket.
      max_prompt_length: most tokens of a prompt, below the largest cache bucket.
      seed: seed of all noise. The noise of a request is a pure function of the seed and of `request_id` or
        `rng`, or without these of the number of requests before it.
    """

    result_type: type[ResultTokens] = ResultTokens
    first_token = True
    """Whether a prefill returns the first token, too."""

    def __init__(self, engine: DecodeEngine, slots: int, max_prompt_length: int, seed: int = 0) -> None:
        if not 0 < max_prompt_length < engine.buckets.cache[-1]:
            raise ValueError(
                f"max_prompt_length: {max_prompt_length} leaves no space for a response in the largest cache"
                f" bucket, {engine.buckets.cache[-1]}"
            )
        self.engine = engine
        self._slots = engine.buckets.batch_for(slots)
        self._max_prompt_length = max_prompt_length
        self._seed = seed
        self._requests = 0
        self._freed: set[int] = set()
        self._lock = threading.Lock()  # JetStream prefills, generates and detokenizes in separate threads

    # -- JetStream's interface -------------------------------------------------------------------------------

    def load_params(self, params: Params) -> Params:
        """See `DecodeEngine.load_params`."""
        return self.engine.load_params(params)

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Callable[[Any], Any] | None = None,
        request_id: uuid.UUID | None = None,
    ) -> Any:
        """Prefills a prompt and samples its first token: returns a `SlotPrefix` and `ResultTokens`; without
        `first_token` only the prefix, with no token sampled.

        Args:
          params: weights from `load_params`.
          existing_prefix: must be None: prompts are prefilled whole.
          padded_tokens: int [T], the prompt with padding.
          true_length: length of the prompt without padding.
          sampler: must be None: the engine has one distribution, the one that is trained.
          request_id: identity of the request, for its noise.
        """
        keys = self._noise_keys(1, None, request_id)
        prefix = self._prefilled(params, existing_prefix, padded_tokens, true_length, sampler, keys)
        return self._with_first_tokens(params, prefix) if self.first_token else prefix

    def prefill_multisampling(
        self,
        *,
        params: Params,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Callable[[Any], Any] | None = None,
        rng: Any = None,
        num_samples: int = 1,
        request_id: uuid.UUID | None = None,
    ) -> tuple[SlotPrefix, ResultTokens]:
        """Prefills a prompt and samples the first tokens of `num_samples` responses; results have a row each.

        Args:
          rng: a JAX random key, the identity of the request in place of `request_id`.

        The other arguments are those of `prefill`.
        """
        if not 1 <= num_samples <= self.max_concurrent_decodes:
            raise ValueError(f"num_samples: {num_samples}; there are {self.max_concurrent_decodes} slots")
        keys = self._noise_keys(num_samples, rng, request_id)
        prefix = self._prefilled(params, existing_prefix, padded_tokens, true_length, sampler, keys)
        return self._with_first_tokens(params, prefix)

    def insert(
        self, prefix: SlotPrefix, decode_state: SlotState, slot: int, request_id: uuid.UUID | None = None
    ) -> SlotState:
        """Inserts the first sample of a prompt into a slot. Consumes `decode_state`."""
        del request_id  # the prefill has derived the noise from it
        return self._insert(prefix, decode_state, [int(slot)])

    def bulk_insert(self, prefix: SlotPrefix, decode_state: SlotState, slots: Sequence[int]) -> SlotState:
        """Inserts sample i of a prompt into slots[i]. Consumes `decode_state`."""
        return self._insert(prefix, decode_state, [int(slot) for slot in slots])

    def generate(
        self, params: Params, decode_state: SlotState, sampler: Callable[[Any], Any] | None = None
    ) -> tuple[SlotState, ResultTokens]:
        """Samples a token for every active slot; other slots get invalid ones. Consumes `decode_state`."""
        self._refuse(sampler, None)
        with self._lock:
            freed, self._freed = sorted(self._freed), set()
        state = decode_state.decode
        if freed:
            state = self.engine.free_resource(state, freed)
        state, result = self.engine.generate(params, state, max_steps=1)
        tokens = np.zeros((state.batch, 1), np.int32)
        log_prob = np.zeros((state.batch, 1), np.float32)
        tokens[:, : result.tokens.shape[1]] = result.tokens
        log_prob[:, : result.tokens.shape[1]] = result.logprobs
        valid = np.zeros((state.batch, 1), np.int32)
        valid[:, : result.tokens.shape[1]] = result.tokens >= 0
        sampled = np.asarray(decode_state.sampled) + valid[:, 0]
        results = self._results(np.where(valid, tokens, 0), valid, sampled, log_prob, 1)
        return SlotState(state, jnp.asarray(sampled)), results

    def free_resource(self, slot: int) -> None:
        """Frees a slot; it stops decoding before the next token."""
        with self._lock:
            self._freed.add(int(slot))

    def init_decode_state(self) -> SlotState:
        """Returns a decode state with all slots free."""
        state = self.engine.init_state(self._slots, self.engine.buckets.cache[-1])
        return SlotState(state, jnp.zeros(state.batch, jnp.int32))

    def get_prefix_destination_sharding(self) -> Sharding | None:
        """Returns the sharding of prefixes that come from another engine."""
        return SingleDeviceSharding(jax.devices()[0]) if self.engine.mesh is None else None

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Most tokens of a prompt. JetStream's padding of token requests needs a power of two here."""
        return self._max_prompt_length

    @property
    def mesh(self) -> Mesh:
        if self.engine.mesh is not None:
            return self.engine.mesh
        return Mesh(np.asarray(jax.devices()[:1]), ("data",))

    @property
    def colocated_cpus(self) -> None:
        return None

    @property
    def use_chunked_prefill(self) -> bool:
        """False: a prompt is prefilled whole."""
        return False

    @property
    def prefill_chunk_size(self) -> int:
        """Unused: JetStream reads it only with chunked prefill."""
        return self._max_prompt_length

    # -- helpers ---------------------------------------------------------------------------------------------

    def _noise_keys(self, samples: int, rng: Any, request_id: uuid.UUID | None) -> np.ndarray:
        """Returns the noise keys of a request's samples, uint32 [samples, 2]."""
        if rng is not None:
            if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
                rng = jax.random.key_data(rng)
            identity = [1, *np.asarray(rng).reshape(-1).tolist()]
        elif request_id is not None:
            identity = [2, request_id.int >> 64, request_id.int & (1 << 64) - 1]
        else:
            with self._lock:
                identity = [0, self._requests]
                self._requests += 1
        return np.stack([request_key(self._seed, _PURPOSE, *identity, i) for i in range(samples)])

    def _refuse(self, sampler: Any, existing_prefix: Any) -> None:
        if sampler is not None:
            raise ValueError(
                "sampler: must be None; the engine samples from the distribution it was made for"
            )
        if existing_prefix is not None:
            raise ValueError("existing_prefix: must be None; a prompt is prefilled whole")

    def _prefilled(
        self,
        params: Params,
        existing_prefix: Any,
        padded_tokens: Any,
        true_length: int,
        sampler: Any,
        keys: np.ndarray,
    ) -> SlotPrefix:
        """Prefills a prompt without sampling."""
        self._refuse(sampler, existing_prefix)
        prompt = np.asarray(padded_tokens)[: int(true_length)]
        if not 0 < len(prompt) <= self._max_prompt_length:
            raise ValueError(
                f"true_length: a prompt of {len(prompt)} tokens; expected 1 to {self._max_prompt_length}"
            )
        prefix = self.engine.prefill(params, [prompt.tolist()])
        count = len(keys)
        return SlotPrefix(prefix, jnp.asarray(keys), jnp.zeros(count, jnp.int32), jnp.zeros(count, bool))

    def _with_first_tokens(self, params: Params, prompt: SlotPrefix) -> tuple[SlotPrefix, ResultTokens]:
        """Decodes one token of every sample of a prefilled prompt."""
        keys, length = np.asarray(prompt.noise_keys), int(prompt.prefix.lengths[0])
        count, limit = len(keys), self.engine.buckets.cache[-1] - length
        state = self.engine.init_state(count, length + 1)
        assignments = [Assignment(0, i, key, limit) for i, key in enumerate(keys)]
        state = self.engine.bulk_insert(prompt.prefix, state, assignments)
        state, result = self.engine.generate(params, state, max_steps=1)
        # As for a prompt, the last token of a slot is not in its cache yet.
        prefix = Prefix(state.cache, state.tokens, state.lengths + 1)
        one = np.ones((count, 1), np.int32)
        results = self._results(result.tokens[:count], one, one[:, 0], result.logprobs[:count], count)
        ended = ~result.active[:count]
        return SlotPrefix(prefix, prompt.noise_keys, jnp.asarray(one[:, 0]), jnp.asarray(ended)), results

    def _insert(self, prompt: SlotPrefix, state: SlotState, slots: list[int]) -> SlotState:
        keys, sampled, ended = (
            np.asarray(part) for part in (prompt.noise_keys, prompt.sampled, prompt.ended)
        )
        if len(slots) > len(keys):
            raise ValueError(f"slots: {len(slots)}, but {len(keys)} samples were prefilled (num_samples)")
        rows = range(len(slots)) if sampled.any() else [0] * len(slots)  # before sampling, all share one row
        with self._lock:
            self._freed -= set(slots)
        length = int(prompt.prefix.lengths[0])  # of the prompt with the sampled token
        limit = self.engine.buckets.cache[-1] - length
        assignments = [
            Assignment(row, slot, keys[i], limit)
            for i, (row, slot) in enumerate(zip(rows, slots, strict=True))
        ]
        decode = self.engine.bulk_insert(prompt.prefix, state.decode, assignments)
        if decode.counts is not None and sampled.any():  # penalties count the first tokens as well
            first = prompt.prefix.last_tokens[: len(slots)]
            decode = decode.replace(counts=decode.counts.at[jnp.asarray(slots), first].set(1))
        over = [slot for i, slot in enumerate(slots) if ended[i]]
        if over:
            decode = self.engine.free_resource(decode, over)
        counts = np.array(state.sampled)
        counts[slots] = sampled[: len(slots)]
        return SlotState(decode, jnp.asarray(counts))

    def _results(
        self, tokens: np.ndarray, valid: np.ndarray, lengths: np.ndarray, log_prob: np.ndarray, samples: int
    ) -> ResultTokens:
        columns = tokens.shape[1]
        return self.result_type(
            data=np.concatenate([tokens, valid, lengths[:, None]], axis=1).astype(np.int32),
            tokens_idx=(0, columns),
            valid_idx=(columns, 2 * columns),
            length_idx=(2 * columns, 2 * columns + 1),
            samples_per_slot=samples,
            log_prob=log_prob,
        )
