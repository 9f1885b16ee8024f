"""Responses that call tools move as others do: answers are in the ledger, or the tools are asked again."""

from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import Died, Piece, Pieces
from tests.cluster.same_run import differences, run
from tests.cluster.test_coordinator import begun, whole
from tests.cluster.turns import local_run

TOOLS = (
    "tools={names: [calculator], opening: '+', closing: '=', answer_opening: '<', answer_closing: '>'}",
    "warm_start.steps=20",
    "algorithm.overlong_buffer=40",
)


def test_workers_lost_in_calls_and_behind_them_change_nothing(world, monkeypatch):
    """One is lost while a response waits for a tool, and one behind an answer."""
    lost = []

    def interfere(fabric):
        for name, worker in list(fabric.workers.items()):
            if worker.loop is None or len(lost) == 2 or worker._rollout <= len(lost):
                continue
            waits = worker.loop.turns.paused
            answered = any(each.tool_answers and each.ending is None for each in worker._keys)
            if answered if lost else waits:
                lost.append(name)
                fabric.kill(name)
                return

    alone = run(world, "tools_alone", *TOOLS)
    assert all(line["tools/calls"] for line in alone.metrics[1:])
    clustered, _ = local_run(world, "tools", monkeypatch, *TOOLS, interfere=interfere)
    assert len(lost) == 2
    changed = [name for name in differences(alone, clustered) if "tools/" not in name]
    assert not changed
    tokens = [[line["tools/tokens"] for line in each.metrics[1:]] for each in (alone, clustered)]
    assert all(ours >= theirs for ours, theirs in zip(tokens[1], tokens[0], strict=True))  # asked again


def test_answers_are_in_the_ledger():
    ledger = Ledger()
    ledger.open([0], 0)
    ledger.add("worker-0", Piece(0, 0, 0, (1, 2, 3, 4), (-1.0, 0.0, 0.0, -1.0), answers=((1, 3),)))
    assert ledger[0].partial().tool_answers == ((1, 3),)
    ledger.add("worker-0", Piece(0, 0, 1, (2, 3, 4, 5), (0.0, 0.0, -1.0, -2.0), "eos", answers=((1, 3),)))
    completion = ledger[0].completion(with_mask=True)
    assert completion.sampled_mask.tolist() == [True, False, False, True, True]
    assert completion.sampled_tokens == 3


def test_a_lost_workers_answers_do_not_count():
    """The tool may have said something else to the one that goes on."""
    coordinator, _ = begun()
    coordinator.only_holders = True
    coordinator.on(Died("worker-0", "of a test"), 2.0)
    assert coordinator.on(Pieces("worker-0", 1, (whole(0, 0, 2),)), 3.0) == []
    assert not coordinator.ledger[0].tokens
    assert coordinator.counts.late == 1
    coordinator.on(Pieces("worker-1", 1, (whole(0, 0, 1),)), 4.0)
    assert len(coordinator.ledger[0].tokens) == 1
