"""The variants of a rollout that are compared: plain decoding, and every drafter."""

import contextlib
import dataclasses
import functools
import inspect
import pkgutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drafters.base import Drafter, Outcome
from drafters.registry import make_drafters, states_read
from rljax.assembly.checkpoint import RunCheckpoints
from rljax.assembly.decoding import warm_up
from rljax.assembly.policy import make_policy
from rljax.config import ExperimentConfig
from rljax.config.speculation import SpeculationConfig
from rljax.config.wing import POLICIES, part
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import enable_compilation_cache
from rljax.engine.number_type import with_number_type
from rljax.errors import UserError
from rljax.models.huggingface import save_model
from rljax.progress import Progress
from rljax.requests import Completion, DecodeStatistics, Request, accumulate
from rljax.rollout.collector import TRAINING, Collector, Group, Scheduler, Timing, WantedGroups, outcomes
from rljax.run_directory import RunDirectory
from rljax.speculation.idle_requests import make_idle_requests
from rljax.speculation.managers.manager import Manager
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from rljax.training import loop
from rljax.training.building import make_run
from rljax.training.training_run import TrainingRun
from rljax.training.warm_start import warm_start

PLAIN = "plain"
ALL_SLOTS = -1  # in a variant: run ahead in every slot that is idle
_EAGLE = {"learning_rate": 3e-3, "slices": 16, "depths": [2, 4]}
_CHAIN = 5  # the shortest of EfficientRollout's draft lengths (section 4.1): where its patience ladder begins
_ALWAYS = {"drafter": "quantized", "depth": _CHAIN, "top_k": 1, "nodes": _CHAIN}
SPECULATION_OFF = {
    name: SpeculationConfig.model_fields[name].get_default(call_default_factory=True)
    for name in ("drafter", "others", "args", "mix", "decoupled")
    if name in SpeculationConfig.model_fields
}
"""Keys of the config's section `speculation` with which nothing drafts."""
_ALL: dict[str, Any] = {"drafter": "srt", "others": {"eagle": _EAGLE, "quantized": {}}}
_SMALL: dict[str, Any] = {"drafter": "small_model"}
_WINDOW = 4

# By name: keys of the config's section `speculation`; None decodes plainly. Papers' keys need `rljax/papers`.
VARIANTS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "prompt lookup": {"drafter": "prompt_lookup"},
    "suffix decoding": {"drafter": "suffix_decoding"},
    "HistoSpec": {"drafter": "histospec"},
    "SRT": {"drafter": "srt"},
    "SRT as published": {"drafter": "srt", "args": {"substitutions": False, "novelty": 0.0}},
    "SRT without substitutions": {"drafter": "srt", "args": {"substitutions": False}},
    "SRT without running rollouts": {"drafter": "srt", "args": {"live": False}},
    "SRT in halves": {"drafter": "srt", "overlap": True},
    "SRT with run-ahead": {"drafter": "srt", "run_ahead_below": ALL_SLOTS},
    "quantized": {"drafter": "quantized"},
    "quantized always": {"drafter": "quantized", "choice": "fixed", "strategies": [_ALWAYS]},
    "quantized by the roofline": {"drafter": "quantized", "choice": "roofline"},
    "small model": _SMALL,
    "small model always coupled": _SMALL | {"decoupled": {"window": _WINDOW, "modes": ("coupled",)}},
    "small model always decoupled": _SMALL | {"decoupled": {"window": _WINDOW, "modes": ("decoupled",)}},
    "small model by Algorithm 1": _SMALL | {"decoupled": {"window": _WINDOW}},
    "EAGLE": {"drafter": "eagle", "args": {"variant": "eagle", **_EAGLE}},
    "EAGLE-3": {"drafter": "eagle", "args": _EAGLE},
    "EAGLE-3 frozen": {"drafter": "eagle", "args": {**_EAGLE, "train": False}},
    "SRT and a small model": {"drafter": "srt", "others": {"small_model": {}}},
    "all": _ALL,
    "all and a small model": _ALL | {"others": {**_ALL["others"], "small_model": {}}},
    "all mixed": _ALL | {"mix": True},
    "all by the bandit": _ALL | {"choice": "bandit"},
    "all by the ladder": _ALL | {"choice": "ladder"},
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "configured": {},
    "configured frozen": {"args": {"train": False}},
    "configured unmixed": {"mix": False},
    "configured alone": {"mix": False, "others": {}},
}
"""By name of a variant with the config's own drafters: changes of the section `speculation`. They are only
compared where they are named.
"""
BESIDE = [name for name, keys in VARIANTS.items() if "decoupled" in (keys or {})]
"""Variants that need a device beside those of the mesh."""


@dataclasses.dataclass
class Variant:
    """One way to roll out.

    Attributes:
      name: name in the rows.
      seconds: seconds of decoding, per step.
      learning: seconds in which drafters learned after the rollout, per step.
      windows: metrics of drafts ahead, per step; none where nothing is decoupled.
      baseline: seconds of plain decoding just before and after, per step.
      same: share of the responses that are those of plain decoding, per step.
    """

    name: str
    collector: Collector
    speculator: Speculator | NoDrafts
    seconds: list[float] = dataclasses.field(default_factory=list)
    learning: list[float] = dataclasses.field(default_factory=list)
    statistics: list[DecodeStatistics] = dataclasses.field(default_factory=list)
    windows: list[dict[str, float]] = dataclasses.field(default_factory=list)
    baseline: list[float] = dataclasses.field(default_factory=list)
    same: list[float] = dataclasses.field(default_factory=list)

    def total(self, steps: slice = slice(None)) -> DecodeStatistics:
        """The sum of the statistics of some steps, all by default."""
        total = DecodeStatistics()
        for statistics in self.statistics[steps]:
            accumulate(total, statistics)
        return total


def with_keys(config: ExperimentConfig, **sections: dict[str, Any]) -> ExperimentConfig:
    """Returns a config with other values of keys, by section."""
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)


@contextlib.contextmanager
def open_run(config: ExperimentConfig) -> Iterator[tuple[TrainingRun, Progress]]:
    """Opens the config's run in a temporary directory, in the number type that a run has."""
    config = with_number_type(config)
    if config.engine.compilation_cache is not None:
        enable_compilation_cache(config.engine.compilation_cache)
    with tempfile.TemporaryDirectory() as directory, Progress() as progress:
        config = config.model_copy(update={"run_dir": directory})
        checkpoints = RunCheckpoints(Path(directory) / "checkpoints", config.checkpoint.keep)
        with contextlib.closing(checkpoints):
            started = time.perf_counter()
            yield make_run(config, RunDirectory(directory), checkpoints, progress, started), progress


def needs_shape(name: str) -> bool:
    """Whether a variant has a small model, which is made from `policy.shape`."""
    keys = VARIANTS.get(name) or {}
    return "small_model" in (keys.get("drafter"), *keys.get("others", ()))


def default_variants(config: ExperimentConfig) -> list[str]:
    """The variants that need no device of their own, and that can be made for the config's policy."""
    shaped = config.policy.shape is not None
    return [name for name in VARIANTS if name not in BESIDE and (shaped or not needs_shape(name))]


def check_variants(config: ExperimentConfig, names: Sequence[str]) -> None:
    """Raises a UserError for a variant that cannot be made for the config's policy, or on these devices."""
    devices = config.mesh.num_devices
    for name in names:
        why = ""
        if name in BESIDE and jax.device_count() <= devices:
            why = f"drafts on a device beside the {devices} of the mesh, and there is none;"
        elif needs_shape(name) and config.policy.shape is None:
            why = "is made from policy.shape, which this config lacks;"
        elif name in CONFIGURED and config.speculation.drafter is None:
            why = "needs speculation.drafter; set it, or"
        if why:
            raise UserError(f"--variants: {name!r} {why} leave it out")


def make_variants(run: TrainingRun, names: Sequence[str]) -> list[Variant]:
    """Returns all variants on the run's engine, plain decoding first."""
    times: dict[Any, PassTimes] = {}
    return [make_variant(run, name, _keys(run.config, name), times) for name in names]


def _keys(config: ExperimentConfig, name: str) -> dict[str, Any] | None:
    """Returns a variant's keys of the section `speculation`."""
    if name not in CONFIGURED:
        return VARIANTS[name]
    own, changed = config.speculation, CONFIGURED[name]
    args = own.args | changed.get("args", {})
    return {"drafter": own.drafter, "others": own.others, "mix": own.mix} | changed | {"args": args}


def make_variant(
    run: TrainingRun,
    name: str,
    keys: dict[str, Any] | None,
    times: dict[Any, PassTimes],
    roofline_of: Callable[[DecodeEngine, Drafter], Any] | None = None,
    make: Callable[..., Manager] | None = None,
) -> Variant:
    """Returns one variant, by keys of the section `speculation`; None decodes plainly.

    Args:
      times: measured times of passes, by the layers whose features the engine returns and by whether drafts
        have devices of their own; shared and updated.
      roofline_of: the roofline of `choice: roofline`, for an engine and its drafter; None measures it.
      make: see `StrategyChoice`.
    """
    config, own, slots = run.config, run.collector, run.config.engine.max_slots
    engine, speculator, overlap = with_hidden_layers(run.engine, None), None, False
    if keys is not None:
        params = run.engine.load_params(run.state.params)
        below = slots if keys.get("run_ahead_below") == ALL_SLOTS else 0
        update = SPECULATION_OFF | keys | {"run_ahead_below": below}
        if "decoupled" in keys:
            update["decoupled"] = type(config.speculation.decoupled)(**keys["decoupled"])
        if update["drafter"] == "small_model":
            update["args"] = {"path": str(small_model(run))}
        if "small_model" in update["others"]:
            update["others"] = update["others"] | {"small_model": {"path": str(small_model(run))}}
        speculation = config.speculation.model_copy(update=update)
        config = config.model_copy(update={"speculation": speculation})
        drafters, overlap = make_drafters(speculation), speculation.overlap
        engine = with_hidden_layers(engine, states_read(drafters, engine.config))
        if speculation.choice == "roofline":
            if roofline_of is None:
                run.progress.message("calibrating the roofline")
                roofline_of = functools.partial(part("measure_roofline"), params=params)
            roofline = roofline_of(engine, drafters[speculation.drafter])
            make = functools.partial(pkgutil.resolve_name(POLICIES["roofline"].manager), roofline=roofline)
        idle = make_idle_requests(speculation)
        shared = times.setdefault((engine.hidden_layers, "decoupled" in keys), PassTimes())
        strategies = StrategyChoice(speculation, config.seed, engine, make)
        speculator = Speculator(engine, drafters, speculation.max_batch, idle, shared, strategies)
    scheduler = Scheduler(engine, slots, own.scheduler.stop_strings, speculator, overlap, own.scheduler.tools)
    if keys is not None:
        warm_up(scheduler, params, config, wait=True)
    longest = config.rollout.max_response_length
    collector = Collector(own.task, own.tokenizer, scheduler, config.seed, run.prompts, longest)
    return Variant(name, collector, scheduler.speculator)


def with_hidden_layers(engine: DecodeEngine, hidden_layers: tuple[int, ...] | None) -> DecodeEngine:
    """Returns the same engine with other `hidden_layers`."""
    if hidden_layers == engine.hidden_layers:
        return engine
    same = {name: getattr(engine, name) for name in inspect.signature(DecodeEngine).parameters}
    other = DecodeEngine(**same | {"hidden_layers": hidden_layers})
    other.fixed_gain = engine.fixed_gain
    return other


def small_model(run: TrainingRun) -> Path:
    """Returns the path of a smaller policy's checkpoint, and makes it if it is missing: half of the layers of
    `policy.shape`, warmed up like the run's policy, and not grown.
    """
    directory, config = run.directory.path / "small_model", run.config
    if directory.exists():
        return directory
    shape = config.policy.shape.model_copy(update={"num_layers": max(config.policy.shape.num_layers // 2, 1)})
    config = with_keys(config, policy={"shape": shape})
    task, partial = run.collector.task, run.directory.path / "small_warm_start"
    policy = make_policy(config, task, run.directory.path / "tokenizer")
    if config.warm_start is not None:
        shared = (run.numerics, run.pool, run.engine.mesh, run.progress)
        policy = warm_start(config, policy, task, *shared, partial, run.stop)
    save_model(directory, policy.config, policy.params, "float32")
    return directory


def _wanted(run: TrainingRun, step: int) -> WantedGroups:
    prompts, samples = run.config.rollout.prompts_per_step, run.config.rollout.samples_per_prompt
    return WantedGroups("train", range(step * prompts, (step + 1) * prompts), samples, TRAINING, step)


def step_requests(run: TrainingRun, step: int) -> list[Request]:
    return run.collector.requests(_wanted(run, step))


def collect_step(
    run: TrainingRun, collector: Collector, step: int
) -> tuple[list[Group], DecodeStatistics, Timing]:
    """Returns a step's groups by the current policy."""
    return collector.collect(run.engine.load_params(run.state.params), _wanted(run, step))


def unrewarded(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Outcome]:
    """Returns outcomes without rewards, for drafters that do not need them."""
    return [
        Outcome(request.prompt_ids, completion.response_ids, 0.0)
        for request, completion in zip(requests, completions, strict=True)
    ]


def roll_out(run: TrainingRun, variant: Variant, step: int) -> list[Group]:
    """Returns one step's groups by one variant, whose drafters learn from them."""
    variant.speculator.idle.plan(step_requests(run, step + 1))
    groups, statistics, timing = collect_step(run, variant.collector, step)
    start = time.perf_counter()
    variant.speculator.learn(outcomes(groups))
    variant.learning.append(time.perf_counter() - start)
    variant.seconds.append(timing.decode)
    variant.statistics.append(statistics)
    metrics, prefix = variant.speculator.metrics(statistics), "speculation/decoupled_"
    variant.windows.append(
        {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    )
    return groups


def trained_steps(
    run: TrainingRun, progress: Progress, plain: Variant, variants: Sequence[Variant]
) -> Iterator[dict[str, float]]:
    """Trains the run's policy: rolls every step out plainly and by every variant, and yields the metrics of
    the update. Raises as `check_same`.
    """
    progress.stage("bench", run.config.training.steps)
    for step in range(run.config.training.steps):
        expected = roll_out(run, plain, step)
        for variant in variants:
            check_same(expected, roll_out(run, variant, step), variant.name)
        yield loop.learn(run, expected)
        progress.step(step + 1, {"tokens_per_second": plain.statistics[-1].tokens / plain.seconds[-1]})


def check_same(plain: Sequence[Group], other: Sequence[Group], name: str) -> float:
    """Returns the share of responses with equal tokens. On a CPU it raises a UserError for any response whose
    tokens or logprobs' bits differ.
    """
    on_cpu, same, count = jax.default_backend() == "cpu", 0, 0
    for ours, theirs in zip(other, plain, strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            equal = np.array_equal(a.response_ids, b.response_ids)
            if on_cpu and not (equal and np.array_equal(a.logprobs, b.logprobs)):
                raise UserError(f"{name}: sampled other tokens than plain decoding for {ours.problem.id}")
            same, count = same + equal, count + 1
    return same / count
