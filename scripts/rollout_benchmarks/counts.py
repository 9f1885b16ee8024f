"""Papers' figures in tokens of a pass: they follow from the tokens alone, and not from a machine's times.

`algorithms`: SRT by algorithm (Table 1 of its paper) and by responses to a prompt (Table 3), in about the
proportions of its Table 2; ReTool is PPO with the calculator's task. Whatever a drafter has is verified, up
to so many nodes: on a small policy the default manager would rightly verify nothing. `draft_lengths`:
EfficientRollout's patience ladder (section 4.3 and Figure 4), under a made-up roofline by which drafting
always pays, so that the length alone decides. `races`: the draft ladder (TLT), with made-up drafters, each
of which knows most of some responses and little of the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters.base import Drafter
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig, SpeculationConfig, load_config
from rljax.config.wing import part
from rljax.engine.engine import DecodeEngine
from rljax.errors import UserError
from rljax.reports.figures import COLORS, new_figure, save
from rljax.requests import Completion, DecodeStatistics, accumulate
from rljax.rollout.collector import Scheduler
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from rljax.training.compiling import compile_programs
from rollout_benchmarks.equality import Knowing, check_equal
from rollout_benchmarks.variants import (
    PLAIN,
    make_variant,
    open_run,
    step_requests,
    trained_steps,
    with_hidden_layers,
)


def _passes_row(
    name: str, total: DecodeStatistics, base: DecodeStatistics, unit: str, baseline: str, **more: Any
) -> Row:
    """The row of the tokens of a pass."""
    counts = {"tokens": total.tokens, "passes": total.steps, "baseline_passes": base.steps}
    counts["verifying_passes"] = total.verified
    rates = total.tokens / total.steps, base.tokens / base.steps
    return counted_row(name, *rates, unit, baseline, **counts, **more)


# --- SRT by algorithm ------------------------------------------------------------------------------------

_TOOLS = "configs/tools.yaml"
CASES: dict[str, tuple[str, int, int]] = {  # algorithm, prompts of a step, responses to each
    "PPO": ("ppo", 32, 1),
    "GRPO, 5 responses": ("grpo", 8, 5),
    "GRPO, 10 responses": ("grpo", 8, 10),
    "DAPO": ("dapo", 8, 16),
    "PPO with tools": ("ppo", 32, 1),
}
_DRAFTERS = {"n-gram": "prompt_lookup", "SuffixDecoding": "suffix_decoding", "SRT": "srt"}
_STEPS_OF_AN_EPOCH = 2


def algorithm_rows(file: str, overrides: Sequence[str]) -> list[Row]:
    """Counts the tokens of a forward pass for each case and drafter, against plain decoding."""
    return [row for name, config in configs(file, overrides) for row in _rows(name, config)]


def configs(file: str, overrides: Sequence[str]) -> Iterator[tuple[str, ExperimentConfig]]:
    """Yields the name and the config of every case."""
    for name, (algorithm, prompts, responses) in CASES.items():
        keys = (
            f"algorithm.name={algorithm}",
            f"rollout.prompts_per_step={prompts}",
            f"rollout.samples_per_prompt={responses}",
            f"task.problems={_STEPS_OF_AN_EPOCH * prompts}",
            "speculation.drafter=srt",
        )
        yield name, load_config(_TOOLS if "tools" in name else file, [*overrides, *keys])


def _rows(name: str, config: ExperimentConfig) -> list[Row]:
    shape = dict.fromkeys(("depth", "top_k", "nodes"), config.speculation.max_drafts)
    with open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        times, plain, variants = {}, make_variant(run, PLAIN, None, {}), []
        for drafter, kind in _DRAFTERS.items():
            keys = {"drafter": kind, "choice": "fixed", "strategies": [{"drafter": kind, **shape}]}
            variants.append(make_variant(run, drafter, keys, times))
        for _ in trained_steps(run, progress, plain, variants):
            pass
    rows, first = [], _STEPS_OF_AN_EPOCH
    for when, which in (("first epoch", slice(0, first)), ("later epochs", slice(first, None))):
        if not plain.seconds[which]:
            continue
        base = plain.total(which)
        for variant in variants:
            total, label = variant.total(which), f"algorithms/{name}/{when}/{variant.name}"
            accepted = total.accepted / max(total.drafted, 1)
            more = {"accept_length": total.accept_length, "acceptance": accepted}
            rows.append(_passes_row(label, total, base, "tokens a forward pass", "plain decoding", **more))
    return rows


# --- EfficientRollout's draft lengths --------------------------------------------------------------------

_LADDER = "patience ladder"


def draft_length_rows(config: ExperimentConfig) -> list[Row]:
    """Counts the tokens of a pass and the drafts in vain of the patience ladder of `speculation.toggle`,
    against fixed lengths.
    """
    toggle = config.speculation.toggle
    lengths = toggle.lengths[0], toggle.lengths[-1]
    toggles = {_LADDER: toggle} | {
        f"{length} drafts": toggle.model_copy(update={"lengths": (length,), "first": None})
        for length in lengths
    }
    shared = {"drafter": "quantized", "args": config.speculation.args, "choice": "roofline"}
    steps: dict[str, list[float]] = {"length": [], "acceptance": [], "accept_length": [], "entropy": []}
    with open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        times: dict[Any, Any] = {}
        plain = make_variant(run, PLAIN, None, times)
        variants = [
            make_variant(run, name, shared | {"toggle": each}, times, always_pays)
            for name, each in toggles.items()
        ]
        for metrics in trained_steps(run, progress, plain, variants):
            first, state, acceptance = variants[0], variants[0].speculator.state(), part("StepAcceptance")()
            length = int(state["patience_ladder"][0])
            acceptance.load_state(state["toggle_acceptance"])
            share, tokens = acceptance.share(length) or 0.0, first.statistics[-1].accept_length
            for values, value in zip(
                steps.values(), (length, share, tokens, metrics["entropy"]), strict=True
            ):
                values.append(value)
    ladder, *fixed = (variant.total() for variant in variants)
    more = {f"{name}_by_step": values for name, values in steps.items()} | {"toggle": toggle.model_dump()}
    rows = []
    for length, total in zip(lengths, fixed, strict=True):
        details = {"tokens": ladder.tokens, "steps": config.training.steps, "fixed_length": length}
        baseline, label = f"{length} drafts throughout", f"draft_lengths/{_LADDER}"
        both = ladder.accept_length, total.accept_length
        rows.append(counted_row(f"{label}/tokens a pass", *both, "tokens", baseline, **details, **more))
        vain = [(each.drafted - each.accepted) / each.tokens for each in (ladder, total)]
        rows.append(counted_row(f"{label}/drafts in vain", *vain, "a token", baseline, less=True, **details))
        more = {}
    return rows


def always_pays(engine: DecodeEngine, drafter: Drafter) -> Any:
    """A roofline by which drafting takes a thousandth of a plain step, and verifying the time of one."""
    nothing = dict.fromkeys(
        ("kv_byte", "flop", "attention_flop", "slot", "verified_slot", "verifying", "draft_flop"), 0.0
    )
    costs = part("policy_costs")(engine.config, engine.numerics, drafter.policy_weights.format)
    return part("Roofline")(costs=costs, byte=1.0, draft_byte=1e-3, draft_slot=0.0, overlap=1.0, **nothing)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the draft length and the tokens of a pass by step, and what was accepted beside the thresholds;
    raises a UserError if no row has steps.
    """
    row = next((row for row in rows if "length_by_step" in row), None)
    if row is None:
        raise UserError("--plot: the results have no draft lengths; measure them with --only draft_lengths")
    steps = range(1, 1 + len(row["length_by_step"]))
    figure = new_figure(7.5, 5)
    above, below = figure.subplots(2, 1, sharex=True)
    above.step(steps, row["length_by_step"], where="mid", color=COLORS[0], label="draft length γ")
    above.plot(steps, row["accept_length_by_step"], color=COLORS[1], label="tokens of a pass τ")
    above.set(ylabel="tokens", ylim=(0, None))
    below.plot(steps, row["acceptance_by_step"], "o-", color=COLORS[2], markersize=3, label="drafts accepted")
    for name, line in (("alpha_up", "--"), ("alpha_down", ":")):
        value = row["toggle"][name]
        below.axhline(value, color="0.4", linestyle=line, linewidth=1, label=f"{name} {value:g}")
    below.set(xlabel="training step", ylabel="share", ylim=(0, 1.02))
    entropy = below.twinx()
    entropy.plot(steps, row["entropy_by_step"], color=COLORS[3], linewidth=1, label="entropy (right)")
    entropy.set(ylabel="nats", ylim=(0, None))
    handles = [*below.get_legend_handles_labels()[0], *entropy.get_legend_handles_labels()[0]]
    below.legend(handles=handles, loc="lower left", fontsize=8)
    above.legend(loc="lower right", fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    save(figure, path)


# --- TLT's draft ladder ----------------------------------------------------------------------------------

_SHARES = {"first": 0.6, "second": 0.25, "third": 0.15}  # of the requests that each drafter is good for
_GOOD, _BAD = 0.9, 0.15  # share of the tokens that a drafter is right about
_PLAIN_ROWS = 64  # a pass of so many rows takes twice as long as a plain step


class _MadeUpTimes(PassTimes):
    """Times by the number of rows, whatever is measured."""

    def has_plain(self, batch: int, length: int) -> bool:
        return True

    def plain(self, batch: int, length: int) -> float:
        return 1.0

    def verify(self, batch: int, length: int, rows: int) -> float:
        return 1.0 + rows / _PLAIN_ROWS

    def _add(self, seconds: float, *key: Any) -> None:
        """Does nothing."""


def race_rows(config: ExperimentConfig, seeds: int = 4) -> list[Row]:
    """Counts verifying passes and tokens a pass of the draft ladder, against its first drafter alone, on one
    step's requests. A seed draws who is good for which of them; its first rollout gives the ladder its
    history, and its second is counted.
    """
    ways = {
        "first alone": (["first"], "ladder"),
        "ladder": (_SHARES, "ladder"),
        "expected": (_SHARES, "expected"),
    }
    totals = {name: DecodeStatistics() for name in ways}
    with open_run(config) as (run, progress):
        progress.stage("bench", seeds)
        engine, slots = with_hidden_layers(run.engine, None), run.config.engine.max_slots
        requests, params = step_requests(run, 0), run.engine.load_params(run.state.params)
        completions, _ = run.collector.scheduler.run(params, requests)
        for seed in range(seeds):
            right = _draw(completions, np.random.default_rng(seed))
            for name, (known, choice) in ways.items():
                drafters = {each: Knowing(right[each], completions) for each in known}
                chosen = StrategyChoice(SpeculationConfig(choice=choice))
                speculator = Speculator(engine, drafters, slots, times=_MadeUpTimes(), strategies=chosen)
                scheduler = Scheduler(engine, slots, None, speculator)
                scheduler.run(params, requests)
                again, statistics = scheduler.run(params, requests)
                check_equal(completions, again)
                accumulate(totals[name], statistics)
            progress.step(seed + 1, {"tokens_per_second": 0.0})
    alone, rows = totals.pop("first alone"), []
    for name, total in totals.items():
        more = {"seeds": seeds, "verified_rows": total.verified_rows}
        more["tokens_a_slot_and_pass"] = total.accept_length
        baseline = "the ladder with the first drafter alone"
        rows.append(_passes_row(f"races/{name}", total, alone, "tokens a pass", baseline, **more))
    return rows


def _draw(completions: Sequence[Completion], rng: np.random.Generator) -> dict[str, list[np.ndarray]]:
    """By drafter, the tokens of every response that it is right about."""
    good = rng.choice(list(_SHARES), len(completions), p=list(_SHARES.values()))
    return {
        name: [
            rng.random(len(completion.response_ids)) < (_GOOD if of_request == name else _BAD)
            for completion, of_request in zip(completions, good, strict=True)
        ]
        for name in _SHARES
    }
