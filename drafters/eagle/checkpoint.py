"""Writes and reads heads, in the layout of SGLang's and vLLM's EAGLE and EAGLE-3 loaders.

A directory with `config.json` and `model.safetensors`. Only trained weights are stored: both engines take
embeddings and LM head from the policy (`tie_word_embeddings` as in the policy; EAGLE-3's `draft_vocab_size`
null means the policy's whole vocabulary). An EAGLE-3 head with a draft vocabulary has an LM head of its own
as well: `lm_head.weight` [V', d], `d2t` int64 [V'] (id i of the head is token i + d2t[i] of the policy) and
`t2d` bool [V] (which tokens these are). The layer of an EAGLE-3 head is `midlayer` to the EAGLE authors,
SpecForge and SGLang, and `layers.0` to vLLM; both are read. The two engines differ in:

- the architecture of EAGLE: SGLang wants `LlamaForCausalLMEagle`; vLLM puts "Eagle" in front of
  `LlamaForCausalLM` itself. Both read EAGLE-3 as `LlamaForCausalLMEagle3`.
- the layers of EAGLE-3: SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids` and counts layers from
  0; vLLM reads the same name at the top level and counts the layers before the state.

HASS is EAGLE trained otherwise: the same files.

What vLLM's `speculators` writes is read, too (`speculators.py`): an EAGLE-3 head, and DFlash's as a block.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (safetensors.numpy reads bfloat16 only where ml_dtypes has registered it)
import numpy as np
import safetensors
import safetensors.numpy

from drafters.eagle.head_state import named_leaves, nested_leaves
from drafters.eagle.model import DraftVocabulary, HeadConfig, head_shapes
from drafters.eagle.saving import holds_saved, load_saved
from drafters.eagle.speculators import MODEL_TYPE, dflash_block, plain_config
from rljax.errors import CheckpointError
from rljax.hub import local_directory
from rljax.models.config import ModelConfig
from rljax.models.huggingface import read_json_object
from rljax.models.transformer import Params

ServingEngine = Literal["sglang", "vllm"]

_WEIGHTS = "model.safetensors"
_LAYER_TENSORS = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "embed_norm": "input_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
}
_BLOCK_TENSORS = _LAYER_TENSORS | {
    "attention_norm": "input_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
"""Of the layers of a DFlash head."""
_FROM_THE_POLICY = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)
_VOCAB_MAPS = ("d2t", "t2d")
_CONFIG_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "mlp_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def _tensor_names(config: HeadConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns by tensor name its path in the params pytree (`named_leaves`) and its shape."""
    shapes = head_shapes(config)
    names = {"fc.weight": ("fc", shapes["fc"])}
    if config.block is not None:
        names["hidden_norm.weight"] = ("context_norm", shapes["context_norm"])
        for number, layer in shapes["layers"].items():
            for key, shape in layer.items():
                names[f"layers.{number}.{_BLOCK_TENSORS[key]}"] = (f"layers.{number}.{key}", shape)
    else:
        prefix = "midlayer" if config.fused else "layers.0"
        for key, shape in shapes["layer"].items():
            names[f"{prefix}.{_LAYER_TENSORS[key]}"] = (f"layer.{key}", shape)
    if config.fused:
        names["norm.weight"] = ("norm", shapes["norm"])
    if config.vocabulary is not None:
        names["lm_head.weight"] = ("lm_head", shapes["lm_head"])
    return names


def _config_json(config: HeadConfig, dtype: np.dtype, engine: ServingEngine) -> dict[str, Any]:
    policy = config.policy
    scaling = policy.rope_scaling
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle" if engine == "sglang" else "LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype.name,
        **{key: getattr(policy, field) for key, field in _CONFIG_KEYS.items()},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": policy.max_positions,
        "rms_norm_eps": policy.norm_epsilon,
        "rope_theta": policy.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "tie_word_embeddings": policy.tie_embeddings,
    }
    if config.fused:
        content |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None}
        if config.vocabulary is not None:
            # The head's LM head is its own, whether the policy's is tied to its embeddings or not.
            content |= {"draft_vocab_size": len(config.vocabulary), "tie_word_embeddings": False}
        if engine == "sglang":
            layers = [layer - 1 for layer in config.layers]
            content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
        else:
            content["eagle_aux_hidden_state_layer_ids"] = list(config.layers)
        if config.norm_before_residual:
            content["norm_before_residual"] = True
    return content


def save_head(
    directory: str | Path,
    config: HeadConfig,
    params: Params,
    dtype: str = "bfloat16",
    engine: ServingEngine = "sglang",
) -> None:
    """Writes a directory that the serving engine loads as a draft model.

    Args:
      directory: the destination; must not exist, or be empty. If writing fails, nothing is left there.
      config: the head's shape.
      params: the head's weights, on any device.
      dtype: type of the weights in the file: "float32", "bfloat16" or "float16".
      engine: serving engine that will load it.
    """
    directory = Path(directory).resolve()
    if engine not in ("sglang", "vllm"):
        raise CheckpointError(f"{directory}: engine {engine!r} is unknown; use sglang or vllm")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not an empty directory; choose another one")
    if config.fused:
        check_layers(directory, config)
    stored_as = np.dtype(dtype)
    tensors, leaves = {}, named_leaves(params)
    for name, (path, shape) in _tensor_names(config).items():
        array = np.asarray(leaves[path])
        if array.shape != shape:
            raise CheckpointError(f"{directory}: {name} is {array.shape}, but this head has {shape} there")
        tensors[name] = np.ascontiguousarray(array.astype(stored_as))
    if not config.fused:
        # SGLang's layer has a bias whether a file brings one or not.
        bias = params.get("fc_bias", np.zeros(config.policy.hidden_size))
        tensors["fc.bias"] = np.ascontiguousarray(np.asarray(bias).astype(stored_as))
    if config.vocabulary is not None:
        known = np.zeros(config.policy.vocab_size, bool)
        known[config.vocabulary.tokens] = True
        tensors |= {"d2t": config.vocabulary.offsets, "t2d": known}
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    try:
        partial.chmod(0o755)  # mkdtemp's directories are for their owner alone
        content = json.dumps(_config_json(config, stored_as, engine), indent=2) + "\n"
        (partial / "config.json").write_text(content, encoding="utf-8")
        safetensors.numpy.save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_layers(directory: Path, config: HeadConfig) -> None:
    """Raises a CheckpointError for an EAGLE-3 head that cannot be served: the engines collect a state where a
    layer begins, each once.
    """
    if len(set(config.layers)) < 3 or not all(0 < each < config.policy.num_layers for each in config.layers):
        raise CheckpointError(
            f"{directory}: a head over the states behind layers {list(config.layers)} of"
            f" {config.policy.num_layers} cannot be served; it needs three different ones from 1 to"
            f" {config.policy.num_layers - 1}"
        )


def load_head(directory: str | Path, policy: ModelConfig) -> tuple[HeadConfig, Params]:
    """Loads a head and its float32 weights, written by `save_head` or by others in the same layout, or by a
    run to its `save_dir` (`saving.py`); the directory may be a name on the hub.

    An EAGLE head is loaded as `eagle`; to train it as HASS, replace `variant`.

    Raises:
      CheckpointError: it is no such head, or not one for this policy.
    """
    directory = local_directory(directory)
    if holds_saved(directory):
        config, saved = load_saved(directory, policy)
        return config, jax.block_until_ready(jax.tree.map(jnp.asarray, saved))
    content = read_json_object(directory / "config.json")
    if MODEL_TYPE in content:
        content = plain_config(directory / "config.json", content, policy)
    dflash = content.get(MODEL_TYPE) == "dflash"
    for key, field in _CONFIG_KEYS.items():
        if content.get(key) is not None and content[key] != getattr(policy, field):
            raise CheckpointError(
                f"{directory / 'config.json'}: {key} is {content[key]}, but the policy's is"
                f" {getattr(policy, field)}; a head fits only the policy it was made for"
            )
    try:
        tensors = safetensors.numpy.load_file(directory / _WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{directory / _WEIGHTS} cannot be read as safetensors: {error}") from error
    # Some writers keep the names of a whole model.
    tensors = {name.removeprefix("model."): array for name, array in tensors.items()}
    if any("hidden_norm" in name for name in tensors) and not dflash:  # an EAGLE-3 head
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): array for name, array in tensors.items()}
    config = _head_config(directory / "config.json", content, tensors, policy)
    expected = _tensor_names(config)
    leaves = {}
    for name, (path, shape) in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / _WEIGHTS}: {name} {list(shape)} is missing")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{directory / _WEIGHTS}: {name} is {list(tensors[name].shape)}, but a {config.variant} head"
                f" of this policy has {list(shape)} there"
            )
        leaves[path] = jnp.asarray(tensors[name].astype(np.float32))
    bias = tensors.get("fc.bias")
    if bias is not None and np.any(bias):
        leaves["fc_bias"] = jnp.asarray(bias.astype(np.float32))
    surplus = sorted(set(tensors) - set(expected) - {"fc.bias", *_FROM_THE_POLICY, *_VOCAB_MAPS})
    if surplus:
        raise CheckpointError(
            f"{directory / _WEIGHTS}: {surplus[0]} is not part of a {config.variant} head, whose layers have"
            f" no biases{'' if dflash else ' and query/key norms'}"
        )
    return config, jax.block_until_ready(nested_leaves(leaves))


def _head_config(
    file: Path, content: dict[str, Any], tensors: dict[str, np.ndarray], policy: ModelConfig
) -> HeadConfig:
    """Returns the shape of the stored head; the layer of an EAGLE-3 head is named `midlayer`."""
    if content.get(MODEL_TYPE) == "dflash":
        block, layers = dflash_block(file, content)
        vocabulary = _vocabulary(file, content, tensors, policy)
        try:
            return HeadConfig("block", policy, layers, vocabulary, block)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error
    if not any(name.startswith("midlayer.") for name in tensors):
        if any(name in tensors for name in _VOCAB_MAPS):
            raise CheckpointError(f"{file.parent / _WEIGHTS}: d2t and t2d belong to EAGLE-3 heads only")
        return HeadConfig("eagle", policy)
    vocabulary = _vocabulary(file, content, tensors, policy)
    if content.get("eagle_aux_hidden_state_layer_ids"):
        layers = tuple(content["eagle_aux_hidden_state_layer_ids"])
    else:
        nested = (content.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
        layers = tuple(layer + 1 for layer in nested)
    try:
        normed = bool(content.get("norm_before_residual"))
        return HeadConfig("eagle3", policy, layers, vocabulary, norm_before_residual=normed)
    except ValueError as error:
        raise CheckpointError(f"{file}: eagle_aux_hidden_state_layer_ids: {error}") from error


def _vocabulary(
    file: Path, content: dict[str, Any], tensors: dict[str, np.ndarray], policy: ModelConfig
) -> DraftVocabulary | None:
    """Returns the draft vocabulary; None for a head that uses the policy's LM head."""
    weights, size, d2t = file.parent / _WEIGHTS, content.get("draft_vocab_size"), tensors.get("d2t")
    if d2t is None:
        if size not in (None, policy.vocab_size):
            raise CheckpointError(f"{weights}: d2t [{size}] is missing")
        has_lm_head = size is not None and "lm_head.weight" in tensors  # for the policy's whole vocabulary
        return DraftVocabulary(np.arange(size)) if has_lm_head else None
    if d2t.ndim != 1 or (size is not None and len(d2t) != size):
        raise CheckpointError(f"{weights}: d2t is {list(d2t.shape)}, but draft_vocab_size is {size}")
    try:
        vocabulary = DraftVocabulary.from_offsets(d2t)
    except ValueError as error:
        raise CheckpointError(f"{weights}: d2t: {error}") from error
    if vocabulary.tokens.max() >= policy.vocab_size:
        raise CheckpointError(
            f"{weights}: d2t leads to token {vocabulary.tokens.max()}, but the policy has {policy.vocab_size}"
        )
    t2d = tensors.get("t2d")
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(vocabulary.tokens)):
        raise CheckpointError(f"{weights}: t2d marks other tokens than d2t")
    return vocabulary
