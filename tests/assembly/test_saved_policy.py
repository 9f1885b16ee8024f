"""Saved policies: the bits of a run's checkpoint without its optimizer, a Hugging Face directory, and every
directory that is neither.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest

from rljax.assembly.checkpoint import RunCheckpoints
from rljax.assembly.policy import Policy, checkpoint_parts, make_policy, policy_parts, turn_end_line
from rljax.assembly.saved_policy import load_saved_policy
from rljax.config import load_config
from rljax.errors import CheckpointError, ConfigError, UserError
from rljax.learning.accumulation import TrainState
from rljax.models.growth import grow
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.run_directory import RunDirectory
from rljax.tasks.registry import make_task
from rljax.training.export import export_policy
from tests.models.checkpoints import write_tokenizer
from tests.models.test_huggingface import QWEN2
from tests.training.tiny_run import write_config

STEPS = (3, 5)


def write_run(directory, *overrides, steps=STEPS, drafter=None):
    """A run directory as training leaves it, without training: other weights at every step."""
    config = load_config(write_config(directory), overrides)
    run = RunDirectory(config.run_dir)
    run.write_config(config)
    task = make_task(config.task.name, config.seed, **config.task.args)
    policy = make_policy(config, task, run.path / "tokenizer")
    checkpoints, model = RunCheckpoints(run.checkpoints_path, keep=10), policy.config
    for step in steps:
        params = init_params(policy.config, step)
        if config.policy.growth is not None:
            params, model = grow(params, policy.config, **config.policy.growth.model_dump(), seed=0)
        state = TrainState(params, optax.adamw(1e-3).init(params), np.asarray(step, np.int32))
        checkpoints.save(step, state, {"data_position": step}, drafter)
    checkpoints.close()
    return run.path, model


def assert_params(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, jax.Array) and not ours.committed
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("saved"), drafter={"srt/tokens": np.arange(3)})


def test_a_run_gives_the_newest_checkpoint_or_the_one_asked_for(run):
    path, model = run
    saved = load_saved_policy(path)
    assert (saved.step, saved.policy.config, saved.path) == (5, model, path)
    assert_params(saved.policy.params, init_params(model, 5))
    assert saved.policy.eos_token_ids == (saved.policy.tokenizer.eos_token_id,)
    assert saved.policy.tokenizer_directory == path / "tokenizer"
    assert saved.experiment == load_config(path / "config.yaml")
    assert_params(load_saved_policy(str(path), step=3).policy.params, init_params(model, 3))


def test_the_drafters_state_is_there_when_it_is_asked_for(run, tmp_path):
    np.testing.assert_array_equal(load_saved_policy(run[0]).drafter_state()["srt/tokens"], np.arange(3))
    without, _ = write_run(tmp_path, steps=(1,))
    assert load_saved_policy(without).drafter_state() == {}


def test_a_grown_policy_has_its_grown_shape(tmp_path):
    grown_by = "policy.growth={hidden_size: 128, mlp_size: 96, num_layers: 2}"
    path, model = write_run(tmp_path, grown_by, steps=(1,))
    saved = load_saved_policy(path)
    assert saved.policy.config == model and model.num_layers == 2
    sizes = {"hidden_size": 64, "mlp_size": 64, "num_layers": 1, "norm_epsilon": model.norm_epsilon * 2}
    base = dataclasses.replace(model, **sizes)
    assert_params(saved.policy.params, grow(init_params(base, 1), base, 128, 96, 2, 0)[0])


def test_a_moved_run_is_called_by_its_new_name(run, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(run[0], moved)
    assert load_saved_policy(moved).experiment.run_dir == str(moved)


def test_a_hugging_face_directory(run, tmp_path):
    path, model = run
    saved = load_saved_policy(path)
    save_model(tmp_path / "hf", model, saved.policy.params, "float32", path / "tokenizer")
    loaded = load_saved_policy(tmp_path / "hf")
    assert (loaded.experiment, loaded.step, loaded.drafter_state()) == (None, None, {})
    assert loaded.policy.config == model
    assert loaded.policy.eos_token_ids == saved.policy.eos_token_ids
    assert_params(loaded.policy.params, saved.policy.params)
    with pytest.raises(CheckpointError, match="no step 3"):
        load_saved_policy(tmp_path / "hf", step=3)


@pytest.fixture
def base_model(tmp_path):
    """A model directory without weights whose EOS is not the token that ends a turn."""
    write_tokenizer(tmp_path / "model")
    ids = {"eos_token_id": 0, "pad_token_id": 0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN2 | ids))
    return tmp_path / "model"


def test_a_run_says_that_a_turn_does_not_end_a_response(base_model, tmp_path):
    def policy(*overrides):
        made = [f"policy.path={base_model}", "policy.shape=null", *overrides]
        model, *others = policy_parts(load_config(write_config(tmp_path), made), tmp_path)
        return Policy(model, {}, *others)

    assert policy().eos_token_ids == policy().tokenizer.eos_token_ids == (0,)
    line = turn_end_line(policy())
    assert "<|im_end|>" in line and "only with <|endoftext|>" in line and "policy.extra_eos_tokens" in line
    for entry in ("<|im_end|>", 2):
        more = policy(f"policy.extra_eos_tokens=['{entry}']" if entry != 2 else "policy.extra_eos_tokens=[2]")
        assert more.eos_token_ids == more.tokenizer.eos_token_ids == (0, 2)
        assert turn_end_line(more) is None
    for entry in ("'<|imend|>'", "'a b'", 300, 5000, -1):
        with pytest.raises(ConfigError, match=r"^policy\.extra_eos_tokens: .* is no token of"):
            policy(f"policy.extra_eos_tokens=[{entry}]")


def test_eos_ids_that_no_response_could_end_with(base_model):
    content = json.loads((base_model / "config.json").read_text())
    for ids, message in ((5000, "eos_token_id is 5000; .* 0 to 319"), ([300, 310], "no response would ever")):
        (base_model / "config.json").write_text(json.dumps(content | {"eos_token_id": ids}))
        with pytest.raises(CheckpointError, match=message):
            checkpoint_parts(base_model)


def test_an_export_ends_with_the_tokens_of_the_run(tmp_path):
    path, _ = write_run(tmp_path, "policy.extra_eos_tokens=['<|endoftext|>']", steps=(1,))
    saved = load_saved_policy(path)
    assert saved.policy.eos_token_ids == saved.policy.tokenizer.eos_token_ids == (2, 0)
    exported = export_policy(saved, tmp_path / "exported")
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert load_saved_policy(exported).policy.eos_token_ids == (2, 0)


def without(*parts):
    def remove(path):
        for part in parts:
            for each in path.glob(part):
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        return path

    return remove


def with_config(old, new):
    def edit(path):
        text = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(text.replace(old, new))
        return path

    return edit


def policy_gone(path):
    config = load_config(path / "config.yaml", ["policy={path: models/gone}"])
    (path / "config.yaml").unlink()
    RunDirectory(path).write_config(config)
    return path


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda path: path / "nowhere", CheckpointError, "does not exist; give a run directory or a Hugging"),
        (lambda path: path / "config.yaml", CheckpointError, "is not a directory"),
        (lambda path: path.parent, CheckpointError, "neither a run .* nor a Hugging Face model directory"),
        (lambda path: path / "checkpoints", CheckpointError, "the run is .*, and --step chooses"),
        (lambda path: path / "checkpoints" / "5", CheckpointError, "the run is .*, and --step chooses"),
        (without("checkpoints"), CheckpointError, "no complete checkpoint yet; the first comes at step 1"),
        (without("checkpoints/*/checkpoint.json"), CheckpointError, "no complete checkpoint yet"),
        (without("tokenizer"), UserError, "tokenizer.json does not exist"),
        (with_config("seed: 0", "sead: 0"), ConfigError, "the run's config cannot be used .*sead"),
        (with_config("n_size: 64", "n_size: 32"), CheckpointError, r"float32\[.*\] in the checkpoint"),
        (policy_gone, CheckpointError, "policy.path of its config.yaml, models/gone, which is not there"),
    ],
)
def test_every_other_directory_is_one_clear_error(run, tmp_path, make, kind, message):
    path = tmp_path / "run"
    shutil.copytree(run[0], path)
    with pytest.raises(kind, match=message) as raised:
        load_saved_policy(make(path))
    assert isinstance(raised.value, UserError) and "\n" not in str(raised.value)
