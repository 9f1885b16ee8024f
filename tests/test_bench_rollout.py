"""scripts/bench_rollout.py: its sections on a tiny policy."""

from pathlib import Path

import pytest

from rljax.config import load_config
from rljax.errors import UserError
from tests.scripts import load_script
from tests.training.tiny_run import write_config

counts = load_script("rollout_benchmarks.counts")
rollout = load_script("rollout_benchmarks.rollout")
variants = load_script("rollout_benchmarks.variants")

TINY = [
    "task.problems=2", "engine.max_slots=2", "engine.batch_buckets=[2]", "speculation.drafter=srt",
    "speculation.verify_buckets=[16]", "speculation.max_drafts=7",
]  # fmt: skip


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path), TINY)


def test_a_variant_that_cannot_be_made_is_refused_at_once(tmp_path, config):
    policy = config.policy.model_copy(update={"path": str(tmp_path), "shape": None})
    with pytest.raises(UserError, match=r"--variants: 'small model' is made from policy\.shape"):
        rollout.rollout_rows(config.model_copy(update={"policy": policy}), ["plain", "SRT", "small model"])


def test_a_configs_drafters_are_compared_together_and_the_first_alone(config):
    own = {"drafter": "eagle", "args": {"depths": [2]}, "others": {"srt": {}}, "mix": True}
    config = variants.with_keys(config, speculation=own)
    keys = {name: variants._keys(config, name) for name in variants.CONFIGURED}
    assert keys["configured"] == own
    assert keys["configured frozen"] == own | {"args": {"depths": [2], "train": False}}
    assert keys["configured unmixed"] == own | {"mix": False}
    assert keys["configured alone"] == own | {"mix": False, "others": {}}


def test_variants_with_a_device_of_their_own_are_refused_without_one(config):
    assert variants.BESIDE
    with pytest.raises(UserError, match=r"^--variants: .* drafts on a device beside the 1 of the mesh"):
        variants.check_variants(config, ["plain", variants.BESIDE[0]])


def test_rows_of_the_first_step(config, monkeypatch):
    """Two runs share a compilation cache of their own, with and without the drafter."""

    def train(file, run_dir, *keys):
        config = load_config(file, keys)
        assert config.training.steps == 1
        stored = Path(config.engine.compilation_cache)
        begins = (4.0 if config.speculation.drafter is None else 6.5) / (2 if stored.exists() else 1)
        stored.mkdir(exist_ok=True)
        return [{"time/elapsed": 1.0}, {"time/elapsed": begins + 0.5, "time/step": 0.5}], 0

    monkeypatch.setattr(rollout, "train", train)
    (row,) = rollout.first_step_rows(config, repeats=2)
    assert (row.name, row.value, row.baseline_value) == ("first step/begins/srt", 6.5, 4.0)
    assert (row.details["later"], row.details["first_step_seconds"]) == (2.5, 0.5)
    assert (row.details["stored"], row.details["baseline_stored"]) == (3.25, 2.0)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["task.problems=4", "training.steps=5"], {"epoch 1": [0, 1], "epoch 2": [2, 3], "epoch 3": [4]}),
        (["task.problems=1", "training.steps=2"], {"epoch 1": [0], "epoch 2": [1]}),
        (["task.problems=0", "training.steps=3"], {"fresh prompts": [0, 1, 2]}),
    ],
)
def test_a_row_is_of_an_epoch_or_of_prompts_that_never_come_back(tmp_path, overrides, names):
    config = load_config(write_config(tmp_path), overrides)
    steps = range(config.training.steps)
    assert {name: list(steps[stretch]) for name, stretch in rollout.stretches(config).items()} == names


def test_the_cases_by_algorithm_are_the_papers():
    """Four algorithms, of which those with a critic have one response to a prompt, and one has tools."""
    found = dict(counts.configs("configs/bench_algorithms.yaml", ["training.steps=4"]))
    samples = {"PPO": 1, "GRPO, 5 responses": 5, "GRPO, 10 responses": 10, "DAPO": 16, "PPO with tools": 1}
    assert {name: config.rollout.samples_per_prompt for name, config in found.items()} == samples
    for name, config in found.items():
        assert (config.algorithm.advantage_baseline == "critic") == name.startswith("PPO")
        assert (config.tools is not None) == name.endswith("tools")
        assert config.task.problems == 2 * config.rollout.prompts_per_step


@pytest.mark.long
def test_rows_by_algorithm(tmp_path, monkeypatch):
    """Every drafter samples what plain decoding does, with tools too; SRT knows the group's other samples."""
    monkeypatch.setattr(counts, "CASES", {"GRPO": ("grpo", 2, 4), "PPO with tools": ("ppo", 4, 1)})
    monkeypatch.setattr(counts, "_TOOLS", tmp_path / "tools.yaml")
    plain = write_config(tmp_path).read_text(encoding="utf-8")
    calls = "opening: '+', closing: '=', answer_opening: '<', answer_closing: '>'"
    tools = f"{plain}tools: {{names: [calculator], {calls}}}\n"
    (tmp_path / "tools.yaml").write_text(tools, encoding="utf-8")
    drafts = ("speculation.max_drafts=3", "speculation.verify_buckets=[16]")
    rows = counts.algorithm_rows(tmp_path / "config.yaml", ["training.steps=3", *drafts])
    names = [row.name.split("/")[1:] for row in rows]
    assert names == [
        [case, when, drafter]
        for case in ("GRPO", "PPO with tools")
        for when in ("first epoch", "later epochs")
        for drafter in ("n-gram", "SuffixDecoding", "SRT")
    ]
    assert all(row.details["tokens"] > 0 and row.details["passes"] > 0 for row in rows)
    assert rows[5].ratio > 1  # history
