"""The README lists the default path: the files that a step goes through, and how many lines they have."""

import json
import re
import subprocess
import sys

import pytest

from tests.default_path import ROOT, lines_of

_SAID = re.compile(r"(\d+) files and ([\d,]+) lines")
_FILE = re.compile(r"`([\w/]+/)`|`([\w/]+\.py)` (?:\| )?(\d+)")


def listed(text):
    """By part of a README's section: the files with their lines, and the totals that it names."""
    section = text.partition("## The default path\n")[2].partition("\n## ")[0]
    path, rest = section.split("On the way they ask")
    found = []
    for part in (path, *rest.split("In the compiled programs alone")):
        folder, files = "", {}
        for into, name, lines in _FILE.findall(part):
            folder = into or folder
            files |= {} if into else {folder + name: int(lines)}
        number, lines = _SAID.search(part).groups()
        found.append((files, int(number), int(lines.replace(",", ""))))
    return found


@pytest.fixture(scope="module")
def readme():
    return listed((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.long  # a run of its own
def test_the_readme_lists_what_a_step_goes_through(readme):
    command = [sys.executable, "-m", "tests.default_path", "--json"]
    ran = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    path, asked, programs = readme
    assert ran["path"] == list(path[0])
    assert sorted(ran["asked"]) == sorted(asked[0])
    assert sorted(ran["programs"]) == sorted(programs[0])


def test_the_totals_are_those_of_the_list(readme):
    """Files may change by a tenth of their lines before the list is another one, and the path stays short."""
    for files, number, lines in readme:
        assert (number, lines) == (len(files), sum(files.values()))
        for name, said in files.items():
            there = lines_of(name)
            assert abs(there - said) <= max(said / 10, 10), f"{name} has {there} lines, not {said}"
    path = readme[0][0]
    assert len(path) <= 12 and sum(map(lines_of, path)) <= 4000


def test_one_pass_names_every_file_of_the_path(readme):
    page = (ROOT / "docs/one-pass.md").read_text(encoding="utf-8")
    table = page.partition("## Every file\n")[2].partition("\n## ")[0]
    folder, named = "", set()
    for into, name in re.findall(r"`([\w/]+/)`|`(\w+\.py)`", table):
        folder = into or folder
        named |= set() if into else {folder + name}
    assert named == {name for files, *_ in readme for name in files}
