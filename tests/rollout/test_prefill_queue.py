"""The order in which waiting responses are prefilled and begin."""

import itertools
from types import SimpleNamespace

import pytest

from rljax.engine.buckets import Buckets
from rljax.rollout.decode_loop import PrefillQueue, _parts
from rljax.rollout.slots import Slots

PROMPTS = {"a": (2, 3, 4), "b": (5, 6), "c": (7, 8), "d": (9,) * 20, "e": (9, 8), "f": (7,) * 18}


def make_queue(names, has_history=False):
    """A queue for five slots, with responses of these names to the prompts of their letters, and the numbers
    of prompts that have been prefilled together.
    """
    prefilled = []
    engine = SimpleNamespace(
        prefill=lambda _, prompts: prefilled.append(len(prompts)) or f"prefix {len(prefilled)}",
        prefill_length=lambda length: 16 if length <= 16 else 32,
        prefill_rows=(2, 5),
        buckets=Buckets((2, 5), (128,)),
    )
    slots = Slots(engine, "weights", 0)
    slots.has_history, slots.state = has_history, SimpleNamespace(batch=5)
    queue = PrefillQueue(slots, 5, None)
    queue.add(SimpleNamespace(name=name, prefix_ids=PROMPTS[name[0]]) for name in names.split())
    return queue, prefilled


@pytest.mark.parametrize(("has_history", "order"), [(False, "a0 a1 a2 b0 b1"), (True, "a0 b0 a1 a2 b1")])
def test_one_response_to_every_prompt_begins_before_those_that_may_draft_from_it(has_history, order):
    queue, _ = make_queue("a0 a1 a2 b0 b1", has_history)
    _, rows = queue.take(free=5)
    assert " ".join(response.name for _, response in rows) == order
    assert {(row, response.name[0]) for row, response in rows} == {(0, "a"), (1, "b")}


@pytest.mark.parametrize(
    ("names", "free", "prefilled"),
    [
        ("a0 a1 b0 b1 c0", 1, [2]),  # a slot is free; a prefill of one prompt has room for two
        ("a0 d0 b0", 1, [1]),  # the next prompt is of another length
        ("a0 b0 c0", 2, [2]),  # no room
    ],
)
def test_padding_of_a_prefill_is_filled_with_prompts_that_come_next(names, free, prefilled):
    queue, together = make_queue(names)
    _, rows = queue.take(free)
    assert together == prefilled
    assert " ".join(response.name for _, response in rows) == " ".join(names.split()[:free])
    while queue:
        queue.take(free=5)
    assert sum(together) == len({name[0] for name in names.split()})


@pytest.mark.parametrize(
    ("prompts", "sizes", "rows"),
    [
        (12, (8, 32), [8, 8]),  # not 32
        (20, (8, 32), [8, 8, 8]),
        (25, (8, 32), [32]),
        (33, (8, 32), [32, 8]),
        (3, (2, 5), [2, 2]),
        (9, (8,), [8, 8]),
        (0, (8, 32), []),
    ],
)
def test_prompts_are_split_where_a_larger_prefill_would_be_mostly_padding(prompts, sizes, rows):
    assert _parts(prompts, sizes) == rows


@pytest.mark.parametrize(
    ("names", "free", "prefilled"),
    [
        ("a0 d0 f0 b0 c0", [2], [2, 2, 1]),
        ("a0 d0 b0 f0 c0", [2], [2, 2, 1]),
        ("a0 b0 c0 e0", [3, 1], [2, 2]),  # two prefills of two are less than one of five
    ],
)
def test_what_padding_has_room_for_begins_in_the_order_of_the_queue(names, free, prefilled):
    queue, together = make_queue(names)
    order, room = [], itertools.chain(free, itertools.repeat(free[-1]))
    while queue:
        order += [response.name for _, response in queue.take(free=next(room))[1]]
    assert order == names.split()
    assert together == prefilled
