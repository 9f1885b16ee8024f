"""The order in which waiting responses are prefilled and begin."""

from types import SimpleNamespace

import pytest

from rljax.engine.buckets import Buckets
from rljax.requests import DecodeStatistics
from rljax.rollout.prefill_queue import PrefillQueue


@pytest.mark.parametrize(
    ("speculator", "order"),
    [
        (None, "a0 a1 a2 b0 b1"),
        (SimpleNamespace(has_history=False), "a0 a1 a2 b0 b1"),
        (SimpleNamespace(has_history=True), "a0 b0 a1 a2 b1"),
    ],
    ids=["plain", "drafts", "drafts from the history"],
)
def test_one_response_to_every_prompt_begins_before_those_that_may_draft_from_it(speculator, order):
    if speculator is not None:
        speculator.prefill = lambda *_: []
    engine = SimpleNamespace(
        prefill=lambda *_: "prefix", prefill_length=lambda _: 16, buckets=Buckets((2, 5), (128,))
    )
    queue = PrefillQueue(engine, 5, speculator, DecodeStatistics(), None)
    prompts = {"a": (2, 3, 4), "b": (5, 6)}
    queue.add(
        SimpleNamespace(name=name, prefix_ids=prompts[name[0]]) for name in ("a0", "a1", "a2", "b0", "b1")
    )
    _, rows = queue.take("weights", free=5, batch=5)
    assert " ".join(response.name for _, response in rows) == order
    assert {(row, response.name[0]) for row, response in rows} == {(0, "a"), (1, "b")}
