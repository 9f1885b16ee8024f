"""Bad input of the papers' policies, through scripts/train.py: one line, and nothing lost."""

import shutil

import pytest

from tests import test_bad_input
from tests.configs import table
from tests.training.tiny_run import write_config

world = test_bad_input.world

KEYS = """
speculation.drafter=quantized & speculation.choice=roofline & speculation.calibration_dir=none
    -> speculation.choice: roofline finds no constants
speculation.drafter=small_model & speculation.args={path: POLICY}
    & speculation.decoupled={window: 3, devices: [99]}
    -> speculation.decoupled.devices: number 99 is needed, and there
"""


@pytest.mark.parametrize(("arguments", "says"), table(KEYS))
def test_a_key(world, tmp_path, monkeypatch, capsys, arguments, says):
    shutil.copytree(world / "policy", tmp_path / "policy")
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert says in test_bad_input.refusal(tmp_path, monkeypatch, capsys, arguments.split(" & "))
