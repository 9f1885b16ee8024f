"""Hugging Face checkpoints: the logits of transformers, there and back; what cannot be loaded is named."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from rljax.errors import CheckpointError, TokenizerError
from rljax.models import huggingface
from rljax.models.config import ModelConfig, RopeScaling
from rljax.models.huggingface import (
    GenerationConfig,
    load_generation_config,
    load_model_config,
    load_params,
    save_model,
)
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import inverse_frequencies, rope_table
from rljax.models.transformer import forward, init_params, logits
from rljax.numerics.rows import Numerics
from tests.engines import lively_params
from tests.models.checkpoints import KINDS, VOCAB_SIZE, make_checkpoint, write_tokenizer

TOLERANCE = 1e-4
STATUS = Path("/proc/self/status")
LENGTHS = (96, 61, 17, 1)  # of a right-padded batch; beyond the 32 positions before llama3 scaling


def right_padded_batch():
    """Tokens and segment ids, both int32 [B, T]."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB_SIZE, (len(LENGTHS), max(LENGTHS)), dtype=np.int32)
    segment_ids = (np.arange(max(LENGTHS)) < np.asarray(LENGTHS)[:, None]).astype(np.int32)
    return tokens, segment_ids


def our_logits(config, params):
    """Float32 [B, T, V] of the right-padded batch."""
    tokens, segment_ids = right_padded_batch()
    numerics = Numerics()

    @jax.jit
    def run(params):
        hidden, _ = forward(
            params,
            config,
            jnp.asarray(tokens),
            jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
            PackedAttention(jnp.asarray(segment_ids), numerics),
            jnp.asarray(rope_table(config, tokens.shape[1])),
            numerics,
        )
        return logits(params, config, hidden, numerics)

    return np.asarray(run(params))


def reference_logits(model):
    torch = pytest.importorskip("torch")
    tokens, mask = right_padded_batch()
    with torch.no_grad():
        output = model(torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask).long())
    return output.logits.float().numpy()


def assert_same_logits(ours, expected):
    _, segment_ids = right_padded_batch()
    real = segment_ids == 1
    assert np.abs(expected[real]).max() > 1  # logits that say something
    assert np.abs(ours - expected)[real].max() < TOLERANCE


def reload(directory):
    """transformers' own model of a directory; fails on tensors that are missing or unexpected."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def edit_json(file, **changes):
    """Sets keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(directory, change):
    """Applies `change` to the dict of tensors of an unsharded checkpoint."""
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def assert_same_params(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


# --- against transformers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shards"), [(kind, place % 2 == 0) for place, kind in enumerate(KINDS)])
def test_logits_are_those_of_transformers_before_and_after_export(kind, shards, tmp_path):
    model = make_checkpoint(tmp_path / "made", kind, max_shard_size="100KB" if shards else None)
    config = load_model_config(tmp_path / "made")
    params = load_params(tmp_path / "made", config)
    expected = reference_logits(model)
    assert_same_logits(our_logits(config, params), expected)
    most = 100_000 if shards else 2**30
    exported = tmp_path / "exported"
    save_model(exported, config, params, "float32", tokenizer_source=tmp_path / "made", max_shard_bytes=most)
    for directory in (tmp_path / "made", exported):
        assert (len(list(directory.glob("*.safetensors"))) > 1) == shards
    np.testing.assert_array_equal(reference_logits(reload(exported)), expected)
    assert load_model_config(exported) == config
    assert_same_params(load_params(exported, config), params)


@pytest.mark.parametrize("theta,head_dim", [(500_000.0, 64), (1_000_000.0, 128)])
def test_rope_frequencies_are_those_of_transformers(theta, head_dim):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def theirs(**parameters):
        config = transformers.LlamaConfig(
            hidden_size=head_dim * 2,
            num_attention_heads=2,
            max_position_embeddings=131_072,
            rope_parameters={"rope_theta": theta} | parameters,
        )
        return LlamaRotaryEmbedding(config).inv_freq.numpy()

    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected = theirs(rope_type="llama3", original_max_position_embeddings=8192, **scaling)
    ours = inverse_frequencies(head_dim, theta, RopeScaling(**scaling, original_max_positions=8192))
    np.testing.assert_allclose(ours, expected, rtol=3e-7)
    # To the bit, but for a channel: an angle at position 30,000 magnifies its last bit by as much.
    assert np.sum(inverse_frequencies(head_dim, theta, None) != theirs(rope_type="default")) <= 1


def test_exported_tokenizer_and_sampling_defaults(tmp_path):
    transformers = pytest.importorskip("transformers")
    made, exported = tmp_path / "made", tmp_path / "out" / "exported"
    make_checkpoint(made, "llama3")
    config = load_model_config(made)
    save_model(exported, config, load_params(made, config), "bfloat16", tokenizer_source=made)
    chat = [{"role": "user", "content": "hi"}]
    before, copied = (transformers.AutoTokenizer.from_pretrained(each) for each in (made, exported))
    assert copied.apply_chat_template(chat) == before.apply_chat_template(chat)
    model = reload(exported)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.generation_config.eos_token_id == list(load_generation_config(exported).eos_token_ids)
    assert model.generation_config.temperature == load_generation_config(exported).temperature == 0.6
    assert load_generation_config(exported) == load_generation_config(made)
    assert oct(exported.stat().st_mode & 0o777) == oct(0o755)


# --- without torch ----------------------------------------------------------------------------------


def small_config(**changes):
    config = ModelConfig("qwen3", VOCAB_SIZE, 32, 2, 4, 2, 16, 48, qk_norm=True, max_positions=256)
    return dataclasses.replace(config, **changes)


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with an untied Qwen3 checkpoint and a tokenizer."""
    write_tokenizer(tmp_path / "tokenizer")
    directory = tmp_path / "checkpoint"
    save_model(directory, small_config(), lively_params(small_config()), "float32", tmp_path / "tokenizer")
    return directory


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_dtypes(stored, tmp_path):
    config = small_config()
    params = lively_params(config)
    save_model(tmp_path / "exported", config, params, stored)
    rounded = jax.tree.map(lambda w: w.astype(stored), params)
    assert_same_params(load_params(tmp_path / "exported", config), rounded)
    with safetensors.safe_open(tmp_path / "exported" / "model.safetensors", framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers 4 refuses anything else
    as_float32 = load_params(tmp_path / "exported", config, dtype="float32")
    assert_same_params(as_float32, jax.tree.map(lambda w: w.astype(jnp.float32), rounded))
    with pytest.raises(CheckpointError, match="int8"):
        load_params(tmp_path / "exported", config, dtype="int8")


def test_put_places_each_weight_as_it_arrives_and_is_waited_for(checkpoint):
    # Else the host arrays of unfinished transfers pile up: up to 24 at a time on JAX 0.10.
    seen, in_flight = {}, []

    class Transfer:
        def __init__(self, path):
            self.path = path
            in_flight.append(self)

        def block_until_ready(self):
            in_flight.remove(self)
            return self

    def put(path, array):
        assert isinstance(array, np.ndarray) and not in_flight
        seen[path] = array.shape
        return Transfer(path)

    params = load_params(checkpoint, small_config(), put=put)
    assert not in_flight
    assert params["layers"][1]["q"].path == ("layers", 1, "q")
    assert params["final_norm"].path == ("final_norm",)
    assert seen["layers", 0, "k"] == (32, 32) and len(seen) == 3 + 2 * 11


QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}


def write_config(directory, **changes):
    content = {key: value for key, value in (QWEN2 | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(content))


def test_older_and_newer_spellings_mean_the_same(tmp_path):
    write_config(tmp_path)
    old = load_model_config(tmp_path)
    assert old.rope_theta == 1e6 and old.head_dim == 16 and old.attention_bias and old.tie_embeddings
    write_config(
        tmp_path,
        rope_theta="absent",
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        layer_types=["full_attention"] * 2,
        torch_dtype="absent",
        dtype="bfloat16",
    )
    assert load_model_config(tmp_path) == old
    scaled = LLAMA3 | {"original_max_position_embeddings": 128}
    write_config(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=scaled)
    old = load_model_config(tmp_path)
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 128)
    assert old.rope_theta == 5e5
    newer = {"rope_theta": "absent", "rope_parameters": scaled | {"rope_theta": 5e5}}
    write_config(tmp_path, model_type="llama", **newer)
    assert load_model_config(tmp_path) == old
    del scaled["rope_type"]
    write_config(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=scaled | {"type": "llama3"})
    assert load_model_config(tmp_path) == old
    both = scaled | {"type": "llama3"}, scaled | {"rope_type": "llama3", "rope_theta": 5e5}
    for older, newer in (({}, both[1]), (None, both[1]), both, (both[0], {})):
        write_config(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=older, rope_parameters=newer)
        assert load_model_config(tmp_path) == old, (older, newer)
    write_config(tmp_path, rope_scaling={}, rope_parameters=None)
    assert load_model_config(tmp_path).rope_scaling is None


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"model_type": "mistral"}, 'model_type is "mistral"'),
        ({"model_type": "absent"}, "model_type is null"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*sliding_attention"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is true"),
        ({"model_type": "qwen3", "head_dim": 16, "attention_bias": True}, "attention_bias is true"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is true"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_scaling.rope_type is "yarn"'),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 'rope_scaling.type is "linear"'),
        (
            {"rope_theta": "absent", "rope_scaling": {}, "rope_parameters": YARN},
            'rope_parameters.rope_type is "yarn"',
        ),
        ({"rope_theta": 1e6, "rope_parameters": YARN | {"rope_type": "default"}}, "both 500000 and 1e"),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": YARN},
            "contradict each other: factor is 4.0 and 8.0",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "contradict each other: factor is null and 8.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor is 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"hidden_size": 63}, "hidden_size is 63"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes"'),
        ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps is "1e-6"'),
    ],
)
def test_an_unsupported_option_is_one_error_that_names_it(changes, named, tmp_path):
    write_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_config_that_is_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
    for content, message in (("{", "not readable JSON"), ("[]", "JSON object, not a list")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            load_model_config(tmp_path)


def test_eos_ids_and_their_fallbacks(checkpoint):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    im_end = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|im_end|>")
    assert load_generation_config(checkpoint) == GenerationConfig((im_end,))
    generation = checkpoint / "generation_config.json"
    listed = {"eos_token_id": [5, 7, 5], "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    generation.write_text(json.dumps(listed))
    assert load_generation_config(checkpoint) == GenerationConfig((5, 7), 0.7, 20, 0.8)
    generation.write_text(json.dumps({"do_sample": False, "temperature": 0.7, "top_k": -1}))
    assert load_generation_config(checkpoint) == GenerationConfig((im_end,), temperature=0.0, top_k=0)
    generation.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": -2}))
    with pytest.raises(CheckpointError, match=r"top_k is -2; it should be a positive integer"):
        load_generation_config(checkpoint)
    for file in (generation, checkpoint / "config.json"):
        edit_json(file, eos_token_id=[im_end, VOCAB_SIZE], top_k=0)
        with pytest.raises(CheckpointError, match=rf"{file.name}: eos_token_id is \[2, 320\]; .* 0 to 319"):
            load_generation_config(checkpoint)
        edit_json(file, eos_token_id=None if file == generation else im_end)
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is \"</s>\""):
        load_generation_config(checkpoint)
    generation.unlink()
    edit_json(checkpoint / "config.json", eos_token_id=[9])
    assert load_generation_config(checkpoint).eos_token_ids == (9,)
    edit_json(checkpoint / "config.json", eos_token_id=None)
    assert load_generation_config(checkpoint).eos_token_ids == (im_end,)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no EOS token"):
        load_generation_config(checkpoint)


DOWN, ROTARY = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
WRONG_TENSORS = {
    "missing": (
        lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"),
        r"missing .*1\.self_attn\.q_norm\.weight \[16\]",
    ),
    "misshapen": (
        lambda tensors: tensors.update({DOWN: np.zeros((48, 32), np.float32)}),
        rf"tensor {DOWN} has shape \[48, 32\], but config\.json asks for \[32, 48\]",
    ),
    "surplus": (
        lambda tensors: tensors.update({f"extra.{i}": np.zeros(3, np.float32) for i in range(6)}),
        r"surplus tensors extra\.0, extra\.1, extra\.2, extra\.3 and 2 more",
    ),
    "integer": (
        lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int8)}),
        r"tensor model\.norm\.weight is stored as I8",
    ),
    "rotary buffers": (lambda tensors: tensors.update({ROTARY: np.zeros(8, np.float32)}), None),
}


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_named_but_rotary_buffers_ignored(change, message, checkpoint):
    edit_tensors(checkpoint, change)
    if message is None:
        load_params(checkpoint, small_config())
        return
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
        load_params(checkpoint, small_config())


def test_the_lm_head_of_a_tied_model(tmp_path):
    config = small_config(tie_embeddings=True)
    save_model(tmp_path / "tied", config, lively_params(config), "bfloat16")
    embed = "model.embed_tokens.weight"
    edit_tensors(tmp_path / "tied", lambda tensors: tensors.update({"lm_head.weight": tensors[embed].copy()}))
    params = load_params(tmp_path / "tied", config)
    assert "lm_head" not in params

    def last_row(tensors):
        tensors["lm_head.weight"][-1, -1] += ml_dtypes.bfloat16(1)

    edit_tensors(tmp_path / "tied", last_row)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_params(tmp_path / "tied", config)


@pytest.mark.parametrize("shard", ["model-00001-of-", "model-lost.safetensors"])
def test_a_promised_head_of_a_tied_model_need_not_be_there(shard, tmp_path):
    config = small_config(tie_embeddings=True)
    params = lively_params(config)
    save_model(tmp_path / "tied", config, params, "float32", max_shard_bytes=20_000)
    index = tmp_path / "tied" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = next((name for name in weight_map.values() if name.startswith(shard)), shard)
    edit_json(index, weight_map=weight_map | {"lm_head.weight": shard})
    assert_same_params(load_params(tmp_path / "tied", config), params)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_params(tmp_path / "tied", small_config())


@pytest.mark.parametrize("generation", [None, {}, {"temperature": 0.7, "eos_token_id": None}])
def test_an_export_has_the_eos_ids_of_the_policy(generation, checkpoint, tmp_path):
    (checkpoint / "generation_config.json").unlink()
    if generation is not None:
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    edit_json(checkpoint / "config.json", eos_token_id=7)
    for place, ids in enumerate((None, (7, 9))):
        exported = tmp_path / f"exported-{place}"
        save_model(exported, small_config(), lively_params(small_config()), "float32", checkpoint, ids)
        expected = 7 if ids is None else [7, 9]
        for name in ("generation_config.json", "config.json"):
            assert json.loads((exported / name).read_text())["eos_token_id"] == expected, name
        assert load_generation_config(exported).temperature == (generation or {}).get("temperature", 1.0)


def test_a_truncated_file(checkpoint):
    file = checkpoint / "model.safetensors"
    for content in (file.read_bytes()[:-100], b""):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"safetensors \({len(content)} bytes\) cannot be read"):
            load_params(checkpoint, small_config())


def test_shards_and_their_index(tmp_path):
    config = small_config()
    directory = tmp_path / "sharded"
    save_model(directory, config, lively_params(config), "float32", max_shard_bytes=20_000)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]

    edit_json(index, weight_map=weight_map | {"model.norm.weight": "../outside.safetensors"})
    with pytest.raises(CheckpointError, match="the name of a file next to it"):
        load_params(directory, config)
    other = next(shard for shard in weight_map.values() if shard != weight_map["model.norm.weight"])
    edit_json(index, weight_map=weight_map | {"model.norm.weight": other})
    with pytest.raises(CheckpointError, match=rf"{other}: tensor model\.norm\.weight is missing"):
        load_params(directory, config)
    edit_json(index, weight_map=weight_map)
    load_params(directory, config)
    shard = weight_map["model.layers.1.mlp.up_proj.weight"]
    (directory / shard).unlink()
    with pytest.raises(CheckpointError, match=rf"{shard} does not exist; .* lists tensor model\.layers\."):
        load_params(directory, config)
    index.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .* pytorch_model\.bin should"):
        load_params(directory, config)


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    config = small_config()
    save_file = safetensors.numpy.save_file
    written = []

    def fail_on_the_second(tensors, file, metadata):
        if written:
            raise KeyboardInterrupt
        written.append(file)
        save_file(tensors, file, metadata=metadata)

    monkeypatch.setattr(huggingface.safetensors.numpy, "save_file", fail_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "exported", config, lively_params(config), "float32", max_shard_bytes=20_000)
    assert written
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_what_transformers_could_not_load(tmp_path, checkpoint):
    config, params = small_config(), lively_params(small_config())
    before = sorted(os.listdir(checkpoint))
    with pytest.raises(CheckpointError, match="not an empty directory"):
        save_model(checkpoint, config, params, "float32")
    assert sorted(os.listdir(checkpoint)) == before
    for wrong, message in (
        (small_config(attention_bias=True), "attention_bias False, but the policy has True"),
        (small_config(architecture="llama"), "qk_norm False, but the policy has True"),
        (small_config(architecture="gpt2"), "no architecture 'gpt2'"),
        (small_config(mlp_size=64), r"params\.layers\.0\.gate has shape \(48, 32\)"),
        (small_config(num_layers=3), r"params\.layers\.2\..* has shape None"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_model(tmp_path / "exported", wrong, params, "float32")
    few = small_config(vocab_size=32)
    with pytest.raises(TokenizerError, match="vocab_size is 32"):
        save_model(tmp_path / "exported", few, lively_params(few), "float32", tokenizer_source=checkpoint)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["checkpoint", "tokenizer"]


@pytest.mark.skipif(
    not (STATUS.exists() and "VmHWM" in STATUS.read_text()), reason="needs Linux's count of peak memory"
)
def test_peak_memory_of_loading_is_below_1_3_times_the_checkpoint(tmp_path):
    # Shaped like small published models: the embedding is a quarter of the weights.
    config = small_config(
        vocab_size=51_200, hidden_size=512, mlp_size=2560, num_layers=17, tie_embeddings=True
    )
    save_model(tmp_path / "large", config, init_params(config, 0), "bfloat16")
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 180e6
    script = """
        import sys

        import jax
        import jax.numpy as jnp

        from rljax.models.huggingface import load_model_config, load_params

        def kilobytes(key):
            for line in open("/proc/self/status"):
                if line.startswith(key):
                    return int(line.split()[1])

        config = load_model_config(sys.argv[1])
        jax.block_until_ready(jnp.asarray([1.0]))  # the backend's own memory is not the checkpoint's
        before = kilobytes("VmRSS")
        params = jax.block_until_ready(load_params(sys.argv[1], config))
        # Not getrusage: its peak begins with what the parent process had.
        print((kilobytes("VmHWM") - before) * 1024)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        # What the loader holds, without glibc's free lists: its own, moving threshold leaves up to 0.2 more
        # in them, another amount each run.
        env=os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        cwd=Path(__file__).parents[2],
    )
    assert process.returncode == 0, process.stderr
    peak = int(process.stdout)
    assert 0.95 * size < peak < 1.3 * size, f"peak {peak / size:.3f} x the checkpoint"
