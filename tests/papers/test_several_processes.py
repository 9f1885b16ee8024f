"""TLT's bandit over several processes, over gloo."""

import pytest

from tests.training import test_several_processes
from tests.training.test_several_processes import STEPS

one = test_several_processes.one


@pytest.mark.long
def test_drafts_change_nothing_over_processes(one, tmp_path):
    """Every pass asks another drafter, and what it took decides which is next. Two halves take turns."""
    bandit = ("speculation.choice=bandit", "speculation.epsilon=0.5", "speculation.overlap=true")
    drafts = ("speculation.drafter=srt", "speculation.others={quantized: {}}", *bandit)
    lines = test_several_processes._train(tmp_path, 2, "mesh.tensor=2", *drafts)
    test_several_processes._agree(lines, one[:STEPS])
    assert sum(line["speculation/drafted"] for line in lines[1:]) > 0
