"""The worker: requests that come and go at any time get the tokens that they get from the scheduler."""

import dataclasses
import queue
import threading

import numpy as np
import pytest

from drafters.base import Outcome
from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.errors import PolicyError
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.rollout.decode_loop import DecodeLoop
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.serving.jobs import Closed, Job, QueueFull
from rljax.serving.worker import EngineWorker
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import SLOTS, CheapTimes, make_engine, make_params

WAIT = 120.0


@pytest.fixture(scope="module")
def engine():
    return make_engine(buckets=Buckets((2, 4), (128,), (16,), 7))


class Collected:
    """A job, and what it was told."""

    def __init__(self, request, stop=None, on_piece=None):
        self.pieces = queue.SimpleQueue()
        self.on_piece = on_piece
        self.job = Job(request, self.deliver, stop)

    def deliver(self, piece):
        self.pieces.put(piece)
        if self.on_piece is not None:
            self.on_piece(piece)

    def result(self):
        """(tokens, logprobs, ending)."""
        tokens, logprobs = [], []
        while True:
            piece = self.pieces.get(timeout=WAIT)
            if isinstance(piece, BaseException):
                raise piece
            assert len(piece.tokens) == len(piece.logprobs)
            tokens, logprobs = tokens + piece.tokens, logprobs + piece.logprobs
            if piece.ending is not None:
                assert self.pieces.empty()
                return tokens, logprobs, piece.ending


def assert_same(result, completion):
    tokens, logprobs, ending = result
    np.testing.assert_array_equal(tokens, completion.response_ids)
    np.testing.assert_array_equal(np.asarray(logprobs, np.float32), completion.logprobs)
    assert ending == completion.finish_reason


@pytest.fixture
def make_worker(engine, params):
    workers = []

    def make(**options):
        worker = EngineWorker(engine, params, SLOTS, **options)
        workers.append(worker)
        worker.start()
        return worker

    yield make
    for worker in workers:
        assert worker.close(drain=False, timeout=WAIT)


def endless(sample):
    """A request with a limit of 90 tokens, which the policy takes some passes to end."""
    return Request((5, 6, 7), request_key(3, 0, sample), 90)


def test_requests_that_come_together_get_their_own_tokens(make_worker, requests, expected):
    """Also where the worker is closed behind them: it finishes what there is."""
    worker = make_worker()
    collected = [Collected(request) for request in requests]
    worker.submit([each.job for each in collected])
    for each, completion in zip(collected, expected, strict=True):
        assert_same(each.result(), completion)
    assert worker.active == worker.waiting == 0
    assert sum(worker.endings.values()) == len(requests)
    assert worker.statistics.tokens == sum(len(completion.response_ids) for completion in expected)
    collected = [Collected(request) for request in requests]
    worker.submit([each.job for each in collected])
    assert worker.close(timeout=WAIT) and not worker.alive and worker.wait() is None
    for each, completion in zip(collected, expected, strict=True):
        assert_same(each.result(), completion)
    with pytest.raises(Closed, match="shutting down"):
        worker.submit([Collected(requests[0]).job])


def test_states_widen_and_compact(make_worker, engine, requests, expected):
    worker, batches, running = make_worker(), [], threading.Event()

    def look(_):
        batches.append(worker.loop.slots.batch)
        running.set()

    collected = [Collected(requests[2], on_piece=look)]
    worker.submit([collected[0].job])
    assert running.wait(WAIT)
    collected += [Collected(request, on_piece=look) for request in requests[3:6]]
    worker.submit([each.job for each in collected[1:]])
    for each, completion in zip(collected, expected[2:6], strict=True):
        assert_same(each.result(), completion)
    assert set(batches) == {2, 4} and batches[0] == 2
    assert {"widen", "compact"} <= {key[0] for key in engine.pool._programs}


def test_cancelled_jobs_free_their_slots(make_worker, requests, expected):
    """Cancelled from the worker's thread, so that what is cancelled cannot have ended by itself."""
    worker, cancelled = make_worker(), []

    def cancel(_):
        if not cancelled:
            cancelled.extend(running[1:] + waiting)
            worker.cancel([each.job for each in cancelled])

    running = [Collected(endless(0), on_piece=cancel)]
    running += [Collected(endless(sample)) for sample in range(1, SLOTS)]
    waiting = [Collected(endless(sample)) for sample in range(3)]
    worker.submit([each.job for each in running + waiting])
    for each in running[1:] + waiting:
        assert each.result()[2] == "cancelled"
    assert len(running[0].result()[0]) > 8  # goes on alone
    last = Collected(endless(0), on_piece=lambda _: worker.cancel([last.job]))
    collected = Collected(requests[0])
    worker.submit([last.job, collected.job])
    assert last.result()[2] == "cancelled"
    assert_same(collected.result(), expected[0])
    worker.cancel([collected.job])  # over already: nothing happens
    assert worker.endings["cancelled"] == SLOTS + 3


def test_weights_are_swapped_while_requests_run_and_at_once_where_none_does(
    make_worker, engine, params, requests, expected
):
    """The running response keeps its tokens, records the position, and later jobs are of the new weights. An
    idle worker keeps no old weights until a request comes; the last of several swaps counts.
    """
    other = engine.load_params(make_params(1))
    by_other = Scheduler(engine, SLOTS).run(other, requests[3:5])[0]
    worker, swapped, loaded = make_worker(), [], threading.Event()

    def swap(_):  # from the worker's thread, so that the position is known
        if not swapped:
            worker.load_params(other, 7)
            swapped.append(len(running.job.response.tokens))

    running = Collected(requests[-1], on_piece=swap)
    worker.submit([running.job])
    tokens = running.result()[0]
    position = swapped[0]
    assert 0 < position < len(tokens)
    assert running.job.response.versions == [(0, 0), (position, 7)]
    assert tokens[:position] == expected[-1].response_ids[:position].tolist()
    assert tokens != expected[-1].response_ids.tolist()
    later = [Collected(request) for request in requests[3:5]]
    worker.submit([collected.job for collected in later])
    for collected, completion in zip(later, by_other, strict=True):
        assert_same(collected.result(), completion)
        assert collected.job.response.versions == [(0, 7)]

    def load(*arguments):
        DecodeLoop.load_params(worker.loop, *arguments)
        loaded.set()

    worker.loop.load_params = load
    worker.load_params(other, 8)
    assert loaded.wait(WAIT) and worker.loop.slots.version == 8
    worker.load_params(params, 9)
    collected = Collected(requests[0])
    worker.submit([collected.job])
    assert_same(collected.result(), expected[0])
    assert collected.job.response.versions == [(0, 9)]
    assert worker.close(timeout=WAIT)
    with pytest.raises(Closed, match="shutting down"):
        worker.load_params(params, 10)


def test_a_full_queue_takes_all_of_a_request_or_nothing_and_closing_cancels(make_worker):
    worker = make_worker(max_waiting=2)
    collected = [Collected(endless(sample)) for sample in range(SLOTS + 2)]
    worker.submit([each.job for each in collected])
    with pytest.raises(QueueFull, match="waiting"):
        worker.submit([Collected(endless(0)).job])
    worker.cancel([collected[0].job, collected[1].job])
    collected[0].result(), collected[1].result()
    with pytest.raises(QueueFull):
        worker.submit([Collected(endless(0)).job for _ in range(3)])
    fits = [Collected(endless(sample)) for sample in range(2)]
    worker.submit([each.job for each in fits])
    assert worker.close(drain=False, timeout=WAIT)
    assert {each.result()[2] for each in [*collected[2:], *fits]} == {"cancelled"}


def test_impossible_requests_are_refused_before_the_thread(make_worker, requests):
    worker = make_worker()
    for prompt, limit in ((), 5), ((1, 2), 0), ((1,) * 100, 29):
        with pytest.raises(ValueError):
            worker.submit([Collected(Request(prompt, request_key(0, 0), limit)).job])
    with pytest.raises(ValueError, match="samples all requests alike"):
        cold = dataclasses.replace(requests[0], sampling=SamplingParams(temperature=0.5))
        worker.submit([Job(cold, print)])
    assert worker.waiting == 0


def test_what_ends_the_worker_is_told_to_all(make_worker, engine, params, monkeypatch):
    worker = make_worker()
    bad = lambda *_: (_ for _ in ()).throw(PolicyError("policy: overflows"))  # noqa: E731
    monkeypatch.setattr(worker.loop, "_collect", bad)
    collected = [Collected(endless(sample)) for sample in range(SLOTS + 2)]
    worker.submit([each.job for each in collected])
    for each in collected:
        with pytest.raises(PolicyError, match="overflows"):
            each.result()
    assert isinstance(worker.wait(), PolicyError) and not worker.alive
    with pytest.raises(Closed, match="overflows"):
        worker.submit([Collected(endless(0)).job])


def test_drafts_change_no_token_while_requests_join(engine, params, requests, expected, monkeypatch):
    """What a request got is drafted when it comes again. Plain steps are few at a time, and a few answers do
    not drive out what was learned of a prompt.
    """
    chosen = [0, 3, 1, 6]  # the first and the third to one prompt
    prompts, drafter = [requests[i].prompt_ids for i in chosen], make_drafter("srt")
    drafter.learn([Outcome(prompts[0], np.arange(9, dtype=np.int32), 0.0)] * 5)
    speculator = Speculator(engine, {"srt": drafter}, max_batch=4, times=CheapTimes())
    together = {prompts[0]: 5}
    worker = EngineWorker(engine, params, SLOTS, speculator, steps_per_sync=2, learned_together=together)
    steps, generate = [], engine.generate
    counted = lambda *arguments: (steps.append(arguments[2]), generate(*arguments))[1]  # noqa: E731
    monkeypatch.setattr(engine, "generate", counted)
    worker.start()
    second_came = threading.Event()
    try:
        for _ in range(2):  # the second time, the first is history
            joined = [Collected(requests[0], on_piece=lambda _: second_came.set())]
            worker.submit([joined[0].job])
            assert second_came.wait(WAIT)
            joined += [Collected(requests[i]) for i in chosen[1:]]
            worker.submit([each.job for each in joined[1:]])
            for each, i in zip(joined, chosen, strict=True):
                assert_same(each.result(), expected[i])
        assert worker.statistics.accepted > 0
        assert sum(each.job.response.accepted for each in joined) > 0
        assert steps and max(steps) <= 2
        lengths = [[len(past.lengths) for past in drafter.history.recall(prompt)] for prompt in prompts[:2]]
        assert lengths == [[5], [1]]
    finally:
        assert worker.close(drain=False, timeout=WAIT)
