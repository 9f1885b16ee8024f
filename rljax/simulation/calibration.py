"""Real runs with rollout workers, predicted by the simulator: what its figures are worth on a machine.

    base = read_run("runs/one")                     # a run with one worker
    for row in compared(read_run("runs/two"), base, cores=2):
        print(row)

Seconds come from the run with one worker: of passes by their rows, of prefilling, of updates, of what a
rollout takes besides, and how many cores a worker keeps busy. From the run that is predicted come its number
of workers, and which responses, of which lengths, its steps had: by the run's seed they are those of any
number of workers. Predicted are seconds of a step, and for which share of it each worker has nothing to
decode. All of it is in `workers.jsonl` (`rljax.cluster.timeline`).
"""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.cluster.routing import make_router, make_routings
from rljax.cluster.timeline import TRAINER
from rljax.config import ExperimentConfig, load_config
from rljax.errors import ConfigError, RunDirectoryError
from rljax.run_directory import RunDirectory
from rljax.simulation.cluster import Cluster, Machines, Response
from rljax.simulation.costs import TableCosts

WARM_UP = 1  # steps of a run that are not counted: workers start, and some programs are compiled
TOLERANCE = 0.15  # share of the measured value by which a prediction may be off

Pass = tuple[int, int, float, int]
"""Rows, passes, seconds, and tokens that were prefilled in the same turns of the worker."""


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """A step of a run with workers.

    Attributes:
      seconds: of the step.
      waiting: seconds in which the trainer waited for the rollout.
      decoding: seconds in which each worker had something to decode.
      cpu: the processor's seconds of each worker's decoding, of all cores.
      passes: of all workers.
      groups: tokens of a prompt, and lengths of its responses, in the order in which they were handed out.
    """

    seconds: float
    waiting: float
    decoding: tuple[float, ...]
    cpu: float
    passes: tuple[Pass, ...]
    groups: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def busy(self) -> float:
        """Seconds of all passes, and of prefilling."""
        return sum(seconds for _, _, seconds, _ in self.passes)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run with workers, without its warm-up.

    Attributes:
      config: the experiment.
      steps: its steps.
    """

    config: ExperimentConfig
    steps: tuple[RecordedStep, ...]

    @property
    def workers(self) -> int:
        """Number of its workers."""
        return self.config.cluster.workers


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What a run with one worker measured.

    Attributes:
      passes: seconds of a pass, by its rows.
      prefill: seconds of a prefilled token.
      update: seconds of a step in which the trainer does not wait for a rollout.
      weights: seconds of a rollout in which its worker decodes nothing: the weights are on their way.
      latency: seconds in which a rollout's worker counts as decoding, beyond those in which it does.
      cores: that a worker keeps busy while it decodes.
    """

    passes: dict[int, float]
    prefill: float
    update: float
    weights: float
    latency: float
    cores: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is compared.

    Attributes:
      step: seconds of a step, on average.
      rollout: those of them in which the trainer waits for the rollout.
      idle: share of the step in which a worker has nothing to decode: of the one that has it longest in each
        step, then of the next one, on average over the steps.
    """

    step: float
    rollout: float
    idle: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Compared:
    """A figure of a run by its name, in seconds or as a share of a step, predicted and measured."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else math.inf

    @property
    def agrees(self) -> bool:
        """Whether it is predicted within `TOLERANCE`."""
        return abs(self.ratio - 1.0) <= TOLERANCE


# -- what a run measured -----------------------------------------------------------------------------------


def read_run(path: str | Path) -> RecordedRun:
    """Returns a run with rollout workers.

    Raises:
      ConfigError: there is none, its steps are too few, or it does what is not simulated from records.
    """
    directory = RunDirectory(path, writes=False)
    config = load_config(directory.config_path)
    _check(config, path)
    try:
        lines = directory.read_workers()
        steps = [_step(line) for line in lines]
    except (RunDirectoryError, OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--calibrate: {path} has no records of workers that can be simulated ({error}); repeat the run"
        ) from error
    if len(steps) <= WARM_UP:
        raise ConfigError(f"--calibrate: {path} has {len(steps)} steps, and the first is warm-up")
    return RecordedRun(config, tuple(steps[WARM_UP:]))


def _check(config: ExperimentConfig, path: str | Path) -> None:
    for key, used in (
        ("cluster.workers: 0", not config.cluster.workers),
        ("rollout.staleness", bool(config.rollout.staleness)),
        ("rollout.max_staleness", bool(config.rollout.max_staleness)),
        ("speculation.drafter", bool(config.speculation.kinds)),
        ("algorithm.dynamic_sampling", config.algorithm.dynamic_sampling),
    ):
        if used:
            raise ConfigError(
                f"--calibrate: {path} has {key}; what is predicted from their records are runs with workers,"
                " on-policy, without drafts and with one round a step"
            )


def _step(line: dict[str, Any]) -> RecordedStep:
    spans = {name: row["spans"] for name, row in line["rows"].items()}
    total = {
        name: {state: sum(end - begin for begin, end, each in mine if each == state) for *_, state in mine}
        for name, mine in spans.items()
    }
    workers = [name for name in spans if name != TRAINER]
    rows = [line["rows"][name] for name in workers]
    return RecordedStep(
        line["seconds"],
        total[TRAINER].get("waiting", 0.0),
        tuple(total[name].get("decoding", 0.0) for name in workers),
        sum(row["cpu"] for row in rows if "cpu" in row),
        tuple(
            (size, passes, seconds, tokens) for row in rows for size, passes, seconds, tokens in row["passes"]
        ),
        tuple((prompt, tuple(lengths)) for prompt, lengths in line["groups"]),
    )


def seconds_of(base: RecordedRun) -> Seconds:
    """Returns what a run with one worker measured.

    Raises:
      ConfigError: it has another number of workers.
    """
    if base.workers != 1:
        raise ConfigError(f"--base: has {base.workers} workers; seconds are taken from a run with one")
    passes = [each for step in base.steps for each in step.passes]
    alone: dict[int, tuple[int, float]] = {}
    for rows, count, seconds, prefilled in passes:
        if not prefilled:
            known = alone.get(rows, (0, 0.0))
            alone[rows] = known[0] + count, known[1] + seconds
    # Of a size that was only seen with prefilling, the prefill is counted as part of it.
    for rows, count, seconds, _ in passes:
        alone.setdefault(rows, (count, seconds))
    each = {rows: seconds / count for rows, (count, seconds) in sorted(alone.items())}
    prefilling = [(seconds - count * each[rows], tokens) for rows, count, seconds, tokens in passes if tokens]
    tokens = sum(count for _, count in prefilling)
    busy = sum(step.busy for step in base.steps)
    number = len(base.steps)
    decoding = sum(sum(step.decoding) for step in base.steps)
    waiting = sum(step.waiting for step in base.steps)
    return Seconds(
        each,
        max(sum(seconds for seconds, _ in prefilling), 0.0) / max(tokens, 1),
        (sum(step.seconds for step in base.steps) - waiting) / number,
        max(waiting - decoding, 0.0) / number,
        max(decoding - busy, 0.0) / number,
        sum(step.cpu for step in base.steps) / busy,
    )


# -- predicted and measured --------------------------------------------------------------------------------


def measured(run: RecordedRun) -> Figures:
    """Returns the figures of a run."""
    return _figures([(step.seconds, step.waiting, step.decoding) for step in run.steps], run.workers)


def predicted(run: RecordedRun, seconds: Seconds, cores: float) -> Figures:
    """Returns the figures of a run by simulation, from its config and the lengths of its responses.

    Args:
      run: the run.
      seconds: of a run with one worker.
      cores: that all workers share; infinity where each has its own.
    """
    config = run.config
    rows, times = zip(*seconds.passes.items(), strict=True)
    machines = Machines(
        run.workers,
        config.engine.max_slots,
        TableCosts(rows, times, prefill_token=seconds.prefill, round_up=True),
        train_seconds=lambda tokens: seconds.update,
        weight_seconds=seconds.weights + seconds.latency,
        sync_passes=config.engine.decode_steps_per_sync,
        cores=cores,
        cores_of_worker=seconds.cores,
    )
    router = make_router(
        config.cluster, make_routings(config.cluster), config.speculation, config.engine.max_slots
    )
    cluster = Cluster(machines, "on-policy", router, spans=True)
    prompts = itertools.count()
    steps = [
        [
            Response(prompt, tokens, length)
            for (tokens, lengths), prompt in zip(step.groups, prompts, strict=False)
            for length in lengths
        ]
        for step in run.steps
    ]
    cluster.run(iter(steps), len(steps))
    ends = [step.trained + machines.weight_seconds for step in cluster.steps]
    busy: collections.Counter[tuple[int, int]] = collections.Counter()
    for span in cluster.spans:
        busy[span.step, span.worker] += span.end - span.begin
    decoding = [
        [busy[number, worker] + seconds.latency for worker in range(run.workers)]
        for number in range(1, len(steps) + 1)
    ]
    lasted = [end - begin for begin, end in itertools.pairwise([0.0, *ends])]
    waiting = [each - seconds.update for each in lasted]
    return _figures(list(zip(lasted, waiting, decoding, strict=True)), run.workers)


def _figures(steps: Sequence[tuple[float, float, Sequence[float]]], workers: int) -> Figures:
    idle = [
        sorted((1 - each / seconds for each in [*decoding, *[0.0] * workers][:workers]), reverse=True)
        for seconds, _, decoding in steps
    ]
    return Figures(
        statistics.fmean(seconds for seconds, _, _ in steps),
        statistics.fmean(waiting for _, waiting, _ in steps),
        tuple(statistics.fmean(shares) for shares in zip(*idle, strict=True)),
    )


def compared(run: RecordedRun, base: RecordedRun, cores: float) -> list[Compared]:
    """Returns the figures of a run, predicted from a run of the same experiment with one worker, next to what
    was measured; `cores` as of `predicted`.
    """
    ours, theirs = predicted(run, seconds_of(base), cores), measured(run)
    return [
        Compared("step seconds", "s", ours.step, theirs.step),
        Compared("rollout seconds", "s", ours.rollout, theirs.rollout),
        *(
            Compared(f"idle share, worker {number}", "of a step", *shares)
            for number, shares in enumerate(zip(ours.idle, theirs.idle, strict=True), 1)
        ),
    ]


def table(rows: dict[str, Sequence[Compared]]) -> str:
    """Returns the figures of runs as a table."""
    lines = [f"{'':44}{'predicted':>10}{'measured':>10}{'ratio':>8}"]
    for run, figures in rows.items():
        for each in figures:
            verdict = "" if each.agrees else f"  not within {TOLERANCE:.0%}"
            lines.append(
                f"{run + ': ' + each.name:44}{each.predicted:>10.3f}{each.measured:>10.3f}{each.ratio:>8.2f}"
                f"{verdict}"
            )
    return "\n".join(lines)
