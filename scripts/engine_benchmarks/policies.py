"""Shared by the sections: policies of several sizes, their prompts, and the engines of both sides."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rljax.benchmarking import Comparison, Row
from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.invariance import measured, row_counts
from rljax.errors import UserError
from rljax.models import huggingface
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.provenance import num_cores
from rljax.sampling.distribution import SamplingParams

if TYPE_CHECKING:
    import transformers

SWITCH = {True: "on", False: "off"}
PROMPT_TOKENS = 64


def qwen3(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> ModelConfig:
    """A Qwen3 of this size with tied embeddings."""
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        mlp_size=mlp,
        tie_embeddings=True,
        qk_norm=True,
        max_positions=4096,
    )


POLICIES = {
    "2M": qwen3(vocab=320, hidden=192, layers=4, heads=6, kv_heads=2, mlp=512),  # the quickstart's
    "25M": qwen3(vocab=8192, hidden=512, layers=7, heads=8, kv_heads=4, mlp=1536),
    # The shape of configs/bench_long_tail.yaml, grown: nearly all of it projections.
    "95M": qwen3(vocab=320, hidden=768, layers=12, heads=6, kv_heads=2, mlp=3072),
    "140M": qwen3(vocab=32000, hidden=768, layers=18, heads=12, kv_heads=4, mlp=2048),
}


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Prompts of one length, so that neither side pads."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (count, PROMPT_TOKENS)).tolist()


def measured_numerics(
    config: ModelConfig,
    numerics: Numerics,
    buckets: Buckets,
    others: Sequence[int] = (),
    cache: Path | None = None,
) -> tuple[Numerics, str]:
    """Returns numerics with the form of products that is measured on this device, and a line about it."""
    measurement = measured(config, numerics, row_counts(buckets, others), cache)
    line = measurement.summary(numerics.compute_dtype)
    return dataclasses.replace(numerics, measured_form=measurement.form), line


def make_engine(
    config: ModelConfig,
    row_invariant: bool,
    slots: int,
    length: int,
    sampling: SamplingParams | None = None,
    cache: Path | None = None,
    numerics: Numerics | None = None,
) -> DecodeEngine:
    """Returns an engine without an end-of-sequence token, so that all responses have the requested length.
    float32, measured, unless `numerics` says otherwise.
    """
    buckets = make_buckets(slots, length, row_invariant)
    if numerics is None:
        numerics, _ = measured_numerics(config, Numerics(row_invariant, "float32"), buckets, cache=cache)
    return DecodeEngine(
        config,
        numerics,
        SamplingParams() if sampling is None else sampling,
        buckets,
        eos_token_ids=(),
        pool=ExecutablePool(row_invariant, cache),
    )


def import_reference() -> None:
    """Checks that the reference is installed, and configures it for speed and few messages."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, and decode and update compare with transformers on PyTorch: "
            "install the dev extra (pip install -e '.[dev]'), or measure --only bandwidth,startup"
        ) from error
    torch.set_num_threads(num_cores())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make_reference(config: ModelConfig, directory: Path) -> "tuple[transformers.PreTrainedModel, Params]":
    """Returns the same random policy on both sides: made by transformers, saved, and loaded by rljax."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.mlp_size,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_epsilon,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    model.save_pretrained(directory)
    loaded = huggingface.load_model_config(directory)
    if loaded != config:
        raise RuntimeError(f"transformers saved {loaded}, not {config}")
    return model, huggingface.load_params(directory, loaded, dtype="float32")


def speed_row(name: str, tokens: int, timing: Comparison, baseline: str, details: dict[str, object]) -> Row:
    """Returns the row of tokens per second of two sides that `compare` timed on the same tokens."""
    return Row(
        name=name,
        value=tokens / timing.seconds,
        unit="tokens/s",
        baseline=baseline,
        baseline_value=tokens / timing.baseline_seconds,
        ratio=timing.ratio,
        details={"ratio_low": timing.ratio_low, "ratio_high": timing.ratio_high, **details},
    )
