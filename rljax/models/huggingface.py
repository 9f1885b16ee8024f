"""Reading and writing of Hugging Face checkpoints.

A directory holds `config.json`, the weights as one `model.safetensors` or as shards with
`model.safetensors.index.json`, and `generation_config.json`. Configs of transformers 4 (`rope_theta`,
`rope_scaling`) and 5 (`rope_parameters`) are both read. A config that needs a feature that the forward
pass lacks is an error: a checkpoint that loads computes the same function as in `transformers`.
`docs/checkpoints.md` lists the supported features.
"""

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # safetensors.numpy reads bfloat16 only where ml_dtypes has registered it with numpy
import numpy as np
import safetensors
import safetensors.numpy

from rljax.errors import CheckpointError
from rljax.models.config import GemmaParts, ModelConfig, RopeScaling
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params, param_shapes

ParamPath = tuple[str | int, ...]
"""Path of a weight in the params pytree, such as ("layers", 3, "q")."""

_GEMMA = "gemma3_text"
_CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    _GEMMA: "Gemma3ForCausalLM",
}
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
_STORED_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_TENSOR_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_TENSOR_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GEMMA_TENSOR_NAMES = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_LOCAL, _WHOLE = "sliding_attention", "full_attention"  # of Gemma's layer_types
_LISTED = 4  # names in a message before "and N more"
_COMPARED_ROWS = 4096  # rows of a redundant LM head compared at a time


# --- config.json ---------------------------------------------------------------------------------------


class _Options:
    """A JSON object whose values are checked as they are read, so that errors name the key and the file."""

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = ""):
        self.file, self.values, self._prefix = file, values, prefix

    def refuse(self, key: str, requirement: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {self._prefix}{key} is {json.dumps(self.values.get(key))}; {requirement}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(
                f"{self.file}: {self._prefix}{key} is missing; it should be a positive integer"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, "it should be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number that is not negative."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.file}: {self._prefix}{key} is missing; it should be a number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.refuse(key, "it should be a number, not negative")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.refuse(key, "it should be true or false")
        return value

    def section(self, key: str) -> "_Options | None":
        """Returns an object inside this one, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "it should be an object")
        return _Options(self.file, value, f"{self._prefix}{key}.")


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises `CheckpointError` if there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} should hold a JSON object, not a {type(values).__name__}")
    return values


def load_model_config(directory: str | Path) -> ModelConfig:
    """Reads the architecture from config.json; raises `CheckpointError` if it is not supported."""
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; a policy is a Hugging Face model directory")
    options = _Options(file, read_json_object(file))
    architecture = options.get("model_type")
    if architecture not in _CLASSES:
        raise options.refuse("model_type", f"supported are {', '.join(_CLASSES)}")
    _refuse_unsupported(options)
    gemma = _read_gemma(options) if architecture == _GEMMA else None

    hidden_size, num_heads = options.count("hidden_size"), options.count("num_attention_heads")
    # Published Llama configs may omit the key; those of Qwen always have it.
    llama = architecture == "llama"
    num_kv_heads = options.count("num_key_value_heads", num_heads if llama else None)
    if num_heads % num_kv_heads:
        raise options.refuse("num_key_value_heads", f"it should divide num_attention_heads, {num_heads}")
    head_dim = options.get("head_dim")
    if head_dim is None and architecture in ("qwen2", "llama"):
        if hidden_size % num_heads:
            raise options.refuse(
                "hidden_size", f"without head_dim it should be a multiple of {num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = options.count("head_dim")
    if head_dim % 2:
        raise options.refuse("head_dim", "rotary embeddings need an even head size")
    max_positions = options.count("max_position_embeddings")
    if gemma is None:
        rope_theta, rope_scaling = _read_rope(options, max_positions)
    else:
        rope_theta, rope_scaling = _gemma_theta(options, _WHOLE, "rope_theta", 1e6), None
        max_positions = min(max_positions, gemma.window)
        if options.number("query_pre_attn_scalar", 256) != head_dim:
            raise options.refuse("query_pre_attn_scalar", f"only head_dim, {head_dim}, is supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=options.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=options.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=options.count("intermediate_size"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_epsilon=options.number("rms_norm_eps", 1e-6),
        tie_embeddings=options.flag("tie_word_embeddings")
        or (gemma is not None and options.get("tie_word_embeddings") is None),
        attention_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", _GEMMA),
        max_positions=max_positions,
        gemma=gemma,
    )


def _read_gemma(options: _Options) -> GemmaParts:
    """Reads what Gemma 3 alone has."""
    layers, pattern = options.count("num_hidden_layers"), options.count("sliding_window_pattern", 6)
    kinds = options.get("layer_types", [_WHOLE if (i + 1) % pattern == 0 else _LOCAL for i in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_LOCAL, _WHOLE}:
        raise options.refuse("layer_types", f'it should name {layers} layers "{_LOCAL}" or "{_WHOLE}"')
    return GemmaParts(
        local_layers=tuple(kind == _LOCAL for kind in kinds),
        local_rope_theta=_gemma_theta(options, _LOCAL, "rope_local_base_freq", 10_000.0),
        window=options.count("sliding_window", 4096),
        trained_positions=options.count("max_position_embeddings"),
    )


def _gemma_theta(options: _Options, kind: str, key: str, default: float) -> float:
    """Returns the base of rotary frequencies of a kind of layer: from `rope_parameters` (transformers 5), or
    a key of its own.
    """
    sections = options.section("rope_parameters")
    rope = None if sections is None else sections.section(kind)
    for scaling in (rope, options.section("rope_scaling")):
        if scaling is not None and scaling.get("rope_type", "default") != "default":
            raise scaling.refuse("rope_type", 'only "default" is supported for gemma3_text')
    return options.number(key, default) if rope is None else rope.number("rope_theta", default)


def _refuse_unsupported(options: _Options) -> None:
    is_gemma = options.get("model_type") == _GEMMA
    if options.get("hidden_act", "silu") != "silu" and not is_gemma:
        raise options.refuse("hidden_act", 'only "silu" is supported')
    if is_gemma:
        if options.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise options.refuse("hidden_activation", 'only "gelu_pytorch_tanh" is supported')
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if options.get(key):
                raise options.refuse(key, "it is not supported")
    if options.flag("use_sliding_window"):
        raise options.refuse("use_sliding_window", "sliding-window attention is not supported")
    layer_types = [] if is_gemma else options.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise options.refuse("layer_types", 'only "full_attention" layers are supported')
    if options.flag("attention_bias") and options.get("model_type") != "qwen2":
        # In the other two architectures the option also adds a bias to the output projection.
        raise options.refuse("attention_bias", "attention biases are supported for qwen2 only")
    if options.flag("mlp_bias"):
        raise options.refuse("mlp_bias", "MLP biases are not supported")
    if options.number("partial_rotary_factor", 1.0) != 1.0:
        raise options.refuse("partial_rotary_factor", "only fully rotated heads (1.0) are supported")
    for key in ("quantization_config", "compression_config"):
        if options.get(key) is not None:
            raise options.refuse(
                key, "quantized checkpoints are not supported; use float32, bfloat16 or float16"
            )


def read_rope(file: Path, values: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Reads base and scaling of rotary positions from an object inside a config.

    Args:
      file: the config, for errors.
      values: the object.
      max_positions: for a scaling that does not say its own.

    Raises:
      CheckpointError: they are not supported.
    """
    return _read_rope(_Options(file, values), max_positions)


def _read_rope(options: _Options, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Reads base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    theta = options.number("rope_theta", 10_000.0)
    sections = [options.section(name) for name in ("rope_parameters", "rope_scaling")]
    stated = [section for section in sections if section is not None and section.values]  # {} is as null
    if not stated:
        return theta, None
    rope = stated[0]
    _check_rope(options, stated)
    theta = rope.number("rope_theta", theta)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor", "only fully rotated heads (1.0) are supported")
    type_key = "rope_type" if rope.get("rope_type") is not None else "type"
    rope_type = rope.get(type_key, "default")
    if rope_type == "default":
        nested = [key for key, value in rope.values.items() if isinstance(value, dict)]
        if nested:
            raise rope.refuse(nested[0], "RoPE parameters for each kind of layer are not supported")
        return theta, None
    if rope_type != "llama3":
        raise rope.refuse(type_key, 'supported are "default" and "llama3"')
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low < high:
        raise rope.refuse(
            "high_freq_factor", f"it should be above low_freq_factor, {low:g}, which is above 0"
        )
    return theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=rope.count("original_max_position_embeddings", max_positions),
    )


def _check_rope(options: _Options, stated: Sequence[_Options]) -> None:
    """Raises where the two spellings, or the base next to them, contradict each other."""
    places = [place for place in (options, *stated) if place.get("rope_theta") is not None]
    thetas = sorted({place.number("rope_theta") for place in places})
    if len(thetas) > 1:
        raise CheckpointError(
            f"{options.file}: rope_theta is both {' and '.join(f'{theta:g}' for theta in thetas)}; keep one"
        )
    newer, older = map(_rope_values, (stated[0], stated[-1]))
    for key in sorted(newer.keys() | older.keys()):
        if newer.get(key) != older.get(key):
            raise CheckpointError(
                f"{options.file}: rope_parameters and rope_scaling contradict each other: {key} is"
                f" {json.dumps(newer.get(key))} and {json.dumps(older.get(key))}; keep one of the two"
            )


def _rope_values(section: _Options) -> dict[str, Any]:
    """Returns what a section says besides the base, in the newer spelling."""
    values = {key: value for key, value in section.values.items() if value is not None}
    values.pop("rope_theta", None)
    return {"rope_type": values.pop("type", "default")} | values


# --- generation_config.json ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Sampling parameters from a checkpoint's authors. Those they do not set have no effect.

    Attributes:
      eos_token_ids: tokens that end a response, at least one.
      temperature: temperature; 1 samples the unscaled distribution, 0 (also `do_sample: false`) is greedy.
      top_k: number of tokens to keep; 0 (also -1) keeps every token.
      top_p: probability to keep; 1 keeps every token.
      min_p: smallest relative probability to keep; 0 keeps every token.
      repetition_penalty: penalty; 1 has no effect. It also covers the prompt's tokens, unlike in rljax.
    """

    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_generation_config(directory: str | Path) -> GenerationConfig:
    """Reads sampling defaults and EOS ids.

    EOS ids come from generation_config.json, else from config.json, else from the tokenizer.
    """
    directory = Path(directory)
    files = [directory / "generation_config.json", directory / "config.json"]
    stated = [
        _Options(file, read_json_object(file)) if file.is_file() else _Options(file, {}) for file in files
    ]
    eos = next((options for options in stated if options.get("eos_token_id") is not None), None)
    if eos is not None:
        value = eos.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if not ids or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise eos.refuse("eos_token_id", "it should be a token id or a list of token ids")
        rows = stated[1].get("vocab_size")
        if isinstance(rows, int) and max(ids) >= rows:
            raise eos.refuse("eos_token_id", f"the policy has tokens 0 to {rows - 1} (vocab_size)")
    else:
        tokenizer = Tokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise CheckpointError(
                f"{directory}: no EOS token; give eos_token_id in generation_config.json or config.json, "
                "or eos_token in tokenizer_config.json"
            )
        ids = [tokenizer.eos_token_id]
    sampling = stated[0]
    greedy = sampling.get("do_sample") is False
    return GenerationConfig(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        temperature=0.0 if greedy else sampling.number("temperature", 1.0),
        top_k=0 if sampling.get("top_k", 0) in (0, -1) else sampling.count("top_k"),
        top_p=sampling.number("top_p", 1.0),
        min_p=sampling.number("min_p", 0.0),
        repetition_penalty=sampling.number("repetition_penalty", 1.0),
    )


# --- reading weights -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # name in safetensors

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def _tensor_names(config: ModelConfig) -> dict[str, tuple[ParamPath, tuple[int, ...]]]:
    """Returns tensors of a checkpoint in their usual order: name -> (path in the params pytree, shape)."""
    shapes = param_shapes(config)
    names = {_TENSOR_NAMES["embed"]: (("embed",), shapes["embed"])}
    for index, layer in enumerate(shapes["layers"]):
        for key, shape in layer.items():
            names[_layer_tensor_name(config, index, key)] = (("layers", index, key), shape)
    for key in ("final_norm", "lm_head"):
        if key in shapes:
            names[_TENSOR_NAMES[key]] = ((key,), shapes[key])
    return names


def _layer_tensor_name(config: ModelConfig, index: int, key: str) -> str:
    if config.gemma is not None and key in _GEMMA_TENSOR_NAMES:
        return f"model.layers.{index}.{_GEMMA_TENSOR_NAMES[key]}"
    return layer_tensor_name(index, key)


def layer_tensor_name(index: int, key: str) -> str:
    """Returns the name in a checkpoint of a layer's weight, such as ("q")
    model.layers.0.self_attn.q_proj.weight.
    """
    return f"model.layers.{index}.{_LAYER_TENSOR_NAMES[key]}"


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _open(file: Path) -> Any:
    """Opens a safetensors file; checks its header against the file's length, but reads no tensor."""
    try:
        return safetensors.safe_open(file, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        size = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
        raise CheckpointError(
            f"{file} ({size}) cannot be read as safetensors: {error}; copy or download it again"
        ) from error


def _weight_files(directory: Path, optional: str | None) -> tuple[list[Path], dict[str, Path]]:
    """Returns the files with weights and, for shards, the file of each tensor by the index; that of
    `optional` need not exist.
    """
    single, index = directory / _WEIGHTS, directory / _INDEX
    if single.is_file():
        return [single], {}
    if not index.is_file():
        others = sorted(f.name for f in directory.glob("*") if f.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {_listing(others)} should be converted to safetensors first" if others else ""
        raise CheckpointError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}{hint}")
    weight_map = _Options(index, read_json_object(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map should be an object that maps tensor names to files")
    listed = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index}: tensor {name} is in {shard!r}, which should be the name of a file next to it"
            )
        if name == optional and not (directory / shard).is_file():
            continue
        listed[name] = directory / shard
        if not listed[name].is_file():
            raise CheckpointError(f"{listed[name]} does not exist; {index.name} lists tensor {name} in it")
    return sorted(set(listed.values())), listed


def _read_headers(directory: Path, optional: str | None) -> dict[str, _StoredTensor]:
    """Returns the tensors that the files hold. The index may list `optional` and no file hold it."""
    files, listed = _weight_files(directory, optional)
    stored: dict[str, _StoredTensor] = {}
    for file in files:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if listed.get(name, file) == file:
                    header = opened.get_slice(name)
                    stored[name] = _StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
    for name, file in listed.items():
        if name not in stored and name != optional:
            raise CheckpointError(f"{file}: tensor {name} is missing, though {_INDEX} lists it here")
    return stored


def _check_tensors(directory: Path, config: ModelConfig, stored: Mapping[str, _StoredTensor]) -> None:
    expected = _tensor_names(config)
    where = next(iter({tensor.file for tensor in stored.values()})) if stored else directory
    if len({tensor.file for tensor in stored.values()}) > 1:
        where = directory / _INDEX
    missing = [f"{name} {list(shape)}" for name, (_, shape) in expected.items() if name not in stored]
    if missing:
        raise CheckpointError(
            f"{where}: missing tensor{'s' if len(missing) > 1 else ''} {_listing(missing)}, "
            "which config.json asks for"
        )
    for name, (_, shape) in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, "
                f"but config.json asks for {list(shape)}"
            )
        if tensor.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; "
                f"supported are {', '.join(_STORED_DTYPES)}"
            )
    surplus = [
        name
        for name in stored
        # Old checkpoints keep the rotary frequencies, which follow from the config.
        if name not in expected and not name.endswith("rotary_emb.inv_freq")
    ]
    if config.tie_embeddings and _TENSOR_NAMES["lm_head"] in surplus:
        _check_redundant_head(stored)
        surplus.remove(_TENSOR_NAMES["lm_head"])
    if surplus:
        raise CheckpointError(
            f"{stored[surplus[0]].file}: surplus tensor{'s' if len(surplus) > 1 else ''} "
            f"{_listing(sorted(surplus))}; a {config.architecture} policy with this config.json has none such"
        )


def _check_redundant_head(stored: Mapping[str, _StoredTensor]) -> None:
    """Raises unless the LM head that a tied model stores equals the embedding."""
    head, embed = (stored[_TENSOR_NAMES[key]] for key in ("lm_head", "embed"))
    same = head.shape == embed.shape and head.dtype == embed.dtype
    if same:
        with _open(head.file) as head_file, _open(embed.file) as embed_file:
            head_rows = head_file.get_slice(_TENSOR_NAMES["lm_head"])
            embed_rows = embed_file.get_slice(_TENSOR_NAMES["embed"])
            for start in range(0, embed.shape[0], _COMPARED_ROWS):
                rows = slice(start, min(start + _COMPARED_ROWS, embed.shape[0]))
                if not np.array_equal(head_rows[rows], embed_rows[rows]):
                    same = False
                    break
    if not same:
        raise CheckpointError(
            f"{head.file}: tensor lm_head.weight differs from model.embed_tokens.weight, but config.json has "
            "tie_word_embeddings true; set it to false to keep both"
        )


def _weight_dtype(dtype: str | np.dtype) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype not in _STORED_DTYPES.values():
        raise CheckpointError(f"weights cannot be {dtype}; supported are float32, bfloat16 and float16")
    return dtype


def load_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: str | np.dtype | None = None,
    put: Callable[[ParamPath, np.ndarray], Any] | None = None,
) -> Params:
    """Loads the weights of a checkpoint as the params pytree of `rljax.models.transformer`.

    Every header is checked before the first tensor is read. Tensors are read one at a time, the largest
    first, so that temporary memory (pages of the file, a host copy) is released before most others are there.

    Args:
      directory: a Hugging Face model directory.
      config: architecture, from `load_model_config`.
      dtype: type of the weights; None keeps the stored types.
      put: called with the path and the host array of each tensor; returns the leaf of the pytree, such as an
        array on devices with a sharding. By default an array on JAX's default device.
    """
    directory = Path(directory)
    if dtype is not None:
        dtype = _weight_dtype(dtype)
    # Tied checkpoints may list the head that they share with the embedding.
    stored = _read_headers(directory, _TENSOR_NAMES["lm_head"] if config.tie_embeddings else None)
    _check_tensors(directory, config, stored)
    if put is None:

        def put(path: ParamPath, array: np.ndarray) -> Any:
            return jnp.asarray(array)

    params: Params = {"layers": [{} for _ in range(config.num_layers)]}
    expected = _tensor_names(config)
    for name in sorted(expected, key=lambda name: -stored[name].num_elements):
        path = expected[name][0]
        # The file is opened for each tensor, as closing it releases the mapped pages.
        with _open(stored[name].file) as opened:
            array = opened.get_tensor(name)
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        parent = params["layers"][path[1]] if path[0] == "layers" else params
        # Transfers are asynchronous and keep their host arrays: wait, so that these do not accumulate.
        parent[path[-1]] = jax.block_until_ready(put(path, array))
        del array  # before the next tensor is read
    return params


# --- writing a directory --------------------------------------------------------------------------------


def save_model(
    directory: str | Path,
    config: ModelConfig,
    params: Params,
    dtype: str | np.dtype,
    tokenizer_source: str | Path | None = None,
    eos_token_ids: Sequence[int] | None = None,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Everything is written to a temporary directory next to the destination, which is renamed when it is
    complete: an interrupted export leaves nothing under the destination's name.

    Args:
      directory: the destination; must not exist, or be empty.
      config: the architecture.
      dtype: type of the weights in the file: "float32", "bfloat16" or "float16".
      tokenizer_source: a model directory to copy the tokenizer and the sampling defaults from.
      eos_token_ids: tokens that end a response; None for those of `tokenizer_source`.
      max_shard_bytes: weights beyond this many bytes go to several files; a single tensor may be larger.
    """
    directory = Path(directory).resolve()
    dtype = _weight_dtype(dtype)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not an empty directory; choose another one")
    _check_exportable(directory, config)
    _check_params(config, params)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    try:
        partial.chmod(0o755)  # directories of mkdtemp are private to their owner
        source = None if tokenizer_source is None else Path(tokenizer_source)
        _write_configs(partial, config, dtype, source, eos_token_ids)
        _write_weights(partial, config, params, dtype, max_shard_bytes)
        partial.rename(directory)  # an empty destination is replaced
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_exportable(directory: Path, config: ModelConfig) -> None:
    """Raises unless the switches are those that transformers derives from `model_type` alone."""
    if config.architecture not in _CLASSES:
        raise CheckpointError(
            f"{directory}: no architecture {config.architecture!r}; one of {', '.join(_CLASSES)}"
        )
    for switch, architectures in (("attention_bias", ("qwen2",)), ("qk_norm", ("qwen3", _GEMMA))):
        implied = config.architecture in architectures
        if getattr(config, switch) != implied:
            raise CheckpointError(
                f"{directory}: a {config.architecture} checkpoint has {switch} {implied}, "
                f"but the policy has {not implied}"
            )
    if config.architecture == "llama" and config.hidden_size % config.num_heads:
        raise CheckpointError(
            f"{directory}: transformers refuses a llama whose hidden_size ({config.hidden_size}) is not "
            f"a multiple of its heads ({config.num_heads})"
        )


def _at(params: Params, path: ParamPath) -> Any:
    for key in path:
        params = params[key]
    return params


def _check_params(config: ModelConfig, params: Params) -> None:
    for path, shape in _tensor_names(config).values():
        try:
            actual = tuple(_at(params, path).shape)
        except (KeyError, IndexError):
            actual = None
        if actual != shape:
            place = ".".join(map(str, path))
            raise CheckpointError(f"params.{place} has shape {actual}; the config asks for {shape}")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_configs(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype,
    source: Path | None,
    eos_token_ids: Sequence[int] | None,
) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files."""
    eos = list(eos_token_ids or ())
    bos = pad = None
    generation_file = directory / "generation_config.json"
    generation: dict[str, Any] = {}
    if source is not None:
        tokenizer = Tokenizer.load(source)
        tokenizer.check_fits(config)
        bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
        eos = eos or list(load_generation_config(source).eos_token_ids)
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        if (source / generation_file.name).is_file():
            generation = read_json_object(source / generation_file.name)
    special = {
        "bos_token_id": bos,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "pad_token_id": pad,
    }
    # Without EOS in this file, transformers would generate on and on.
    stated = {name: value for name, value in generation.items() if value is not None}
    _write_json(generation_file, special | stated | {"eos_token_id": special["eos_token_id"]})
    rope_scaling = None
    if config.rope_scaling is not None:
        rope_scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    # Names of transformers 4, which every version of it and the serving engines read.
    content = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "torch_dtype": dtype.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        **special,
    }
    if config.gemma is not None:
        content |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": config.gemma.trained_positions,
            "query_pre_attn_scalar": config.head_dim,
            "rope_local_base_freq": config.gemma.local_rope_theta,
            "sliding_window": config.gemma.window,
            "layer_types": [_LOCAL if local else _WHOLE for local in config.gemma.local_layers],
        }
        del content["hidden_act"]
    _write_json(directory / "config.json", content)


def _shards(
    names: Mapping[str, tuple[ParamPath, tuple[int, ...]]], itemsize: int, max_bytes: int
) -> Iterator[list[str]]:
    """Yields the tensor names of each file."""
    shard: list[str] = []
    size = 0
    for name, (_, shape) in names.items():
        tensor_bytes = math.prod(shape) * itemsize
        if shard and size + tensor_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor_bytes
    yield shard


def _write_weights(
    directory: Path, config: ModelConfig, params: Params, dtype: np.dtype, max_shard_bytes: int
) -> None:
    names = _tensor_names(config)
    shards = list(_shards(names, dtype.itemsize, max_shard_bytes))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: np.ascontiguousarray(np.asarray(_at(params, names[name][0])).astype(dtype, copy=False))
            for name in shard
        }
        # transformers 4 refuses a file without a framework in its metadata.
        safetensors.numpy.save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(math.prod(shape) for _, shape in names.values()) * dtype.itemsize
        _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
