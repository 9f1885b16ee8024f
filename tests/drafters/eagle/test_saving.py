"""Saves of a head in the background: copied at once, whole or not at all, errors at the next call."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from drafters.eagle import saving
from drafters.eagle.checkpoint import load_head
from drafters.eagle.model import DraftVocabulary, HeadConfig, init_head
from drafters.eagle.saving import AsyncHeadSaver
from drafters.registry import make_drafter
from rljax.errors import CheckpointError
from tests.drafters.eagle.published import BLOCK, write_dflash
from tests.drafters.eagle.tiny import POLICY, policy_params

CONFIG = HeadConfig("eagle3", POLICY)


def head(seed=0):
    return init_head(CONFIG, policy_params(), seed)


def latest(directory):
    """The step and the weights of what was saved."""
    with safetensors.safe_open(directory / "head.safetensors", framework="np") as file:
        return int(file.metadata()["step"]), load_head(directory, POLICY)[1]


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_newest_comes_back(tmp_path):
    saver = AsyncHeadSaver(tmp_path / "deep" / "head")
    for step in (3, 5, 4):  # a run that was resumed from before saves lower numbers again
        saver.save(step, head(step), CONFIG)
    saver.wait()
    step, params = latest(saver.directory)
    assert step == 4
    same(params, head(4))
    assert sorted(path.name for path in saver.directory.iterdir()) == ["head.safetensors"]


def test_the_caller_may_donate_at_once(tmp_path, monkeypatch):
    """The weights are those of the call, though nothing is written before they have been overwritten."""
    go = threading.Event()
    write = saving.write_durably
    monkeypatch.setattr(saving, "write_durably", lambda *args: (go.wait(30), write(*args)))
    saver, params = AsyncHeadSaver(tmp_path), head()
    expected = jax.tree.map(np.array, params)
    saver.save(1, params, CONFIG)
    assert not list(tmp_path.iterdir())
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(overwrite(params))
    go.set()
    saver.wait()
    same(latest(tmp_path)[1], expected)


def test_a_failed_save_is_told_once_and_leaves_the_last_one(tmp_path, monkeypatch):
    saver = AsyncHeadSaver(tmp_path)
    saver.save(1, head(1), CONFIG)
    saver.wait()

    def full(path, content):
        (path.parent / f".{path.name}.tmp").write_bytes(content[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_durably", full)
        saver.save(2, head(2), CONFIG)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written \(No space left"):
            saver.save(3, head(3), CONFIG)
    step, params = latest(tmp_path)
    assert step == 1
    same(params, head(1))
    saver.save(4, head(4), CONFIG)
    saver.wait()
    assert latest(tmp_path)[0] == 4
    (tmp_path / "file").write_text("")
    saver = AsyncHeadSaver(tmp_path / "file")
    saver.save(1, {"fc": jnp.ones((2, 2))}, CONFIG)
    with pytest.raises(CheckpointError, match="could not be written"):  # the last one's, too
        saver.wait()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no saved head"),
        (b"not a head", "is no saved head"),
        (safetensors.numpy.save({"fc": np.ones((2, 2))}), "does not tell the head's 'layers'; save it again"),
    ],
    ids=["empty", "text", "without its shape"],
)
def test_a_damaged_file_is_one_line(tmp_path, content, message):
    (tmp_path / "head.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, POLICY)


@pytest.mark.parametrize("kind", ["hass", "eagle3", "eagle3 with a draft vocabulary", "dflash"])
def test_a_saved_head_is_loaded_by_the_key_that_names_a_head(kind, tmp_path):
    if kind == "dflash":
        write_dflash(tmp_path / "published", POLICY, (1, 3), None)
        config, params = load_head(tmp_path / "published", POLICY)
        drafter = make_drafter("block", block_size=BLOCK - 1, depths=[3], path=str(tmp_path))
    else:
        vocabulary = DraftVocabulary(np.arange(1, POLICY.vocab_size, 2)) if " " in kind else None
        layers = () if kind == "hass" else (1, 2, 4)
        config = HeadConfig(kind.split()[0], POLICY, layers, vocabulary)
        params = init_head(config, policy_params(), 3)
        drafter = make_drafter("eagle", variant=config.variant, path=str(tmp_path))
    saver = AsyncHeadSaver(tmp_path)
    saver.save(7, params, config)
    saver.wait()
    loaded_config, loaded = load_head(tmp_path, POLICY)
    assert loaded_config == config
    same(loaded, params)
    assert drafter.reads(POLICY, None) == config.layers and drafter.config == config
    with pytest.raises(CheckpointError, match=r"head\.safetensors: .* is .* there"):
        load_head(tmp_path, dataclasses.replace(POLICY, hidden_size=16))
