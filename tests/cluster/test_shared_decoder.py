"""What several training processes get of one that has workers; they are threads here."""

import queue
import threading

import pytest

from rljax import processes
from rljax.cluster import shared_decoder
from rljax.cluster.shared_decoder import SharedDecoder, in_first
from rljax.errors import ClusterError


class Decoder:
    """A rollout that looks for news three times, and ends with an error if it is told to."""

    def __init__(self, error=None):
        self.error, self.seen = error, []

    def begin(self, params, requests, version):
        self.seen.append((params, version))
        return list(requests)

    def finish(self, begun, on_progress):
        for news in range(3):
            on_progress(news, 0)
        if self.error is not None:
            raise self.error
        return [f"{request} is decoded" for request in begun], len(begun)


@pytest.fixture
def world(monkeypatch):
    """Makes `from_first` of two threads; returns what the first one has sent."""
    sent, channel, me = [], queue.Queue(), threading.local()

    def broadcast(data):
        if me.first:
            sent.append(data)
            channel.put(data)
            return data
        return channel.get(timeout=30)

    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "is_first", lambda: me.first)
    monkeypatch.setattr(processes, "_broadcast", broadcast)

    def run(work):
        """Calls `work` in both; returns what it returned or raised, the first one's first."""
        results = {}

        def process(first):
            me.first = first
            try:
                results[first] = work(first)
            except ClusterError as error:
                results[first] = error

        other = threading.Thread(target=process, args=(False,))
        other.start()
        process(True)
        other.join(30)
        return results[True], results[False]

    run.sent = sent
    return run


def roll_out(decoder, show=None):
    """Work of a process: a rollout of two requests, with the weights of version 7."""

    def work(first):
        cluster = SharedDecoder(decoder if first else None)
        begun = cluster.begin("weights", ["one", "two"], 7)
        return cluster.finish(begun, show if first else pytest.fail)

    return work


@pytest.mark.parametrize(("longest_wait", "news"), [(0.0, 3), (60.0, 0)])
def test_all_get_what_the_first_one_s_workers_decode(world, monkeypatch, longest_wait, news):
    """And are told to wait no more often than needed."""
    monkeypatch.setattr(shared_decoder, "_LONGEST_WAIT", longest_wait)
    decoder, shown = Decoder(), []

    first, other = world(roll_out(decoder, lambda tokens, ended: shown.append(tokens)))
    assert first == other == (["one is decoded", "two is decoded"], 2)
    assert decoder.seen == [("weights", 7)] and shown == [0, 1, 2]
    assert len(world.sent) == 1 + news + 1  # it has begun; wait; the responses


def test_an_error_of_the_workers_ends_all(world):
    first, other = world(roll_out(Decoder(ClusterError("no worker is left"))))
    assert str(first) == str(other) == "no worker is left"
    assert isinstance(other, ClusterError) and other.elsewhere


def test_only_the_first_one_starts_workers(world):
    started = []

    class Context:
        def __enter__(self):
            started.append(threading.current_thread())
            return Decoder()

        def __exit__(self, *error):
            started.append("over")

    def work(first):
        with in_first(Context()) as cluster:
            return cluster._decoder is not None

    assert world(work) == (True, False)
    assert started == [threading.current_thread(), "over"]


def test_the_others_have_nothing_to_write():
    other = SharedDecoder(None)
    other.learn([])
    other.load_state({})
    assert (other.doing, other.metrics(), other.timeline(), other.state()) == ("", {}, {}, {})
