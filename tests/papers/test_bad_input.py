"""Bad input of the papers' policies, through scripts/train.py: one line, and nothing lost."""

import pytest

from tests.configs import table
from tests.test_bad_input import policy, refusal, world  # noqa: F401 (fixtures)

KEYS = """
speculation.drafter=quantized & speculation.choice=roofline & speculation.calibration_dir=none
    -> speculation.choice: roofline finds no constants
speculation.drafter=small_model & speculation.args={path: POLICY}
    & speculation.decoupled={window: 3, devices: [99]}
    -> speculation.decoupled.devices: number 99 is needed, and there
"""


@pytest.mark.parametrize(("arguments", "says"), table(KEYS))
def test_a_key(policy, refusal, arguments, says):  # noqa: F811
    assert says in refusal(*arguments.split(" & "))
