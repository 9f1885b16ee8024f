"""What an evaluation is made of: a run's config, a config file, overrides; and what it refuses to be told."""

import pytest

from rljax.config import load_config, to_yaml
from rljax.errors import ConfigError
from rljax.evaluation.settings import evaluation_config
from tests.configs import table
from tests.scripts import load_script
from tests.training.tiny_run import write_config


@pytest.fixture
def run(tmp_path):
    """A run directory as far as its config."""
    overrides = ["speculation.drafter=srt", "training.pack_length=112"]
    config = load_config(write_config(tmp_path), overrides)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    return tmp_path / "run"


def test_a_runs_own_config_is_what_it_is_evaluated_with(run):
    config, run_config = evaluation_config(run, None, []), load_config(run / "config.yaml")
    for section in ("task", "rollout", "kernels", "mesh", "evaluation", "engine", "policy"):
        assert getattr(config, section) == getattr(run_config, section)
    assert config.seed == run_config.seed and config.run_dir == str(run)
    assert config.speculation.drafter == "srt"
    assert config.warm_start is None


def test_the_tools_of_a_run_are_those_of_its_evaluation(run):
    text = (run / "config.yaml").read_text().replace("tools: null", "tools: {names: [calculator]}")
    (run / "config.yaml").write_text(text)
    assert evaluation_config(run, None, []).tools.names == ("calculator",)
    assert evaluation_config(run, None, ["tools=null"]).tools is None


def test_overrides_reach_what_training_would_refuse(run):
    overrides = ["rollout.max_response_length=100", "engine.cache_buckets=null", "evaluation.samples=4"]
    config = evaluation_config(run, None, overrides)
    assert config.rollout.max_response_length == 100  # a packed row of the run holds 48 after the prompt
    assert config.evaluation.samples == 4


def test_a_run_with_one_sample_a_prompt_is_evaluated(run, tmp_path):
    overrides = ["algorithm.name=ppo", "rollout.samples_per_prompt=1"]
    config = load_config(write_config(tmp_path), overrides)
    (run / "config.yaml").write_text(to_yaml(config))
    assert evaluation_config(run, None, []).rollout == config.rollout
    (tmp_path / "model").mkdir()
    assert evaluation_config(tmp_path / "model", run / "config.yaml", []).rollout == config.rollout


def test_a_hugging_face_directory_takes_the_task_from_a_file_or_the_command_line(run, tmp_path):
    (tmp_path / "model").mkdir()
    from_file = evaluation_config(tmp_path / "model", run / "config.yaml", [])
    assert from_file.task == load_config(run / "config.yaml").task
    assert from_file.policy.path == str(tmp_path / "model") and from_file.policy.shape is None
    evaluated = evaluation_config(
        tmp_path / "model", None, ["task.name=chain_arithmetic", "policy.compute_dtype=bfloat16"]
    )
    assert evaluated.policy.compute_dtype == "bfloat16"


def test_drafts_change_nothing_whatever_the_run_did(run):
    text = (run / "config.yaml").read_text().replace("verification: coupled", "verification: rejection")
    (run / "config.yaml").write_text(text)
    assert evaluation_config(run, None, []).engine.verification == "coupled"


IMPOSSIBLE = """
training.steps=3 -> training.steps: not a key of an evaluation
policy.path=other -> policy.path: not a key of an evaluation
rollout.samples_per_prompt=3 -> evaluation.samples says how many
rollout.prompts_per_step=3 -> evaluation.problems says how many
engine.verification=rejection -> samples coupled
evaluation.every=2 -> evaluated once
evaluation.problems=0 -> evaluation.problems: is 0
evaluation.samples=2000 -> evaluation.samples
evaluation.pass_at=[4] -> evaluation.pass_at: 4 is more than evaluation.samples 1
evaluation.samples=4 & evaluation.pass_at=[2,2] -> must ascend
evaluation.sampels=4 -> the nearest is evaluation.samples
evaluation.temperature=1e-9 -> evaluation.temperature: 1e-09, expected 0 or 1e-4 to 1e4
"""


@pytest.mark.parametrize(("overrides", "message"), table(IMPOSSIBLE))
def test_what_cannot_be_is_one_clear_line(run, overrides, message, capsys):
    overrides = overrides.split(" & ")
    with pytest.raises(ConfigError, match=message) as raised:
        evaluation_config(run, None, overrides)
    assert "\n" not in str(raised.value)
    assert load_script("evaluate").main([str(run), *overrides]) == 2
    assert str(raised.value) in capsys.readouterr().err
    assert [entry.name for entry in run.iterdir()] == ["config.yaml"]  # nothing was begun


def test_a_hugging_face_directory_without_a_task_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match="is no run, so say what to evaluate on: --config FILE"):
        evaluation_config(tmp_path, None, ["evaluation.samples=4"])
    with pytest.raises(ConfigError, match="no such config file"):
        evaluation_config(tmp_path, tmp_path / "nowhere.yaml", [])
