"""Runs whose workers take turns in this process, and a test that interferes with them."""

import contextlib

import jax

from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.desired_workers import DesiredWorkersFile
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.worker import RolloutWorker
from rljax.training import session
from tests.cluster.same_run import STEPS, run


class LenientWorker(RolloutWorker):
    """A worker whose turns are those of the test's thread to JAX, whoever gives it turns."""

    def turn(self):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return super().turn()


class Turns:
    """Makes local fabrics in place of Ray's.

    Attributes:
      fabrics, decoders: of the runs so far.
      said: lines for the user of the last one.
    """

    def __init__(self, interfere=None, network=lambda data: (0,), versions=2, decoders=None):
        self.interfere, self.network, self.versions = interfere, network, versions
        self.fabrics, self.decoders = [], [] if decoders is None else decoders

    @contextlib.contextmanager
    def cluster_of(self, config, say, directory=None):
        self.said = []
        if not config.cluster.workers:
            yield None
            return
        fabric = LocalFabric(LenientWorker, self.network)
        fabric.before_turn = self.interfere
        self.fabrics.append(fabric)
        desired = None if directory is None else DesiredWorkersFile(directory, self.said.append)
        decoder = ClusterDecoder(fabric, config.cluster, self.said.append, self.versions, desired)
        with contextlib.closing(decoder) as cluster:
            self.decoders.append(cluster)
            cluster.start_workers()
            yield cluster


def local_run(world, name, monkeypatch, *overrides, resumes=False, steps=STEPS, turns=None, **options):
    """A run with two workers, or as the overrides say, and its `Turns`."""
    turns = turns or Turns(**options)
    monkeypatch.setattr(session, "cluster_of", turns.cluster_of)
    overrides = ("cluster.workers=2", "cluster.lease_seconds=2", *overrides)
    return run(world, name, *overrides, resumes=resumes, steps=steps), turns


def losing(lost, after=-1, note=lambda fabric: None):
    """Kills the first worker in the middle of a response of a rollout after `after`; `lost` gets its devices
    by its name.
    """

    def interfere(fabric):
        note(fabric)
        for name, worker in list(fabric.workers.items()):
            if not lost and worker._rollout > after and in_the_middle(worker):
                lost[name] = len(worker._params["embed"].sharding.device_set)
                fabric.kill(name)

    return interfere


def in_the_middle(worker):
    """Whether a worker is in the middle of a response."""
    return worker.loop is not None and any(
        4 < len(response.tokens) < 40 and response.ending is None for response in worker._keys
    )
