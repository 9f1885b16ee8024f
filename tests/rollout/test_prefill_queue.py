"""The order in which waiting responses are prefilled and begin."""

from types import SimpleNamespace

import pytest

from rljax.engine.buckets import Buckets
from rljax.rollout.prefill_queue import PrefillQueue
from rljax.rollout.slots import Slots


@pytest.mark.parametrize(("has_history", "order"), [(False, "a0 a1 a2 b0 b1"), (True, "a0 b0 a1 a2 b1")])
def test_one_response_to_every_prompt_begins_before_those_that_may_draft_from_it(has_history, order):
    engine = SimpleNamespace(
        prefill=lambda *_: "prefix",
        prefill_length=lambda _: 16,
        prefill_rows=(2, 5),
        buckets=Buckets((2, 5), (128,)),
    )
    slots = Slots(engine, "weights", 0)
    slots.has_history, slots.state = has_history, SimpleNamespace(batch=5)
    queue = PrefillQueue(slots, 5, None)
    prompts = {"a": (2, 3, 4), "b": (5, 6)}
    queue.add(
        SimpleNamespace(name=name, prefix_ids=prompts[name[0]]) for name in ("a0", "a1", "a2", "b0", "b1")
    )
    _, rows = queue.take(free=5)
    assert " ".join(response.name for _, response in rows) == order
    assert {(row, response.name[0]) for row, response in rows} == {(0, "a"), (1, "b")}
