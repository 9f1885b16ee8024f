"""Files of an evaluation: nothing that was finished is lost, nothing of another evaluation is taken over."""

import json
import os
import signal

import pytest

from rljax.errors import ConfigError, UserError
from rljax.evaluation import records
from rljax.evaluation.records import EvaluationDirectory, JsonLog
from tests.fork_server import shared

IDENTITY = {"policy": "abc", "rollout.temperature": 1.0, "rollout.stop": ("x",)}


def test_a_log_survives_a_kill_in_the_middle_of_a_line(tmp_path):
    with JsonLog(tmp_path / "log") as log:
        log.append((1, 0), {"text": "b\nc"})
        log.append((0, 1), {"text": "ü"})
        assert JsonLog(tmp_path / "log").lines == log.lines  # before it is closed
    with open(tmp_path / "log", "ab") as file:
        file.write(b'{"problem": 2, "sam')
    again = JsonLog(tmp_path / "log")
    assert set(again.lines) == {(1, 0), (0, 1)}
    with again:
        again.append((0, 0), {"text": ""})
    assert JsonLog(tmp_path / "log").lines == again.lines
    again.sort()
    lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert [(line["problem"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (1, 0)]
    assert JsonLog(tmp_path / "log").lines == again.lines


def test_a_damaged_line_is_named(tmp_path):
    for line in ("no JSON", '{"sample": 1}', "[1]"):
        (tmp_path / "log").write_text(f'{{"problem": 0, "sample": 0}}\n{line}\n')
        with pytest.raises(UserError, match=r"log:2: not a line of an evaluation .* delete the line"):
            JsonLog(tmp_path / "log")


def test_the_same_evaluation_goes_on_and_another_is_refused(tmp_path):
    EvaluationDirectory(tmp_path, IDENTITY)
    EvaluationDirectory(tmp_path, IDENTITY)
    with pytest.raises(ConfigError, match=r"rollout.temperature: is 0.5, but the evaluation in .* has 1.0"):
        EvaluationDirectory(tmp_path, IDENTITY | {"rollout.temperature": 0.5})
    with pytest.raises(ConfigError, match="evaluates other weights"):
        EvaluationDirectory(tmp_path, IDENTITY | {"policy": "def"})
    (tmp_path / "evaluation.json").write_text("[")
    with pytest.raises(UserError, match="damaged"):
        EvaluationDirectory(tmp_path, IDENTITY)
    with pytest.raises(ConfigError, match="--output: cannot create"):
        EvaluationDirectory(tmp_path / "evaluation.json" / "below", IDENTITY)


HOLDS = """
import sys, time
from rljax.evaluation.records import EvaluationDirectory

with EvaluationDirectory(sys.argv[1], {}):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_one_process_at_a_time(tmp_path):
    """A second one would cut off the line that the first is writing."""
    directory, said = tmp_path / "evaluation", tmp_path / "said"
    said.touch()
    other = shared().start(HOLDS, [directory], said, said)
    while not said.read_text() and other.wait(0.01) is None:
        pass
    assert said.read_text() == "locked\n"
    with pytest.raises(ConfigError, match="--output: another process evaluates in"):
        EvaluationDirectory(directory, {})
    other.send(signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL
    with EvaluationDirectory(directory, {}):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "log").symlink_to("/dev/full")
    log = JsonLog(tmp_path / "none")
    log.path = tmp_path / "log"
    full_disk = r"cannot be written \(No space left on device\); started again, it continues"
    with pytest.raises(UserError, match=full_disk), log:
        log.append((0, 0), {"text": "a"})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write_durably", full)
    for tried in (log.sort, lambda: EvaluationDirectory(tmp_path / "new", IDENTITY)):
        with pytest.raises(UserError, match=full_disk):
            tried()
