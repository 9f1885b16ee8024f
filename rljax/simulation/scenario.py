"""A simulation as keys and values: `python scripts/simulate.py workers=64 order=pipe router=ranked`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args, get_type_hints

from rljax.cluster.migration import OutlierRule
from rljax.cluster.pipe import group_seconds, workers_of_groups
from rljax.cluster.planner import Affine, Mode
from rljax.cluster.router import Balancing, Migrating, Racing, RankedQueues, Router, SharedQueue
from rljax.errors import ConfigError, known_names
from rljax.simulation.cluster import Cluster, Machines, Order
from rljax.simulation.costs import (
    PassCosts,
    named_hardware,
    named_shape,
    planned_costs,
    roofline_costs,
)
from rljax.simulation.drafting import Drafting
from rljax.simulation.lengths import LengthModel, recorded_lengths
from rljax.simulation.workload import Workload

Routing = Literal["shared", "static", "ranked", "two-tiers"]


def _key(default: object, help: str) -> "dataclasses.Field":  # noqa: A002 - as argparse calls it
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Everything that a simulation is computed from. Times are seconds."""

    model: str = _key("qwen3-14b", "policy: a shape of costs.py")
    device: str = _key("h100", "device of the planner's table")
    tensor: int = _key(2, "devices of a worker")
    workers: int = _key(16, "rollout workers")
    slots: int = _key(256, "responses that a worker decodes at a time")
    order: Order = _key("on-policy", "on-policy, one-off (one version behind), or pipe")
    router: Routing = _key(
        "shared",
        "shared: workers take prompts as they have room; static: as many for each, dealt out at once; ranked:"
        " HistoPipe's ranking groups; two-tiers: with more workers for long ones",
    )
    groups: int = _key(0, "ranking groups; 0 for one a worker")
    migration: bool = _key(False, "move outliers of ranking groups (RhymeRL, section 6.3)")
    balance: int = _key(0, "free workers take half of a worker that has at least so many responses; 0 never")
    race: int = _key(0, "free workers decode copies of so many stragglers each; 0 never")
    prompts: int = _key(0, "prompts of an epoch; 0 for four steps")
    prompts_per_step: int = _key(256, "prompts of a step")
    samples: int = _key(16, "responses to a prompt")
    prompt_tokens: int = _key(300, "tokens of a prompt")
    mean: float = _key(4000.0, "mean tokens of a response in the first epoch")
    longest: int = _key(16384, "longest response")
    sigma: float = _key(0.8, "spread of the logarithm of lengths")
    within: float = _key(0.3, "share of that variance within a prompt's responses")
    drift: float = _key(0.1, "movement of a prompt's logarithm from epoch to epoch")
    growth: float = _key(1.0, "growth of the mean from epoch to epoch")
    rollouts: str = _key("", "rollouts.jsonl of a run, for its lengths")
    costs: str = _key("", "plan written by scripts/plan.py --json, for its decode passes")
    arithmetic: float = _key(0.5, "share of the device's FLOP/s that is reached")
    memory: float = _key(0.7, "share of its bandwidth that is reached")
    base_ms: float = _key(3.0, "milliseconds that every pass takes besides")
    drafters: str = _key(
        "",
        "drafters as name:acceptance:spread:milliseconds[:more per request], separated by commas; workers begin"
        " with the first one",
    )
    windows: str = _key("0,1,2,3,4,6,8", "drafts a pass to choose among")
    draft_below: int = _key(0, "batches of at most so many draft; 0 for all")
    mode: Mode = _key("coupled", "coupled or decoupled drafting")
    train: float = _key(60.0, "seconds of an update")
    train_tokens_per_second: float = _key(0.0, "instead: rate of updates")
    weights: float = _key(2.0, "seconds from an update's end until workers have the weights")
    failures_per_hour: float = _key(0.0, "of a worker")
    restart: float = _key(60.0, "seconds until a lost worker is replaced")
    sync: float = _key(0.0, "seconds between two looks of the host; 0 sees every end at once")
    look: float = _key(5.0, "seconds between two reports where requests are moved")
    steps: int = _key(20, "steps")
    warm_up: int = _key(8, "steps that are not counted: two epochs of the default")
    seed: int = _key(0, "of everything random")

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
        if self.race and not self.drafters:
            raise ConfigError("race: copies need another drafter; set drafters")
        if ranked and self.order != "pipe":
            raise ConfigError(
                "router: a worker with long responses would be waited for in every step; set order=pipe"
            )
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
        return roofline_costs(
            named_shape(self.model),
            named_hardware(self.device),
            self.tensor,
            self.arithmetic,
            self.memory,
            self.base_ms / 1000,
        )

    def drafters_of(self) -> dict[str, tuple[float, float, Affine]]:
        """Returns acceptance, its spread, and costs of each drafter."""
        found = {}
        for text in filter(None, self.drafters.split(",")):
            name, *numbers = text.split(":")
            try:
                mean, spread, base, each = [*map(float, numbers), 0.0][:4]
            except ValueError as error:
                raise ConfigError(
                    f"drafters: {text} should be name:acceptance:spread:milliseconds, such as srt:0.6:0.2:0"
                ) from error
            found[name] = mean, spread, Affine(each / 1000, base / 1000)
        return found

    def drafting(self, costs: PassCosts) -> Drafting | None:
        """Returns how far is drafted; None for not at all."""
        drafters = self.drafters_of()
        if not drafters:
            return None
        return Drafting(
            costs,
            {name: each[2] for name, each in drafters.items()},
            {name: each[0] for name, each in drafters.items()},
            [int(window) for window in self.windows.split(",")],
            self.mode,
            self.draft_below or None,
        )

    def workload(self) -> Workload:
        """Returns the responses of the steps."""
        lengths = (
            recorded_lengths(self.rollouts, self.seed)
            if self.rollouts
            else LengthModel(self.mean, self.longest, self.sigma, self.within, self.drift, self.growth)
        )
        acceptance = [each[:2] for each in self.drafters_of().values()]
        return Workload(
            lengths,
            self.num_prompts,
            self.prompts_per_step,
            self.samples,
            self.prompt_tokens,
            acceptance,
            self.seed,
        )

    def machines(self) -> Machines:
        """Returns what steps run on."""
        costs, rate = self.pass_costs(), self.train_tokens_per_second
        return Machines(
            self.workers,
            self.slots,
            costs,
            self.drafting(costs),
            (lambda tokens: tokens / rate) if rate else (lambda tokens: self.train),
            self.weights,
            self.restart,
            self.failures_per_hour,
            sync_seconds=self.sync,
            look_seconds=self.look,
        )

    def routers(self, workload: Workload, machines: Machines) -> Callable[[], Router]:
        """Returns what makes the router of a coordinator."""

        def pass_seconds(running: int, tokens: float) -> float:
            cached = machines.costs.cached * (tokens + running * self.prompt_tokens)
            drafting = machines.drafting
            if drafting is None:
                return machines.costs.fixed(running, running) + cached
            name, milliseconds = drafting.names[0], int(1000 * cached)
            window = drafting.window(running, name, milliseconds)
            level = round(self.drafters_of()[name][0] * 20)
            seconds = drafting.seconds(running, name, window, milliseconds) + cached
            return seconds / drafting.tokens(level, window)

        def sizes(groups: Sequence[Sequence[int]]) -> list[int]:
            means = [sum(lengths) / len(lengths) for lengths in groups]
            by_mean = dict(zip(means, groups, strict=True))

            @functools.cache
            def time(mean: float, workers: int) -> float:
                return group_seconds(by_mean[mean], workers, self.slots, pass_seconds)

            most = max(1, 4 * self.workers // len(groups))
            return workers_of_groups(means, self.workers, time, self.train, most=most)

        def router() -> Router:
            made: Router
            if self.router in ("ranked", "two-tiers"):
                two_tiers = sizes if self.router == "two-tiers" else None
                made = RankedQueues(
                    self.workers, lambda: workload.history, two_tiers, self.groups or self.workers
                )
                if self.migration:
                    made = Migrating(made, lambda: OutlierRule(0.1, workload.growth))
            elif self.router == "static":
                made = RankedQueues(self.workers, dict)
            else:
                made = SharedQueue()
            if self.balance:
                made = Balancing(made, self.balance)
            if self.race:
                made = Racing(made, list(self.drafters_of()), self.race)
            return made

        return router

    def run(self, spans: bool = False) -> Cluster:
        """Returns the cluster after all steps."""
        workload, machines = self.workload(), self.machines()
        cluster = Cluster(machines, self.order, self.routers(workload, machines), spans, self.seed)
        cluster.run(workload.steps(), self.steps)
        return cluster


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
    lines = []
    for field in dataclasses.fields(Scenario):
        default = field.default if field.default != "" else "none"
        lines.append(f"  {field.name:<24} {field.metadata['help']} [{default}]")
    return "\n".join(lines)
