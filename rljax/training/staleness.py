"""Rollouts whose weights are older than those that learn from them (`rollout.staleness`, `max_staleness`).

The version of the weights is a number: the steps that they have learned. A step's requests are created with
the newest version that there is when they are created; with `staleness: 1` that is at the beginning of the
step before, so that workers decode them while the trainer updates (RhymeRL's off-policyness of 1). A process
without workers decodes the same requests with the same versions when it needs them: the same bits.

What a step needs of the one before it, and a checkpoint keeps: which problems were begun, and the weights
that sample them. The responses are decoded again.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.assembly.checkpoint import SAMPLED_BY
from rljax.errors import CheckpointError
from rljax.models.host_params import params_of, parts_of
from rljax.requests import spans_of
from rljax.rollout.collector import TRAINING, BegunGroups, Group, WantedGroups

if TYPE_CHECKING:
    from rljax.training.training_run import TrainingRun


def oldest_lag(run: "TrainingRun") -> int:
    """Steps by which a token's weights may be older than those that learn from it."""
    rollout = run.config.rollout
    return max(rollout.staleness, rollout.max_staleness)


def hold_weights(run: "TrainingRun") -> None:
    """Keeps this step's weights under their number, and those before as long as rollouts may need them."""
    lag = oldest_lag(run)
    if run.step in run.versions:
        return
    run.versions = {version: held for version, held in run.versions.items() if version >= run.step - lag}
    # An update donates the trainer's arrays.
    run.versions[run.step] = run.engine.load_params(run.state.params, copy=lag > 0)


def begin_rollouts(run: "TrainingRun") -> None:
    """Begins this step's rollout and, with staleness, the next one's, unless an earlier step has."""
    hold_weights(run)
    last = min(run.step + run.config.rollout.staleness, run.config.training.steps - 1)
    for step in range(run.step, last + 1):
        if step not in run.begun:
            run.begun[step] = begin_round(run, step, run.step)


def begin_round(run: "TrainingRun", step: int, version: int) -> BegunGroups:
    """Begins a round of a step's rollout: the next problems, under these weights."""
    count, position = run.config.rollout.prompts_per_step, run.data_position
    indices, run.data_position = run.prompts.next_problems("train", position, count)
    run.passed_over += run.data_position - position - count
    return begin_groups(run, step, indices, version)


def begin_groups(run: "TrainingRun", step: int, indices: Sequence[int], version: int) -> BegunGroups:
    """Begins the groups of these problems with a step's noise, under these weights."""
    samples, weights = run.config.rollout.samples_per_prompt, run.versions[version]
    wanted = WantedGroups("train", indices, samples, TRAINING, step, version=version)
    return run.collector.begin(weights, wanted)


def sampled_by(run: "TrainingRun") -> Mapping[int, Any] | None:
    """Weights by the versions that sampled a step's responses; None where they are those of the step."""
    return run.versions if oldest_lag(run) else None


def lag_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Returns how many steps older than the step's weights those are that sampled its tokens: `lag_mean` over
    tokens, `lag_max`, and `stale_share`, the share of tokens under older ones.
    """
    tokens: dict[int, int] = {}
    for completion in (completion for group in groups for completion in group.completions):
        for version in {version for _, version in completion.versions}:
            count = sum(end - begin for begin, end in spans_of(completion, version))
            tokens[step - version] = tokens.get(step - version, 0) + count
    total = sum(tokens.values())
    return {
        "rollout/lag_mean": sum(lag * count for lag, count in tokens.items()) / total,
        "rollout/lag_max": max(lag for lag, count in tokens.items() if count),
        "rollout/stale_share": 1.0 - tokens.get(0, 0) / total,
    }


# -- checkpoints -------------------------------------------------------------------------------------------


def state_of(run: "TrainingRun") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns what was begun for later steps as JSON values, and the weights that sample it as arrays."""
    needed = {each.wanted.version for each in run.begun.values()}
    if run.replay is not None:
        needed = set(run.versions)
    begun = [
        {
            "step": step,
            "indices": [int(index) for index in each.wanted.indices],
            "version": each.wanted.version,
        }
        for step, each in run.begun.items()
    ]
    arrays, layouts = {}, {}
    for version in sorted(needed):
        parts = parts_of(run.versions[version])
        layouts[str(version)] = [[name, dtype, list(shape)] for name, dtype, shape, _ in parts]
        arrays |= {f"{SAMPLED_BY}{version}/{name}": data for name, _, _, data in parts}
    state: dict[str, Any] = {"begun": begun, "sampled_by": layouts} if needed else {}
    if run.under_way is not None:  # decoded again, under the weights of the checkpoint
        state["under_way"] = run.under_way.arrivals.state()
    return state, arrays


def restore(run: "TrainingRun", host_state: Mapping[str, Any], held: Mapping[str, np.ndarray]) -> None:
    """Begins again what was begun when a checkpoint was saved.

    Args:
      run: the run.
      host_state: of the checkpoint.
      held: arrays of the checkpoint's older weights.

    Raises:
      CheckpointError: they are of another architecture.
    """
    if not oldest_lag(run):  # by --allow-changes: the problems that were begun are passed over
        return
    for version, layout in host_state.get("sampled_by", {}).items():
        begin = f"{SAMPLED_BY}{version}/"
        parts = [(name, dtype, tuple(shape), held[begin + name]) for name, dtype, shape in layout]
        params = params_of(parts, run.engine.config)
        if params is None:
            raise CheckpointError(f"checkpoint: version {version} of the weights is of another policy")
        run.versions[int(version)] = run.engine.load_params(params)
    if run.under_way is not None and "under_way" in host_state:
        run.under_way.arrivals.load_state(host_state["under_way"])
    for each in host_state.get("begun", []):
        run.begun[each["step"]] = begin_groups(run, each["step"], each["indices"], each["version"])
