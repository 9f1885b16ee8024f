"""Every channel brings the same bits, or an error; and what could not be fetched comes another way."""

import dataclasses
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rljax.cluster.messages import Prefetch
from rljax.cluster.publisher import Publisher
from rljax.cluster.weights import WeightsError, fetch, fetch_parts, files, make_channel, to_params
from rljax.cluster.weights.object_store import ObjectStore, StoredWeights
from rljax.cluster.worker import RolloutWorker
from rljax.config.cluster import ClusterConfig
from rljax.errors import ClusterError
from rljax.models.host_params import digest_of, parts_of
from tests.tiny_policy import CONFIG, make_params


@pytest.fixture(scope="module")
def params():
    return make_params()


class Store:
    """A fabric's store that keeps copies."""

    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append([(*rest, data.copy()) for *rest, data in value])
        return len(self.values) - 1

    def get(self, reference):
        return self.values[reference]


def published(channel, params, version=3):
    parts = parts_of(params)
    return channel.publish(version, params, parts, digest_of(parts))


def assert_same(params, fetched):
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), params, fetched)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    ("name", "dtype"), [("object_store", "float32"), ("files", "bfloat16"), ("jax_transfer", "bfloat16")]
)
def test_a_channel_brings_the_same_bits(params, name, dtype, tmp_path):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    store = Store()
    directory = str(tmp_path) if name == "files" else None
    channel = make_channel(ClusterConfig(weights=name, weights_dir=directory), store.put)
    version = published(channel, params)
    for _ in range(2):  # two workers
        weights = channel.deliver(version)
        assert (weights.version, weights.nbytes) == (3, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
        assert_same(params, to_params(weights, fetch(weights, store.get, 20.0), CONFIG))
    channel.remove(version)
    channel.close()
    assert not os.listdir(tmp_path)


def test_a_file_in_shared_memory_is_read_where_it_is_and_outlives_its_name(params):
    channel = make_channel(ClusterConfig(weights="files"), None)
    version = published(channel, params)
    where = channel.deliver(version).where
    if not where.path.startswith("/dev/shm"):
        pytest.skip("no shared memory here")
    parts = fetch_parts(where, None, 1.0)
    channel.remove(version)
    channel.close()
    assert not os.path.exists(where.path)
    assert digest_of(parts) == version.digest
    for *_, data in parts:
        assert isinstance(data.base, np.memmap) and not data.flags.writeable
    assert parts[0][3].ctypes.data % 64 == 0


def test_damaged_weights_are_never_used(params):
    store = Store()
    channel = ObjectStore(store.put)
    weights = channel.deliver(published(channel, params))
    store.values[0][1][3][5] ^= 1
    with pytest.raises(WeightsError, match="version 3 of the weights came damaged"):
        fetch(weights, store.get, 1.0)
    with pytest.raises(WeightsError, match="did not come: TimeoutError, after 3 seconds"):
        fetch(weights, lambda _: (_ for _ in ()).throw(TimeoutError("after 3 seconds")), 1.0)
    other = dataclasses.replace(CONFIG, num_layers=CONFIG.num_layers + 1)
    store.values[0][1][3][5] ^= 1
    with pytest.raises(WeightsError, match="of another architecture"):
        to_params(weights, fetch(weights, store.get, 1.0), other)


def test_files_that_are_gone_short_or_without_room(params, tmp_path):
    channel = files.Files(str(tmp_path))
    version = published(channel, params)
    weights = channel.deliver(version)
    with open(version.kept.path, "rb+") as file:
        file.truncate(os.path.getsize(version.kept.path) - 1)
    with pytest.raises(WeightsError, match="ends early"):
        fetch(weights, None, 1.0)
    channel.remove(version)
    with pytest.raises(WeightsError, match="did not come: FileNotFoundError"):
        fetch(weights, None, 1.0)
    with pytest.raises(ClusterError, match=r"^cluster.weights_dir: /proc/nowhere cannot be written"):
        files.Files("/proc/nowhere")


@pytest.mark.parametrize("failures", [0, 1])
def test_what_could_not_be_prefetched_is_fetched_when_it_is_needed(params, failures):
    store, asked = Store(), []
    weights = ObjectStore(store.put).deliver(published(ObjectStore(store.put), params))

    def get(reference):
        asked.append(reference)
        if len(asked) <= failures:
            raise TimeoutError("of a test")
        return store.get(reference)

    worker = RolloutWorker("worker", get)
    worker._blueprint = SimpleNamespace(config=SimpleNamespace(cluster=ClusterConfig()))
    worker._built = SimpleNamespace(close=lambda: None)
    worker._carry_out(Prefetch("worker", weights))
    parts, prefetched = worker._on_host(weights)
    assert (prefetched, len(asked)) == (not failures, 1 + failures)
    assert_same(params, to_params(weights, parts, CONFIG))
    # What was prefetched is used once.
    assert worker._on_host(weights)[1] is False
    # Nor in the place of other weights.
    worker._carry_out(Prefetch("worker", weights))
    store.values.append([(*rest, data.copy()) for *rest, data in parts[::-1]])
    where = dataclasses.replace(weights.where, reference=len(store.values) - 1)
    other = dataclasses.replace(weights, digest=digest_of(parts[::-1]), where=where)
    assert other.digest != weights.digest
    found, prefetched = worker._on_host(other)
    assert not prefetched and [part[0] for part in found] == [part[0] for part in parts[::-1]]
    worker.close()


def test_what_killed_runs_left_in_shared_memory_is_removed(tmp_path):
    (tmp_path / "rljax-weights-4194305-x").mkdir()  # more than Linux's largest process id
    (tmp_path / f"rljax-weights-{os.getpid()}-x").mkdir()
    (tmp_path / "rljax-weights-notes").mkdir()
    files._remove_orphans(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


def test_the_traps_of_jax_transfer(params):
    """What was pulled once is not waited for without end; another layout is no weights."""
    channel = make_channel(ClusterConfig(weights="jax_transfer"), None)
    version = published(channel, params)
    weights = channel.deliver(version)
    fetch(weights, None, 20.0)
    with pytest.raises(WeightsError, match="did not come"):
        fetch(weights, None, 0.5)
    again = channel.deliver(version)
    layout = tuple((name, dtype, shape[::-1]) for name, dtype, shape in again.where.layout)
    assert layout != again.where.layout
    turned = dataclasses.replace(again.where, layout=layout)
    with pytest.raises(WeightsError):
        fetch(dataclasses.replace(again, where=turned), None, 5.0)


def test_versions_are_published_beside_everything_else_and_fall_back_to_the_store(params, tmp_path):
    store = Store()
    publisher = Publisher(files.Files(str(tmp_path)), ObjectStore(store.put), keep=2)
    for version in range(3):
        publisher.publish(version, params)
        publisher.wait(version)
    assert len(list(tmp_path.glob("*/*"))) == 2  # the oldest is gone
    assert publisher.weights("worker-0", 0) is None
    weights = publisher.weights("worker-0", 2)
    os.unlink(weights.where.path)
    with pytest.raises(WeightsError):
        fetch(weights, store.get, 1.0)
    publisher.failed("worker-0", 2)
    weights = publisher.weights("worker-0", 2)
    assert isinstance(weights.where, StoredWeights)
    assert_same(params, to_params(weights, fetch(weights, store.get, 1.0), CONFIG))
    assert not isinstance(publisher.weights("worker-1", 2).where, StoredWeights)
    publisher.close()
    assert not list(tmp_path.iterdir())
