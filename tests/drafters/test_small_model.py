"""The checkpoint of a small model that drafts: which ones fit a policy, and what is said of the others."""

import json

import jax
import numpy as np
import pytest

from drafters.arguments import SmallModelArguments, checked
from drafters.small_model import SmallModelDrafter
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.huggingface import save_model
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics, tree_cast
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.warm_up import time_trees
from tests.engines import stored_pool
from tests.models.checkpoints import write_tokenizer

POLICY = ModelConfig("llama", 320, 32, 2, 2, 1, 32, 64)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy")
    write_tokenizer(directory)
    return Tokenizer.load(directory)


def checkpoint(directory, tokenizer=None, vocab_size=320, tied=False):
    """A random model of one layer, and its weights."""
    config = ModelConfig("llama", vocab_size, 32, 1, 2, 1, 32, 64, tie_embeddings=tied)
    params = init_params(config, seed=3)
    save_model(directory, config, params, "float32", tokenizer_source=tokenizer and tokenizer.directory)
    return params


def drafter_of(path, **args):
    given = {"path": str(path), **args}
    return SmallModelDrafter(checked("speculation.args", "small_model", SmallModelArguments, given))


def engine_of(dtype="float32"):
    buckets = Buckets((2,), (64,), (8,), 3)
    return DecodeEngine(POLICY, Numerics(True, dtype), SamplingParams(), buckets, (), pool=stored_pool())


def error_of(act, *args):
    with pytest.raises(ConfigError) as raised:
        act(*args)
    message = str(raised.value)
    assert "\n" not in message and message.startswith("speculation.args.")
    return message.removeprefix("speculation.args.")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_companion_has_the_weights_of_the_checkpoint(tmp_path, tokenizer, dtype):
    params = checkpoint(tmp_path / "small")
    for chosen, expected in ((None, dtype), ("float32", "float32"), ("bfloat16", "bfloat16")):
        drafter = drafter_of(tmp_path / "small", dtype=chosen)
        assert drafter.metrics() == {}
        drafter.check(POLICY, tokenizer)
        companion = drafter.companion(engine_of(dtype))
        assert companion.engine.config.num_layers == 1
        assert companion.engine.numerics == Numerics(True, expected)
        jax.tree.map(np.testing.assert_array_equal, companion.params, tree_cast(params, expected))
        assert drafter.metrics() == {"caught_up": 0.0}


@pytest.mark.parametrize(("rows", "used", "tied"), [(384, 320, False), (310, 310, True)])
def test_the_same_tokens_with_other_padding(tmp_path, tokenizer, rows, used, tied):
    assert tokenizer.vocab_size <= 310
    params = checkpoint(tmp_path / "small", tokenizer, rows, tied)
    drafter = drafter_of(tmp_path / "small")
    drafter.check(POLICY, tokenizer)
    drafter.check(POLICY, tokenizer)  # again
    companion = drafter.companion(engine_of())
    assert companion.engine.config.vocab_size == used
    np.testing.assert_array_equal(companion.params["embed"], params["embed"][:used])
    assert ("lm_head" in companion.params) != tied


def test_another_vocabulary_is_refused(tmp_path, tokenizer):
    checkpoint(tmp_path / "unknown", None, 384)
    write_tokenizer(tmp_path / "other tokens", "llama3")
    checkpoint(tmp_path / "other", Tokenizer.load(tmp_path / "other tokens"), 384)
    for name in ("unknown", "other"):
        assert error_of(drafter_of(tmp_path / name).check, POLICY, tokenizer) == (
            f"path: {tmp_path / name} has vocab_size 384 where the policy has 320, and not the policy's"
            f" {tokenizer.vocab_size} tokens; use a model of the same family"
        )


def test_what_is_no_checkpoint_is_refused(tmp_path, tokenizer):
    missing, small = tmp_path / "missing", tmp_path / "small"
    assert error_of(drafter_of, missing) == (
        f"path: {missing / 'config.json'} does not exist; a policy is a Hugging Face model directory"
    )
    checkpoint(small, tokenizer)
    file = small / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"model_type": "mamba"}))
    assert error_of(drafter_of, small).startswith(f"path: {file}: model_type")
    file.write_text(json.dumps(content))
    (small / "model.safetensors").unlink()
    drafter = drafter_of(small)
    drafter.check(POLICY, tokenizer)
    assert error_of(drafter.companion, engine_of()).startswith(f"path: {small}")
    arguments = "speculation.args", "small_model", SmallModelArguments
    assert error_of(checked, *arguments, {}).startswith("path: ")
    said = error_of(checked, *arguments, {"path": str(small), "dtype": "float16"})
    assert said == "dtype: should be 'float32' or 'bfloat16', got 'float16'"


def test_its_drafts_are_timed_while_it_drafts(tmp_path):
    """And not while it knows of no slot, where it has nothing to do."""
    checkpoint(tmp_path)
    drafter, engine = drafter_of(tmp_path), engine_of()
    drafter.reads(POLICY, None)
    slots, drafted = drafter.attach(engine), []
    draft = slots.draft
    slots.draft = lambda *of: drafted.append(draft(*of)) or drafted[-1]
    longest = slots.strategies[-1]
    seconds = time_trees(engine, slots, longest, batch=2, length=64, repeats=2)
    assert len(seconds) == 2 and longest.depth == 3
    assert all(np.asarray(tree.tree.valid).all() for tree in drafted)
