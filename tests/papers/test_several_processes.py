"""TLT's bandit over several processes, over gloo."""

from unittest import mock

import pytest

from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.training import test_several_processes
from tests.training.test_several_processes import STEPS
from tests.training.tiny_run import train

REWARD = ChainArithmetic.reward  # the processes', which `world` of this folder replaces for the session


@pytest.fixture
def one(tmp_path_factory):
    """The metrics of one process with one device."""
    with mock.patch.object(ChainArithmetic, "reward", REWARD):
        return train(tmp_path_factory.mktemp("one"), f"training.steps={STEPS}")


@pytest.mark.long
def test_drafts_change_nothing_over_processes(one, tmp_path):
    """Every pass asks another drafter, and what it took decides which is next. Two halves take turns."""
    bandit = ("speculation.choice=bandit", "speculation.epsilon=0.5", "speculation.overlap=true")
    drafts = ("speculation.drafter=srt", "speculation.others={quantized: {}}", *bandit)
    lines = test_several_processes._train(tmp_path, 2, "mesh.tensor=2", *drafts)
    test_several_processes._agree(lines, one[:STEPS])
    assert sum(line["speculation/drafted"] for line in lines[1:]) > 0
