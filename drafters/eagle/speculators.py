"""The config of heads that vLLM's `speculators` wrote: EAGLE-3 and DFlash.

A directory as any other (`checkpoint.py`), but for its `config.json`: `speculators_model_type` says what the
head is, and `transformer_layer_config` holds what its layers are, without what is a default of transformers.
Layers of the policy are counted as vLLM does, by how many of them lie before the state. What a head here
cannot be is refused by its key.
"""

from pathlib import Path
from typing import Any

from drafters.eagle.model import BlockShape
from rljax.errors import CheckpointError
from rljax.models.config import ModelConfig
from rljax.models.huggingface import read_rope

MODEL_TYPE = "speculators_model_type"
_LAYER = "transformer_layer_config"
_REFUSED = {
    "eagle3": {
        "norm_before_fc": "the features are fused without a norm",
        "embed_requires_grad": "a head shares the policy's embeddings",
    },
    "dflash": {
        "sample_from_anchor": "a block begins with the last token, whose position drafts nothing",
        "shift_label": "a position drafts its own token",
    },
}
_ALSO_REFUSED = {"attention_bias": "no projection has a bias", "mlp_bias": "no projection has a bias"}


def plain_config(file: Path, content: dict[str, Any], policy: ModelConfig) -> dict[str, Any]:
    """Returns the content of a `config.json` of speculators as others write it: that of its layers at the
    top, and its own keys over it.

    Raises:
      CheckpointError: it asks for what a head here cannot be, or is made for another policy.
    """
    kind, layer = content[MODEL_TYPE], content.get(_LAYER)
    if kind not in _REFUSED:
        raise _refusal(file, MODEL_TYPE, kind, f"supported are {', '.join(_REFUSED)}")
    if not isinstance(layer, dict):
        raise _refusal(file, _LAYER, layer, "it should be an object")
    for key, reason in _REFUSED[kind].items():
        if content.get(key):
            raise _refusal(file, key, content[key], reason)
    if content.get("target_hidden_size") not in (None, policy.hidden_size):
        raise _refusal(file, "target_hidden_size", content["target_hidden_size"], f"not {policy.hidden_size}")
    _check_layer(file, layer, policy)
    if kind == "eagle3":
        layers = layer.get("num_hidden_layers", 1)
        if layers != 1:
            raise _refusal(file, f"{_LAYER}.num_hidden_layers", layers, "an EAGLE-3 head here has one layer")
    elif content.get("projector_type", "dflash") != "dflash":
        raise _refusal(file, "projector_type", content["projector_type"], "only dflash is supported")
    return layer | content


def dflash_block(file: Path, content: dict[str, Any]) -> tuple[BlockShape, tuple[int, ...]]:
    """Returns shape and layers of a DFlash head, from `plain_config`.

    Raises:
      CheckpointError: a key is missing or no such number.
    """
    least = {"block_size": 2, "num_hidden_layers": 1, "mask_token_id": 0}
    numbers = []
    for key, smallest in least.items():
        value = content.get(key, 8 if key == "block_size" else None)
        if not isinstance(value, int) or value < smallest:
            raise _refusal(file, key, value, f"it should be a whole number, at least {smallest}")
        numbers.append(value)
    size, depth, mask = numbers
    layers = content.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise _refusal(file, "aux_hidden_state_layer_ids", layers, "it should be a list of layers")
    return BlockShape(size - 1, depth, width=0, mask=mask), tuple(layers)


def _check_layer(file: Path, layer: dict[str, Any], policy: ModelConfig) -> None:
    """Raises unless the layers compute as those here do. A head has the policy's rotary table and epsilon."""
    if layer.get("hidden_act", "silu") != "silu":
        raise _refusal(file, f"{_LAYER}.hidden_act", layer["hidden_act"], "only silu is supported")
    for key, reason in _ALSO_REFUSED.items():
        if layer.get(key):
            raise _refusal(file, f"{_LAYER}.{key}", layer[key], reason)
    kinds = layer.get("layer_types")
    if any(kind != "full_attention" for kind in kinds or ()):
        raise _refusal(file, f"{_LAYER}.layer_types", kinds, "only full_attention is supported")
    if kinds is None and layer.get("use_sliding_window"):
        raise _refusal(file, f"{_LAYER}.use_sliding_window", True, "only full attention is supported")
    theta, scaling = read_rope(file, layer, policy.max_positions)
    for key, found, own in (
        ("rope_theta", theta, policy.rope_theta),
        ("rope_scaling", scaling, policy.rope_scaling),
        ("rms_norm_eps", layer.get("rms_norm_eps", 1e-6), policy.norm_epsilon),
    ):
        if found != own:
            raise _refusal(file, f"{_LAYER}.{key}", found, f"but the policy's is {own}, which a head shares")


def _refusal(file: Path, key: str, value: Any, reason: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key} is {value}; {reason}")
