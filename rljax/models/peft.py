"""Reading and writing of LoRA adapters in PEFT's format (https://github.com/huggingface/peft).

A directory holds `adapter_config.json` and `adapter_model.safetensors`, with two tensors for each adapted
matrix: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and `...lora_B.weight`
[out, rank]. An adapter that needs more than B A at one rank in all layers is an error.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from rljax.config.lora import TARGETS, LoraConfig
from rljax.errors import CheckpointError
from rljax.models.config import ModelConfig
from rljax.models.huggingface import layer_tensor_name, read_json_object
from rljax.models.lora import Factors, Lora, factor_shapes

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DIGEST = (
    "base_digest"  # in the metadata of the weights: PEFT warns of keys that it does not know in its config
)
_LETTERS = {"a": "lora_A", "b": "lora_B"}
# What changes the function of an adapter besides rank, scale and targets.
_REFUSED = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "kasa_config",
    "layer_replication", "layers_to_transform", "lora_bias", "modules_to_save", "monteclora_config",
    "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
    "velora_config",
)  # fmt: skip
_HARMLESS_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base


def _tensor_names(model: ModelConfig, lora: Lora) -> dict[str, tuple[int, str, str, tuple[int, int]]]:
    """Returns name -> (layer, matrix, factor, shape)."""
    names = {}
    for index, layer in enumerate(factor_shapes(model, lora)["layers"]):
        for matrix, pair in layer.items():
            module = layer_tensor_name(index, matrix).removesuffix(".weight")
            for factor, shape in pair.items():
                names[f"{_PREFIX}{module}.{_LETTERS[factor]}.weight"] = (index, matrix, factor, shape)
    return names


def save_adapter(
    directory: str | Path,
    model: ModelConfig,
    config: LoraConfig,
    factors: Factors,
    base: str,
    digest: str,
    dtype: str = "float32",
) -> None:
    """Writes an adapter that `peft.PeftModel.from_pretrained` loads.

    Args:
      directory: where; must not exist.
      factors: the factors, on any device.
      base: path or name of the base's model.
      digest: `base_digest` of the base, which `load_adapter` compares.
      dtype: type of the factors in the file.
    """
    directory = Path(directory)
    directory.mkdir(parents=True)
    theirs = {ours: theirs for theirs, ours in TARGETS.items()}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "use_rslora": config.rslora,
        "target_modules": [theirs[name] for name in config.matrices],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": "gaussian" if config.init == "gaussian" else True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    lora = Lora.of(config, model)
    tensors = {
        name: np.ascontiguousarray(np.asarray(factors["layers"][index][matrix][factor]).astype(dtype))
        for name, (index, matrix, factor, _) in _tensor_names(model, lora).items()
    }
    metadata = {"format": "pt", _DIGEST: digest}
    safetensors.numpy.save_file(tensors, directory / _WEIGHTS, metadata=metadata)


def load_adapter(directory: str | Path, model: ModelConfig, config: LoraConfig) -> tuple[Factors, str | None]:
    """Reads an adapter for a policy.

    Args:
      directory: a directory in PEFT's format.
      config: the settings that the adapter must have.

    Returns:
      The factors, float32 on the host; and the digest of the base, where rljax has written the adapter.

    Raises:
      CheckpointError: it cannot be read, needs a feature that is not supported, has other settings than
        `config`, or is of a policy with other shapes.
    """
    directory = Path(directory)
    if not (directory / CONFIG).is_file():
        raise CheckpointError(
            f"{directory} holds no {CONFIG}; an adapter is a directory that PEFT or rljax export has written"
        )
    _check_config(directory, config)
    file = directory / _WEIGHTS
    if not file.is_file():
        has_pickle = (directory / "adapter_model.bin").is_file()
        hint = "; adapter_model.bin should be saved as safetensors first" if has_pickle else ""
        raise CheckpointError(f"{directory} holds no {_WEIGHTS}{hint}")
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            digest = (opened.metadata() or {}).get(_DIGEST)
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    expected = _tensor_names(model, Lora.of(config, model))
    _check_targets(file, stored, config)
    for name in [*expected, *stored]:
        if name not in stored:
            raise CheckpointError(f"{file}: tensor {name} is missing; every layer must be adapted alike")
        if name not in expected:
            raise CheckpointError(
                f"{file}: tensor {name} is none of A and B of the policy's matrices; it is an adapter of"
                " another base"
            )
        shape = expected[name][-1]
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {list(stored[name].shape)}, but the policy's matrix wants"
                f" {list(shape)}; it is an adapter of another base"
            )
    layers: list[dict[str, Any]] = [
        {matrix: {} for matrix in config.matrices} for _ in range(model.num_layers)
    ]
    for name, (index, matrix, factor, _) in expected.items():
        layers[index][matrix][factor] = stored[name].astype(np.float32)
    return {"layers": layers}, digest


def _check_config(directory: Path, config: LoraConfig) -> None:
    """Raises unless the adapter is plain LoRA with the settings of the config."""
    file = directory / CONFIG
    values = read_json_object(file)
    if values.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file}: peft_type is {json.dumps(values.get('peft_type'))}; only LORA is supported"
        )
    for key in _REFUSED:
        if values.get(key):
            raise CheckpointError(f"{file}: {key} is {json.dumps(values[key])}, which is not supported")
    if values.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: bias is {json.dumps(values['bias'])}; only none is supported")
    if values.get("init_lora_weights", True) not in _HARMLESS_STARTS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {json.dumps(values['init_lora_weights'])}, which changes the base;"
            " save the adapter converted to plain LoRA"
        )
    for key, ours, default, name in (
        ("r", config.rank, 8, "rank"),
        ("lora_alpha", config.alpha, 8, "alpha"),
        ("use_rslora", config.rslora, False, "rslora"),
    ):
        theirs = values.get(key, default)
        if theirs != ours:
            raise CheckpointError(
                f"policy.lora.{name}: {json.dumps(ours)}, but the adapter in {directory} has"
                f" {json.dumps(theirs)}; set policy.lora.{name} to it"
            )


def _check_targets(file: Path, stored: dict[str, Any], config: LoraConfig) -> None:
    """Raises unless the adapter is of the config's matrices."""
    whole = sorted(name.removeprefix(_PREFIX) for name in stored if ".lora_" not in name)
    if whole:
        raise CheckpointError(
            f"{file}: holds {', '.join(whole)} besides LoRA's factors: a whole matrix, as PEFT saves it with"
            " modules_to_save, or where the embedding was trained or resized; only factors are supported"
        )
    modules = {name.removeprefix(_PREFIX).rpartition(".lora_")[0].rpartition(".")[2] for name in stored}
    unknown = sorted(modules - TARGETS.keys() - {""})
    if unknown:
        raise CheckpointError(f"{file}: adapts {', '.join(unknown)}; supported are {', '.join(TARGETS)}")
    adapted = [theirs for theirs in TARGETS if theirs in modules]
    wanted = [theirs for theirs, ours in TARGETS.items() if ours in config.matrices]
    if adapted != wanted:
        raise CheckpointError(
            f"policy.lora.targets: {', '.join(wanted)}, but the adapter in {file.parent} is of"
            f" {', '.join(adapted)}; set policy.lora.targets=[{','.join(adapted)}]"
        )
