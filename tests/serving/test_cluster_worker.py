"""A server whose requests are decoded by rollout workers: the bytes of one that decodes itself."""

import time

import pytest

from rljax.errors import ConfigError
from rljax.serving import policy
from rljax.serving.cluster_worker import ClusterWorker
from rljax.serving.jobs import QueueFull
from rljax.serving.policy import Options, open_policy
from tests.cluster.turns import Turns, losing
from tests.serving.test_worker import Collected
from tests.serving.tiny_server import make_run

WAIT = 120.0


def pause(fabric):
    """The thread of a server has nothing to do for most of the time, and a local fabric never waits."""
    time.sleep(0.002)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("served"), "engine.batch_buckets=[4]", "speculation.drafter=null")


@pytest.fixture(scope="module")
def turns():
    return Turns(interfere=pause)


@pytest.fixture(scope="module")
def served(run, turns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "cluster_of", turns.cluster_of)
        served = open_policy(run, Options(workers=2, slots=4), lambda line: None, max_waiting=4)
        assert isinstance(served.worker, ClusterWorker)
        served.worker.start()
        yield served
        assert served.worker.close(drain=False, timeout=WAIT)
    assert not turns.fabrics[0].workers


@pytest.fixture(scope="module")
def alone(run):
    """The same policy, decoded in this process."""
    served = open_policy(run, Options(slots=4), lambda line: None, compile_first=False)
    served.worker.start()
    yield served
    served.worker.close(drain=False, timeout=WAIT)


def asked_of(served, seed, length=40, stop=None, sampling=None, prompt="a5+47="):
    """A job, and what comes of it."""
    return Collected(served.request(served.tokenizer.encode(prompt), seed, 0, length, sampling), stop)


def ask(served, seeds, **how):
    asked = [asked_of(served, seed, **how) for seed in seeds]
    for each in asked:
        served.worker.submit([each.job])
    return [each.result() for each in asked]


def test_the_responses_are_those_of_one_process(served, alone, turns):
    """Also where a worker is lost in the middle of them."""
    fabric, lost = turns.fabrics[0], {}
    fabric.before_turn = losing(lost)
    try:
        assert ask(served, range(6)) == ask(alone, range(6))
    finally:
        fabric.before_turn = pause
    assert lost and turns.decoders[0].coordinator.counts.migrations > 0
    cold = served.requested_sampling({"temperature": 0.5})
    assert ask(served, [1], sampling=cold) == ask(alone, [1], sampling=cold) != ask(alone, [1])
    assert served.worker.statistics.tokens > 0
    ((tokens, _, _),) = ask(alone, [2])
    string = alone.tokenizer.decode(tokens)[3:5]
    found = [ask(each, [2], stop=each.stop([string])) for each in (served, alone)]
    assert found[0] == found[1] and found[0][0][2] == "stop" and len(found[0][0][0]) < len(tokens)


def test_what_is_cancelled_ends_and_leaves_room(served, alone, turns):
    coordinator = turns.decoders[0].coordinator
    given_up, kept = asked_of(served, 3, length=60), asked_of(served, 4)
    served.worker.submit([given_up.job])
    served.worker.cancel([given_up.job])
    served.worker.submit([kept.job])
    assert given_up.result()[2] == "cancelled" and kept.result() == ask(alone, [4])[0]
    with pytest.raises(QueueFull):
        served.worker.submit([asked_of(served, seed).job for seed in range(13)])
    assert ask(served, [5]) == ask(alone, [5])
    assert not coordinator.ledger.entries and served.worker.active == served.worker.waiting == 0
    # A rollout without end must not fill the workers' memory.
    assert all(not worker._responses and not worker._keys for worker in turns.fabrics[0].workers.values())


def test_an_address_that_is_none_is_one_line(run):
    with pytest.raises(ConfigError, match=r"--ray: .*not auto or host:port"):
        open_policy(run, Options(workers=1, ray="somewhere"), print)
