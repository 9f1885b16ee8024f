"""The engine as `jetstream.engine.engine_api.Engine` of google-jetstream, for its orchestrator.

    engine = JetStreamEngine(decode_engine, tokenizer, slots=8, max_prompt_length=512)
    driver = Driver(prefill_engines=[engine], generate_engines=[engine], ...)  # jetstream.core.orchestrator

The package is an extra: `pip install 'rljax[jetstream]'`. Its release 0.2.2 imports seqio, and with it
TensorFlow, for tokenizers that are not used here, and its orchestrator calls `jax.tree_map`, which JAX has
removed; `docs/serving.md` describes how it was driven without either. Up to release 0.2.2 a prefill returns
the prefix alone, from 0.3.0 on also the first token; the adapter follows the installed release.
"""

import typing
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from rljax.engine.engine import DecodeEngine
from rljax.errors import ConfigError
from rljax.models.tokenizer import Tokenizer
from rljax.serving.jetstream.slots import ResultTokens, SlotEngine

try:
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2
except ImportError as error:
    raise ConfigError(
        f"JetStream's interface cannot be imported ({error}): pip install 'rljax[jetstream]'; docs/serving.md"
        " describes the requirements of its 0.2.2"
    ) from error

FIRST_TOKEN = typing.get_origin(typing.get_type_hints(engine_api.Engine.prefill).get("return")) is tuple
"""Whether the installed JetStream expects the first token from a prefill."""


@struct.dataclass
class JetStreamTokens(ResultTokens, engine_api.ResultTokens):
    """Results of the orchestrator's type, with log-probabilities even where its release has none."""


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A policy's tokenizer under JetStream's interface.

    It adds no token before a text, because chat templates write every special token. JetStream puts `bos_id`
    before requests of token ids, unless they name a `session_cache`.

    Args:
      stop_tokens: ids of the tokens that end a response.
      engine: engine that determines the padding of prompts.
      max_prompt_length: most tokens of a prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_tokens: tuple[int, ...], engine: DecodeEngine, max_prompt_length: int
    ) -> None:
        self._tokenizer, self._stop_tokens, self._engine = tokenizer, stop_tokens, engine
        self._max_prompt_length = max_prompt_length

    def encode(self, s: str, **kwargs: Any) -> tuple[Array | np.ndarray, int]:
        """Returns token ids, padded to a compiled length, and their number without padding.

        An error here would end JetStream's process. So a text that is too long keeps its end, as in
        JetStream's tokenizers, and a text without tokens becomes BOS.
        """
        most = min(kwargs.get("max_prefill_length") or self._max_prompt_length, self._max_prompt_length)
        ids = self._tokenizer.encode(s, add_special_tokens=True)[-most:] or [self.bos_id]
        padded = np.zeros(self._engine.prefill_length(len(ids)), np.int32)
        padded[: len(ids)] = ids
        return (jnp.asarray(padded) if kwargs.get("jax_padding", True) else padded), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    @property
    def pad_id(self) -> int:
        return 0 if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id

    @property
    def eos_id(self) -> int:
        return self._stop_tokens[0]

    @property
    def bos_id(self) -> int:
        """EOS where the policy has no BOS, as Qwen: requests of token ids should name a `session_cache`."""
        return self.eos_id if self._tokenizer.bos_token_id is None else self._tokenizer.bos_token_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._stop_tokens)


class JetStreamEngine(SlotEngine, engine_api.Engine):
    """A `SlotEngine` that is an `engine_api.Engine`.

    Args:
      slots, max_prompt_length, seed: see `SlotEngine`.
    """

    result_type = JetStreamTokens
    first_token = FIRST_TOKEN

    def __init__(
        self, engine: DecodeEngine, tokenizer: Tokenizer, slots: int, max_prompt_length: int, seed: int = 0
    ) -> None:
        super().__init__(engine, slots, max_prompt_length, seed)
        self._tokenizer = tokenizer

    def free_resource(self, slot: int) -> None:
        """Does nothing: JetStream may call it when the slot already decodes the next request, which it would
        cut short.
        """

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Returns the path of the tokenizer."""
        return tokenizer_pb2.TokenizerParameters(path=str(self._tokenizer.directory), extra_ids=0)

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> JetStreamTokenizer:
        """Returns the policy's tokenizer; `metadata` is ignored."""
        del metadata
        return JetStreamTokenizer(
            self._tokenizer, self.engine.eos_token_ids, self.engine, self.max_prefill_length
        )
