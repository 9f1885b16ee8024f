"""Saves of a head in the background: copied at once, whole or not at all, errors at the next call."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle import saving
from drafters.eagle.model import HeadConfig, init_head
from drafters.eagle.saving import AsyncHeadSaver
from rljax.errors import CheckpointError
from tests.drafters.eagle.tiny import POLICY, policy_params


def head(seed=0):
    return init_head(HeadConfig("eagle3", POLICY), policy_params(), seed)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_newest_comes_back(tmp_path):
    saver = AsyncHeadSaver(tmp_path / "deep" / "head")
    assert saver.latest() is None
    for step in (3, 5, 4):  # a run that was resumed from before saves lower numbers again
        saver.save(step, head(step))
    step, params = saver.latest()
    assert step == 4
    same(params, head(4))
    assert sorted(path.name for path in saver.directory.iterdir()) == ["head.safetensors"]
    step, params = AsyncHeadSaver(saver.directory).latest()
    assert step == 4


def test_the_caller_may_donate_at_once(tmp_path, monkeypatch):
    """The weights are those of the call, though nothing is written before they have been overwritten."""
    go = threading.Event()
    write = saving.write_durably
    monkeypatch.setattr(saving, "write_durably", lambda *args: (go.wait(30), write(*args)))
    saver, params = AsyncHeadSaver(tmp_path), head()
    expected = jax.tree.map(np.array, params)
    saver.save(1, params)
    assert not list(tmp_path.iterdir())
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(overwrite(params))
    go.set()
    same(saver.latest()[1], expected)


def test_a_failed_save_is_told_once_and_leaves_the_last_one(tmp_path, monkeypatch):
    saver = AsyncHeadSaver(tmp_path)
    saver.save(1, head(1))
    saver.wait()

    def full(path, content):
        (path.parent / f".{path.name}.tmp").write_bytes(content[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_durably", full)
        saver.save(2, head(2))
        with pytest.raises(CheckpointError, match=r"step 2 could not be written \(No space left"):
            saver.save(3, head(3))
    step, params = saver.latest()
    assert step == 1
    same(params, head(1))
    saver.save(4, head(4))
    assert saver.latest()[0] == 4


def test_errors_surface_in_wait_and_latest(tmp_path):
    (tmp_path / "file").write_text("")
    for call in ("wait", "latest"):
        saver = AsyncHeadSaver(tmp_path / "file")
        saver.save(1, {"fc": jnp.ones((2, 2))})
        with pytest.raises(CheckpointError, match="could not be written"):
            getattr(saver, call)()


@pytest.mark.parametrize("content", [b"", b"not a head"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / "head.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no saved head"):
        AsyncHeadSaver(tmp_path).latest()
