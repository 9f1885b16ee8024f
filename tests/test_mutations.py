"""The list of mutations: each can be applied, and names tests that exist."""

import json

import pytest

from tests.scripts import SCRIPTS, load_script

mutate = load_script("mutate")
_LIST = mutate.read_mutations()


def test_every_mutation_applies_and_names_tests():
    root = SCRIPTS.parent
    for mutation in _LIST:
        text = (root / mutation.file).read_text(encoding="utf-8")
        assert mutation.applied(text) != text, mutation.name
        with pytest.raises(ValueError, match="its text occurs"):
            mutation.applied(text.replace(mutation.replace, ""))
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            file, _, function = test.partition("::")
            assert (root / file).exists(), mutation.name
            if function:
                assert f"def {function.partition('[')[0]}(" in (root / file).read_text(encoding="utf-8"), test
    assert len({mutation.name for mutation in _LIST}) == len(_LIST)


def test_every_package_is_broken_somewhere():
    broken = {folder for mutation in _LIST for folder in mutation.file.split("/")[:-1]}
    packages = {path.parent.name for path in (SCRIPTS.parent / "rljax").glob("*/__init__.py")}
    # Thin, or only showing what others computed.
    left_out = {"commands", "config", "reports", "runtime"}
    assert packages - left_out <= {*broken, "kernels"}, packages - left_out - broken
    assert len(_LIST) >= 80


def test_noticed_and_survived_and_remembered(tmp_path, monkeypatch, capsys):
    """One mutation whose test notices, one whose test does not, in a repository of one file."""

    def copy_repository(into):
        (into / "tests").mkdir(parents=True)
        (into / "constants.py").write_text("one = 1\ntwo = 2\n")
        test = "import runpy\n\ndef test_one():\n    assert runpy.run_path('constants.py')['one'] == 1\n"
        (into / "tests" / "test_constants.py").write_text(test)
        (into / "tests" / "mutations.yaml").write_text("")

    entries = [
        mutate.Mutation("one is wrong", "constants.py", "one = 1", "one = 3", ("tests/test_constants.py",)),
        mutate.Mutation("two is wrong", "constants.py", "two = 2", "two = 3", ("tests/test_constants.py",)),
    ]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take most of the time of such a test
    monkeypatch.setattr(mutate, "copy_repository", copy_repository)
    monkeypatch.setattr(mutate, "read_mutations", lambda: entries)
    findings = tmp_path / "found.json"
    assert mutate.main(["--findings", str(findings)]) == 1
    said = capsys.readouterr().out
    assert "one is wrong: noticed by tests/test_constants.py::test_one\n" in said
    assert "two is wrong: SURVIVES\n" in said and "1 of 2 noticed" in said
    kept = json.loads(findings.read_text())["failed"]
    assert kept == {
        "one is wrong": "tests/test_constants.py::test_one",
        "tests/test_constants.py::test_one": None,
        "two is wrong": None,
    }
    assert mutate.main(["--findings", str(findings), "--only", "one is"]) == 0
    assert "1 of 1 noticed" in capsys.readouterr().out
