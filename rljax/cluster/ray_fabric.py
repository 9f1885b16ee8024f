"""The fabric on Ray: processes, placement, failure detection and objects. The only import of Ray.

A worker is an actor with two threads of Ray's and one of its own. Orders come by `receive`; what it has to
say is fetched by `news`, one call of which is always in progress, and comes back after a quarter of the lease
at the latest. So a process that hangs falls silent, although to Ray nothing has happened. An actor is never
restarted: a lost worker's name ends with it.

Without its head a Ray cluster cannot go on. Ray ends a driver that has waited a minute for it, from C++, with
pages of its own. So the driver asks by itself whether the head answers, and Ray is told to wait for ever.
When Ray's own process on the driver's machine dies, Ray ends the driver at once, so another process says it.
"""

import atexit
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from rljax.cluster.messages import Arrived, Died, Event, Facts, Heard, Order
from rljax.config.cluster import ClusterConfig
from rljax.errors import ClusterError

_HEAD_SECONDS = 2.0  # between two questions to the head
_HEAD_PATIENCE = 10.0  # seconds without an answer after which the head of a cluster of our own is lost
_JOINED_PATIENCE = 60.0  # the same of others, whose heads may be started again, as under KubeRay; Ray's own
_FOREVER = 10 * 365 * 24 * 3600  # seconds that Ray's own code waits for the head
_ASKING = 15.0  # seconds more for a process that asks for the cluster's health: it imports Ray first
_LAST_WORDS = """
import sys
if not sys.stdin.read():
    line = "error: cluster: the training process has ended without a word: it was killed, or Ray's own"
    line += " process on this machine was. What is saved is kept; run the same command again"
    print(line, file=sys.stderr)
"""


def connect(config: ClusterConfig, say: Callable[[str], None]) -> "RayFabric":
    """Joins the Ray cluster at `cluster.address`, or starts one on this machine.

    Args:
      config: keys of the cluster.
      say: shows a line to the user.

    Raises:
      ClusterError: Ray is not installed, nobody answers there, or this machine, which gets no larger, has no
        room for the workers.
    """
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_FOREVER))
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            f"cluster.workers: {config.workers} needs Ray; pip install 'rljax[cluster]', or set 0"
        ) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its workers a low priority (15): other processes would keep them, and so the run, waiting.
    os.environ.setdefault("RAY_worker_niceness", "0")
    owns = not ray.is_initialized()
    if owns:
        with warnings.catch_warnings():
            # JAX warns of forks next to its threads; Ray's starts other programs at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            _join(ray, config)
    fabric = RayFabric(ray, config, owns)
    room = fabric.room()
    if room < config.workers:
        each = " and ".join(f"{amount:g} {name}" for name, amount in _need(config).items())
        short = f"cluster.workers: {config.workers} workers of {each} each, but the Ray cluster has room for"
        short += f" {room}"
        if config.address is None:
            fabric.close()
            raise ClusterError(f"{short}; lower it, or cluster.cpus_per_worker")
        limit = f"waiting for up to {config.patience_seconds:g} seconds for nodes that have"
        say(f"{short}; " + ("the others join as nodes do" if room else limit))
    return fabric


def _join(ray: Any, config: ClusterConfig) -> None:
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    if config.address is None:
        ray.init(address="local", **options)
        return
    del options["include_dashboard"]  # only for those who start one
    if config.address != "auto":
        _check_answers(config)
    try:
        ray.init(address=config.address, **options)
    except Exception as error:  # ConnectionError, and what Ray raises for versions and tokens
        raise ClusterError(
            f"cluster.address: no Ray cluster at {config.address} that this process can join"
            f" ({_first_line(error)}); one that asks for a token needs RAY_AUTH_MODE=token here, too"
        ) from error


def _check_answers(config: ClusterConfig) -> None:
    """`ray.init` would wait for long, or end the process, where nothing answers or something else does."""
    host, _, port = config.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), config.connect_seconds).close()
    except OSError as error:
        raise ClusterError(
            f"cluster.address: nobody answers at {config.address} within {config.connect_seconds:g} seconds"
            f" ({error.strerror or error}); start one there with `ray start --head`"
        ) from error
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", config.address]
    limit = config.connect_seconds + _ASKING
    try:
        asked = subprocess.run(command, capture_output=True, timeout=limit, text=True)
    except subprocess.TimeoutExpired:
        said = f"it said nothing for {limit:g} seconds"
    else:
        if asked.returncode == 0:
            return
        said = (asked.stderr.strip().splitlines() or ["it gave no reason"])[-1][:200]
    if "AuthToken" in said:
        raise ClusterError(
            f"cluster.address: the Ray cluster at {config.address} asks for its token; set"
            " RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN_PATH where the file is not Ray's default"
        )
    raise ClusterError(
        f"cluster.address: what answers at {config.address} is no Ray cluster that this version can join"
        f" ({said}); give the address that `ray start --head` printed"
    )


def _need(config: ClusterConfig) -> dict[str, float]:
    """Resources of a worker."""
    need = {"CPU": float(config.cpus_per_worker), "GPU": float(config.gpus_per_worker)}
    return {name: amount for name, amount in (need | config.resources_per_worker).items() if amount}


def _say_if_killed() -> Callable[[], None]:
    """Starts a process that speaks for this one if it ends without a word.

    Returns:
      What to call at an ordinary end; otherwise Python calls it at its own.
    """
    command = [sys.executable, "-I", "-S", "-c", _LAST_WORDS]
    speaker = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def end() -> None:
        atexit.unregister(end)
        if not speaker.stdin.closed:  # else it has been called
            speaker.communicate(b".")

    atexit.register(end)
    return end


class WorkerProcess:
    """A rollout worker as an actor.

    Args:
      name: the worker's name.
      fetch_seconds: time limit of fetching an object.
      news_seconds: time after which `news` returns without any.
    """

    def __init__(self, name: str, fetch_seconds: float, news_seconds: float) -> None:
        self._name, self._fetch_seconds, self._news_seconds = name, fetch_seconds, news_seconds
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._failure: str | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def facts(self) -> tuple[Facts, str]:
        """Returns what the driver compares, and the node's id."""
        import ray

        return Facts(), ray.get_runtime_context().get_node_id()

    def receive(self, order: Order) -> None:
        """Takes an order."""
        self._orders.put(order)

    def news(self) -> list[Event]:
        """Waits for events, and returns them; an empty list is a sign of life."""
        try:
            events = self._events.get(timeout=self._news_seconds)
        except queue.Empty:
            events = []
        while not self._events.empty():
            events += self._events.get()
        if not events and self._failure is not None:
            raise RuntimeError(self._failure)
        return events

    def _work(self) -> None:
        """The thread that decodes."""
        try:
            import ray

            from rljax.cluster.worker import RolloutWorker

            worker = RolloutWorker(self._name, lambda ref: ray.get(ref, timeout=self._fetch_seconds), ray.put)
            while True:
                if worker.idle:
                    worker.receive(self._orders.get())
                while not self._orders.empty():
                    worker.receive(self._orders.get())
                events = [event for event in worker.turn() if not isinstance(event, Arrived)]
                if events:
                    self._events.put(events)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {_first_line(error)}"


def _leave() -> None:
    """Ends this process with the status of an error: Ray's threads would crash at an ordinary end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _kill(pid: int) -> None:
    """Ends a process of this node that does not react."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class RayFabric:
    """See the module's docstring, and `Fabric` for the methods.

    Args:
      ray: the module.
      config: keys of the cluster.
      owns: whether to shut Ray down at the end, and to say if Ray ends this process.

    Attributes:
      facts: of the workers that have arrived, by name.
    """

    def __init__(self, ray: Any, config: ClusterConfig, owns: bool) -> None:
        self._ray, self._config, self._owns = ray, config, owns
        resources = dict(config.resources_per_worker)
        self._actor = ray.remote(
            num_cpus=config.cpus_per_worker,
            num_gpus=config.gpus_per_worker,
            resources=resources or None,
            max_restarts=0,
            max_task_retries=0,
            # A thread each: orders stay in order, and news never wait for them.
            concurrency_groups={"orders": 1, "news": 1},
        )(_grouped(ray))
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, tuple[str, str]] = {}  # what is in progress: (worker, method)
        self._nodes: dict[str, str] = {}
        self.facts: dict[str, Facts] = {}
        self._head = ray.get_runtime_context().gcs_address
        self._head_asked = self._head_answered = time.monotonic()
        self._lost = False  # the head
        self._end_ordinarily = _say_if_killed() if owns else None

    def spawn(self, worker: str) -> None:
        config = self._config
        actor = self._actor.remote(worker, config.fetch_seconds, config.lease_seconds / 4)
        self._actors[worker] = actor
        self._calls[actor.facts.remote()] = worker, "facts"

    def stop(self, worker: str) -> None:
        actor = self._actors.pop(worker, None)
        if actor is None:
            return
        self._calls = {call: (name, what) for call, (name, what) in self._calls.items() if name != worker}
        self._ray.kill(actor, no_restart=True)
        if worker in self.facts:  # a stopped process does not notice that, and would keep its cores
            self._end(worker)

    def _end(self, worker: str) -> None:
        """Kills the process of a worker on its node, in a task that needs no resources."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self._nodes[worker], soft=False)
        kill = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_kill)
        kill.remote(self.facts[worker].pid)

    def send(self, worker: str, order: Order) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            actor.receive.remote(order)

    def receive(self, seconds: float) -> list[Event]:
        self._ask_head()
        if not self._calls:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        if ready:  # and all others that have come
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        events: list[Event] = []
        for call in ready:
            worker, what = self._calls.pop(call)
            events += self._result(worker, what, call)
        return events

    def _ask_head(self) -> None:
        """Raises a ClusterError if the head has not answered for long."""
        now = time.monotonic()
        if now - self._head_asked < _HEAD_SECONDS:
            return
        self._head_asked = now
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_SECONDS).close()
            self._head_answered = time.monotonic()
        except OSError as error:
            patience = _HEAD_PATIENCE if self._config.address is None else _JOINED_PATIENCE
            if now - self._head_answered < patience:
                return
            self._lost = True
            again = "" if self._config.address is None else "start Ray there again, and "
            raise ClusterError(
                f"cluster: the head of the Ray cluster, {self._head}, has ended ({error.strerror or error});"
                f" {again}run the same command again"
            ) from error

    def _result(self, worker: str, what: str, call: Any) -> list[Event]:
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:  # the worker's own thread has ended
            return [Died(worker, _first_line(error.cause))]
        except self._ray.exceptions.RayError as error:
            return [Died(worker, f"its process has ended ({type(error).__name__})")]
        self._calls[self._actors[worker].news.remote()] = worker, "news"
        if what == "facts":
            self.facts[worker], self._nodes[worker] = result
            return [Arrived(worker, self.facts[worker])]
        return [Heard(worker), *result]

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def room(self) -> int:
        need, room = _need(self._config), 0
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                room += min(int(has.get(name, 0.0) / amount) for name, amount in need.items())
        return room

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        if self._end_ordinarily is not None:
            self._end_ordinarily()
        if self._lost:  # Ray would wait for the head; the processes of a cluster here end with this one
            atexit.unregister(self._ray.shutdown)
            atexit.register(_leave)
            return
        for worker in list(self._actors):
            self.stop(worker)
        if self._owns:
            self._ray.shutdown()


def _grouped(ray: Any) -> type:
    """Returns `WorkerProcess` with its methods in Ray's threads."""

    class RolloutProcess(WorkerProcess):
        @ray.method(concurrency_group="orders")
        def receive(self, order: Order) -> None:
            super().receive(order)

        @ray.method(concurrency_group="news")
        def news(self) -> list[Event]:
            return super().news()

    return RolloutProcess


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
