"""Heads in the format of vLLM's `speculators`: their drafts against plain NumPy, and what is refused."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from drafters.eagle.checkpoint import load_head
from drafters.eagle.model import init_head
from drafters.eagle.objective import head_training
from drafters.eagle.saving import AsyncHeadSaver
from rljax.errors import CheckpointError
from tests.drafters.eagle.published import attend, greedy_chain, norm, rotate, silu, write_eagle3
from tests.drafters.eagle.test_block import decode_and_learn, speculator_of
from tests.drafters.eagle.test_training import ROWS, loss_of, train
from tests.drafters.eagle.test_training import unrolled as unrolled_program
from tests.drafters.eagle.tiny import (
    POLICY,
    begun,
    chain,
    packed_batch,
    policy_params,
    policy_states,
    rollouts,
    shared,
)
from tests.tiny_policy import CONFIG, HEAD

TOKENS = np.sort(np.random.default_rng(1).permutation(POLICY.vocab_size)[:40])
LAYERS = (1, 2, 3, 4)  # DFlash reads any number
MASK, BLOCK = 7, 6


def config_json(kind, policy, tokens, **more):
    """As speculators 0.5 writes it, without what is a default of transformers (RoPE's base of 10,000)."""
    layer = {
        "model_type": "llama" if kind == "eagle3" else "qwen3",
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.mlp_size,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "num_hidden_layers": 1 if kind == "eagle3" else 2,
        "vocab_size": policy.vocab_size,
        "rms_norm_eps": policy.norm_epsilon,
        "tie_word_embeddings": False,
    }
    if policy.rope_theta != 10_000:
        layer["rope_theta"] = policy.rope_theta
    content = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": policy.vocab_size if tokens is None else len(tokens),
        "target_hidden_size": None,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/policy"}},
    }
    return content | more


def write_dflash(directory, policy, layers=LAYERS, tokens=TOKENS, seed=0):
    """Writes a DFlash head with random weights; returns its tensors. `tokens` None shares the LM head."""
    rng = np.random.default_rng(seed)
    d, f, dim = policy.hidden_size, policy.mlp_size, policy.head_dim
    queries, keys = policy.num_heads * dim, policy.num_kv_heads * dim

    def random(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5 * 1.5).astype(np.float32)

    def norm(size):
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"fc.weight": random(d, len(layers) * d), "norm.weight": norm(d), "hidden_norm.weight": norm(d)}
    for number in range(2):
        layer = {
            "self_attn.q_proj": random(queries, d),
            "self_attn.k_proj": random(keys, d),
            "self_attn.v_proj": random(keys, d),
            "self_attn.o_proj": random(d, queries),
            "self_attn.q_norm": norm(dim),
            "self_attn.k_norm": norm(dim),
            "mlp.gate_proj": random(f, d),
            "mlp.up_proj": random(f, d),
            "mlp.down_proj": random(d, f),
            "input_layernorm": norm(d),
            "post_attention_layernorm": norm(d),
        }
        tensors |= {f"layers.{number}.{name}.weight": array for name, array in layer.items()}
    if tokens is not None:
        known = np.zeros(policy.vocab_size, bool)
        known[tokens] = True
        tensors |= {
            "lm_head.weight": 3 * random(len(tokens), d),
            "d2t": tokens.astype(np.int64) - np.arange(len(tokens)),
            "t2d": known,
        }
    directory.mkdir(parents=True)
    own = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(layers)}
    (directory / "config.json").write_text(json.dumps(config_json("dflash", policy, tokens, **own)))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def write_speculators_eagle3(directory, policy, tokens=TOKENS, **more):
    tensors = write_eagle3(directory, policy, tokens, layout="vllm")
    content = config_json("eagle3", policy, tokens, **more)
    (directory / "config.json").write_text(json.dumps(content))
    return tensors


def dflash_logits(tensors, embed, features, last):
    """Logits [BLOCK - 1, V'] of one block, as `DFlashDraftModel` computes them.

    Args:
      features: [n, layers, d] of the tokens before `last`, which stands at position n.
    """
    tensors = {
        name.removesuffix(".weight"): array.astype(np.float64).T
        for name, array in tensors.items()
        if name != "t2d"
    }
    n, dim = len(features), POLICY.head_dim
    context = norm(features.reshape(n, -1) @ tensors["fc"], tensors["hidden_norm"], POLICY)
    x = np.stack([embed[last], *[embed[MASK]] * (BLOCK - 1)])
    positions = np.arange(n + BLOCK)
    for number in range(2):
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): array for name, array in tensors.items() if prefix in name}
        h = norm(x, layer["input_layernorm"], POLICY)
        everything = np.concatenate([context, h])  # keys and values of both, queries of the block
        q = (h @ layer["self_attn.q_proj"]).reshape(BLOCK, -1, dim)
        k, v = ((everything @ layer[f"self_attn.{name}_proj"]).reshape(n + BLOCK, -1, dim) for name in "kv")
        q = rotate(norm(q, layer["self_attn.q_norm"], POLICY), positions[n:], POLICY)
        k = rotate(norm(k, layer["self_attn.k_norm"], POLICY), positions, POLICY)
        x = x + attend(q, k, v) @ layer["self_attn.o_proj"]
        h = norm(x, layer["post_attention_layernorm"], POLICY)
        x = x + (silu(h @ layer["mlp.gate_proj"]) * (h @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
    return norm(x, tensors["norm"], POLICY)[1:] @ tensors["lm_head"]


def test_dflash_drafts_what_plain_numpy_does(tmp_path):
    """Behind contexts of two lengths; a shorter draft is the same block's beginning; and so in training."""
    tensors = write_dflash(tmp_path / "head", POLICY)
    config, params = load_head(tmp_path / "head", POLICY)
    assert config.variant == "block" and config.layers == LAYERS and config.block.size == BLOCK - 1
    tokens, lengths, embed = rollouts(2, 24, 11), (17, 9), np.asarray(shared()["embed"], np.float64)
    states = np.stack(policy_states(config, tokens))
    state = begun(config, params, tokens, states, lengths)
    expected = [
        dflash_logits(tensors, embed, states[slot, :n, :-1].astype(np.float64), tokens[slot, n])
        for slot, n in enumerate(lengths)
    ]
    best = np.stack([TOKENS[logits.argmax(axis=-1)] for logits in expected])
    for depth in (BLOCK - 1, 2):
        found = chain(config, params, state, lengths, depth).tree.tokens
        np.testing.assert_array_equal(found, best[:, :depth])
    batch = packed_batch(config, list(tokens), [[0], [1]], 24)
    unrolled = unrolled_program(config, 2)(params, batch)  # fewer than the block has
    assert len(unrolled) == 2
    for slot, n in enumerate(lengths):
        outputs = np.stack([np.asarray(each[slot, n - 1], np.float64) for each in unrolled])
        logits = norm(outputs, tensors["norm.weight"], POLICY) @ tensors["lm_head.weight"].T
        np.testing.assert_allclose(logits, expected[slot][:2], rtol=2e-4, atol=2e-4)


def test_eagle3_drafts_what_plain_numpy_does(tmp_path):
    """With the key of this format that changes the layer: `test_draft_vocabulary.py` has heads without it."""
    tensors = write_speculators_eagle3(tmp_path / "head", POLICY, norm_before_residual=True)
    config, params = load_head(tmp_path / "head", POLICY)
    assert config.variant == "eagle3" and config.norm_before_residual
    assert config.layers == (1, 2, 3)  # nothing is said: vLLM's
    tokens, counts, depth = rollouts(2, 24, 11), (17, 9), 4
    states = np.stack(policy_states(config, tokens))
    drafted = chain(config, params, begun(config, params, tokens, states, counts), counts, depth)
    embed = np.asarray(shared()["embed"], np.float64)
    for slot, n in enumerate(counts):
        features, behind = states[slot, :n, :3].astype(np.float64), tokens[slot, 1 : n + 1]
        expected, other = (
            greedy_chain(tensors, POLICY, embed, features, behind, depth, normed) for normed in (True, False)
        )
        assert drafted.tree.tokens[slot].tolist() == expected != other  # so that the test tells them apart


def test_the_whole_vocabulary_is_the_policys(tmp_path):
    write_dflash(tmp_path / "dflash", POLICY, tokens=None)
    write_speculators_eagle3(tmp_path / "eagle3", POLICY, tokens=None)
    for name in ("dflash", "eagle3"):
        config, params = load_head(tmp_path / name, POLICY)
        assert config.vocabulary is None and "lm_head" not in params


@pytest.mark.long  # test_block.py has the training, test_saving.py the files
def test_a_dflash_head_learns_its_policy_and_is_saved(tmp_path):
    write_dflash(tmp_path / "head", POLICY, layers=(1, 3), tokens=None)
    config, _ = load_head(tmp_path / "head", POLICY)
    params, training = init_head(config, policy_params(), 0), head_training("block", 2)
    state, _ = train(config, params, training, 60)
    unseen = packed_batch(config, rollouts(8, 48, 99), ROWS, 96)
    before, after = (loss_of(config, training)(each, unseen)[1] for each in (params, state.params))
    assert after["coupled_length"] > before["coupled_length"] + 0.15
    saver = AsyncHeadSaver(tmp_path / "saved")
    saver.save(1, state.params, config)
    saver.wait()
    found, loaded = load_head(tmp_path / "saved", POLICY)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, state.params)


@pytest.mark.long  # test_block.py has heads of our own; below, drafts are held against NumPy's
@pytest.mark.parametrize("drafter", ["block", "eagle"])
def test_the_tokens_are_those_of_plain_decoding(drafter, tmp_path, params, requests, expected):
    """Frozen; and trained on, over a draft vocabulary."""
    args = {"path": str(tmp_path / "head"), "train": drafter == "eagle"}
    if drafter == "block":
        write_dflash(tmp_path / "head", CONFIG, layers=(0, 1), tokens=None)
        args["block_size"] = BLOCK - 1
    else:
        write_speculators_eagle3(tmp_path / "head", CONFIG, np.arange(40), norm_before_residual=True)
    speculator = speculator_of(drafter, HEAD | args)
    counted = decode_and_learn(speculator, params, requests, expected)
    head, metrics = speculator.drafters[drafter], speculator.metrics(counted[-1])
    assert head.trainer.updates == (4 if args["train"] else 0)
    if args["train"]:
        assert head.trainer.params["lm_head"].shape == (40, CONFIG.hidden_size)
        assert counted[-1].accepted > 0 and metrics["speculation/head/outside_vocabulary"] > 0


def changed(directory, layer=None, **own):
    file = directory / "config.json"
    content = json.loads(file.read_text()) | own
    content["transformer_layer_config"] |= layer or {}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle3", {"speculators_model_type": "mlp"}, "is mlp; supported are eagle3, dflash"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc is True"),
        ("eagle3", {"embed_requires_grad": True}, "embed_requires_grad is True"),
        ("eagle3", {"target_hidden_size": 64}, "target_hidden_size is 64"),
        ("eagle3", {"layer": {"num_hidden_layers": 2}}, "is 2; an EAGLE-3 head here has one layer"),
        ("eagle3", {"layer": {"hidden_size": 64}}, "hidden_size is 64, but the policy's is 32"),
        ("eagle3", {"layer": {"rope_theta": 5e5}}, r"rope_theta is 500000.0; but the policy's is 10000.0"),
        ("eagle3", {"layer": {"rms_norm_eps": 1e-5}}, "rms_norm_eps is 1e-05"),
        ("eagle3", {"layer": {"attention_bias": True}}, "attention_bias is True"),
        ("eagle3", {"layer": {"hidden_act": "gelu"}}, "hidden_act is gelu; only silu"),
        ("dflash", {"layer": {"rope_parameters": {"rope_theta": 1e6}}}, "rope_theta is 1000000.0"),
        ("dflash", {"layer": {"layer_types": ["sliding_attention"] * 2}}, "only full_attention is"),
        ("dflash", {"layer": {"use_sliding_window": True}}, "use_sliding_window is True"),
        ("dflash", {"projector_type": "domino"}, "projector_type is domino"),
        ("dflash", {"sample_from_anchor": True}, "sample_from_anchor is True"),
        ("dflash", {"mask_token_id": None}, "mask_token_id is None; it should be a whole number"),
        ("dflash", {"mask_token_id": 48}, "mask: token 48 is outside the policy's 48"),
        ("dflash", {"block_size": 1}, "block_size is 1; it should be a whole number, at least 2"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ("dflash", {"aux_hidden_state_layer_ids": [1, 9, 2, 3]}, "layers: expected some from 0 to 4"),
        ("dflash", {"draft_vocab_size": 41}, "d2t is .*draft_vocab_size is 41"),
        ("dflash", {"transformer_layer_config": None}, "config is None; it should be an object"),
    ],
)  # fmt: skip
def test_what_a_head_cannot_be_is_one_line(kind, change, message, tmp_path):
    if kind == "dflash":
        write_dflash(tmp_path / "head", POLICY)
    else:
        write_speculators_eagle3(tmp_path / "head", POLICY)
    if "transformer_layer_config" in change:
        content = json.loads((tmp_path / "head" / "config.json").read_text()) | change
        (tmp_path / "head" / "config.json").write_text(json.dumps(content))
    else:
        changed(tmp_path / "head", **change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_head(tmp_path / "head", POLICY)
    assert "\n" not in str(raised.value)


def test_tensors_that_have_no_place_are_refused(tmp_path):
    tensors = write_dflash(tmp_path / "head", POLICY)
    more = tensors | {"layers.2.mlp.up_proj.weight": tensors["layers.1.mlp.up_proj.weight"]}
    safetensors.numpy.save_file(more, tmp_path / "head" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight is not part of a block head"):
        load_head(tmp_path / "head", POLICY)
