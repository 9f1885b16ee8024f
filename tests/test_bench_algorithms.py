"""scripts/bench_algorithms.py: its command line, its rows and its picture; nothing is trained here."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.algorithms.registry import ALGORITHMS
from rljax.config import load_config
from rljax.reports.decisions import RunDecisions
from rljax.reports.runs import RunData
from rljax.requests import Completion
from rljax.rollout.collector import Group
from rljax.tasks.base import Problem
from tests.scripts import SCRIPTS, load_script

bench_algorithms = load_script("bench_algorithms")
PATH = Path("nowhere")
CONFIG = str(SCRIPTS.parent / "configs/bench_algorithms.yaml")


def learned(seed):
    steps = [
        {"step": i + 1, "reward/mean": 0.1 * i + seed, "entropy": 1.0 - 0.1 * i, "rollout/groups_sampled": 2}
        for i in range(6)
    ]
    for line in steps:
        line |= {"policy/clip_fraction_low": 0.01, "policy/clip_fraction_high": 0.02}
        line |= {"speculation/accepted": 5, "mismatch/logprob_abs_max": 0.0}
    heldout = [{"step": 0, "evaluation/reward": 0.25 + seed}, {"step": 6, "evaluation/reward": 0.5 + seed}]
    run = RunData(PATH, "run", steps, heldout, [{"commit": "abc"}], [], RunDecisions(PATH, {}), "")
    return bench_algorithms.Learned(run, 0.5, "grpo")


@pytest.fixture
def row():
    return bench_algorithms.row_of("grpo", [learned(0), learned(1)])


def test_a_row_is_of_all_seeds(row):
    assert (row.name, row.value, row.baseline_value) == ("algorithms/grpo", 1.0, 0.75)
    details = row.as_json()
    assert (details["before"], details["after"], details["gain"]) == ([0.25, 1.25], [0.5, 1.5], 0.25)
    np.testing.assert_allclose(details["reward_by_step"], np.arange(6) / 10 + np.asarray([[0], [1]]))
    assert details["groups_sampled"] == [12, 12] and details["accepted_drafts"] == [30, 30]
    assert details["entropy_at_last"] == pytest.approx([0.5, 0.5])


def test_what_was_written_is_drawn(row, tmp_path, capsys):
    results, picture = tmp_path / "results.json", tmp_path / "picture.png"
    arguments = ["--config", CONFIG, "--output", str(results), "--plot", str(picture)]
    assert bench_algorithms.main(arguments) == 2
    assert f"error: {results}: holds no results" in capsys.readouterr().err
    results.write_text(json.dumps({"rows": [row.as_json()] * len(ALGORITHMS)}))
    assert bench_algorithms.main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_kl_is_summed_over_a_response_and_averaged_over_them():
    """Ratios start / policy of 2 at each token: k3 is 2 - 1 - log 2 each, of 3 and 1 tokens."""
    prompt, config = (1, 2), load_config(CONFIG)
    completions = [
        Completion(np.arange(n, dtype=np.int32), np.full(n, -2.0, np.float32), "eos") for n in (3, 1)
    ]
    group = Group(Problem("heldout/0", (), "", 0), prompt, completions, [{"reward": 0.0}] * 2)

    def score_reference(params, batches):
        return [batch.rollout_logprobs + np.float32(np.log(2)) for batch in batches]

    training = SimpleNamespace(
        config=config,
        heldout=[0],
        state=SimpleNamespace(params=None),
        engine=SimpleNamespace(load_params=lambda params: params),
        trainer=SimpleNamespace(row_multiple=1, score_reference=score_reference),
        collector=SimpleNamespace(collect=lambda *_: ([group], None, None)),
    )
    assert bench_algorithms.kl_from(None, training) == pytest.approx(2 * (1 - np.log(2)), rel=1e-5)
