"""Metrics of a rollout for `metrics.jsonl`: rewards, response lengths and speed."""

import math
from collections.abc import Sequence

import numpy as np

from rljax.errors import UserError
from rljax.requests import DecodeStatistics
from rljax.rollout.collector import Group, Timing


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Returns the rate of decoding."""
    return tokens / seconds


def reward_spread(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the standard deviation of rewards, and the standard error of their mean.

    `reward/std` is over all responses, `reward/standard_error` that of their mean. Responses to one prompt
    are correlated, so the error is computed from the means of the prompts; with a single prompt, from its
    responses. Responses that are left out do not count.
    """
    scored = [group.reward[~np.isnan(group.reward)] for group in groups]
    rewards = np.concatenate(scored)
    independent = np.asarray([each.mean() for each in scored if each.size]) if len(groups) > 1 else rewards
    spread = {"reward/std": float(rewards.std())}
    if len(independent) > 1:
        error = independent.std(ddof=1) / math.sqrt(len(independent))
        spread["reward/standard_error"] = float(error)
    return spread


def mean_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean of every named reward, over the responses that have it, and `declined`, the share of
    responses that are left out.

    Raises:
      UserError: all responses are left out.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    values: dict[str, list[float]] = {}  # tasks of a mixture differ in names
    for name, value in (item for reward in rewards for item in reward.items() if item[1] is not None):
        values.setdefault(name, []).append(value)
    if "reward" not in values:
        raise UserError(f"reward: all {len(rewards)} responses are left out, because a reward declined each")
    means = {name: float(np.mean(each)) for name, each in values.items()}
    return means | {"declined": 1.0 - len(values["reward"]) / len(rewards)}


def rollout_metrics(
    groups: Sequence[Group], sampled: Sequence[Group], statistics: DecodeStatistics, timing: Timing
) -> dict[str, float]:
    """Returns metrics of a rollout: rewards of all sampled groups, lengths of the groups to learn from.

    Args:
      groups: groups to learn from.
      timing: seconds of decoding and of rewarding.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.asarray([completion.sampled_tokens for completion in completions])
    means = mean_rewards(sampled)
    return {
        "reward/mean": means.pop("reward"),
        **reward_spread(sampled),
        **{f"reward/{name}": value for name, value in means.items()},
        "response_length/mean": float(lengths.mean()),
        "response_length/p50": float(np.percentile(lengths, 50)),
        "response_length/p75": float(np.percentile(lengths, 75)),
        "response_length/p95": float(np.percentile(lengths, 95)),
        "response_length/max": int(lengths.max()),
        "response_length/truncated": float(
            np.mean([completion.finish_reason == "length" for completion in completions])
        ),
        "rollout/groups_sampled": len(sampled),
        "rollout/tokens": statistics.tokens,
        "rollout/tokens_per_second": tokens_per_second(statistics.tokens, timing.decode),
        "rollout/occupancy": statistics.occupancy,
        "rollout/decode_steps": statistics.steps,
    }
