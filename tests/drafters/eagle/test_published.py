"""Published heads, EAGLE-3's in three layouts and DFlash's: their drafts against plain NumPy and under the
noise, and what of vLLM's `speculators` is refused.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle.checkpoint import load_head
from drafters.eagle.drafting import DraftStrategy
from drafters.eagle.model import DraftVocabulary, HeadConfig, head_logits
from rljax.errors import CheckpointError
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel, request_key
from tests.drafters.eagle.published import (
    BLOCK,
    dflash_logits,
    greedy_chain,
    norm,
    write_dflash,
    write_eagle3,
    write_speculators_eagle3,
)
from tests.drafters.eagle.test_block import decode_and_learn, speculator_of
from tests.drafters.eagle.test_training import unrolled as unrolled_outputs
from tests.drafters.eagle.tiny import (
    POLICY,
    begun,
    chain,
    jitted_draft,
    packed_batch,
    policy_states,
    rollouts,
    shared,
    with_policy,
)
from tests.tiny_policy import CONFIG, HEAD

TOKENS = np.sort(np.random.default_rng(1).permutation(POLICY.vocab_size)[:40])
LAYERS = (1, 2, 3, 4)  # DFlash reads any number
COUNTS = (17, 9)  # tokens before the drafts, of two slots


def contexts(config):
    """Tokens [2, 24] and the policy's states, of two rollouts."""
    tokens = rollouts(2, 24, 11)
    return tokens, np.stack(policy_states(config, tokens))


def test_dflash_drafts_what_plain_numpy_does(tmp_path):
    """Behind contexts of two lengths, and in training."""
    tensors = write_dflash(tmp_path / "head", POLICY, LAYERS, TOKENS)
    config, params = load_head(tmp_path / "head", POLICY)
    assert config.variant == "block" and config.layers == LAYERS and config.block.size == BLOCK - 1
    (tokens, states), embed = contexts(config), np.asarray(shared()["embed"], np.float64)
    state = begun(config, params, tokens, states, COUNTS)
    expected = [
        dflash_logits(tensors, POLICY, embed, states[slot, :n, :-1].astype(np.float64), tokens[slot, n])
        for slot, n in enumerate(COUNTS)
    ]
    best = np.stack([TOKENS[logits.argmax(axis=-1)] for logits in expected])
    np.testing.assert_array_equal(chain(config, params, state, COUNTS, BLOCK - 1).tree.tokens, best)
    batch = packed_batch(config, list(tokens), [[0], [1]], 24)
    unrolled = unrolled_outputs(config, params, batch)  # fewer than the block has
    assert len(unrolled) == 2
    for slot, n in enumerate(COUNTS):
        outputs = np.stack([np.asarray(each[slot, n - 1], np.float64) for each in unrolled])
        logits = norm(outputs, tensors["norm.weight"], POLICY) @ tensors["lm_head.weight"].T
        np.testing.assert_allclose(logits, expected[slot][:2], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("layout", "layers"), [("sglang", None), ("vllm", (1, 2, 4)), ("speculators", None)])
def test_eagle3_drafts_what_plain_numpy_does(layout, layers, tmp_path):
    """A config that says no layers means 1, 2 and 3; that of speculators may ask for another residual."""
    normed = layout == "speculators"
    if normed:
        tensors = write_speculators_eagle3(tmp_path / "head", POLICY, TOKENS, norm_before_residual=True)
    else:
        tensors = write_eagle3(tmp_path / "head", POLICY, TOKENS, layout, layers)
    config, params = load_head(tmp_path / "head", POLICY)
    vocabulary = DraftVocabulary(TOKENS)
    assert config == HeadConfig(
        "eagle3", POLICY, layers or (1, 2, 3), vocabulary, norm_before_residual=normed
    )
    (tokens, states), embed = contexts(config), np.asarray(shared()["embed"], np.float64)
    drafted = chain(config, params, begun(config, params, tokens, states, COUNTS), COUNTS, 4)
    for slot, n in enumerate(COUNTS):
        features, behind = states[slot, :n, :3].astype(np.float64), tokens[slot, 1 : n + 1]
        expected, other = (
            greedy_chain(tensors, POLICY, embed, features, behind, 4, each) for each in (normed, not normed)
        )
        assert drafted.tree.tokens[slot].tolist() == expected != other  # so that the test tells them apart


def test_drafts_are_ranked_under_the_noise_of_the_policys_tokens(tmp_path):
    write_eagle3(tmp_path / "head", POLICY, TOKENS)
    config, params = load_head(tmp_path / "head", POLICY)
    state = begun(config, params, *contexts(config), COUNTS)
    keys, positions = np.stack([request_key(1, 2), request_key(1, 3)]), np.asarray(COUNTS, np.int32)
    head = with_policy(config, params)
    drafted = jitted_draft(head, state, positions, keys, DraftStrategy(1, 4, 4), SamplingParams())
    logits = head_logits(head, state.outputs)
    noise = gumbel(keys, positions + 1, jnp.arange(POLICY.vocab_size, dtype=jnp.uint32)[None])
    best = np.argsort(-np.asarray(logits + noise[:, TOKENS]))[:, :4]
    assert drafted.tree.tokens.tolist() == TOKENS[best].tolist()


def test_the_whole_vocabulary_is_the_policys(tmp_path):
    write_dflash(tmp_path / "dflash", POLICY, LAYERS, None)
    write_speculators_eagle3(tmp_path / "eagle3", POLICY, None)
    for name in ("dflash", "eagle3"):
        config, params = load_head(tmp_path / name, POLICY)
        assert config.vocabulary is None and "lm_head" not in params


@pytest.mark.long  # test_block.py has heads of our own; below, drafts are held against NumPy's
@pytest.mark.parametrize("drafter", ["block", "eagle"])
def test_the_tokens_are_those_of_plain_decoding(drafter, tmp_path, params, requests, expected):
    """Frozen; and trained on, over a draft vocabulary."""
    args = {"path": str(tmp_path / "head"), "train": drafter == "eagle"}
    if drafter == "block":
        write_dflash(tmp_path / "head", CONFIG, (0, 1), None)
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
    """`layer` in a change stands for what it changes of the config of the layers."""
    if kind == "dflash":
        write_dflash(tmp_path / "head", POLICY, LAYERS, TOKENS)
    else:
        write_speculators_eagle3(tmp_path / "head", POLICY, TOKENS)
    file = tmp_path / "head" / "config.json"
    content = json.loads(file.read_text())
    content["transformer_layer_config"] |= change.get("layer", {})
    file.write_text(json.dumps(content | change))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_head(tmp_path / "head", POLICY)
    assert "\n" not in str(raised.value)
