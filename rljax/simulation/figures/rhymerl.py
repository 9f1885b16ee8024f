"""RhymeRL: HistoPipe, two tiers, HistoSpec and migration over veRL's rollouts, one version behind."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rljax.cluster.pipe import growth_factor
from rljax.simulation.figures.figure import Figure, Published
from rljax.simulation.lengths import LengthModel
from rljax.simulation.outcome import Outcome, draw_timeline, outcome_of
from rljax.simulation.scenario import Scenario

_PIPE = ("order=pipe", "router=ranked", "migration=true")
_TIERS = ("order=pipe", "router=two-tiers", "migration=true")
_HISTORY = "drafters=history:0.5:0.15:0"


def _outcome(overrides: Sequence[str]) -> Outcome:
    scenario = Scenario().replaced(overrides)
    return outcome_of(
        scenario.run(spans=True), scenario.warm_up, scenario.prompts_per_step * scenario.samples
    )


_CENTRAL = (
    "workers=32",
    "tensor=2",
    "model=qwen3-14b",
    "samples=16",
    "prompts_per_step=64",
    "order=one-off",
    "router=static",
    "groups=16",
    "longest=16384",
    "mean=4000",
    "within=0.02",
    "drift=0.05",
    "outliers=0.03",
    "jump=0.7",
    "train=30",
    "steps=16",
    "warm_up=8",
    "look=10",
)
_GIVEN = {
    "policy, devices of a worker": "Qwen3 14B, 2 (section 7)",
    "responses to a prompt": "16",
    "longest response": "16,384 (8,192)",
    "ranking groups": "16 for math, 8 for code (section 7.2.3)",
    "baseline": "veRL, rollout and training apart, one version behind",
    "accuracy of ranks": "table 2: 79.7 % of responses in their group or a lower one with 16 groups (math-1)",
    "acceptance of drafts": "65-79 % of drafts (Fig. 17)",
}
_CHOSEN = {
    "workers=32": "64 of the 128 GPUs decode, the others train: not published",
    "prompts_per_step=64": "32 responses a worker; the batch is not published",
    "mean=4000, sigma=0.8": "Fig. 3: means rise from 1K to 10K while 320 steps pass",
    "within=0.02, drift=0.05, outliers=0.03, jump=0.7": "fitted to table 2's accuracy",
    "train=30": "rollout is 84 to 91 % of a step that does one after the other (section 1)",
    "history:0.5:0.15:0": "probability that a draft is accepted behind accepted ones, drafts at no cost: such"
    " chains of up to 8 drafts have 40 % accepted, and longer windows where they go well are left out",
    "costs": "roofline of an H100 at half its FLOP/s and 70 % of its bandwidth, 3 ms a pass besides",
}
_BAND = (
    ("mean 2,500", ("mean=2500",)),
    ("mean 6,000", ("mean=6000",)),
    ("sigma 1.0", ("sigma=1.0",)),
    ("64 responses a worker", ("prompts_per_step=128",)),
    ("longer updates", ("train=60",)),
    ("more and larger outliers", ("outliers=0.05", "jump=1.5")),
    ("slower passes", ("base_ms=10",)),
)


def _ablation(overrides: Sequence[str]) -> Mapping[str, float]:
    base = _outcome(overrides)
    free = _outcome([*overrides, "order=pipe", "router=static"])
    pipe = _outcome([*overrides, *_PIPE])
    tiers = _outcome([*overrides, *_TIERS])
    spec = _outcome([*overrides, *_TIERS, _HISTORY])
    shared = _outcome([*overrides, "order=pipe", "router=shared", "balance=8", _HISTORY])
    seconds = [each.step_seconds for each in (base, pipe, tiers, spec)]
    return {
        "HistoPipe": seconds[0] / seconds[1],
        "two tiers on top": seconds[1] / seconds[2],
        "HistoSpec on top": seconds[2] / seconds[3],
        "all together": seconds[0] / seconds[3],
        "earliest worker idle, share of the rollout": base.first_idle,
        "responses migrated, percent": 100 * tiers.migrated,
        "ours: the pipe without ranks": seconds[0] / free.step_seconds,
        "ours: without ranks, balanced, with drafts": seconds[0] / shared.step_seconds,
    }


def _picture(path: Path, central: Sequence[str]) -> None:
    clusters = {}
    for name, more in {
        "veRL, one version behind": (),
        "the pipe without ranks": ("order=pipe", "router=static"),
        "HistoPipe": _PIPE,
        "HistoPipe with two tiers": _TIERS,
        "and with drafts from history": (*_TIERS, _HISTORY),
    }.items():
        clusters[name] = Scenario().replaced([*central, *more]).run(spans=True)
    draw_timeline(clusters, path, 9, 13, "RhymeRL, Fig. 10 and 14, by simulation: a colour a step")


def _end_to_end(overrides: Sequence[str]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for longest in (8192, 16384):
        ratios = []
        for model, tensor in (("qwen3-8b", 2), ("qwen3-14b", 2), ("qwen2.5-32b", 4)):
            for groups in (16, 8):
                shape = (
                    f"model={model}",
                    f"tensor={tensor}",
                    f"groups={groups}",
                    f"longest={longest}",
                    f"mean={longest / 4}",
                )
                base = _outcome([*overrides, *shape])
                ours = _outcome([*overrides, *shape, *_TIERS, _HISTORY])
                ratios.append(base.step_seconds / ours.step_seconds)
        found[f"mean of 8B to 32B, {longest // 1024}K"] = sum(ratios) / len(ratios)
        if longest == 16384:
            found["most"] = max(ratios)
    return found


def _by_ten_steps(overrides: Sequence[str]) -> Mapping[str, float]:
    """Time of ten steps; the responses grow from epoch to epoch."""
    runs = {}
    for name, more in {"base": (), "pipe": _PIPE, "tiers": _TIERS}.items():
        cluster = Scenario().replaced([*overrides, *more]).run()
        ends = [step.trained for step in cluster.steps]
        runs[name] = [ends[i + 10] - ends[i] for i in range(7, len(ends) - 10, 10)]
    pipe = [a / b for a, b in zip(runs["base"], runs["pipe"], strict=True)]
    tiers = [a / b for a, b in zip(runs["pipe"], runs["tiers"], strict=True)]
    return {"HistoPipe, most in ten steps": max(pipe), "two tiers, most in ten steps": max(tiers)}


def _ranks(overrides: Sequence[str]) -> Mapping[str, float]:
    """Shares of responses as table 2 defines them, over six epochs."""
    scenario = Scenario().replaced(overrides)
    model = LengthModel(
        scenario.mean,
        scenario.longest,
        scenario.sigma,
        scenario.within,
        scenario.drift,
        outliers=scenario.outliers,
        jump=scenario.jump,
    )
    found: dict[str, float] = {}
    for groups in (8, 16):
        epochs, shares = model.epochs(2048, scenario.samples, 0), []
        previous = next(epochs)
        for _ in range(6):
            lengths = next(epochs)
            shares.append(_rank_shares(previous, lengths, groups))
            previous = lengths
        accurate, migrated = np.mean(shares, axis=0)
        found[f"in their group or a lower one, {groups} groups"] = 100 * accurate
        found[f"migrated, {groups} groups"] = 100 * migrated
    return found


def _rank_shares(previous: np.ndarray, lengths: np.ndarray, groups: int) -> tuple[float, float]:
    medians = np.median(previous, axis=1)
    predicted = np.empty(len(medians), int)
    for group, members in enumerate(np.array_split(np.argsort(medians, kind="stable"), groups)):
        predicted[members] = group
    real = np.empty(lengths.size, int)
    for group, members in enumerate(np.array_split(np.argsort(lengths.ravel(), kind="stable"), groups)):
        real[members] = group
    higher = real.reshape(lengths.shape) > predicted[:, None]
    beta = growth_factor(dict(enumerate(medians)), dict(enumerate(np.median(lengths, axis=1))))
    migrated = 0
    for group in range(groups):
        members = predicted == group
        own = lengths[members]
        last = own > np.quantile(own, 0.9)
        migrated += int((last & higher[members] & (own > beta * medians[members].max())).sum())
    return 1 - float(higher.mean()), migrated / lengths.size


FIGURES = (
    Figure(
        "rhymerl-14",
        "RhymeRL, Fig. 14 (14B, 16K), Fig. 18, and section 1",
        {
            "HistoPipe": Published(1.43, "Fig. 14, math"),
            "two tiers on top": Published(1.10, "Fig. 14, math"),
            "HistoSpec on top": Published(1.50, "Fig. 14, math"),
            "earliest worker idle, share of the rollout": Published(0.76, "section 3.1, 32B"),
            "responses migrated, percent": Published(3.85, "Fig. 18, the middle of 2.2 to 5.5"),
        },
        _GIVEN,
        _CHOSEN,
        _ablation,
        _CENTRAL,
        _BAND,
        (
            "The earliest of 32 workers with 32 responses each is idle for longer than the paper's, whose"
            " number of responses is not published: with 64 each it is idle for 0.88 of the rollout.",
            "A pipe whose workers take their next part as soon as they are free has most of HistoPipe's gain"
            " without any ranks: waiting for the slowest worker in every step is what is lost, and ranks and"
            " tiers add what balance over two steps adds.",
        ),
        _picture,
    ),
    Figure(
        "rhymerl-13",
        "RhymeRL, Fig. 13, end to end",
        {
            "mean of 8B to 32B, 8K": Published(1.9, "section 7.1"),
            "mean of 8B to 32B, 16K": Published(2.3, "section 7.1"),
            "most": Published(2.6, "section 7.1", most=True),
        },
        _GIVEN,
        {**_CHOSEN, "mean": "a quarter of the longest response"},
        _end_to_end,
        (*_CENTRAL, "steps=12"),
        (
            ("64 responses a worker", ("prompts_per_step=128",)),
            ("more and larger outliers", ("outliers=0.05", "jump=1.5")),
        ),
    ),
    Figure(
        "rhymerl-15",
        "RhymeRL, Fig. 15, over ten steps",
        {
            "HistoPipe, most in ten steps": Published(1.68, "Fig. 15", most=True),
            "two tiers, most in ten steps": Published(1.14, "Fig. 15", most=True),
        },
        _GIVEN,
        {**_CHOSEN, "growth=1.1, steps=38": "responses grow while training goes on (Fig. 3a)"},
        _by_ten_steps,
        (*_CENTRAL, "growth=1.1", "mean=2500", "steps=38"),
        _BAND[3:5],
    ),
    Figure(
        "rhymerl-table-2",
        "RhymeRL, table 2, math-1",
        {
            "in their group or a lower one, 8 groups": Published(85.7, "table 2"),
            "in their group or a lower one, 16 groups": Published(79.7, "table 2"),
            "migrated, 8 groups": Published(1.49, "table 2"),
            "migrated, 16 groups": Published(2.47, "table 2"),
        },
        {"responses to a prompt": "16", "alpha": "10 %", "beta": "75th percentile of growth, at least 1.1"},
        {
            "within=0.02, outliers=0.03, jump=0.7": "fitted to the accuracy; a normal spread alone would"
            " need as"
            " small a one, and have no outliers",
            "history": "a prompt's length is its median; a group's longest is the largest of them",
        },
        _ranks,
        _CENTRAL,
        (
            ("within 0.01", ("within=0.01",)),
            ("within 0.05", ("within=0.05",)),
            ("more and larger outliers", ("outliers=0.05", "jump=1.5")),
            ("no outliers", ("outliers=0",)),
        ),
        (
            "More migrate here than in the paper. In each ranking group a tenth is among the last, and where"
            " a seventh of its responses belongs into a higher group, these are nearly all of that tenth."
            " In the"
            " paper only a seventh of the misplaced ones is: they would have to gather in a few groups.",
        ),
    ),
)
