"""Drafters in workers: the same run, and heads that the driver trains draft in the workers."""

import types

import numpy as np
import pytest

from drafters.base import Drafter
from drafters.simple import SimpleDrafter
from drafters.training import Training
from rljax.cluster.blueprint import check_moves, check_shared
from rljax.environments.use import EnvironmentUse
from rljax.errors import ConfigError
from tests.cluster.same_run import differences
from tests.cluster.turns import local_run, losing
from tests.training.tiny_run import HEAD, ONE_PASS

# Few programs: drafters on the device have some for every shape.
FEW = ("engine.batch_buckets=[4]", *ONE_PASS)


class Repeats(SimpleDrafter):
    """A user's: proposes the last token again."""

    def propose(self, tokens, budget):
        return [int(tokens[-1])] * budget


class TrainedHere(Drafter):
    """A user's that is trained on the engine's passes."""

    training = Training()


def test_a_head_and_a_drafter_of_the_user(world, alone, monkeypatch, drafts_always):
    """With a worker that is lost in mid-rollout: the heads of those that are left are the driver's. The
    policy's own quantized weights are in test_local_run.py, small models in tests/papers.
    """
    workers, lost = {}, {}
    interfere = losing(lost, 1, lambda fabric: workers.update(fabric.workers))
    drafters = (
        "speculation.drafter=eagle",
        f"speculation.args={HEAD}",
        "speculation.others={mine: {kind: 'tests.cluster.test_drafters:Repeats'}}",
        *FEW,
    )
    clustered, turns = local_run(world, "device", monkeypatch, *drafters, interfere=interfere)
    assert lost
    assert not differences(alone, clustered)
    steps = clustered.steps
    assert all(line["speculation/drafted"] > 0 for line in steps)
    assert [line["speculation/head/slices"] for line in steps] == [2, 2]

    driver = turns.decoders[0]._scheduler.speculator.drafters["eagle"]
    assert driver.trainer.updates == 4
    last = max(worker._version for worker in workers.values() if worker._version is not None)
    current = [worker for worker in workers.values() if worker._version == last]
    for worker in current:
        head = worker._scheduler.speculator.drafters["eagle"].trainer
        assert type(head).__name__ == "FrozenHead"
        assert head.updates == 4  # what evaluates last has the weights of the last step
        for name, leaf in driver.weights().items():
            if name.startswith("train.params."):
                assert np.array_equal(leaf, _named(head.params)[name])


def _named(params):
    from drafters.eagle.head_state import named_leaves

    return {f"train.params.{name}": np.asarray(leaf) for name, leaf in named_leaves(params).items()}


def test_histories_spill_into_directories_of_the_workers(world, alone, monkeypatch, tmp_path):
    spill, seen = tmp_path / "spill", set()

    def interfere(fabric):
        seen.update(
            path.name.rpartition("-")[0] for path in spill.glob("worker-*") if any(path.glob("*/*.npz"))
        )

    drafters = ("speculation.drafter=srt", f"speculation.args={{spill_dir: {spill}, max_tokens: 100}}", *FEW)
    clustered, _ = local_run(world, "spill", monkeypatch, *drafters, interfere=interfere)
    assert not differences(alone, clustered)
    assert seen == {"worker-0", "worker-1"}
    steps = clustered.steps
    assert not any(line["speculation/history_damaged"] for line in steps)


def test_episodes_of_an_environment_are_refused():
    check_moves(types.SimpleNamespace(tools=None))
    with pytest.raises(ConfigError, match=r"^cluster.workers: the state of an environment does not move"):
        check_moves(types.SimpleNamespace(tools=object.__new__(EnvironmentUse)))


def test_a_drafter_that_only_the_engines_passes_train_is_refused():
    check_shared(types.SimpleNamespace(training={}))
    with pytest.raises(ConfigError, match=r"^speculation.drafter: mine is trained on the engine's passes"):
        check_shared(types.SimpleNamespace(training={"mine": TrainedHere.training}))
