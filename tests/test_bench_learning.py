"""scripts/bench_learning.py: its configs, its rows and its picture; nothing is trained here."""

import pytest

from rljax.reports.decisions import RunDecisions
from rljax.reports.runs import RunData
from tests.scripts import SCRIPTS, load_script

learning = load_script("bench_learning")
CONFIG = str(SCRIPTS.parent / "configs/bench_algorithms.yaml")


@pytest.fixture
def run_of(tmp_path):
    def make(after, **columns):
        steps = [
            {"step": i + 1, "reward/mean": 0.1 * i, "entropy": 1.0 - 0.1 * i, "mismatch/logprob_abs_max": 0.0}
            | {"policy/clip_fraction_low": 0.01, "policy/clip_fraction_high": 0.02, "time/rollout": 2.0}
            | {name.replace("__", "/"): values[i] for name, values in columns.items()}
            for i in range(6)
        ]
        heldout = [{"step": 0, "evaluation/reward": 0.25}, {"step": 6, "evaluation/reward": after}]
        config = "rollout:\n  prompts_per_step: 64\n"  # two steps an epoch of the curriculum's problems
        decisions = RunDecisions(tmp_path, {})
        return RunData(tmp_path, "run", steps, heldout, [{"commit": "abc"}], [], decisions, config)

    return make


def rows_of(section, found):
    rows = learning.EXPERIMENTS[section].rows(found)
    return {row.name: (row.value, row.baseline_value) for row in rows}, [row.as_json() for row in rows]


@pytest.mark.parametrize("section", learning.EXPERIMENTS)
def test_every_way_to_train_is_a_config_with_a_run_of_its_own(section):
    file = str(SCRIPTS.parent / learning.EXPERIMENTS[section].file)
    for way in learning.EXPERIMENTS[section].ways:
        config = learning.config_of(section, way, 3, file, ["training.steps=7", "run_dir=runs/x"])
        assert (config.seed, config.training.steps) == (3, 7)  # the user's keys come last
        assert config.run_dir == f"runs/x/{section}-{way.replace(' ', '-')}-seed3"
        if way == "teacher":
            assert config.algorithm.teacher == "runs/x/distillation-the-teacher-seed0"


def test_a_row_is_of_all_seeds(run_of):
    columns = {"rollout__groups_sampled": [2] * 6, "speculation__accepted": [5] * 6}
    values, (row,) = rows_of("algorithms", {"grpo": [run_of(0.5, **columns), run_of(1.0, **columns)]})
    assert values == {"algorithms/grpo": (0.75, 0.25)}
    assert (row["before"], row["after"]) == ([0.25, 0.25], [0.5, 1.0])
    assert row["groups_sampled"] == [12, 12] and row["accepted_drafts"] == [30, 30]
    assert row["entropy_at_last"] == pytest.approx([0.5, 0.5]) and "lag_mean" not in row


def test_staleness_is_shown_by_lags_and_by_seconds(run_of):
    lags = {"rollout__lag_mean": [1.0] * 6, "rollout__lag_max": [2] * 6}
    values, (row,) = rows_of("staleness", {"1": [run_of(0.5, **lags)]})
    assert values == {"staleness/1": (0.5, 0.25)} and (row["lag_mean"], row["lag_max"]) == ([1.0], 2.0)
    times = {"time__update": [0.5] * 6, "cluster__idle_share": [0.25] * 6}
    found = {way: [run_of(0.5, time__step=[s] * 6, **times)] for way, s in (("0", 3.0), ("1", 2.0))}
    values, (row,) = rows_of("time", found)
    assert values == {"staleness/step with 2 workers": (2.0, 3.0)} and row["ratio"] == 1.5


def test_a_curriculum_is_compared_from_the_second_epoch(run_of):
    skipped = {"none": (0.0, 0.5), "failures": (0.9, 0.25), "uncertain": (0.9, 0.1)}
    found = {
        rule: [run_of(0.6, update__skipped=[first] * 2 + [rest] * 4)]
        for rule, (first, rest) in skipped.items()
    }
    values, _ = rows_of("curriculum", found)
    assert values["curriculum/failures/tokens that teach"] == (0.75, 0.5)
    assert values["curriculum/uncertain/tokens that teach"] == (0.9, 0.5)
    assert values["curriculum/none/held-out"] == (0.6, 0.25) and len(values) == 5


def test_distillation_is_shown_by_held_out_rewards_and_the_kl(run_of):
    taught = [run_of(0.5, teacher__kl=kl) for kl in ([0.8, 0, 0, 0, 0, 0.2], [0.4, 0, 0, 0, 0, 0.1])]
    values, rows = rows_of(
        "distillation", {"the teacher": [run_of(1.0)], "reward": [run_of(0.5)] * 2, "teacher": taught}
    )
    assert values["distillation/teacher/KL to the teacher"] == pytest.approx((0.15, 0.6))
    assert [row["teachers_heldout"] for row in rows[:2]] == [0.25, 0.25] and rows[2]["ratio"] == 4.0


def test_lora_and_agents_are_compared_with_the_plain_way(run_of):
    updates = {"time__update": [2.0] * 6}
    found = {"all weights": [run_of(0.5, **updates)], "LoRA": [run_of(0.75, **updates)]}
    values, (row,) = rows_of("lora", found)
    assert values == {"lora/0.8M": (0.75, 0.5)} and row["heldout"]["LoRA"] == [[0, 0.25], [6, 0.75]]
    assert row["seconds_of_updates"] == row["baseline_seconds_of_updates"] == [12.0]
    agents = run_of(0.5, rollout__tokens=[9, *[100] * 5], agents__requests=[1] * 6, agents__sequences=[1] * 6)
    plain = run_of(0.25, rollout__tokens=[9, *[200] * 5])
    values, _ = rows_of("agents", {"in the run": [plain], "agents": [agents]})
    assert values == {"agents/tokens": (50.0, 100.0), "agents/held-out": (0.5, 0.25)}
