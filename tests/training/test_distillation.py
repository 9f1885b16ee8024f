"""On-policy distillation in whole runs: the policy nears its teacher, and what is no teacher is refused."""

import shutil

import pytest

from rljax.errors import ConfigError, UserError
from rljax.training import loop
from tests.assembly.test_saved_policy import write_run
from tests.training.tiny_run import train


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run whose policy has other weights, with one layer more."""
    return write_run(tmp_path_factory.mktemp("teacher"), "policy.shape.num_layers=2", steps=(1,))[0]


def distil(directory, teacher, *overrides):
    keys = ("algorithm.name=distillation", "algorithm.kl_coefficient=1.0", f"algorithm.teacher={teacher}")
    return train(directory, *keys, "evaluation.problems=0", *overrides)


def test_the_policy_nears_its_teacher(tmp_path, teacher):
    keys = ("training.steps=8", "optimizer.learning_rate=1e-2", "rollout.prompts_per_step=4")
    _, *lines = distil(tmp_path, teacher, *keys)
    for line in lines:
        assert line["mismatch/logprob_abs_max"] == 0.0 and line["gradient_norm"] > 0
        assert line["update/skipped"] == 0.0  # a response that earns nothing still has a teacher
    kl = [line["teacher/kl"] for line in lines]
    assert sum(kl[-2:]) < 0.8 * sum(kl[:2])
    assert lines[0]["engine/compilations"] == lines[-1]["engine/compilations"]


def test_a_teacher_that_does_not_fit_is_one_line(tmp_path, teacher, monkeypatch):
    shutil.copytree(teacher, tmp_path / "others")
    file = tmp_path / "others" / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"content": "<|im_end|>"', '"content": "<|other|>"'))
    monkeypatch.setattr(loop, "compile_programs", lambda run: pytest.fail("it compiles"))
    for name, says in (
        ("absent", "algorithm.teacher: .*absent does not exist"),
        ("others", "algorithm.teacher: .* has another tokenizer than the policy"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            distil(tmp_path, tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher: distillation needs one"):
        train(tmp_path, "algorithm.name=distillation", "algorithm.kl_coefficient=1.0")
