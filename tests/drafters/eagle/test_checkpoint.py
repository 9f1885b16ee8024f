"""Heads out and in: names, config, what does not fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from drafters.eagle.checkpoint import load_head, save_head
from drafters.eagle.model import HeadConfig, init_head
from rljax.errors import CheckpointError
from rljax.models.config import RopeScaling
from tests.drafters.eagle.tiny import POLICY, policy_params

NAMES = [
    f"{name}.weight"
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
]  # fmt: skip


def head(variant, layers=()):
    config = HeadConfig(variant, POLICY, layers)
    return config, init_head(config, policy_params(), 4)


def test_round_trip(tmp_path):
    """EAGLE-3's is in `test_draft_vocabulary.py`."""
    config, params = head("eagle")
    save_head(tmp_path / "head", config, params, "float32")
    loaded_config, loaded = load_head(tmp_path / "head", POLICY)
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


def test_bfloat16_is_the_rounded_head_and_a_trained_bias_survives(tmp_path):
    config, params = head("eagle")
    params["fc_bias"] = jnp.arange(32, dtype=jnp.float32)
    save_head(tmp_path / "head", config, params)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, ml_dtypes.bfloat16).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, rounded, load_head(tmp_path / "head", POLICY)[1])


def test_eagle_names_and_config(tmp_path):
    config, params = head("hass")
    save_head(tmp_path / "head", config, params)
    tensors = safetensors.numpy.load_file(tmp_path / "head" / "model.safetensors")
    assert set(tensors) == {"fc.weight", "fc.bias", *(f"layers.0.{name}" for name in NAMES)}
    assert not tensors["fc.bias"].any()
    content = json.loads((tmp_path / "head" / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle"] and content["num_hidden_layers"] == 1
    save_head(tmp_path / "vllm", config, params, engine="vllm")
    content = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLM"]  # vLLM puts Eagle in front


def test_eagle3_names_and_config(tmp_path):
    config, params = head("eagle3")
    for engine in ("sglang", "vllm"):
        save_head(tmp_path / engine, config, params, engine=engine)
    tensors = safetensors.numpy.load_file(tmp_path / "sglang" / "model.safetensors")
    more = ("input_layernorm.weight", "hidden_norm.weight")
    assert set(tensors) == {"fc.weight", "norm.weight", *(f"midlayer.{name}" for name in (*NAMES, *more))}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    assert tensors["fc.weight"].shape == (32, 96)
    sglang, vllm = (json.loads((tmp_path / e / "config.json").read_text()) for e in ("sglang", "vllm"))
    assert sglang["architectures"] == vllm["architectures"] == ["LlamaForCausalLMEagle3"]
    assert sglang["draft_vocab_size"] is None and sglang["tie_word_embeddings"] is False
    assert config.layers == (1, 2, 3)
    assert sglang["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_transformers_reads_the_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    scaled = dataclasses.replace(POLICY, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 128))
    config = HeadConfig("eagle", scaled)
    save_head(tmp_path / "head", config, init_head(config, policy_params(), 0))
    read = transformers.AutoConfig.from_pretrained(tmp_path / "head")
    assert (read.hidden_size, read.num_key_value_heads, read.head_dim) == (32, 2, 16)
    assert read.rope_parameters["rope_theta"] == 5e5 and read.rope_parameters["factor"] == 8.0


def test_a_head_of_another_policy_is_refused(tmp_path):
    config, params = head("eagle")
    save_head(tmp_path / "head", config, params)
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size is 32, but the policy's is 64"):
        load_head(tmp_path / "head", dataclasses.replace(POLICY, hidden_size=64))
    content = json.loads((tmp_path / "head" / "config.json").read_text())
    del content["num_key_value_heads"]  # the config does not say; the weights do
    (tmp_path / "head" / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is \[32, 32\], but .* \[64, 32\]"):
        load_head(tmp_path / "head", dataclasses.replace(POLICY, num_kv_heads=4))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("fc.weight"), r"fc\.weight \[32, 64\] is missing"),
        (lambda t: t.update({"layers.0.self_attn.q_proj.bias": np.ones(64)}), "q_proj.bias is not part"),
        (lambda t: t.update({"d2t": np.arange(10)}), "d2t and t2d belong to EAGLE-3 heads only"),
    ],
)
def test_other_heads_are_refused(change, message, tmp_path):
    config, params = head("eagle")
    save_head(tmp_path / "head", config, params, "float32")
    file = tmp_path / "head" / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(file))
    change(tensors)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "head", POLICY)


def test_what_cannot_be_served_is_not_saved(tmp_path):
    whole, cut = head("eagle3", (1, 1, 4)), head("eagle")
    cut[1]["fc"] = cut[1]["fc"][:, :5]
    for each, message in (whole, "three different ones from 1 to 3"), (cut, r"fc\.weight"):
        with pytest.raises(CheckpointError, match=message):
            save_head(tmp_path / "head", *each)
    assert not any(tmp_path.iterdir())


def test_a_broken_directory_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is not readable"):
        load_head(tmp_path, POLICY)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_head(tmp_path, POLICY)
