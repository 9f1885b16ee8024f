"""The list of the default path in the README is what a step goes through, with as many files and lines."""

import json
import re
import subprocess
import sys

from tests.default_path import ROOT

_LISTED = re.compile(r"`([\w/]+\.py)` (\d+)")
_SAID = re.compile(r"\*\*(\d+) files and ([\d,]+) lines\*\* on the host, (\d+) files and ([\d,]+) lines in programs")


def listed():
    """By table, host and device: the files of the README and the lines that it says they have."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## The default path\n")[2].partition("\n## ")[0]
    said = [int(number.replace(",", "")) for number in _SAID.search(section.replace("\n", " ")).groups()]
    tables = [dict(_LISTED.findall(table)) for table in section.split("In programs")]
    return said, [{name: int(lines) for name, lines in table.items()} for table in tables]


def test_the_readme_lists_the_default_path():
    python = [sys.executable, "-m", "tests.default_path"]
    answer = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, check=True)
    ran = json.loads(answer.stdout)
    said, (host, device) = listed()
    assert sorted(ran["host"]) == sorted(host)
    assert sorted(ran["device"]) == sorted(device)
    for number, lines, table in ((said[0], said[1], host), (said[2], said[3], device)):
        assert number == len(table)
        assert lines == sum(table.values())


def test_the_lines_are_as_many_as_the_readme_says():
    """Within a tenth: not every change of a file is one of the list."""
    _, tables = listed()
    for name, lines in (pair for table in tables for pair in table.items()):
        there = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert abs(there - lines) <= max(lines / 10, 10), f"{name} has {there} lines, not {lines}"
