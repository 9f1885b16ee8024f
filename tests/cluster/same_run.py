"""The tiny run with two groups a step, and what of it must be equal however its tokens were decoded."""

import contextlib
import dataclasses
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.training.tiny_run import train

STEPS = 2
# What may differ: times, and how the tokens came about.
HOW = ("time/", "speculation/", "engine/compil", "engine/waited_for", "cluster/")
HOW += ("rollout/tokens_per_second", "rollout/occupancy", "rollout/decode_steps")


@dataclasses.dataclass
class Run:
    """Metrics of every step, and the state at the end."""

    metrics: list
    state: list

    @property
    def steps(self):
        """The lines of steps whose tokens workers decoded."""
        return [line for line in self.metrics if "cluster/workers" in line]


@contextlib.contextmanager
def lucky_world(tmp_path_factory):
    """A directory for runs in which every response has a reward of its own."""
    luck = lambda self, problem, text: {"reward": zlib.crc32(text.encode()) % 1000 / 1000}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainArithmetic, "reward", luck)
        yield tmp_path_factory.mktemp("world")


def run(world, name, *overrides, resumes=False, steps=STEPS):
    """A run in a directory of its own, which only one that resumes finds there."""
    directory = world / name
    directory.mkdir(exist_ok=resumes)
    middle = "engine.decode_steps_per_sync=1"  # a rollout has one
    metrics = train(directory, f"training.steps={steps}", "task.problems=2", middle, *overrides)
    path = directory / "run" / "checkpoints" / str(steps) / "arrays"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return Run(metrics, jax.tree_util.tree_leaves_with_path(checkpointer.restore(path)))


def differences(left, right):
    """Names of metrics and arrays that differ between two runs."""
    names = []
    assert len(left.metrics) == len(right.metrics)
    for ours, theirs in zip(left.metrics, right.metrics, strict=True):
        for name in ours.keys() | theirs.keys():
            if not name.startswith(HOW) and ours.get(name) != theirs.get(name):
                names.append(f"step {ours['step']}: {name}")
    for (path, ours), (_, theirs) in zip(left.state, right.state, strict=True):
        if np.asarray(ours).tobytes() != np.asarray(theirs).tobytes():
            names.append(jax.tree_util.keystr(path))
    return names
