"""What may differ between a run and the config that it goes on with, and what is told of it."""

import pytest

from rljax.config import load_config, with_compute_dtype
from rljax.config.changes import config_changes
from rljax.errors import ConfigError
from rljax.run_directory import RunDirectory
from tests.test_run_directory import make_config


def harmless(**sections):
    return {change.name: change.harmless for change in config_changes(make_config(), make_config(**sections))}


def test_what_changes_no_number_is_harmless():
    assert harmless(
        run_dir="elsewhere",
        training={"steps": 7},
        checkpoint={"every": 3, "keep_every": 6, "on_failure": "go_on"},
        evaluation={"every": 2},
        speculation={"drafter": "srt"},
        engine={"max_slots": 8, "batch_buckets": [8], "decode_steps_per_sync": 4, "compilation_cache": None},
    ) == dict.fromkeys(
        (
            "run_dir",
            "training.steps",
            "checkpoint.every",
            "checkpoint.keep_every",
            "checkpoint.on_failure",
            "evaluation.every",
            "speculation.drafter",
            "engine.max_slots",
            "engine.batch_buckets",
            "engine.decode_steps_per_sync",
            "engine.compilation_cache",
        ),
        True,
    )


@pytest.mark.parametrize(("dtype", "same"), [("float32", True), ("bfloat16", False)])
def test_outlined_layers_change_bits_in_bfloat16_only(dtype, same):
    policy = make_config().policy.model_dump() | {"compute_dtype": dtype}
    old = make_config(policy=policy | {"outline_layers": "off"})
    (change,) = config_changes(old, make_config(policy=policy | {"outline_layers": "on"}))
    assert (change.name, change.harmless) == ("policy.outline_layers", same)


@pytest.mark.parametrize("setting", [True, "warn"])
def test_what_happens_where_nothing_is_exact_changes_no_bit(setting):
    other = make_config(engine={"row_invariant": setting})
    for old, new in ((make_config(), other), (other, make_config())):
        (change,) = config_changes(old, new)
        assert (change.name, change.harmless) == ("engine.row_invariant", True)


@pytest.mark.parametrize(
    ("setting", "platform", "recorded", "dtype"),
    [
        ("auto", "cpu", None, "float32"),
        ("auto", "gpu", None, "bfloat16"),
        ("auto", "tpu", None, "bfloat16"),
        ("auto", "gpu", "float32", "float32"),  # a run that began with it
        ("float32", "gpu", "bfloat16", "float32"),  # which `config_changes` then names
    ],
)
def test_the_number_type_of_a_platform(setting, platform, recorded, dtype):
    config = make_config(policy=make_config().policy.model_dump() | {"compute_dtype": setting})
    settled = with_compute_dtype(config, platform, recorded)
    assert settled.policy.compute_dtype == dtype
    assert settled == with_compute_dtype(settled, "tpu")


def test_a_run_that_goes_on_keeps_its_number_type(run):
    assert run.recorded_config() is None
    run.begin(with_compute_dtype(make_config(), "gpu"))
    assert run.recorded_config() is None  # nothing to go on from
    run.append_metrics({"step": 0})
    recorded = run.recorded_config().policy.compute_dtype
    assert recorded == "bfloat16"
    resumed = with_compute_dtype(make_config(), "cpu", recorded)
    assert run.begin(resumed) == []


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"task": {"name": "t", "args": {"a": 1, "b": 2}}}, "task.args.b"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"algorithm": {"clip_high": 0.3}}, "algorithm.clip_high"),
        ({"optimizer": {"learning_rate": 1e-5}}, "optimizer.learning_rate"),
        ({"engine": {"row_invariant": False}}, "engine.row_invariant"),
        ({"engine": {"verification": "target_only"}}, "engine.verification"),
        ({"training": {"minibatches_per_step": 2}}, "training.minibatches_per_step"),
        ({"mesh": {"data": 2}}, "mesh.data"),
        ({"kernels": {"compaction": "xla"}}, "kernels.compaction"),
    ],
)
def test_what_changes_the_experiment_is_not(sections, name):
    assert harmless(**sections)[name] is False


def test_scheduling_is_harmless_only_where_rows_are_invariant():
    one = make_config(engine={"row_invariant": False})
    other = make_config(engine={"row_invariant": False, "max_slots": 8, "compilation_cache": None})
    changes = {change.name: change.harmless for change in config_changes(one, other)}
    assert changes == {"engine.max_slots": False, "engine.compilation_cache": True}


@pytest.mark.parametrize("engine", [{"row_invariant": False}, {"verification": "target_only"}])
def test_drafts_are_harmless_only_where_they_change_no_token(engine):
    """Without row-invariance a pass that verifies computes other logits: near-ties flip."""
    drafted = make_config(engine=engine, speculation={"drafter": "srt"})
    change, *_ = config_changes(make_config(engine=engine), drafted)
    assert (change.name, change.harmless) == ("speculation.drafter", False)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


def test_all_keys_that_differ_are_named_with_the_ways_out(run):
    run.write_config(make_config())
    run.append_metrics({"step": 0})
    changed = make_config(seed=3, rollout={"temperature": 0.5, "top_p": 0.9}, training={"steps": 7})
    with pytest.raises(ConfigError) as error:
        run.begin(changed)
    assert str(error.value) == (
        f"seed: is 3, but the run in {run.path} has 0 (and rollout.temperature: 1.0 -> 0.5, rollout.top_p:"
        " 1.0 -> 0.9); choose another run_dir, set it back to resume that run, or go on with --allow-changes"
    )
    assert load_config(run.config_path) == make_config()


def test_changes_that_are_allowed_are_noted_with_the_session(run):
    run.write_config(make_config())
    run.append_metrics({"step": 0})
    run.record_session(0)
    changed = make_config(seed=3, training={"steps": 7})
    told = run.begin(changed, allow_changes=True)
    assert list(map(str, told)) == ["seed: 0 -> 3", "training.steps: 100 -> 7"]
    assert load_config(run.config_path) == make_config()  # nothing was resumed yet
    run.write_config(changed, allow_changes=True)
    run.record_session(4)
    before, now = run.read_sessions()
    assert "changed" not in before
    assert now["changed"] == {"seed": [0, 3], "training.steps": [100, 7]}
    assert run.begin(changed) == []


def test_a_start_that_is_killed_between_its_session_and_its_config_loses_no_change(run):
    run.write_config(make_config())
    run.append_metrics({"step": 0})
    for _ in range(2):
        start = RunDirectory(run.path)
        start.begin(make_config(seed=3), allow_changes=True)
        start.record_session(1)
    start.write_config(make_config(seed=3), allow_changes=True)
    assert [each["changed"] for each in run.read_sessions()] == [{"seed": [0, 3]}] * 2


def test_a_start_that_failed_binds_nothing(run):
    run.write_config(make_config())
    tokenizer = run.path / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir()
    tokenizer.write_text("{}")
    assert run.begin(make_config(training={"steps": 7})) != []
    assert tokenizer.exists()  # the same experiment
    assert run.begin(make_config(seed=3)) == []
    assert load_config(run.config_path) == make_config(seed=3)
    assert not tokenizer.exists()


@pytest.mark.parametrize("begun", ["metrics.jsonl", "checkpoints/1/arrays", "warm_start/1/arrays"])
def test_a_start_that_left_something_does(run, begun):
    run.write_config(make_config())
    (run.path / begun).parent.mkdir(parents=True, exist_ok=True)
    (run.path / begun).write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match="seed: is 3, but the run in"):
        run.begin(make_config(seed=3))
