"""Heads out and in, in the layouts of serving engines: names, config, draft vocabulary, what does not fit."""

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
from tests.drafters.eagle.published import write_dflash, write_eagle3
from tests.drafters.eagle.tiny import POLICY, policy_params

TOKENS = np.flatnonzero(np.arange(POLICY.vocab_size) % 3 != 1)  # 32 of 48
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
    """In bfloat16, of the rounded head; a trained bias survives."""
    config, params = head("eagle")
    params["fc_bias"] = jnp.arange(32, dtype=jnp.float32)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, ml_dtypes.bfloat16).astype(np.float32), params)
    for dtype, expected in ("float32", params), ("bfloat16", rounded):
        save_head(tmp_path / dtype, config, params, dtype)
        loaded_config, loaded = load_head(tmp_path / dtype, POLICY)
        assert loaded_config == config
        jax.tree.map(np.testing.assert_array_equal, expected, loaded)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_round_trip_of_a_published_head_with_a_draft_vocabulary(engine, tmp_path):
    tensors = write_eagle3(tmp_path / "published", POLICY, TOKENS, layers=(1, 2, 3))
    config, params = load_head(tmp_path / "published", POLICY)
    save_head(tmp_path / "written", config, params, "float32", engine)
    written = safetensors.numpy.load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written[name], array)
        assert written[name].dtype == array.dtype
    content = json.loads((tmp_path / "written" / "config.json").read_text())
    assert content["draft_vocab_size"] == len(TOKENS) and content["vocab_size"] == POLICY.vocab_size
    again, loaded = load_head(tmp_path / "written", POLICY)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


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
    ("variant", "change", "message"),
    [
        ("eagle", lambda t: t.pop("fc.weight"), r"fc\.weight \[32, 64\] is missing"),
        ("eagle", lambda t: t.update({"layers.0.mlp.bias": np.ones(64)}), r"mlp\.bias is not part"),
        ("eagle", lambda t: t.update(d2t=np.arange(10)), "d2t and t2d belong to EAGLE-3 heads only"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"] + 100), "d2t leads to token 147, but the policy has 48"),
        ("eagle3", lambda t: t.update(d2t=-np.arange(32)), "d2t: tokens: expected .* each once"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"][:5]), r"d2t is \[5\], but draft_vocab_size is 32"),
        ("eagle3", lambda t: t.update(t2d=~t["t2d"]), "t2d marks other tokens than d2t"),
        ("eagle3", lambda t: t.pop("d2t"), r"d2t \[32\] is missing"),
        ("eagle3", lambda t: t.pop("lm_head.weight"), r"lm_head\.weight \[32, 32\] is missing"),
        ("dflash", lambda t: t.update({"layers.2.mlp.bias": np.ones(64)}), "is not part of a block head"),
    ],
)
def test_other_tensors_are_refused(variant, change, message, tmp_path):
    if variant == "eagle":
        save_head(tmp_path / "head", *head("eagle"), "float32")
    elif variant == "eagle3":
        write_eagle3(tmp_path / "head", POLICY, TOKENS)
    else:
        write_dflash(tmp_path / "head", POLICY, (1, 3), TOKENS)
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
