"""scripts/bench_learning.py and bench_endpoints.py: their rows and configs; nothing is trained here."""

from pathlib import Path

import pytest

from rljax.config import load_config
from rljax.reports.decisions import RunDecisions
from rljax.reports.runs import RunData
from tests.scripts import SCRIPTS, load_script

bench_learning = load_script("bench_learning")
bench_endpoints = load_script("bench_endpoints")
CONFIG = str(SCRIPTS.parent / "configs/bench_algorithms.yaml")
PATH = Path("nowhere")


def run_of(after, **columns):
    steps = [
        {"step": i + 1, "reward/mean": 0.1 * i, "entropy": 1.0, "mismatch/logprob_abs_max": 0.0}
        | {"policy/clip_fraction_low": 0.01, "policy/clip_fraction_high": 0.02, "time/rollout": 2.0}
        | {name.replace("__", "/"): values[i] for name, values in columns.items()}
        for i in range(4)
    ]
    heldout = [{"step": 0, "evaluation/reward": 0.25}, {"step": 4, "evaluation/reward": after}]
    config = "rollout:\n  prompts_per_step: 64\n"  # two steps an epoch of the curriculum's problems
    return RunData(PATH, "run", steps, heldout, [{"commit": "abc"}], [], RunDecisions(PATH, {}), config)


def test_a_curriculum_is_compared_from_the_second_epoch():
    from training_benchmarks import curriculum

    passed = {"curriculum__passed_over": [0, 0, 10, 20], "curriculum__pass_rate": [0.1, 0.2, 0.3, 0.4]}
    rows = curriculum.rows_of(
        {
            "none": [run_of(0.5, update__skipped=[0.0, 0.0, 0.5, 0.5])],
            "failures": [run_of(0.6, update__skipped=[0.9, 0.9, 0.25, 0.25], **passed)],
            "uncertain": [run_of(0.75, update__skipped=[0.9, 0.9, 0.1, 0.1], **passed)],
        }
    )
    values = {row.name: (row.value, row.baseline_value) for row in rows}
    assert values == {
        "curriculum/none/held-out": (0.5, 0.25),
        "curriculum/failures/held-out": (0.6, 0.25),
        "curriculum/uncertain/held-out": (0.75, 0.25),
        "curriculum/failures/tokens that teach": (0.75, 0.5),
        "curriculum/uncertain/tokens that teach": (0.9, 0.5),
    }
    assert rows[1].as_json()["passed_over_a_step"] == [7.5]
    assert rows[1].as_json()["pass_rate_at_last"] == [0.4]


def test_distillation_is_shown_by_held_out_rewards_and_the_kl():
    from training_benchmarks import distillation

    taught = [run_of(0.75, teacher__kl=[0.8, 0.5, 0.3, 0.2]), run_of(0.5, teacher__kl=[0.4, 0.3, 0.2, 0.1])]
    rows = distillation.rows_of(run_of(1.0), {"reward": [run_of(0.5)] * 2, "teacher": taught})
    assert [row.value for row in rows[:2]] == [0.5, 0.625]
    assert rows[1].as_json()["teachers_heldout"] == 0.25
    assert (rows[2].value, rows[2].baseline_value, rows[2].ratio) == pytest.approx((0.15, 0.6, 4.0))


def test_agents_are_compared_with_a_run_that_samples_itself():
    from training_benchmarks import agent

    agents = run_of(
        0.5, rollout__tokens=[9, 100, 100, 100], agents__requests=[1] * 4, agents__sequences=[1] * 4
    )
    rows = agent.rows_of({"in the run": run_of(0.25, rollout__tokens=[9, 200, 200, 200]), "agents": agents})
    assert (rows[0].value, rows[0].baseline_value, rows[0].ratio) == (50.0, 100.0, 0.5)
    assert (rows[1].value, rows[1].baseline_value) == (0.5, 0.25)
    assert rows[0].as_json()["mismatch_logprob_abs_max"] == 0.0


def test_a_judge_is_shown_with_several_requests_and_with_a_cache():
    pytest.importorskip("httpx", reason="the endpoints extra is not installed")
    from training_benchmarks import judge

    rows = judge.judge_rows(4)
    assert [row.name for row in rows] == [
        "judge/4 responses/16 at a time",
        "judge/4 responses/from the cache",
    ]
    assert rows[0].baseline_value >= 4 * judge.SECONDS  # one at a time cannot be faster than the endpoint


def test_every_way_to_train_is_a_config():
    from training_benchmarks import agent, curriculum, distillation

    for keys in (*agent._WAYS.values(), *distillation._WAYS.values()):
        load_config(CONFIG, [*keys, "algorithm.teacher=somewhere"] if "distillation" in str(keys) else keys)
    for rule in curriculum.RULES:
        load_config(CONFIG, [*curriculum._KEYS, f"task.curriculum={rule}"])
