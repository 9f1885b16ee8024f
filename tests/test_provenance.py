"""rljax/provenance.py: the machine, the commit and the command behind a figure."""

import subprocess

import jax
import numpy as np

from rljax.provenance import command_line, git_commit, machine_facts
from tests.scripts import SCRIPTS


def test_machine_facts():
    facts = machine_facts(("numpy", "surely-not-installed"))
    assert facts["cpu"] and facts["cores"] >= 1
    assert facts["vectors"] in (None, "AVX2", "AVX-512", "AMX")
    assert facts["jax"] == jax.__version__
    assert facts["numpy"] == np.__version__
    assert "surely-not-installed" not in facts
    if jax.default_backend() == "cpu":
        assert facts["accelerator"] is None


def test_commit_and_whether_it_is_what_ran(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path / "nowhere") is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "engine.json").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == head
    (results / "engine.json").write_text("2")
    (tmp_path / "notes.txt").write_text("untracked")
    assert git_commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert git_commit(tmp_path) == head + "-dirty"


def test_the_command_can_be_run_again_and_names_no_home():
    argv = [str(SCRIPTS / "bench_engine.py"), "--output", "a file.json"]
    assert command_line(argv) == "python scripts/bench_engine.py --output 'a file.json'"
