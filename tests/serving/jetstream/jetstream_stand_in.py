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


def demanding(name: str, methods: str, properties: str, **others: Any) -> type:
    """An abstract class; a method is written as the name and its arguments behind self."""
    members = dict(others)
    for line in methods.strip().splitlines():
        method, _, arguments = line.partition(":")
        members[method] = abc.abstractmethod(eval(f"lambda self, {arguments}: None"))
    for each in properties.split():
        members[each] = property(abc.abstractmethod(lambda self: None))
    return abc.ABCMeta(name, (), members)


Engine = demanding(
    "Engine",
    """
prefill: *, params, existing_prefix=None, padded_tokens, true_length, sampler=None, request_id=None
prefill_multisampling: *, params, existing_prefix=None, padded_tokens, true_length, sampler=None, rng=None, \
num_samples=1
generate: params, decode_state, sampler=None
insert: prefix, decode_state, slot, request_id=None
bulk_insert: prefix, decode_state, slots
load_params: *args, **kwargs
get_prefix_destination_sharding:
get_tokenizer:
init_decode_state: *args, **kwargs
""",
    """max_concurrent_decodes samples_per_slot max_prefill_length mesh colocated_cpus use_chunked_prefill
    prefill_chunk_size""",
    free_resource=lambda self, slot: None,
    build_tokenizer=lambda self, metadata: None,
)
Tokenizer = demanding(
    "Tokenizer",
    "encode: s, **kwargs\ndecode: token_ids, **kwargs",
    "pad_id eos_id bos_id",
    stop_tokens=property(lambda self: {self.eos_id, self.pad_id}),
)


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
