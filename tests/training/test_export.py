"""Exports: what transformers computes from them, what the card says, and what is never overwritten."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from drafters.eagle.checkpoint import load_head
from drafters.eagle.model import HeadConfig, init_head
from drafters.eagle.objective import published_training
from drafters.eagle.spot_trainer import BufferSettings, HeadTrainer, head_optimizer
from rljax.assembly.policy import checkpoint_parts
from rljax.assembly.saved_policy import load_saved_policy
from rljax.evaluation.records import default_output
from rljax.models.digest import weights_digest
from rljax.models.huggingface import load_params
from rljax.models.rope import rope_table
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.run_directory import RunDirectory
from rljax.training import export
from rljax.training.model_card import model_card
from tests.assembly.test_saved_policy import write_run
from tests.models.test_huggingface import assert_same_logits, our_logits, reference_logits, reload
from tests.scripts import load_script


def main(*arguments):
    return load_script("export").main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two checkpoints, at steps 3 and 5, with metrics of seven steps."""
    path, model = write_run(tmp_path_factory.mktemp("export"))
    directory = RunDirectory(path)
    directory.record_session(0)
    for step in range(8):
        line = {"step": step, "reward/mean": 0.1 * step, "response_length/mean": 20.0 + step}
        if step in (0, 5, 7):
            line["evaluation/reward"] = 0.5 + step / 100
        directory.append_metrics(line)
    return path, model


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "policy"
    assert main(run[0], output) == 0
    return output


def test_transformers_computes_the_same_logits(run, exported):
    """And has the tokenizer and its chat template."""
    _, model = run
    assert_same_logits(our_logits(model, init_params(model, 5)), reference_logits(reload(exported)))
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.load(run[0] / "tokenizer"), transformers.AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": "47a5b8c9="}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert rendered["input_ids"] == ours.encode_chat(messages)
    assert theirs.eos_token_id == ours.eos_token_id
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == ours.eos_token_id


def test_an_older_step_in_bfloat16(run, tmp_path):
    path, model = run
    assert main(path, tmp_path / "half", "--step", 3, "--dtype", "bfloat16") == 0
    assert checkpoint_parts(tmp_path / "half")[0] == model
    params = load_params(tmp_path / "half", model)
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(model, 3))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert "bfloat16" in (tmp_path / "half" / "README.md").read_text()


def test_the_card_tells_what_it_is(run, exported):
    card = (exported / "README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["tags"] == ["rljax", "reinforcement-learning", "grpo"]
    assert "after 5 of 2 steps of grpo on the task `chain_arithmetic`" in text
    assert "| reward on held-out problems | 0.5 (step 0) | 0.55 (step 5) |" in text
    assert "| reward in training | 0 (step 0) | 0.5 (step 5) |" in text  # not 0.7, of step 7
    config = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert config["task"]["args"] == {"max_terms": 3} and config["optimizer"]["learning_rate"] == 1e-3
    assert config["run_dir"] == "run"  # the folders of a machine are not told
    assert str(run[0].parent) not in card
    assert RunDirectory(run[0]).read_sessions()[0]["date"] in text
    assert "Evaluated on" not in text


def test_the_card_has_what_evaluate_found(run):
    path, _ = run
    output = default_output(path, 5, "heldout")
    output.mkdir(parents=True)
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75}
    found = {"overall": {"pass@4": estimate}, "problems": 8, "samples": 4}
    found["settings"] = {"policy": weights_digest(load_saved_policy(path).policy.params)}
    (output / "results.json").write_text(json.dumps(found))
    card = model_card(load_saved_policy(path), "float32", "policy")
    assert "Evaluated on 8 held-out problems, 4 responses each" in card
    assert "| pass@4 | 0.5 (0.25 to 0.75) |" in card
    assert "Evaluated on" not in model_card(load_saved_policy(path, 3), "float32", "policy")
    # Of a checkpoint that was deleted, before the run came to this step again in another way.
    found["settings"]["policy"] = "another"
    (output / "results.json").write_text(json.dumps(found))
    assert "Evaluated on" not in model_card(load_saved_policy(path), "float32", "policy")


def test_no_backticks_in_a_config_end_its_block(tmp_path):
    path, _ = write_run(tmp_path, "rollout.stop=['```', '````']", steps=(1,))
    card = model_card(load_saved_policy(path), "float32", "policy")
    block = card.split("`````yaml\n")[1].split("\n`````")[0]
    assert yaml.safe_load(block)["rollout"]["stop"] == ["```", "````"]


def test_nothing_is_overwritten_unless_asked_for(run, tmp_path, capsys):
    path, model = run
    output = tmp_path / "policy"
    assert main(path, output, "--step", 3) == 0
    before = (output / "model.safetensors").read_bytes()
    assert main(path, output) == 2
    assert "a model already; choose another directory, or replace it: --force" in capsys.readouterr().err
    assert (output / "model.safetensors").read_bytes() == before
    (output / "left-over").write_text("")
    assert main(path, output, "--force") == 0
    params = load_params(output, model)
    np.testing.assert_array_equal(params["embed"], init_params(model, 5)["embed"])
    assert not (output / "left-over").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy"]


def test_an_export_that_fails_leaves_everything_as_it_was(run, tmp_path, monkeypatch, capsys):
    path, _ = run
    assert main(path, tmp_path / "policy", "--step", 3) == 0
    before = sorted((file.name, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "model_card", full)
    assert main(path, tmp_path / "policy", "--force") == 2
    assert "No space left on device" in capsys.readouterr().err
    after = sorted((file.name, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file())
    assert after == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy"]
    # What is no model is never replaced.
    (tmp_path / "thesis.tex").write_text("years")
    assert main(path, tmp_path, "--force") == 2
    assert "is not a model directory; choose another one" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("when", ["policy", "old"])
def test_an_export_that_is_stopped_while_it_takes_its_place(tmp_path, monkeypatch, when):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("old")
    rename = Path.rename

    def stopped(path, target):
        monkeypatch.undo()
        if when == "old":  # the model that was there has gone out of the way
            rename(path, target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), export._replacing(tmp_path / "policy") as partial:
        partial.mkdir()
        monkeypatch.setattr(Path, "rename", stopped)
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy"]
    assert (tmp_path / "policy" / "config.json").read_text() == "old"


def test_the_head_is_what_its_loader_reads(tmp_path):
    """From the state that its trainer keeps in checkpoints, under the name of its drafter."""
    drafters = "speculation={drafter: srt, others: {eagle: {variant: eagle, path: null}}}"
    _, model = write_run(tmp_path, drafters, steps=())
    head = HeadConfig("eagle", model)
    params = init_head(head, init_params(model, 1), seed=7)
    training = published_training("eagle")
    rope = rope_table(model, 32)
    trainer = HeadTrainer(
        head, training, head_optimizer(1e-3), rope, Numerics(), BufferSettings(), 16, 1, 0, params
    )
    state = {f"eagle/{name}": array for name, array in trainer.state().items()}
    path, _ = write_run(tmp_path, drafters, steps=(1,), drafter=state)
    assert main(path, tmp_path / "policy", "--drafter", tmp_path / "head") == 0
    config, loaded = load_head(tmp_path / "head", model)
    assert config == HeadConfig("eagle", model)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_bad_input_is_one_line(run, exported, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["{run}", "out", "--drafter", "head"], "no EAGLE head at this step, as it was trained without a dr"),
        (["nowhere", "out"], "nowhere does not exist"),
        (["{run}", "{run}"], "is not a model directory"),
        (["{run}", "out", "--step", "4"], "no checkpoint of step 4; there are 3, 5"),
        (["{model}", "out"], "is a Hugging Face directory already"),
    ):
        assert main(*(each.format(run=run[0], model=exported) for each in arguments)) == 2
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
