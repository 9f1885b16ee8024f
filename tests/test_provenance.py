"""rljax/provenance.py: the machine, the commit and the command behind a figure."""

import json
import re
import subprocess
from pathlib import Path

import jax
import numpy as np

from rljax import provenance
from rljax.provenance import git_commit, machine_facts


def test_machine_facts():
    facts = machine_facts(("numpy", "surely-not-installed"))
    assert facts["cpu"] and facts["cores"] >= 1
    assert facts["vectors"] in (None, "AVX2", "AVX-512", "AMX")
    assert facts["jax"] == jax.__version__
    assert facts["numpy"] == np.__version__
    assert "surely-not-installed" not in facts
    if jax.default_backend() == "cpu":
        assert facts["accelerator"] is None


def git(where, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    command = ["git", "-C", str(where), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_whether_it_is_what_ran(tmp_path):
    assert git_commit(tmp_path / "nowhere") is None
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "engine.json").write_text("1")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "engine.md").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(tmp_path) == head
    (results / "engine.json").write_text("2")
    (tmp_path / "docs" / "engine.md").write_text("2")
    (tmp_path / "notes.txt").write_text("untracked")
    assert git_commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert git_commit(tmp_path) == head + "-dirty"


def commits_of(result):
    """The commit of a result, and those of all that is in it: rows may be of runs that were made before."""
    found = [result.get("commit")]
    parts = list(result.values())
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            found += [part["commit"]] if "commit" in part else []
            found += part.get("commits", [])
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return [str(commit).removesuffix("-dirty") for commit in found]


def unknown_commits(directory, repository):
    """Names of results with a commit that is not in the history that is checked out; "-dirty" counts as its
    base. Of a shallow clone, and where there is no git, those with one that is no hash: nothing else can be
    known.
    """
    is_whole = (repository / ".git").exists() and git(
        repository, "rev-parse", "--is-shallow-repository"
    ) == "false"
    history = set(git(repository, "rev-list", "HEAD").split()) if is_whole else None
    found = []
    for path in sorted(directory.glob("*.json")):
        for commit in commits_of(json.loads(path.read_text(encoding="utf-8"))):
            if not re.fullmatch("[0-9a-f]{40}", commit) or (history is not None and commit not in history):
                found.append(path.name)
                break
    return found


def test_every_result_names_a_commit_of_this_history():
    root = Path(provenance.__file__).parent.parent
    assert unknown_commits(root / "benchmarks/results", root) == []


def test_a_result_of_an_unknown_commit_is_found(tmp_path):
    source, results = tmp_path / "source", tmp_path / "results"
    source.mkdir()
    results.mkdir()
    git(source, "init", "-q")
    git(source, "commit", "-q", "--allow-empty", "-m", "first")
    first = git_commit(source)
    git(source, "commit", "-q", "--allow-empty", "-m", "second")
    known = {"commit": git_commit(source)}
    contents = {
        "dirty": {"commit": f"{first}-dirty"},
        "elsewhere": {"commit": "f" * 40},
        "short": {"commit": first[:9]},
        "without": {},
        "row": known | {"rows": [{"commits": [first]}, {"commits": ["e" * 40 + "-dirty"]}]},
        "part": known | {"before": {"runs": [{"commit": "none"}]}},
        "rows": known | {"rows": [{"commits": [first]}, known]},
    }
    for name, content in contents.items():
        (results / f"{name}.json").write_text(json.dumps(content))
    no_hash = ["part.json", "short.json", "without.json"]
    assert unknown_commits(results, source) == sorted([*no_hash, "elsewhere.json", "row.json"])
    git(tmp_path, "clone", "-q", "--depth", "1", source.as_uri(), "shallow")
    for where in (tmp_path / "shallow", tmp_path):
        assert unknown_commits(results, where) == no_hash
