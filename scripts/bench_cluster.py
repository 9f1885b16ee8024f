"""Rollout workers: `python scripts/bench_cluster.py [--only SECTIONS] [key=value ...]`.

`overhead`, `cores` and `recovery` run the config, SmolLM2's by default; the others need no policy, or one
that learns in seconds. `coordinator`, `sharing`, `spot` and `small_model` count, or measure the processor's
time alone, and need no Ray and no quiet machine; the others need both. `docs/cluster.md` has what each
compares.
"""

import dataclasses
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

from cluster_benchmarks import experiment, sharing_rows, small_model_rows, spot_rows, step_metrics
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row, speed_row
from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.messages import Arrived, Begin, Decode, Facts, Piece, Pieces, Status, Tick
from rljax.cluster.weights import fetch_parts, make_channel
from rljax.config.cluster import ClusterConfig
from rljax.errors import ClusterError, UserError
from rljax.models.host_params import Part, digest_of
from rljax.requests import DecodeStatistics, Request
from rljax.timing import compare, interleave
from workloads import REAL_CONFIG

_SYNC_SECONDS = 0.1  # between two host syncs of a simulated worker
_TOKENS = 8  # of a piece
_LENGTH = 64  # of a simulated response
_ROLLOUTS = 9  # of a run that are timed
_PATIENCE = 60.0  # seconds that weights may take

# --- the coordinator -------------------------------------------------------------------------------------


def simulate(workers: int, slots: int, requests: int) -> tuple[int, float]:
    """Decodes simulated responses, eight of each prompt. Returns the number of events, and the processor's
    seconds that the coordinator took.
    """
    coordinator = Coordinator(workers, Facts(), Limits(), None)
    events, spent, now = 0, 0.0, 0.0
    decoding: dict[str, dict[int, int]] = {}

    def tell(event: Any) -> None:
        nonlocal events, spent
        start = time.thread_time()
        commands = coordinator.on(event, now)
        spent += time.thread_time() - start
        events += 1
        for command in commands:
            if isinstance(command, Decode):
                mine = decoding.setdefault(command.worker, {})
                mine |= {key: len(partial.tokens) for key, _, partial in command.work}

    tell(Tick())
    for name in coordinator.workers():
        tell(Arrived(name, Facts()))
        tell(Status(name, None, slots, 0))
    keys = np.zeros(2, np.uint32)
    tell(Begin(1, 0, {i: Request((i // 8,), keys, _LENGTH) for i in range(requests)}))
    for name in coordinator.workers():
        tell(Status(name, None, slots, 0))
    logprobs = (-0.5,) * _TOKENS
    while not coordinator.done:
        now += _SYNC_SECONDS
        for name, mine in decoding.items():
            pieces = []
            for key in list(mine)[:slots]:
                begin, end = mine[key], mine[key] + _TOKENS
                ending = "eos" if end >= _LENGTH else None
                pieces.append(Piece(key, 0, begin, tuple(range(begin, end)), logprobs, ending))
                mine[key] = end
                if ending is not None:
                    del mine[key]
            if pieces:
                tell(Pieces(name, 1, tuple(pieces), DecodeStatistics(), 0.0))
        tell(Tick())
    return events, spent


def coordinator_rows(sizes: list[tuple[int, int, int]], repeats: int) -> list[Row]:
    """Measures events a second that the coordinator takes of so many simulated workers, each of which sends a
    piece of every slot at a host sync. Time is counted, not waited for, and only the processor's is measured.
    """
    rows = []
    for workers, slots, requests in sizes:
        runs = [simulate(workers, slots, requests) for _ in range(repeats)]
        rate, events = float(np.median([events / seconds for events, seconds in runs])), runs[-1][0]
        name, needed = f"coordinator/{workers:,} workers of {slots} slots", workers / _SYNC_SECONDS
        baseline = f"a host sync every {_SYNC_SECONDS:g} s of each"
        details = {"events": events, "requests": requests, "tokens_per_second": rate * slots * _TOKENS}
        rows.append(counted_row(name, rate, needed, "events/s", baseline, **details))
    return rows


# --- runs ------------------------------------------------------------------------------------------------


def rollouts_of(file: str, *overrides: str, cores: int | None = None) -> tuple[list[int], list[float]]:
    """Tokens and seconds of the rollouts but the first, in this process on so many cores."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        lines = step_metrics(f"training.steps={1 + _ROLLOUTS}", *overrides, file=file)
    finally:
        os.sched_setaffinity(0, before)
    tokens, seconds = ([line[name] for line in lines[1:]] for name in ("rollout/tokens", "time/rollout"))
    return tokens, seconds


Rollouts = tuple[Sequence[int], Sequence[float]]
"""Tokens and seconds of each."""


def compared(name: str, ours: Rollouts, baseline: str, theirs: Rollouts) -> list[Row]:
    """The row of two runs with the same tokens: their rollouts are compared one by one."""
    (tokens, seconds), (their_tokens, their_seconds) = ours, theirs
    if list(tokens) != list(their_tokens):
        raise UserError(f"{name}: {list(tokens)} tokens in its rollouts, and {list(their_tokens)} without")
    rates = [sum(tokens) / sum(each) for each in (seconds, their_seconds)]
    row = speed_row(name, sum(tokens), compare(seconds, their_seconds), baseline)
    return [dataclasses.replace(row, value=rates[0], baseline_value=rates[1])]


_RUNS = {  # by section: workers of ours, the baseline, and its cores
    "overhead": ("one worker", 1, "no worker", None),
    "cores": ("two workers, a core each", 2, "one process, two cores", 2),
}


def run_rows(section: str, file: str, keys: Sequence[str]) -> list[Row]:
    """Compares workers on Ray with one process, in tokens per second."""
    name, workers, baseline, cores = _RUNS[section]
    ours = rollouts_of(file, *keys, f"cluster.workers={workers}")
    return compared(f"{section}/{name}", ours, baseline, rollouts_of(file, *keys, cores=cores))


def recovery_rows(file: str, keys: Sequence[str]) -> list[Row]:
    """Measures the seconds from a worker's kill -9 to the next token of one of its responses."""
    from rljax.cluster import ray_fabric
    from rljax.training.session import run

    killed: dict[str, float] = {}
    keys: set[int] = set()
    receive = ray_fabric.RayFabric.receive

    def watch(fabric: Any, seconds: float) -> list[Any]:
        events = receive(fabric, seconds)
        for event in events:
            if not isinstance(event, Pieces) or event.rollout < 2:
                continue
            if not killed:
                keys.update(piece.key for piece in event.pieces if piece.ending is None)
                os.kill(fabric.facts[event.worker].pid, signal.SIGKILL)
                killed[event.worker] = time.perf_counter()
            elif event.worker in killed or "back" in killed:
                continue
            elif keys.intersection(piece.key for piece in event.pieces if piece.tokens):
                killed["back"] = time.perf_counter()
        return events

    with (
        mock.patch.object(ray_fabric.RayFabric, "receive", watch),
        experiment(*keys, "cluster.workers=2", file=file) as config,
    ):
        run(config)
    if "back" not in killed:
        raise UserError("recovery: the worker had nothing left when it was killed; raise rollout lengths")
    (dead, *_), lease = killed, config.cluster.lease_seconds
    seconds = killed["back"] - killed[dead]
    baseline = "the lease, for a process that hangs"
    return [counted_row("recovery/kill -9", seconds, lease, "s", baseline, less=True)]


# --- weights ---------------------------------------------------------------------------------------------


def weights_rows(megabytes: list[int]) -> list[Row]:
    """Measures the seconds to publish weights by each channel of `cluster.weights`, and to fetch them in
    another process, against one copy in memory.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError("weights: needs Ray; pip install 'rljax[cluster]'") from error
    ray.init(address="local", include_dashboard=False, log_to_driver=False)

    @ray.remote
    class Other:
        def fetch(self, weights: Any) -> tuple[float, float]:
            start = time.perf_counter()
            parts = fetch_parts(weights.where, ray.get, _PATIENCE)
            got = time.perf_counter() - start
            assert digest_of(parts) == weights.digest
            return got, time.perf_counter() - start

    rows, channels = [], {}
    for name in ("object_store", "files", "jax_transfer"):
        try:
            channels[name] = make_channel(ClusterConfig(weights=name), ray.put)
        except ClusterError as error:
            print(f"left out: {error}")
    try:
        other = Other.remote()
        for size in megabytes:
            data = np.random.default_rng(0).integers(0, 256, size * 2**20 // 8, np.uint8)
            parts: list[Part] = [(f"layer {i}", "uint8", data.shape, data) for i in range(8)]
            params = {f"layer {i}": jnp.asarray(data) for i in range(8)}
            copies = interleave({"": lambda parts=parts: [part[3].copy() for part in parts]}, 5)[""]
            copy = float(np.median(copies))
            digest = digest_of(parts)
            for channel_name, channel in channels.items():
                start = time.perf_counter()
                published = channel.publish(0, params, parts, digest)
                publish = time.perf_counter() - start
                got, fetched = ray.get(other.fetch.remote(channel.deliver(published)))
                channel.remove(published)
                for what, seconds in (("publish", publish), ("get", got), ("get and check", fetched)):
                    name = f"weights/{size} MiB/{channel_name}/{what}"
                    rows.append(counted_row(name, seconds, copy, "s", "a copy", less=True))
    finally:
        for channel in channels.values():
            channel.close()
        ray.shutdown()
    return rows


_COUNTED = (  # the section, what measures it, and its arguments
    # Of the coordinator: workers, slots, responses.
    ("coordinator", coordinator_rows, ([(8, 64, 4096), (4000, 8, 64_000)], 5)),
    ("sharing", sharing_rows, ([2, 4], 16)),
    ("spot", spot_rows, (8, 48)),
    ("small_model", small_model_rows, (8, 48)),
    ("weights", weights_rows, ([100, 400],)),
)


def _plan(arguments: Namespace) -> list[Measurement]:
    given = arguments.file, arguments.overrides
    runs = [Measurement(section, arguments.file, run_rows, (section, *given)) for section in _RUNS]
    runs.append(Measurement("recovery", arguments.file, recovery_rows, given))
    return runs + [Measurement(section, "without a config", rows, given) for section, rows, given in _COUNTED]


BENCHMARK = Benchmark(
    name="cluster",
    description=__doc__,
    plan=_plan,
    config=REAL_CONFIG,
    packages=("ray",),
    disturbance="processes share the cores, so all rows but counts and those of the coordinator suffer",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
