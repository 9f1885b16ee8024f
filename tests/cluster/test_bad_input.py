"""What cannot be decoded by workers is one line that names the key, before anything begins."""

import pytest

from rljax.config import check_with_workers, load_config
from rljax.config.changes import config_changes
from rljax.errors import ConfigError
from tests.configs import table
from tests.training.tiny_run import write_config


@pytest.fixture
def config_with(tmp_path):
    file = write_config(tmp_path)
    return lambda *overrides: load_config(file, overrides)


KEYS = """
cluster.workers=-1 -> cluster.workers:
cluster.worker=2 -> cluster.worker: unknown key; the nearest is cluster.workers
cluster.address=ray://10.0.0.1:10001 -> cluster.address: 'ray://10.0.0.1:10001' is a Ray client's
cluster.address=somewhere -> cluster.address: 'somewhere' is not auto or host:port
cluster.lease_seconds=0 -> cluster.lease_seconds:
cluster.resources_per_worker={TPU: 0} -> cluster.resources_per_worker.TPU:
cluster.weights_dir=/tmp -> cluster.weights_dir: is not used with cluster.weights: object_store
cluster.replay=runs/other -> cluster.replay: repeats a run with rollout.max_staleness
rollout.staleness=2 -> rollout.staleness:
rollout.staleness=1 & rollout.max_staleness=2 -> rollout.max_staleness: is another mode than
rollout.max_staleness=2 -> rollout.max_staleness: needs cluster.workers
rollout.max_staleness=2 & cluster.workers=2 & algorithm.dynamic_sampling=true
    -> rollout.max_staleness: is not possible with algorithm.dynamic_sampling
"""


@pytest.mark.parametrize(("overrides", "message"), table(KEYS))
def test_keys_that_cannot_be(config_with, overrides, message):
    with pytest.raises(ConfigError) as error:
        config_with(*overrides.split(" & "))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_workers_do_not_support(config_with):
    for overrides, key in (
        (["engine.row_invariant=false"], "engine.row_invariant"),
        (["cluster.mesh.data=2", "cluster.gpus_per_worker=1"], "cluster.gpus_per_worker=1"),
        (["cluster.mesh.data=2"], "cluster.mesh"),
    ):
        check_with_workers(config_with(*overrides))
        with pytest.raises(ConfigError, match=rf"^{key}: .*cluster\.workers") as error:
            check_with_workers(config_with(*overrides, "cluster.workers=2"))
        assert "\n" not in str(error.value)


def test_a_run_goes_on_with_other_workers_but_not_with_other_weights(config_with):
    """How weights travel is nothing to it; staleness is another experiment."""
    before, overrides = config_with(), ("cluster.workers=2", "cluster.address=auto", "cluster.weights=files")
    changes = config_changes(before, config_with(*overrides))
    assert [change.name for change in changes] == ["cluster.workers", "cluster.address", "cluster.weights"]
    assert all(change.harmless for change in changes)
    assert not any(change.harmless for change in config_changes(before, config_with("rollout.staleness=1")))
