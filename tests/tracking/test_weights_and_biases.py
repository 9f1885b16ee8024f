"""Weights & Biases, offline: a run directory is one run there, and no step is there twice."""

import json
import math
import struct
import time
from importlib.util import find_spec

import pytest

from tests.tracking.test_trackers import session

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="the wandb extra is not installed")


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """Nothing of the user's settings, and nothing that waits for a key."""
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def records(file):
    """The records of a session's file, a log as LevelDB writes it: blocks of 32 KiB with records in parts,
    each behind its checksum, length and kind (1 is whole, 2 the first part, 3 a middle one, 4 the last).
    """
    data, at, parts = file.read_bytes(), 7, []  # behind the file's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def sent(path):
    """What the sessions left for `wandb sync`: (id, project, name) and the lines of history."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs, lines = set(), []
    for file in sorted(path.glob("wandb/offline-run-*/run-*.wandb")):
        for _ in range(100):  # its process may still be writing
            written = [Record.FromString(data) for data in records(file)]
            if written and written[-1].HasField("exit"):
                break
            time.sleep(0.1)
        for record in written:
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.HasField("history"):
                items = record.history.item
                lines.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                )
    return runs, lines


def test_sessions_of_a_run_directory_are_one_run_without_doubled_steps(tmp_path):
    path = tmp_path / "run"
    first = {"step": 0, "x": 0.5, "note": "n"}
    said = session(path, {"mode": "offline"}, first, {"step": 1, "x": math.nan}, {"step": 2, "x": 2.0})
    kept = json.loads((path / "wandb.json").read_text())
    assert kept["step"] == 2
    # It resumes from a checkpoint of step 1.
    said += session(path, {"mode": "offline"}, {"step": 2, "x": 2.0}, {"step": 3, "x": 3.0})
    runs, lines = sent(path)
    assert said == []
    assert runs == {(kept["id"], "chains", "first try")}
    assert [(line["_step"], line["x"]) for line in lines] == [(0, 0.5), (1, "nan"), (2, 2.0), (3, 3.0)]
    assert lines[0]["note"] == "n"


def test_no_key_and_no_network_are_one_warning(tmp_path):
    """As on a machine where nobody has logged in: the run goes on."""
    said = session(tmp_path / "run", {"mode": "online"}, {"step": 0, "x": 1.0}, {"step": 1, "x": 1.0})
    assert len(said) == 1, said
    assert said[0].startswith("warning: Weights & Biases failed, the run goes on without it: ")
    assert "\n" not in said[0]
