"""scripts/train_drafter.py: a whole warm-up of a tiny policy, also after an interruption."""

import json
import signal

import jax
import numpy as np
import pytest
import safetensors.numpy

from drafters.eagle.checkpoint import load_head
from drafters.training import HeadTrainer
from tests.scripts import load_script
from tests.training.tiny_run import write_config

train_drafter = load_script("train_drafter")

ARGUMENTS = ("--steps", "5", "--slices-per-round", "2", "--heldout", "3", "--learning-rate", "1e-2")


@pytest.fixture(scope="module", autouse=True)
def relaxed():
    """Scripts run without the tests' strictness."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A config, and the head that an uninterrupted run makes of it."""
    directory = tmp_path_factory.mktemp("world")
    config = write_config(directory)
    assert warm_up(config, directory / "head") == 0
    return config, directory / "head"


def warm_up(config, output, *more):
    return train_drafter.main(["--config", str(config), "--output", str(output), *ARGUMENTS, *more])


def test_the_head_is_where_engines_read_it(world, capsys):
    config, directory = world
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert not directory.with_name("head.partial").exists()
    content = json.loads((directory / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle"] and content["hidden_size"] == 64
    assert warm_up(config, directory) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err


def test_acceptance_is_told_before_and_after(world, tmp_path, capsys):
    config, _ = world
    assert warm_up(config, tmp_path / "head", "seed=1") == 0
    out = capsys.readouterr().out
    for word in ("before: accept length 1.", "after:  accept length 1.", "head 5/5", "tokens/s"):
        assert word in out, out


def test_an_interrupted_run_goes_on_with_the_same_bits(world, tmp_path, monkeypatch, capsys):
    config, uninterrupted = world
    one_slice, calls = HeadTrainer.slice, []

    def interrupted(self, shared):
        calls.append(None)
        if len(calls) == 3:  # in the middle of a round
            signal.raise_signal(signal.SIGTERM)
        return one_slice(self, shared)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "slice", interrupted)
        assert warm_up(config, tmp_path / "head") == 128 + signal.SIGTERM
    assert "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
    # What was begun with other settings is not gone on with.
    assert warm_up(config, tmp_path / "head", "--variant", "hass") == 2
    assert "variant: is hass" in capsys.readouterr().err
    assert warm_up(config, tmp_path / "head") == 0
    assert "resumed after 3 updates" in capsys.readouterr().out
    ours, theirs = (
        safetensors.numpy.load_file(directory / "model.safetensors")
        for directory in (tmp_path / "head", uninterrupted)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name])


def test_a_killed_run_goes_on_from_the_last_round(world, tmp_path, monkeypatch):
    config, uninterrupted = world
    one_slice, calls = HeadTrainer.slice, []

    def killed(self, shared):
        calls.append(None)
        if len(calls) == 4:  # the second of the second round
            raise KeyboardInterrupt
        return one_slice(self, shared)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "slice", killed)
        assert warm_up(config, tmp_path / "head") == 130
    assert warm_up(config, tmp_path / "head") == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "head" / file).read_bytes() == (uninterrupted / file).read_bytes()


def test_a_head_that_cannot_be_served_is_refused_before_training(world, tmp_path, capsys):
    config, _ = world
    assert warm_up(config, tmp_path / "head", "--variant", "eagle3") == 2
    error = capsys.readouterr().err
    assert "needs three different ones" in error and error.count("\n") == 1


def test_it_trains_a_loadable_head(world):
    _, directory = world
    from drafters.eagle.model import head_shapes
    from rljax.models.config import ModelConfig

    content = json.loads((directory / "config.json").read_text())
    policy = ModelConfig(
        "qwen3",
        content["vocab_size"],
        64,
        1,
        2,
        1,
        64,
        64,
        tie_embeddings=True,
        qk_norm=True,
        max_positions=256,
    )
    head, params = load_head(directory, policy)
    shapes = jax.tree.map(np.shape, params)
    assert {"fc", "layer"} <= shapes.keys() and shapes["layer"] == head_shapes(head)["layer"]
