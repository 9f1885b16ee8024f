"""The ledger takes pieces in any order, and finds bits that differ."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import Piece
from rljax.errors import NumericsError

TOKENS = tuple(range(10, 30))
LOGPROBS = tuple(-token / 16 for token in TOKENS)


def piece(begin, end, version=0, key=1):
    ending = "eos" if end == len(TOKENS) else None
    return Piece(key, version, begin, TOKENS[begin:end], LOGPROBS[begin:end], ending)


def open_ledger(strict=True):
    ledger = Ledger(strict)
    ledger.open([1], 0)
    return ledger


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tokens_are_neither_lost_nor_doubled_nor_reordered(data):
    """Pieces of three workers that overlap, in any order, some twice."""
    cuts = [sorted(data.draw(st.sets(st.integers(1, 19), max_size=6))) for _ in range(3)]
    pieces = [
        (worker, piece(begin, end))
        for worker, inner in enumerate(cuts)
        for begin, end in zip([0, *inner], [*inner, 20], strict=True)
    ]
    pieces += data.draw(st.lists(st.sampled_from(pieces), max_size=5))
    ledger = open_ledger()
    grown = sum(ledger.add(f"worker-{worker}", each) for worker, each in data.draw(st.permutations(pieces)))
    entry = ledger[1]
    assert (tuple(entry.tokens), tuple(entry.logprobs), entry.ending) == (TOKENS, LOGPROBS, "eos")
    assert grown == ledger.tokens == len(TOKENS)
    assert not ledger.has_gap(1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (piece(0, 8), dataclasses.replace(piece(4, 12), tokens=(0, *TOKENS[5:12]))),
        (piece(0, 8), dataclasses.replace(piece(4, 12), logprobs=(0.25, *LOGPROBS[5:12]))),
        (piece(0, 20), dataclasses.replace(piece(18, 20), ending="stop")),
        (piece(0, 8), dataclasses.replace(piece(0, 4), ending="eos")),
        (dataclasses.replace(piece(0, 8), ending="eos"), piece(4, 12)),
    ],
    ids=["token", "logprob", "ending", "end before", "behind the end"],
)
def test_bits_that_differ_name_both_workers(first, second):
    ledger = open_ledger()
    ledger.add("worker-0", first)
    with pytest.raises(NumericsError, match="workers worker-0 and worker-7 sampled different bits"):
        ledger.add("worker-7", second)
    lenient = open_ledger(strict=False)
    lenient.add("worker-0", first)
    assert lenient.add("worker-7", second) == 0
    assert lenient.differences == 1
    assert tuple(lenient[1].tokens) == first.tokens


def test_what_belongs_to_no_open_request_is_left_out():
    ledger = open_ledger()
    assert ledger.add("worker-0", piece(0, 8, key=2)) == 0
    assert ledger.add("worker-0", piece(0, 8, version=1)) == 0
    assert not ledger[1].tokens


def test_the_response_so_far_is_what_another_worker_goes_on_with():
    ledger = open_ledger()
    ledger.add("worker-0", piece(0, 8))
    ledger.add("worker-1", piece(12, 14))
    partial = ledger[1].partial()
    assert (partial.tokens, partial.logprobs) == (TOKENS[:8], LOGPROBS[:8])
    assert ledger.has_gap(1)
    ledger.add("worker-1", piece(6, 12))
    assert len(ledger[1].tokens) == 14
    assert [ledger[1].writer(position) for position in (0, 7, 8, 13)] == ["worker-0"] * 2 + ["worker-1"] * 2


def test_of_a_renewed_response_only_pieces_of_the_last_order_are_taken():
    """An earlier worker may have gone on under other weights; also a piece that came too early is its own."""
    ledger = Ledger()
    ledger.open([1], 0, renewed=True)
    ledger[1].ordered(1)
    assert ledger.add("worker-0", dataclasses.replace(piece(0, 4), order=1)) == 4
    assert ledger.add("worker-0", dataclasses.replace(piece(8, 12), order=1)) == 0 and ledger.has_gap(1)
    ledger[1].ordered(2)
    assert not ledger.has_gap(1)
    late = dataclasses.replace(piece(4, 8), order=1, tokens=(0, 0, 0, 0))
    assert ledger.add("worker-0", late) == 0
    assert ledger.add("worker-1", dataclasses.replace(piece(4, 8, version=1), order=2)) == 4
    entry = ledger[1]
    assert tuple(entry.tokens) == TOKENS[:8] and entry.versions == [(0, 0), (4, 1)]


def test_answers_of_tools_are_in_the_ledger():
    ledger = Ledger()
    ledger.open([0], 0)
    ledger.add("worker-0", Piece(0, 0, 0, (1, 2, 3, 4), (-1.0, 0.0, 0.0, -1.0), answers=((1, 3),)))
    assert ledger[0].partial().tool_answers == ((1, 3),)
    ledger.add("worker-0", Piece(0, 0, 1, (2, 3, 4, 5), (0.0, 0.0, -1.0, -2.0), "eos", answers=((1, 3),)))
    completion = ledger[0].completion(with_mask=True)
    assert completion.sampled_mask.tolist() == [True, False, False, True, True]
    assert completion.sampled_tokens == 3
