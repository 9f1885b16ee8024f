"""What may differ between a run and the config that it goes on with, and what is told of it."""

import pytest

from rljax.config import load_config, with_compute_dtype
from rljax.config.changes import config_changes
from rljax.errors import ConfigError
from rljax.run_directory import RunDirectory
from tests.test_run_directory import make_config


@pytest.fixture
def changes(config_file):
    """Changes from a config with `before` to that with overrides, and back."""

    def changes(*overrides, before=()):
        old, new = load_config(config_file, before), load_config(config_file, [*before, *overrides])
        there, back = (
            {each.name: each.harmless for each in config_changes(*pair)} for pair in ((old, new), (new, old))
        )
        assert there == back
        return there

    return changes


HARMLESS = """run_dir=elsewhere training.steps=7 checkpoint.every=3 checkpoint.keep_every=10
checkpoint.on_failure=go_on evaluation.every=2 speculation.drafter=srt engine.max_slots=8
engine.batch_buckets=[64] engine.decode_steps_per_sync=4 engine.compilation_cache=null
engine.row_invariant=true engine.row_invariant=warn"""
OTHERS = """seed=1 task.args.b=2 rollout.temperature=0.5 algorithm.clip_high=0.3 optimizer.learning_rate=1e-5
engine.row_invariant=false engine.verification=target_only training.minibatches_per_step=2 mesh.data=2
kernels.compaction=xla training.remat=true"""


@pytest.mark.parametrize(
    ("override", "before", "is_harmless"),
    [
        *((override, [], True) for override in HARMLESS.split()),
        # Outlined layers change bits in bfloat16 only.
        ("policy.outline_layers=on", ["policy.compute_dtype=float32", "policy.outline_layers=off"], True),
        ("policy.outline_layers=on", ["policy.compute_dtype=bfloat16", "policy.outline_layers=off"], False),
        # Scheduling changes none where rows are invariant.
        ("engine.max_slots=8", ["engine.row_invariant=false"], False),
        ("engine.compilation_cache=null", ["engine.row_invariant=false"], True),
        # Otherwise a pass that verifies drafts computes other logits, too: near-ties flip.
        ("speculation.drafter=srt", ["engine.row_invariant=false"], False),
        ("speculation.drafter=srt", ["engine.verification=target_only"], False),
    ],
)
def test_what_changes_no_number_is_harmless(changes, override, before, is_harmless):
    assert changes(override, before=before) == {override.partition("=")[0]: is_harmless}


@pytest.mark.parametrize("override", OTHERS.split())
def test_what_changes_the_experiment_is_not(changes, override):
    assert changes(override)[override.partition("=")[0]] is False


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


def test_a_run_directory_of_an_earlier_release_is_read(config_file):
    """Each holds all keys, defaults included, so that nothing could be resumed otherwise."""
    assert load_config(config_file, ["engine.compile=behind"]) == load_config(config_file)
