"""A policy with the parts of Gemma 3 has the bits of any other: alone, drafted and trained. That its logits
are those of transformers is tested with all other checkpoints (`test_huggingface.py`).
"""

import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.errors import CheckpointError
from rljax.models.config import GemmaParts, ModelConfig
from rljax.models.growth import grow
from rljax.models.huggingface import load_model_config
from tests.engines import (
    SAMPLING,
    VOCAB,
    ask,
    decode,
    lively_params,
    speculate,
    stored_pool,
    tangled,
    trained_logprobs,
)
from tests.exactness import check_same, exact_numerics
from tests.models.checkpoints import make_checkpoint

LONGEST = 128
BUCKETS = Buckets((4,), (LONGEST,), (12,), 3)
PARTS = GemmaParts((True, False), 10_000.0, LONGEST, 1024)
CONFIG = ModelConfig(
    "gemma3_text", VOCAB, 64, 2, 4, 2, 64, 160, rope_theta=1e6, tie_embeddings=True, qk_norm=True, gemma=PARTS
)


def weights():
    """Embeddings are so short that the token before does not decide alone which one comes next."""
    params = lively_params(CONFIG)
    return params | {"embed": params["embed"] / 4}


@pytest.fixture(scope="module")
def world():
    """An engine, weights, requests, and what they get when decoded together."""
    numerics = exact_numerics(CONFIG, "bfloat16", BUCKETS, (2 * LONGEST,))
    engine = DecodeEngine(CONFIG, numerics, SAMPLING, BUCKETS, [], 64, stored_pool())
    params = engine.load_params(weights())
    asked = ask([3, 60, 20, 1], [60, 30, 90, 5])
    return engine, params, asked, decode(engine, params, asked)


def test_alone_and_drafted(world):
    engine, params, asked, together = world
    assert len({token for tokens, _ in together for token in tokens}) > VOCAB // 3
    check_same(decode(engine, params, asked[2:3]), together[2:3])
    emitted = speculate(engine, params, asked, tangled([tokens for tokens, _ in together]), 3)
    check_same(emitted.outputs, together)
    assert np.mean(emitted.counts) > 1.2


def test_trained_logprobs_are_those_of_decoding(world):
    engine, _, asked, together = world
    found = trained_logprobs(engine, weights(), asked, together, length=2 * LONGEST)
    assert found == [logprobs for _, logprobs in together]


def test_sequences_are_no_longer_than_the_window_and_it_does_not_grow(tmp_path):
    make_checkpoint(tmp_path / "made", "gemma3", sliding_window=96)
    config = load_model_config(tmp_path / "made")
    assert config.max_positions == 96 and config.gemma.trained_positions == 512
    assert config.gemma.local_layers == (True, False)
    assert (config.rope_theta, config.gemma.local_rope_theta) == (1e6, 1e4)
    with pytest.raises(ValueError, match="a Gemma cannot grow"):
        grow(lively_params(CONFIG), CONFIG, 96, 160, 2, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; it is not supported"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64; only head_dim, 32, is supported"),
        ({"hidden_activation": "silu"}, 'hidden_activation is "silu"; only "gelu_pytorch_tanh"'),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    make_checkpoint(tmp_path / "made", "gemma3", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path / "made")
