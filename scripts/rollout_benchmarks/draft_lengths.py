"""EfficientRollout's draft length over training steps: does it follow what the policy accepts?

A policy trains with real updates, and every step is rolled out plainly, with the draft length of the patience
ladder, and with its shortest and its longest one throughout (section 4.3 and Figure 4 of the paper). The
roofline is made up: by it drafting always pays, so that the length alone decides.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.base import Drafter
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.config.wing import part
from rljax.engine.engine import DecodeEngine
from rljax.errors import UserError
from rljax.reports.figures import COLORS, new_figure, save
from rljax.requests import DecodeStatistics
from rljax.training.compiling import compile_programs
from rollout_benchmarks.variants import PLAIN, Variant, make_variant, open_run, trained_steps

_LADDER = "patience ladder"


def draft_length_rows(config: ExperimentConfig) -> list[Row]:
    """Counts the tokens of a pass and the drafts in vain of the patience ladder, against fixed lengths.

    Args:
      config: the workload, whose `speculation.toggle` and `speculation.args` are used.
    """
    toggle = config.speculation.toggle
    lengths = {
        _LADDER: toggle,
        **{
            f"{length} drafts": toggle.model_copy(update={"lengths": (length,), "first": None})
            for length in (toggle.lengths[0], toggle.lengths[-1])
        },
    }
    steps: dict[str, list[float]] = {"length": [], "acceptance": [], "accept_length": [], "entropy": []}
    with open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        times: dict[Any, Any] = {}
        plain = make_variant(run, PLAIN, None, times)
        variants = [
            make_variant(
                run,
                name,
                {
                    "drafter": "quantized",
                    "args": config.speculation.args,
                    "choice": "roofline",
                    "toggle": keys,
                },
                times,
                always_pays,
            )
            for name, keys in lengths.items()
        ]
        for metrics in trained_steps(run, progress, plain, variants):
            accept_length = variants[0].statistics[-1].accept_length
            now = *_drafted(variants[0]), accept_length, metrics["entropy"]
            for values, value in zip(steps.values(), now, strict=True):
                values.append(value)
    ladder, *fixed = (variant.total() for variant in variants)
    by_step = {f"{name}_by_step": values for name, values in steps.items()}
    rows = []
    for (name, keys), total in zip(list(lengths.items())[1:], fixed, strict=True):
        details = {"tokens": ladder.tokens, "steps": config.training.steps, "fixed_length": keys.lengths[0]}
        rows += [
            counted_row(
                f"draft_lengths/{_LADDER}/tokens a pass",
                ladder.accept_length,
                total.accept_length,
                "tokens",
                f"{name} throughout",
                **details,
                **(by_step if not rows else {}),
                **({"toggle": toggle.model_dump()} if not rows else {}),
            ),
            counted_row(
                f"draft_lengths/{_LADDER}/drafts in vain",
                _vain(ladder),
                _vain(total),
                "a token",
                f"{name} throughout",
                less=True,
                **details,
            ),
        ]
    return rows


def always_pays(engine: DecodeEngine, drafter: Drafter) -> Any:
    """A roofline by which drafting takes a thousandth of a plain step, and verifying the time of one."""
    nothing = dict.fromkeys(
        ("kv_byte", "flop", "attention_flop", "slot", "verified_slot", "verifying", "draft_flop"), 0.0
    )
    costs = part("policy_costs")(engine.config, engine.numerics, drafter.policy_weights.format)
    return part("Roofline")(costs=costs, byte=1.0, draft_byte=1e-3, draft_slot=0.0, overlap=1.0, **nothing)


def _drafted(variant: Variant) -> tuple[int, float]:
    """The draft length of the last step, and the share of its drafts that was accepted."""
    state, acceptance = variant.speculator.state(), part("StepAcceptance")()
    length = int(state["patience_ladder"][0])
    acceptance.load_state(state["toggle_acceptance"])
    return length, acceptance.share(length) or 0.0


def _vain(total: DecodeStatistics) -> float:
    return (total.drafted - total.accepted) / total.tokens


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the draft length and the tokens of a pass by step, and what was accepted beside the thresholds.

    Raises:
      UserError: no row has steps.
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
