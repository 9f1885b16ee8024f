"""rljax/commands/doctor.py: a line a subject, the command for a missing extra, and the exit status."""

import importlib.metadata
import importlib.util
import tomllib

import pytest

from rljax.commands import doctor
from tests.scripts import SCRIPTS

PROJECT = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]


@pytest.fixture
def without(monkeypatch):
    """Hides modules and distributions."""

    def without(*names):
        find, version = importlib.util.find_spec, importlib.metadata.version
        visible = lambda name, *rest: None if name in names else find(name, *rest)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", visible)

        def hidden(name):
            if name in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(importlib.metadata, "version", hidden)

    return without


def test_the_core_works_here(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctor.main([]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    subjects = [line[5:].split(":")[0] for line in lines]
    said_of = "rljax Python JAX core devices number_types row-invariance compilation_cache configs hub"
    assert subjects[:10] == [subject.replace("_", " ") for subject in said_of.split()]
    assert all(line.startswith("ok   ") for line in lines[:10]) and said.err == ""
    assert "(supported: <0.13,>=0.10.2)" in lines[2] and "exact in float32" in lines[6]
    assert "no compiled programs found" in lines[7]
    assert list(tmp_path.iterdir()) == []  # it writes nothing


def test_a_missing_extra_is_named_with_its_command_and_no_failure(without, monkeypatch):
    without("wandb", "starlette")
    lines = {line.subject: line for line in doctor.extra_lines(["wandb", "serve", "math"])}
    assert lines["extra wandb"].text == "Weights & Biases: needs wandb; pip install 'rljax[wandb]'"
    assert lines["extra serve"].text == "rljax serve: needs starlette; pip install 'rljax[serve]'"
    assert not any(line.failed for line in lines.values())
    assert doctor._missing(["surely_not_there.inside", "json"]) == ["surely_not_there.inside"]


def test_what_the_core_lacks_fails(without, monkeypatch, capsys):
    without("optax")
    monkeypatch.setattr(doctor, "device_lines", list)
    assert doctor.main([]) == 1
    said = capsys.readouterr()
    assert "FAIL core: optax is missing; pip install 'optax>=0.2.8'" in said.out
    assert said.err == "error: the core does not work; see the lines that say FAIL\n"


def test_versions_out_of_range_fail(monkeypatch):
    python, jax, core = doctor.core_lines(["jax>=99", "numpy>=2"], ">=3.99")
    assert python.failed and jax.failed and "pip install 'jax>=99'" in jax.text and not core.failed


def test_every_extra_of_the_project_is_known():
    extras = set(PROJECT["optional-dependencies"])
    assert extras - set(doctor.FOR_DEVELOPERS) <= set(doctor.EXTRAS)
    assert {"serve", "datasets", "math", "wandb", "cuda", "tpu"} <= extras
