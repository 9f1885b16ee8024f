"""A simulation as keys and values: `python scripts/simulate.py workers=64 order=pipe router=ranked`.

The responses of its steps are epochs over a set of prompts, whose lengths come from a model or from a run. A
prompt has a length of its own, log-normal over prompts; the responses of its group scatter around it, and
from epoch to epoch it moves and grows. All is cut off at the longest response. The keys `mean`, `longest`,
`sigma`, `within`, `drift`, `growth`, `settling`, `outliers` and `jump` say how far.

What passes take is one set of inputs for everything. `memory` is a customary share of the bandwidth.
`base_ms` and `sum_us` follow from it and from TLT's throughputs of Qwen2.5 7B without drafts, one request, on
H100: 164.65 tokens/s on one device (table 2), 6.1 ms a pass, of which the weights take 5.3; and 242.11 on
two (table 7), 4.1 ms, of which half of the weights takes 2.6, `base_ms` 0.8, and 56 all-reduces the rest. A
32B policy on four then takes 8.3 ms; SpecActor (section 5.1) tells below 13. `arithmetic` is a guess.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import numpy as np

from rljax.cluster.router import Balancing, Router, SharedQueue
from rljax.config.wing import part
from rljax.errors import ConfigError, known_names
from rljax.planning.hardware import known_hardware
from rljax.planning.passes import pass_work
from rljax.planning.rollout import scale_to_mean
from rljax.simulation.cluster import Cluster, Machines, Order, Response
from rljax.simulation.costs import POLICIES, PassCosts, named, planned_costs, roofline_costs
from rljax.simulation.drafting import LEVELS, Drafting, SimulatedDrafter

Modes = Literal["coupled", "decoupled", "either", "aimd"]
Routing = Literal["shared", "static", "ranked", "two-tiers"]
Prompt = tuple[int, ...]
_MANY = 10**6  # tokens of a prefill that arithmetic rules


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Everything that a simulation is computed from. Times are seconds."""

    model: Annotated[str, "policy: a shape of costs.py"] = "qwen3-14b"
    device: Annotated[str, "device of the planner's table"] = "h100"
    tensor: Annotated[int, "devices of a worker"] = 2
    workers: Annotated[int, "rollout workers"] = 16
    slots: Annotated[int, "responses that a worker decodes at a time"] = 256
    order: Annotated[Order, "on-policy, one-off (one version behind), or pipe"] = "on-policy"
    router: Annotated[
        Routing,
        "shared: workers take prompts as they have room; static: as many for each, dealt out at once; ranked:"
        " HistoPipe's ranking groups; two-tiers: with more workers for long ones",
    ] = "shared"
    groups: Annotated[int, "ranking groups; 0 for one a worker"] = 0
    min_workers: Annotated[int, "fewest workers of a ranking group with two-tiers"] = 1
    max_workers: Annotated[int, "most of them; 0 for four times an even share"] = 0
    migration: Annotated[bool, "move outliers of ranking groups (RhymeRL, section 6.3)"] = False
    balance: Annotated[
        int, "free workers take half of a worker that has at least so many responses; 0 never"
    ] = 0
    race: Annotated[int, "free workers decode copies of so many stragglers each; 0 never"] = 0
    cache_gb_s: Annotated[
        float,
        "GB/s at which the end of a moved response's cache comes from its worker, while the beginning is"
        " computed (SpecActor, section 4.3); 0 computes all of it",
    ] = 0.0
    prompts: Annotated[int, "prompts of an epoch; 0 for four steps"] = 0
    prompts_per_step: Annotated[int, "prompts of a step"] = 256
    samples: Annotated[int, "responses to a prompt"] = 16
    prompt_tokens: Annotated[int, "tokens of a prompt"] = 300
    mean: Annotated[float, "mean tokens of a response in the first epoch"] = 4000.0
    longest: Annotated[int, "longest response"] = 16384
    sigma: Annotated[float, "spread of the logarithm of lengths"] = 0.8
    within: Annotated[float, "share of that variance within a prompt's responses"] = 0.3
    drift: Annotated[float, "movement of a prompt's logarithm from epoch to epoch"] = 0.1
    growth: Annotated[float, "growth of the mean from epoch to epoch"] = 1.0
    settling: Annotated[float, "by which drift and outliers shrink from epoch to epoch; 1 for never"] = 1.0
    outliers: Annotated[float, "share of responses that are longer than their prompt lets expect"] = 0.0
    jump: Annotated[float, "spread of the logarithm by which these are longer"] = 1.0
    rollouts: Annotated[str, "rollouts.jsonl of a run, for its lengths"] = ""
    costs: Annotated[str, "plan written by scripts/plan.py --json, for its decode passes"] = ""
    arithmetic: Annotated[float, "share of the device's FLOP/s that is reached"] = 0.5
    memory: Annotated[float, "share of its bandwidth that is reached"] = 0.8
    base_ms: Annotated[float, "milliseconds that every pass takes besides"] = 0.8
    sum_us: Annotated[float, "microseconds of each of two all-reduces a layer, over several devices"] = 12.0
    drafters: Annotated[
        str,
        "drafters as name:acceptance:spread:milliseconds[:more per request], separated by commas; workers"
        " begin with the first one",
    ] = ""
    windows: Annotated[str, "drafts a pass to choose among"] = "0,1,2,3,4,6,8"
    draft_below: Annotated[int, "batches of at most so many draft; 0 for all"] = 0
    mode: Annotated[
        Modes,
        "coupled or decoupled drafting, or what is faster at a time: either; or aimd, HistoSpec's windows, of"
        " each request's own",
    ] = "coupled"
    breadth: Annotated[float, "rows that are verified for each drafted token: trees have more than one"] = 1.0
    misses: Annotated[float, "with aimd: passes behind a rejection until history matches again"] = 0.0
    spot: Annotated[int, "idle workers from which they train a head (TLT, section 4.2); 0 never"] = 0
    spot_update: Annotated[float, "seconds of an update of the head"] = 0.2
    spot_updates: Annotated[int, "most updates of the head in a rollout"] = 200
    spot_tokens: Annotated[int, "most tokens of a rollout that the head is trained on"] = 200_000
    train: Annotated[float, "seconds of an update"] = 60.0
    train_tokens_per_second: Annotated[float, "instead: rate of updates"] = 0.0
    weights: Annotated[float, "seconds from an update's end until workers have the weights"] = 2.0
    failures_per_hour: Annotated[float, "of a worker"] = 0.0
    restart: Annotated[float, "seconds until a lost worker is replaced"] = 60.0
    sync: Annotated[float, "seconds between two looks of the host; 0 sees every end at once"] = 0.0
    look: Annotated[float, "seconds between two reports where requests are moved"] = 5.0
    steps: Annotated[int, "steps"] = 20
    warm_up: Annotated[int, "steps that are not counted: two epochs of the default"] = 8
    seed: Annotated[int, "of everything random"] = 0

    def replaced(self, overrides: Sequence[str]) -> "Scenario":
        """Returns the scenario with `key=value` overrides.

        Raises:
          ConfigError: a key or a value is none.
        """
        kinds, changed = get_type_hints(Scenario), {}
        for override in overrides:
            key, equals, text = override.partition("=")
            if key not in kinds or not equals:
                raise ConfigError(f"{override}: is not key=value; {known_names(key, list(kinds))}")
            changed[key] = _value(key, text, kinds[key])
        scenario = dataclasses.replace(self, **changed)
        scenario.check()
        return scenario

    def check(self) -> None:
        """Raises a ConfigError where keys do not fit together."""
        for key in ("workers", "slots", "tensor", "prompts_per_step", "samples", "longest", "steps"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} should be at least 1")
        if self.warm_up >= self.steps:
            raise ConfigError(f"warm_up: {self.warm_up} leaves nothing of {self.steps} steps")
        if self.mean > self.longest:
            raise ConfigError(f"mean: {self.mean:g} is larger than longest, {self.longest}")
        ranked = self.router in ("ranked", "two-tiers")
        if self.migration and not ranked:
            raise ConfigError("migration: outliers are those of ranking groups; set router=ranked")
        groups = min(self.groups or self.workers, self.workers)
        if not 1 <= self.min_workers <= self.workers // groups:
            raise ConfigError(f"min_workers: {self.min_workers} for each of {groups} groups are too many")
        if self.max_workers and self.max_workers < self.min_workers:
            raise ConfigError(f"max_workers: {self.max_workers} are fewer than min_workers")
        if self.cache_gb_s and self.costs:
            raise ConfigError("cache_gb_s: a plan does not tell what a prefill takes; leave out costs")
        if self.race and not self.drafters:
            raise ConfigError("race: copies need another drafter; set drafters")
        if ranked and self.order != "pipe":
            raise ConfigError(
                "router: a worker with long responses would be waited for in every step; set order=pipe"
            )
        if self.spot >= self.workers:
            raise ConfigError(f"spot: {self.spot} of {self.workers} workers are never idle within a rollout")
        if self.num_prompts < self.prompts_per_step:
            raise ConfigError(f"prompts: {self.prompts} are fewer than prompts_per_step")

    @property
    def num_prompts(self) -> int:
        """Prompts of an epoch."""
        return self.prompts or 4 * self.prompts_per_step

    def pass_costs(self) -> PassCosts:
        """Returns the seconds of passes."""
        if self.costs:
            return planned_costs(self.costs)
        policy, device = named("model", self.model, POLICIES), named("device", self.device, known_hardware())
        worker = device.reaching(self.arithmetic, self.memory, self.tensor)
        latency = self.sum_us / 1e6 if self.tensor > 1 else 0.0
        return roofline_costs(policy, worker, self.base_ms / 1000, latency)

    def drafters_of(self) -> dict[str, SimulatedDrafter]:
        """Returns the drafters by name."""
        found = {}
        for text in filter(None, self.drafters.split(",")):
            name, *numbers = text.split(":")
            try:
                mean, spread, base, each = [*map(float, numbers), 0.0][:4]
            except ValueError as error:
                raise ConfigError(
                    f"drafters: {text} should be name:acceptance:spread:milliseconds, such as srt:0.6:0.2:0"
                ) from error
            found[name] = SimulatedDrafter(mean, spread, base / 1000, each / 1000)
        return found

    def machines(self) -> Machines:
        """Returns what steps run on."""
        costs, rate, spot = self.pass_costs(), self.train_tokens_per_second, None
        drafting = Drafting(
            costs,
            self.drafters_of(),
            [int(window) for window in self.windows.split(",")],
            ("coupled", "decoupled") if self.mode == "either" else (self.mode,),
            self.draft_below or None,
            self.breadth,
            self.misses,
        )
        if self.spot:
            limits = self.spot_updates, self.spot_tokens, self.longest
            rule = part("SpotRule")(self.spot, 8, *limits, retry=math.inf)
            spot = part("SpotTimes")(rule, self.spot_update, costs.prefill)
        return Machines(
            self.workers,
            self.slots,
            costs,
            drafting,
            (lambda tokens: tokens / rate) if rate else (lambda tokens: self.train),
            self.weights,
            self.restart,
            self.failures_per_hour,
            sync_seconds=self.sync,
            look_seconds=self.look,
            spot=spot,
            moved_seconds=self.moved_seconds(costs) if self.cache_gb_s else None,
        )

    def moved_seconds(self, costs: PassCosts) -> float:
        """Returns the seconds of a token of a moved response: computing and copying end at the same time."""
        computed = costs.prefill(_MANY) / _MANY
        copied = pass_work(named("model", self.model, POLICIES)).cached / (1e9 * self.cache_gb_s)
        return computed * copied / (computed + copied)

    def router_of(self, workload: "Workload", machines: Machines) -> Router:
        """Returns the router."""

        def pass_seconds(running: int, tokens: float) -> float:
            cached = machines.costs.cached * (tokens + running * self.prompt_tokens)
            return machines.drafting.token_seconds(running, cached)

        def sizes(groups: Sequence[Sequence[int]]) -> list[int]:
            outliers = part("OutlierRule")().last if self.migration else 0.0
            limits = self.min_workers, self.max_workers or None
            return part("tier_sizes")(
                groups, self.workers, self.slots, pass_seconds, self.train, *limits, outliers=outliers
            )

        made: Router
        if self.router in ("ranked", "two-tiers"):
            two_tiers = sizes if self.router == "two-tiers" else None
            made = part("RankedQueues")(
                self.workers, lambda: workload.history, two_tiers, self.groups or self.workers
            )
            if self.migration:
                made = part("Migrating")(made, lambda: part("OutlierRule")(0.1, workload.growth))
        elif self.router == "static":
            made = part("RankedQueues")(self.workers, None)
        else:
            made = SharedQueue()
        if self.balance:
            made = Balancing(made, self.balance)
        if self.race:
            drafters = list(self.drafters_of())
            made = part("Racing")(made, drafters, self.race, initial=drafters[0])
        return made

    def run(self, spans: bool = False) -> Cluster:
        """Returns the cluster after all steps."""
        workload, machines = Workload(self), self.machines()
        cluster = Cluster(machines, self.order, self.router_of(workload, machines), spans, self.seed)
        cluster.run(workload.steps(), self.steps)
        return cluster


def epochs(scenario: Scenario, prompts: int) -> Iterator[np.ndarray]:
    """Yields the lengths of one epoch after the other, int64 [prompts, samples]."""
    random, samples = np.random.default_rng(scenario.seed), scenario.samples
    between = scenario.sigma * np.sqrt(1 - scenario.within) * random.standard_normal(prompts)
    spread = scenario.sigma * np.sqrt(scenario.within)
    noise = np.random.default_rng(0).standard_normal((prompts, min(samples, 16)))
    scale = scale_to_mean(np.exp(between[:, None] + spread * noise), scenario.mean, scenario.longest)
    restless = 1.0
    while True:
        noise = spread * random.standard_normal((prompts, samples))
        if scenario.outliers:
            beyond = random.random((prompts, samples)) < restless * scenario.outliers
            noise += beyond * np.abs(scenario.jump * random.standard_normal((prompts, samples)))
        lengths = np.rint(scale * np.exp(between[:, None] + noise))
        yield np.clip(lengths, 1, scenario.longest).astype(np.int64)
        between = between + restless * scenario.drift * random.standard_normal(prompts)
        scale *= scenario.growth
        restless *= scenario.settling


def recorded_lengths(path: str, seed: int = 0) -> list[np.ndarray]:
    """Returns the lengths of a run's steps, each in the bins of its `rollouts.jsonl`, spread evenly within.

    Raises:
      ConfigError: the file cannot be read, or is none.
    """
    random, steps = np.random.default_rng(seed), []
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            lengths = json.loads(line)["lengths"]
            width, counts = lengths["bin"], np.asarray(lengths["counts"])
            low = np.repeat(np.arange(len(counts)) * width, counts)
            steps.append(low + random.integers(1, width + 1, len(low)))
    except OSError as error:
        raise ConfigError(f"lengths: {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"lengths: {path} is no rollouts.jsonl of a run") from error
    if not steps:
        raise ConfigError(f"lengths: {path} has no step")
    return steps


class Workload:
    """Yields the responses of one step after the other.

    Attributes:
      history: lengths of each prompt's responses in the previous epoch.
      growth: 75th percentile of the growth of prompts' median lengths in the last epoch, at least 1.1;
        computed where responses migrate.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._acceptance = scenario, list(scenario.drafters_of().values())
        # With further drafters the first one's acceptances are the same.
        self._further = [
            np.random.default_rng((scenario.seed, number)) for number in range(1, len(self._acceptance))
        ]
        self._recorded = recorded_lengths(scenario.rollouts, scenario.seed) if scenario.rollouts else None
        self.history: dict[Prompt, Sequence[int]] = {}
        self.growth = 1.1

    def steps(self) -> Iterator[list[Response]]:
        """Yields the responses of each step, those of a prompt together; those of a run are repeated."""
        scenario, random = self._scenario, np.random.default_rng(self._scenario.seed + 1)
        if self._recorded is not None:
            for number, lengths in enumerate(itertools.cycle(self._recorded)):
                count = max(len(lengths) // scenario.samples, 1)
                table = np.resize(lengths, (count, scenario.samples))
                yield self._responses(np.arange(count) + number * count, table, random)
        medians: dict[Prompt, float] = {}
        prompts, per_step = scenario.num_prompts, scenario.prompts_per_step
        for lengths in epochs(scenario, prompts):
            order = random.permutation(prompts)
            now: dict[Prompt, Sequence[int]] = {}
            for begin in range(0, prompts - per_step + 1, per_step):
                chosen = order[begin : begin + per_step]
                yield self._responses(chosen, lengths[chosen], random)
                now |= {(int(prompt),): lengths[prompt].tolist() for prompt in chosen}
            self.history = now
            before, medians = medians, {prompt: statistics.median(each) for prompt, each in now.items()}
            if scenario.migration:
                self.growth = part("growth_factor")(before, medians)

    def _responses(
        self, prompts: np.ndarray, lengths: np.ndarray, random: np.random.Generator
    ) -> list[Response]:
        drawn = [
            np.clip(
                np.rint(LEVELS * (each.acceptance + each.spread * own.standard_normal(lengths.shape))),
                0,
                LEVELS - 1,
            ).astype(int)
            for each, own in zip(self._acceptance, [random, *self._further], strict=False)
        ]
        levels = np.stack(drawn, -1).tolist() if drawn else None
        return [
            Response(
                prompt,
                self._scenario.prompt_tokens,
                length,
                () if levels is None else tuple(levels[row][column]),
            )
            for row, (prompt, group) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True))
            for column, length in enumerate(group)
        ]


@functools.cache
def rank_shares(scenario: Scenario, groups: int) -> np.ndarray:
    """Returns the shares of responses by their ranking group, float [4]: RhymeRL's table 2, over 1,024
    prompts and four epochs.

    A response is in the group that its prompt's history expects, or in a lower one; or in a higher one, and
    then not among the last tenth of the expected group; or among it, and within beta times the longest of
    its prompts; or beyond that, and migrates. A prompt's length is its median.
    """
    lengths = list(itertools.islice(epochs(scenario, 1024), 5))
    shares = [_shares(previous, now, groups) for previous, now in itertools.pairwise(lengths)]
    return np.asarray(np.mean(shares, axis=0))


def _shares(previous: np.ndarray, lengths: np.ndarray, groups: int) -> np.ndarray:
    medians = np.median(previous, axis=1)
    predicted = _ranks(medians, groups)
    higher = _ranks(lengths.ravel(), groups).reshape(lengths.shape) > predicted[:, None]
    beta = part("growth_factor")(dict(enumerate(medians)), dict(enumerate(np.median(lengths, axis=1))))
    counts = np.zeros(4)
    for group in range(groups):
        members = predicted == group
        own, above = lengths[members], higher[members]
        last = own > np.quantile(own, 0.9)
        far = own > beta * medians[members].max()
        kinds = ~above, above & ~last, above & last & ~far, above & last & far
        counts += [kind.sum() for kind in kinds]
    return counts / lengths.size


def _ranks(lengths: np.ndarray, groups: int) -> np.ndarray:
    """Ranking group of each length."""
    found = np.empty(len(lengths), int)
    for group, members in enumerate(np.array_split(np.argsort(lengths, kind="stable"), groups)):
        found[members] = group
    return found


def _value(key: str, text: str, kind: object) -> object:
    choices = get_args(kind)
    if choices:
        if text not in choices:
            raise ConfigError(f"{key}: {text!r} is none of {', '.join(choices)}")
        return text
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)  # type: ignore[operator]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{key}: {text!r} is no {kind.__name__}") from error  # type: ignore[attr-defined]


def keys_text() -> str:
    """Returns every key with its default and meaning, for `--help`."""
    meanings, lines = get_type_hints(Scenario, include_extras=True), []
    for field in dataclasses.fields(Scenario):
        (meaning,) = meanings[field.name].__metadata__
        default = field.default if field.default != "" else "none"
        lines.append(f"  {field.name:<24} {meaning} [{default}]")
    return "\n".join(lines)
