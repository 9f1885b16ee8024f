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


def test_distillation_is_shown_by_held_out_rewards_and_the_kl(run_of):
    taught = [run_of(0.5, teacher__kl=kl) for kl in ([0.8, 0, 0, 0, 0, 0.2], [0.4, 0, 0, 0, 0, 0.1])]
    values, rows = rows_of(
        "distillation", {"the teacher": [run_of(1.0)], "reward": [run_of(0.5)] * 2, "teacher": taught}
    )
    assert values["distillation/teacher/KL to the teacher"] == pytest.approx((0.15, 0.6))
    assert [row["teachers_heldout"] for row in rows[:2]] == [0.25, 0.25] and rows[2]["ratio"] == 4.0
