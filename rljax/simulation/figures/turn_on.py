"""Which mechanism pays for which shape of workload: the table of docs/what-to-turn-on.md."""

import dataclasses
from collections.abc import Mapping, Sequence

from rljax.simulation.figures.figure import Figure
from rljax.simulation.scenario import Scenario

_DRAFTS = "drafters=srt:0.5:0.2:0"
_TWO = "drafters=srt:0.5:0.2:0,prompt_lookup:0.35:0.25:0"
# The head's acceptance is what benchmarks/results/cluster-spot.json measured: 1.55 tokens a pass of one that
# is not trained, 2.80 after the updates of idle workers, 3.67 after those of a stage behind every rollout.
_HEAD = "drafters=head:{}:0.1:0.5"
_UPDATES_OF_HEAD = 200 * 0.2  # seconds, where they are a stage of their own
_SMALL = "drafters=small:0.7:0.12:1.5:0.02"
_OWN_DEVICES = "workers=11"  # of 32 GPUs each has three: two verify, one drafts
_CENTRAL = (
    "workers=16",
    "prompts_per_step=32",
    "steps=8",
    "warm_up=4",
    "mean=4000",
    "within=0.05",
    "drift=0.05",
    "outliers=0.03",
    "jump=0.7",
    "train=30",
    "look=10",
)
_PIPE = ("order=pipe", "router=ranked", "migration=true")
_WAYS: dict[str, tuple[str, ...]] = {
    "balance": ("balance=8",),
    "drafts": (_DRAFTS,),
    "drafts, balance": (_DRAFTS, "balance=8"),
    "drafts, balance, race": (_TWO, "balance=8", "race=4"),
    "head": (_HEAD.format(0.36),),
    "head, trained behind rollouts": (_HEAD.format(0.73),),
    "head, `spot`": (_HEAD.format(0.64), "spot=2"),
    "small model": (_SMALL,),
    "small model, `decoupled`": (_SMALL, _OWN_DEVICES, "mode=either"),
    "staleness 1": ("order=pipe",),
    "staleness 1, balance": ("order=pipe", "balance=8"),
    "staleness 1, ranked": _PIPE,
    "staleness 1, two tiers": ("order=pipe", "router=two-tiers", "migration=true", "groups=8"),
    "staleness 1, ranked, drafts": (*_PIPE, _DRAFTS),
}


def _speed_ups(overrides: Sequence[str]) -> Mapping[str, float]:
    def step(*more: str, stage: float = 0.0) -> float:
        scenario = Scenario().replaced([*overrides, *more])
        scenario = dataclasses.replace(scenario, train=scenario.train + stage)
        steps = scenario.run().steps
        begin = steps[scenario.warm_up - 1].trained
        return (steps[-1].trained - begin) / (len(steps) - scenario.warm_up)

    base = step()
    stages = {"head, trained behind rollouts": _UPDATES_OF_HEAD}
    return {name: base / step(*more, stage=stages.get(name, 0.0)) for name, more in _WAYS.items()}


FIGURES = (
    Figure(
        "turn-on",
        "what to turn on, by shape of the workload; speed-ups of a step over workers that take prompts as"
        " they have room, on-policy",
        {},
        {},
        {
            "drafts": "from a cache, at no cost, accepted with 0.5; a second drafter with 0.35, independent",
            "head": "0.5 ms a drafted token; accepted with 0.36 as it begins, 0.64 trained in idle time and"
            " 0.73 in a stage of 40 s behind every rollout (cluster-spot.json)",
            "small model": "1.5 ms a drafted token, accepted with 0.7; decoupled, a third of the GPUs draft",
        },
        _speed_ups,
        _CENTRAL,
        (
            ("8 responses a worker", ("prompts_per_step=8",)),
            ("128 responses a worker", ("prompts_per_step=128",)),
            ("lengths nearly alike", ("sigma=0.2", "outliers=0")),
            ("a longer tail", ("sigma=1.2", "mean=3000")),
            ("updates as long as rollouts", ("train=200",)),
            ("lengths that history does not tell", ("within=0.9", "outliers=0")),
        ),
    ),
)
