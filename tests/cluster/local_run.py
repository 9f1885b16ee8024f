"""The tiny run with workers in this process, on a fabric that a test may interfere with."""

import contextlib

import jax

from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.worker import RolloutWorker
from rljax.training import session
from tests.cluster.same_run import run


class LenientWorker(RolloutWorker):
    """A worker whose turns are those of the test's thread to JAX, whoever gives it turns."""

    def turn(self):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return super().turn()


class Turns:
    """Makes local fabrics in place of Ray's, and lets a test interfere."""

    def __init__(self, interfere=None, network=lambda data: (0,), versions=2, clusters=None):
        self.interfere, self.network, self.versions, self.fabrics = interfere, network, versions, []
        self.clusters = [] if clusters is None else clusters

    @contextlib.contextmanager
    def cluster_of(self, config, say):
        self.said = []
        if not config.cluster.workers:
            yield None
            return
        fabric = LocalFabric(LenientWorker, self.network)
        fabric.before_turn = self.interfere
        self.fabrics.append(fabric)
        decoder = ClusterDecoder(fabric, config.cluster, self.said.append, self.versions)
        with contextlib.closing(decoder) as cluster:
            self.clusters.append(cluster)
            cluster.gather()
            yield cluster


def local_run(world, name, monkeypatch, *overrides, resumes=False, steps=2, **options):
    turns = Turns(**options)
    monkeypatch.setattr(session, "cluster_of", turns.cluster_of)
    overrides = ("cluster.workers=2", "cluster.lease_seconds=2", *overrides)
    return run(world, name, *overrides, resumes=resumes, steps=steps), turns
