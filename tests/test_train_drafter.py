"""scripts/train_drafter.py: a whole warm-up of a tiny policy, also after an interruption."""

import contextlib
import functools
import io
import json
import re
import signal

import pytest

from drafters.eagle.arguments import EagleArguments
from drafters.eagle.checkpoint import load_head
from drafters.eagle.objective import HeadTraining, head_training
from drafters.eagle.spot_trainer import HeadTrainer
from rljax.config import load_config
from rljax.models.config import ModelConfig
from rljax.training import drafter_warm_up
from tests.scripts import load_script
from tests.training.tiny_run import write_config

train_drafter = load_script("train_drafter")

# EAGLE-3, the default, needs more layers than this policy has.
ARGUMENTS = [
    *("--variant", "eagle", "--steps", "5", "--slices-per-round", "2", "--heldout", "3"),
    *("--learning-rate", "1e-2"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A config, the head that an uninterrupted run makes of it, and what that run says."""
    directory, said = tmp_path_factory.mktemp("world"), io.StringIO()
    config = write_config(directory)
    with contextlib.redirect_stdout(said):
        assert warm_up(config, directory / "head") == 0
    return config, directory / "head", said.getvalue()


def warm_up(config, output, *more):
    with pytest.MonkeyPatch.context() as patch:  # acceptance by two positions: a small program
        patch.setattr(drafter_warm_up, "WarmUp", functools.partial(drafter_warm_up.WarmUp, depth=2))
        return train_drafter.main(["--config", str(config), "--output", str(output), *ARGUMENTS, *more])


def test_the_head_is_where_engines_read_it_and_its_acceptance_is_told(world, capsys):
    config, directory, said = world
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert not directory.with_name("head.partial").exists()
    content = json.loads((directory / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle"] and content["hidden_size"] == 64
    shape = (content["vocab_size"], 64, 1, 2, 1, 64, 64)
    load_head(directory, ModelConfig("qwen3", *shape, tie_embeddings=True, qk_norm=True))
    assert warm_up(config, directory) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err
    for word in ("before: accept length", "after:  accept length", "head 5/5", "tokens/s"):
        assert word in said
    before, after = (line for line in said.splitlines() if "acceptance by position" in line)
    assert before.split(":")[1] != after.split(":")[1]


def test_a_run_that_is_killed_and_then_interrupted_goes_on_with_the_same_bits(
    world, tmp_path, monkeypatch, capsys
):
    """Killed, from the last round; after a signal, from the update that was in progress."""
    config, uninterrupted, _ = world
    one_slice, calls = HeadTrainer.slice, []

    def ended(self, shared):
        calls.append(None)
        if len(calls) == 4:  # the second of the second round
            raise KeyboardInterrupt
        if len(calls) == 5:  # the first of that round again
            signal.raise_signal(signal.SIGTERM)
        return one_slice(self, shared)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "slice", ended)
        assert warm_up(config, tmp_path / "head") == 130
        capsys.readouterr()
        assert warm_up(config, tmp_path / "head") == 128 + signal.SIGTERM
    assert "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
    # `auto` is measured, and a resumed run keeps what it began with.
    assert load_config(tmp_path / "head.partial" / "config.yaml").policy.compute_dtype == "float32"
    # What was begun with other settings is not gone on with.
    assert warm_up(config, tmp_path / "head", "--variant", "hass") == 2
    assert "variant: is hass" in capsys.readouterr().err
    assert warm_up(config, tmp_path / "head") == 0
    assert "resumed after 3 updates" in capsys.readouterr().out
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "head" / file).read_bytes() == (uninterrupted / file).read_bytes()


def test_a_run_and_a_warm_up_make_the_same_head():
    """Without arguments, and with the same ones."""
    required = ["--config", "c", "--output", "o"]
    assert train_drafter._parser().parse_args(required).variant == EagleArguments().variant
    objective = {"unrolled_steps": 2, "cross_entropy_weight": 0.0, "reverse_kl_weight": 0.5, "lk_weight": 1.0}
    objective |= {"tv_weight": 0.25, "coupled_weight": 2.0, "sampled_weight": 3.0}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in objective.items()]
    parsed = vars(train_drafter._parser().parse_args([*required, *options]))
    assert {name: parsed[name] for name in train_drafter._OBJECTIVE} == {"hidden_weight": None} | objective
    training = EagleArguments(**objective).training
    assert training == HeadTraining(2, 0.8, 0.0, 0.0, 0.5, 1.0, 0.25, 2.0, 3.0)
    assert training == head_training("eagle3", **objective)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lk-weight", "-1"], "lk_weight: should be a finite number and not negative, got -1.0"),
        (["--variant", "eagle3", "--hidden-weight", "1"], "hidden_weight: eagle3's outputs are no hidden"),
        (["--hidden-weight", "0", "--cross-entropy-weight", "0"], "cross_entropy_weight: it and all other"),
        (["--unrolled-steps", "255"], "training.pack_length: 256 is too short for 255 unrolled steps"),
        (["--variant", "eagle3"], ".* cannot be served; it needs three different ones"),
    ],
)
def test_a_head_that_cannot_be_is_refused_before_training(world, tmp_path, capsys, options, message):
    assert warm_up(world[0], tmp_path / "head", *options) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: {message}", error) and error.count("\n") == 1
