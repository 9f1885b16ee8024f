"""An agent that asks once, with OpenAI's client, and a run that it samples for beside one without it."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.benchmarking import Row
from rljax.reports.runs import RunData
from training_benchmarks.curves import CONFIG, train_to_end

# One reward either way: the answer behind the last marker.
_REWARD = "task.rewards=[{name: exact, args: {answer_in: marker, marker: '#'}}]"
_WAYS: Mapping[str, tuple[str, ...]] = {
    "in the run": (),
    "agents": ("agents={agent: 'training_benchmarks.agent:solve', parallel: 8}",),
}
"""The overrides of each way to sample; the first is the baseline."""


@functools.cache
def _client(api_key: str):
    import openai

    return openai.OpenAI(base_url="http://unused", api_key=api_key, max_retries=0)


def solve(base_url: str, model: str, api_key: str, problem: Mapping[str, Any]) -> float:
    """The agent: one request, and 1 for the right answer."""
    completions = _client(api_key).with_options(base_url=base_url).chat.completions
    reply = completions.create(model=model, messages=problem["messages"]).choices[0].message.content or ""
    return float(reply.rpartition("#")[2].strip() == problem["answer"])


def agent_rows(steps: int) -> list[Row]:
    """Trains both ways; a run that is there goes on, or is only read.

    Args:
      steps: steps of each run.
    """
    shared = ("run_dir=runs/bench_endpoints", f"training.steps={steps}", "tracking.report=false", _REWARD)
    return rows_of(
        {way: train_to_end(CONFIG, [*shared, *keys], way.replace(" ", "_")) for way, keys in _WAYS.items()}
    )


def rows_of(found: Mapping[str, RunData]) -> list[Row]:
    """Returns the rows of finished runs: tokens a second of rollouts, and the held-out reward at the end."""
    plain, agents = (found[way] for way in _WAYS)
    rates = [
        float(np.sum(run.column("rollout/tokens")[1:]) / np.sum(run.column("time/rollout")[1:]))
        for run in (agents, plain)
    ]
    before, after = ([run.evaluations[i]["evaluation/reward"] for run in (agents, plain)] for i in (0, -1))
    details = {
        "steps": len(agents.steps),
        "mismatch_logprob_abs_max": float(agents.column("mismatch/logprob_abs_max").max()),
        "requests": agents.mean("agents/requests"),
        "sequences": agents.mean("agents/sequences"),
    }
    return [
        Row("agents/tokens", rates[0], "tokens/s", "in the run", rates[1], rates[0] / rates[1], details),
        Row(
            "agents/held-out",
            after[0],
            "reward",
            "in the run",
            after[1],
            after[0] / after[1],
            {"before": before, "reward_by_step": agents.column("reward/mean").tolist()},
        ),
    ]
