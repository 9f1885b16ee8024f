"""A saved policy evaluated by workers has the responses of one evaluated here."""

from rljax.assembly.saved_policy import load_saved_policy
from rljax.evaluation import evaluator
from rljax.evaluation.settings import evaluation_config
from rljax.progress import silent_progress
from rljax.run_directory import RunDirectory
from tests.cluster.turns import Turns, losing


def evaluate(path, output, *overrides):
    config = evaluation_config(path, None, ("evaluation.samples=2", *overrides))
    evaluator.Evaluator(load_saved_policy(path), config, "heldout", output, silent_progress()).run()
    return (output / "responses.jsonl").read_text()


def test_workers_give_the_same_responses(world, alone, monkeypatch, tmp_path):
    """One is lost in the middle. Only the command line asks for workers, not the config of the run."""
    path, lost = world / "alone" / "run", {}
    here = evaluate(path, tmp_path / "here", "engine.decode_steps_per_sync=1")
    turns = Turns(losing(lost))
    monkeypatch.setattr(evaluator, "cluster_of", turns.cluster_of)
    there = evaluate(path, tmp_path / "there", "engine.decode_steps_per_sync=1", "cluster.workers=2")
    assert lost
    assert here == there
    assert len(here.splitlines()) == 2 * 4

    config = RunDirectory(path).config_path.read_text()
    assert "cluster:" in config
    assert not evaluation_config(path, None, ()).cluster.workers
