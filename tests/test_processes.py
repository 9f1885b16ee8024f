"""Several processes: their config, how they meet, how they notice an end. Whole runs are in
tests/training/test_several_processes.py."""

import concurrent.futures
import queue
import socket

import pytest
from pydantic import ValidationError

from rljax.config import check_over_processes, check_with_workers, load_config
from rljax.config.changes import config_changes
from rljax.config.distributed import DistributedConfig, launcher
from rljax.errors import ConfigError
from rljax.rendezvous import Rendezvous
from tests.training.tiny_run import write_config


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _meet(*places: tuple[int, int], timeout: float = 10.0) -> list[Rendezvous | ConfigError]:
    """What every process gets, for (processes, process) of each."""
    address = f"127.0.0.1:{_free_port()}"

    def come(place: tuple[int, int]) -> Rendezvous | ConfigError:
        try:
            return Rendezvous(address, *place, timeout)
        except ConfigError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(come, places))


# -- the config --------------------------------------------------------------------------------------------


def test_a_launcher_is_seen_by_its_environment():
    assert launcher({}) is None
    assert launcher({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}) == "SLURM"
    assert launcher({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert launcher({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}) is None  # sbatch alone starts one
    assert launcher({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}) == "Open MPI"
    assert launcher({"TPU_WORKER_HOSTNAMES": "a,b"}) == "TPU pod"
    assert launcher({"TPU_WORKER_HOSTNAMES": "localhost"}) is None
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    assert DistributedConfig().is_wanted(slurm) and not DistributedConfig().is_wanted({})
    assert not DistributedConfig(enabled="off").is_wanted(slurm)
    assert DistributedConfig(enabled="on").is_wanted({})
    assert DistributedConfig(coordinator="host:1", processes=2, process=0).is_wanted({})
    for address in ("host", "host:99999", ":1"):
        with pytest.raises(ValidationError, match=f"'{address}' is not host:port"):
            DistributedConfig(coordinator=address, processes=2, process=0)


def test_other_processes_are_the_same_experiment(tmp_path):
    file = write_config(tmp_path)
    keys = ["distributed.coordinator=host:1", "distributed.processes=2", "distributed.process=1"]
    changes = config_changes(load_config(file), load_config(file, [*keys, "distributed.enabled=on"]))
    assert len(changes) == 4 and all(change.harmless for change in changes)  # on is a word, not true


def test_what_processes_share_and_what_they_cannot(tmp_path):
    """Workers draft by clocks of their own; processes that decode, by that of the first."""

    def check(*keys):
        check_over_processes(load_config(write_config(tmp_path), keys), 4, 2, {"eagle"})

    keys = ["mesh.data=4", "cluster.workers=2", "distributed.enabled=on", "speculation.drafter=srt"]
    check(*keys, "speculation.others={quantized: {}}")
    check_with_workers(load_config(write_config(tmp_path), [*keys, "speculation.others={quantized: {}}"]))
    more = ["speculation.others={srt: {}, quantized: {}}", "speculation.overlap=true"]
    check("mesh.data=4", "speculation.drafter=eagle", *more)
    for broken, message in (
        ([*keys, "speculation.drafter=eagle"], "speculation.drafter: eagle is trained in the processes that"),
        (["mesh.data=2"], ".*the product must be 4"),
        (["mesh.data=4", "tools={names: [calculator]}"], "tools: decides by the clock of one process"),
        (["mesh.data=4", "rollout.staleness=1"], "rollout.staleness: is for one process that trains"),
        (["mesh.data=4", "rollout.max_staleness=2", "cluster.workers=2"], "rollout.max_staleness: is for"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            check(*broken)
    sent = load_config(write_config(tmp_path), [*keys, "cluster.weights=jax_transfer"])
    with pytest.raises(ConfigError, match=r"^cluster.weights=jax_transfer: .*several train"):
        check_with_workers(sent)


# -- meeting -----------------------------------------------------------------------------------------------


def test_processes_meet_in_any_order():
    assert all(isinstance(place, Rendezvous) for place in _meet((3, 2), (3, 0), (3, 1)))


def test_who_does_not_come_or_comes_wrongly_is_named_by_all_others():
    first, second = _meet((3, 0), (3, 2), timeout=1.0)
    assert str(first) == str(second) and "distributed.process 1 of 3 has not come" in str(first)
    (alone,) = _meet((2, 1), timeout=0.5)
    assert "process 0 is not at distributed.coordinator 127.0.0.1" in str(alone)
    assert all("distributed.process: 1 has come twice" in str(each) for each in _meet((3, 0), (3, 1), (3, 1)))
    first, _ = _meet((2, 0), (3, 1))
    assert "distributed.processes: 3 in process 1, but 2 in process 0" in str(first)


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
            Rendezvous(f"127.0.0.1:{port}", 2, 0, 1.0)


@pytest.mark.parametrize(("end", "expected"), [("killed", [False]), ("failed", [True]), ("done", [])])
def test_an_end_is_noticed(end, expected):
    first, second = _meet((2, 0), (2, 1))
    heard: queue.Queue[tuple[str, bool]] = queue.Queue()
    first.watch(lambda name, reported: heard.put((name, reported)))
    if end != "killed":
        second.close(failed=end == "failed")
    for connection in second._connections.values():
        connection.shutdown(socket.SHUT_RDWR)  # as the operating system does when a process ends
    if expected:
        assert heard.get(timeout=10.0) == ("process 1", expected[0])
    else:
        with pytest.raises(queue.Empty):
            heard.get(timeout=0.5)
