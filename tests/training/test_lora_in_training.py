"""Whole runs with LoRA: exact logprobs, drafts without consequences, checkpoints of factors, export."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from rljax.assembly.saved_policy import load_saved_policy
from rljax.errors import CheckpointError
from rljax.models.digest import base_digest
from rljax.models.huggingface import load_model_config, load_params
from rljax.models.lora import matrices_of, merge, with_matrices
from tests.models.test_huggingface import assert_same_logits, our_logits, reference_logits
from tests.scripts import load_script
from tests.training.test_speculation_in_training import final_state, run, what, world  # noqa: F401

LORA = "policy.lora={rank: 4, alpha: 8}"
STEPS = 4
KEYS = ("algorithm.kl_coefficient=0.04", f"training.steps={STEPS}", "checkpoint.every=2")


@pytest.fixture(scope="module")
def plain(world):  # noqa: F811
    return run(world, "lora", LORA, *KEYS)


@pytest.fixture(scope="module")
def exported(world, plain):  # noqa: F811
    """The merged policy, and the adapter alone."""
    directory = world / "exported"
    arguments = [world / "lora" / "run", directory / "policy", "--adapter", directory / "adapter"]
    assert load_script("export").main([str(argument) for argument in arguments]) == 0
    return directory


def test_the_training_pass_has_the_rollouts_logprobs(plain):
    assert [line["mismatch/logprob_abs_max"] for line in plain[1:]] == [0.0] * STEPS
    assert all(line["gradient_norm"] > 0 for line in plain[1:])
    assert len({line["engine/compilations"] for line in plain[1:]}) == 1


def test_the_reference_is_the_base(plain):
    """The first update is that of a policy with B = 0, whose KL to the base is exactly 0."""
    assert plain[1]["loss/kl"] == 0.0 < plain[2]["loss/kl"] < plain[-1]["loss/kl"]


def test_drafts_change_no_number(world, plain):  # noqa: F811
    lines = run(world, "srt", LORA, *KEYS, drafter="srt", verified=[True])
    assert what(lines) == what(plain)
    assert sum(line["speculation/accepted"] for line in lines[1:]) > 10
    assert final_state(world, "srt", STEPS) == final_state(world, "lora", STEPS)


def test_a_run_that_goes_on_has_the_same_numbers(world, plain):  # noqa: F811
    run(world, "resumed", LORA, *KEYS, "training.steps=2")
    lines = run(world, "resumed", LORA, *KEYS)
    for line, other in zip(what(lines), what(plain), strict=True):
        common = line.keys() & other.keys()  # the end of the first session evaluates, too
        assert {key: line[key] for key in common} == {key: other[key] for key in common}
        assert {"reward/mean", "loss/policy", "gradient_norm"} <= common or line["step"] == 0
    assert final_state(world, "resumed", STEPS) == final_state(world, "lora", STEPS)


def test_a_checkpoint_holds_what_is_trained(world, plain):  # noqa: F811
    seal = json.loads((world / "lora" / "run" / "checkpoints" / str(STEPS) / "checkpoint.json").read_text())
    names = seal["leaves"].keys()
    assert "factors.layers.0.gate.b" in names
    assert not any(name.startswith(("params", "base")) for name in names)
    assert sum(name.endswith("layers.0.q.a") for name in names) == 3  # and two moments
    saved = load_saved_policy(world / "lora" / "run")
    base = load_params(world / "lora" / "run" / "base", saved.policy.config)
    assert seal["host_state"]["base"] == base_digest(base)
    lora, factors = saved.adapter.adapter.lora, saved.adapter.adapter.factors
    expected = with_matrices(base, merge(matrices_of(base, lora), factors, lora))
    for ours, theirs in zip(jax.tree.leaves(saved.policy.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not np.array_equal(saved.policy.params["layers"][0]["q"], base["layers"][0]["q"])


def test_what_is_exported_is_the_same_policy_twice(world, exported):  # noqa: F811
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = world / "lora" / "run" / "base"
    settings = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base.resolve()) and settings["r"] == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    theirs = reference_logits(peft.PeftModel.from_pretrained(model, exported / "adapter").eval())
    config = load_model_config(exported / "policy")
    assert_same_logits(our_logits(config, load_params(exported / "policy", config)), theirs)
    assert "LoRA adapter" in (exported / "adapter" / "README.md").read_text()


def test_an_adapter_to_go_on_from(world, exported):  # noqa: F811
    """The reference is then the policy with the adapter, from which the run begins."""
    adapter, base = exported / "adapter", world / "lora" / "run" / "base"
    keys = (*KEYS, "warm_start=null", "training.steps=1", "evaluation.problems=0")
    begun = f"policy={{path: {base}, lora: {{rank: 4, alpha: 8, path: {adapter}}}}}"
    lines = run(world, "further", begun, *keys)
    assert lines[1]["mismatch/logprob_abs_max"] == lines[1]["loss/kl"] == 0.0 < lines[1]["gradient_norm"]
    saved, start = load_saved_policy(world / "further" / "run"), load_saved_policy(world / "lora" / "run")
    factors = (jax.tree.leaves(each.adapter.adapter.factors) for each in (saved, start))
    moved = [np.abs(np.subtract(*pair)).max() for pair in zip(*factors, strict=True)]
    assert 0 < max(moved) < 0.01

    # Another base, of the same shape: for an adapter, and for a run that has begun.
    other = world / "other_base"
    shutil.copytree(base, other)
    file = other / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"policy.lora.path: the adapter in .* another base"):
        run(world, "refused", begun.replace(str(base), str(other)), *keys)
    shutil.copyfile(file, base / "model.safetensors")
    file = adapter / "adapter_model.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(file), file)  # without the name of its base
    for refused in (
        lambda: load_saved_policy(world / "further" / "run"),
        lambda: run(world, "further", begun, *keys, "training.steps=2"),
    ):
        with pytest.raises(CheckpointError, match=r"its adapter belongs to another base than .* holds now"):
            refused()
