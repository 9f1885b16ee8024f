"""What the adapter needs of google-jetstream 0.3.0, for machines without the package.

The abstract classes demand what those of `jetstream.engine.engine_api` and `tokenizer_api` demand, with their
arguments and results (https://github.com/AI-Hypercomputer/JetStream); nothing stands behind them.
"""

import abc
import dataclasses
import types
from typing import Any

from flax import struct


@struct.dataclass
class ResultTokens(abc.ABC):
    """`engine_api.ResultTokens`: its fields."""

    data: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)
    log_prob: Any = struct.field(default=None)


class Engine(abc.ABC):
    """`engine_api.Engine`."""

    @abc.abstractmethod
    def prefill(
        self, *, params, existing_prefix=None, padded_tokens, true_length, sampler=None, request_id=None
    ) -> tuple[Any, ResultTokens]: ...

    @abc.abstractmethod
    def prefill_multisampling(
        self,
        *,
        params,
        existing_prefix=None,
        padded_tokens,
        true_length,
        sampler=None,
        rng=None,
        num_samples=1,
    ) -> tuple[Any, ResultTokens]: ...

    @abc.abstractmethod
    def generate(self, params, decode_state, sampler=None) -> tuple[Any, ResultTokens]: ...

    @abc.abstractmethod
    def insert(self, prefix, decode_state, slot, request_id=None): ...

    @abc.abstractmethod
    def bulk_insert(self, prefix, decode_state, slots): ...

    def free_resource(self, slot):
        return None

    @abc.abstractmethod
    def load_params(self, *args, **kwargs): ...

    @abc.abstractmethod
    def get_prefix_destination_sharding(self): ...

    @abc.abstractmethod
    def get_tokenizer(self): ...

    def build_tokenizer(self, metadata):
        raise NotImplementedError

    @abc.abstractmethod
    def init_decode_state(self, *args, **kwargs): ...

    @property
    @abc.abstractmethod
    def max_concurrent_decodes(self): ...

    @property
    @abc.abstractmethod
    def samples_per_slot(self): ...

    @property
    @abc.abstractmethod
    def max_prefill_length(self): ...

    @property
    @abc.abstractmethod
    def mesh(self): ...

    @property
    @abc.abstractmethod
    def colocated_cpus(self): ...

    @property
    @abc.abstractmethod
    def use_chunked_prefill(self): ...

    @property
    @abc.abstractmethod
    def prefill_chunk_size(self): ...


class Tokenizer(abc.ABC):
    """`tokenizer_api.Tokenizer`."""

    @abc.abstractmethod
    def encode(self, s, **kwargs): ...

    @abc.abstractmethod
    def decode(self, token_ids, **kwargs): ...

    @property
    @abc.abstractmethod
    def pad_id(self): ...

    @property
    @abc.abstractmethod
    def eos_id(self): ...

    @property
    @abc.abstractmethod
    def bos_id(self): ...

    @property
    def stop_tokens(self):
        return {self.eos_id, self.pad_id}


@dataclasses.dataclass
class TokenizerParameters:
    """The message of `tokenizer_pb2`."""

    path: str
    extra_ids: int


def modules() -> dict[str, types.ModuleType]:
    """For `sys.modules`."""
    engine = types.ModuleType("jetstream.engine")
    modules = {"jetstream": types.ModuleType("jetstream"), "jetstream.engine": engine}
    for name, contents in (
        ("engine_api", (Engine, ResultTokens)),
        ("tokenizer_api", (Tokenizer,)),
        ("tokenizer_pb2", (TokenizerParameters,)),
    ):
        module = modules[f"jetstream.engine.{name}"] = types.ModuleType(f"jetstream.engine.{name}")
        vars(module).update({each.__name__: each for each in contents})
        setattr(engine, name, module)
    modules["jetstream"].engine = engine
    return modules
