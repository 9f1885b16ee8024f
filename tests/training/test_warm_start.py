"""The warm start's cache and checkpoints: never the weights of another one, and no update lost. Nothing is
compiled: an update adds 1.
"""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.assembly.policy import Policy
from rljax.config import load_config
from rljax.errors import CheckpointError
from rljax.learning.accumulation import TrainState
from rljax.models.config import ModelConfig
from rljax.tasks.dataset import Dataset
from rljax.training import warm_start
from tests.training.tiny_run import write_config

MODEL = ModelConfig("qwen3", 384, 32, 1, 2, 1, 16, 32, tie_embeddings=True, qk_norm=True, max_positions=256)
FULL = OSError(28, "No space left on device")


class World:
    """What `warm_start` needs; `stop_at` is the update at which a signal comes."""

    def __init__(self, directory, monkeypatch):
        self.directory, self.updates, self.said, self.stop_at = directory, 0, [], None
        self.stop = warm_start.StopRequest(self.said.append, first=None)
        init = lambda params: TrainState(params, (), jnp.int32(0))  # noqa: E731
        monkeypatch.setattr(warm_start, "Trainer", lambda *_: SimpleNamespace(init=init))
        monkeypatch.setattr(warm_start, "_update", self.update)
        monkeypatch.setattr(warm_start, "_demonstrations", lambda config, policy, task, n: ([], n + 1))
        monkeypatch.setattr(warm_start, "save_model", self.save)
        monkeypatch.setattr(warm_start, "load_params", lambda path, *_, **__: _load(path))

    def update(self, config, trainer, state, sequences):
        self.updates += 1
        if self.updates == self.stop_at:
            self.stop.signal = 15
        return state.replace(params={"w": state.params["w"] + 1}), {"loss/supervised": 0.0}

    def save(self, path, config, params, dtype, tokenizer_source):
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        np.save(path / "w.npy", params["w"])

    def run(self, *overrides):
        """The weight in the end, and how many updates that took now."""
        self.updates, self.stop.signal = 0, None
        cache = f"warm_start.cache_dir={self.directory}/cache"
        config = load_config(write_config(self.directory), [cache, *overrides])
        policy = Policy(MODEL, {"w": jnp.zeros(2)}, None, self.directory, (1,))
        quiet = SimpleNamespace(message=self.said.append, stage=lambda *_, **__: None, step=lambda *_: None)
        shared = (None, None, None, quiet, self.directory / "in progress", self.stop)
        found = warm_start.warm_start(config, policy, None, *shared)
        return float(found.params["w"][0]), self.updates


def _load(path):
    return {"w": np.load(path / "w.npy")}


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_one_that_was_stopped_goes_on_only_as_the_same_one(world):
    """Of another config it would put other weights into the cache, under that config's name. How the same one
    goes on is in `test_interruption.py`.
    """
    world.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        world.run("warm_start.steps=5")
    world.stop_at = None
    assert world.run("warm_start.steps=3") == (3.0, 3)
    assert "warm start: begins anew; the one that was in progress is another one" in world.said
    assert not (world.directory / "in progress").exists()


def test_a_full_disk_costs_no_update(world, monkeypatch):
    def full(*_, **__):
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "save_model", full)
        with pytest.raises(CheckpointError, match=r"cache_dir: .* cannot be written \(No space left on dev"):
            world.run()
    assert world.updates == 3
    assert world.run() == (3.0, 0)


def test_another_run_may_make_the_same_one_meanwhile(world, monkeypatch):
    def late(path, *arguments, **options):
        world.save(path, *arguments, **options)
        raise CheckpointError(f"{path} exists and is not an empty directory; choose another one")

    monkeypatch.setattr(warm_start, "save_model", late)
    assert world.run() == (3.0, 3)
    assert world.run() == (3.0, 0)


def test_the_cache_knows_what_is_in_files(tmp_path):
    """Weights, chat templates and solutions that were replaced under the same name."""
    keys = []

    def note(weight=0.0, template="a", solution="b"):
        (tmp_path / "chat_template.jinja").write_text(template)
        rows = [{"prompt": f"{n}?", "answer": "1", "solution": solution} for n in range(20)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = Dataset(0, str(tmp_path / "rows.jsonl"), solution="solution")
        config = load_config(write_config(tmp_path), [f"policy={{path: {tmp_path}}}"])
        policy = Policy(MODEL, {"w": np.full(2, weight, np.float32)}, None, tmp_path, (1,))
        keys.append(warm_start._cache_key(config, policy, task))

    for changes in ({}, {"weight": 1.0}, {"template": "c"}, {"solution": "d"}, {}):
        note(**changes)
    assert keys[-1] == keys[0] and len(set(keys)) == 4
