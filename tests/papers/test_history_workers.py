"""RhymeRL's history workers: automata built while the engine decodes, which draft as those built later."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from drafters import history_index
from drafters.base import DraftRequest, Outcome, Queries, Sampled
from drafters.history import RolloutHistory
from drafters.history_index import HistoryIndex
from drafters.registry import make_drafter
from drafters.suffix import insert_past
from drafters.suffix_automaton import SuffixForest
from tests.speculation.speculators import FEW, learn, make_speculator, roll_out
from tests.tiny_policy import assert_same, by_rows

A, B, C = (1, 2), (3,), (4, 5, 6)


def built(index):
    """The prompts whose automata are finished, after the threads are done with what they have begun."""
    index.wait()
    return list(index._begun)


def learned(index, history, **responses):
    """A rollout of so many tokens of each of the prompts A, B and C."""
    prompts = {"a": A, "b": B, "c": C}
    history.record(
        [Outcome(prompts[name], np.arange(n, dtype=np.int32), 0.0) for name, n in responses.items()]
    )
    index.learn(prompts[name] for name in responses)


def make_index(workers=1, most_tokens=100, rollouts=2, remembered=1000):
    history = RolloutHistory(rollouts, remembered)
    return HistoryIndex(history, insert_past, 8, workers, most_tokens), history


def test_what_was_learned_first_is_built_first_and_the_rest_as_there_is_room():
    index, history = make_index(most_tokens=10)
    learned(index, history, a=8, b=8, c=8)
    assert built(index) == [A, B]  # the first two reach the limit
    forest = SuffixForest(8)
    assert list(index.plant(forest, [A, A])) == [A]
    assert forest.num_tokens == 8
    assert built(index) == [B, C]
    learned(index, history, b=3)  # it has changed: the next one, with both rollouts, comes after C
    assert built(index) == [C, B]
    assert index._tokens == 8 + 11
    index.plant(SuffixForest(8), [B])
    assert index.metrics().items() >= {"history_prompts": 1, "history_indexed_ahead": 1}.items()


def test_a_prompt_that_is_forgotten_leaves_its_room():
    index, history = make_index(most_tokens=10, remembered=10)
    learned(index, history, a=9)
    assert built(index) == [A]
    learned(index, history, b=9)  # evicts A from the history
    assert built(index) == [B] and index._tokens == 9
    forest = SuffixForest(8)
    index.plant(forest, [A])
    assert forest.num_tokens == 0 and index.metrics()["history_prompts"] == 0


def test_what_no_thread_has_begun_is_built_when_the_rollout_begins():
    index, history = make_index()
    gate = threading.Event()
    index._threads.submit(gate.wait)  # the only thread is busy
    learned(index, history, a=8)
    forest = SuffixForest(8)
    index.plant(forest, [A])
    gate.set()
    assert forest.num_tokens == 8
    assert index.metrics().items() >= {"history_prompts": 1, "history_indexed_ahead": 0}.items()


def rounds(drafter, **options):
    """Drafts of a few epochs of random rollouts over prompts that come back, an evaluation among them."""
    rng, taken = np.random.default_rng(7), []
    for step in range(7):
        prompts = [(int(prompt), 9) for prompt in rng.integers(0, 5, 6)]
        drafter.begin([DraftRequest(prompt, None) for prompt in prompts])
        everyone, zeros = np.arange(6, dtype=np.int32), np.zeros(6, np.int32)
        said = [[] for _ in prompts]
        for _ in range(8):
            queries = Queries(everyone, zeros + 2, zeros + 8, 8)
            drafts = drafter.propose(queries)
            taken.append([each.copy() for each in dataclasses.astuple(drafts)])
            tokens = rng.integers(0, 3, (6, 4)).astype(np.int32)
            drafter.observe(Sampled(everyone, tokens, zeros + 4, zeros, zeros, zeros.astype(bool)))
            for mine, more in zip(said, tokens.tolist(), strict=True):
                mine += more
        if step != 3:  # an evaluation is not learned
            drafter.learn(
                [
                    Outcome(prompt, np.asarray(mine, np.int32), float(rng.random()))
                    for prompt, mine in zip(prompts, said, strict=True)
                ]
            )
        if step == 4:
            state = drafter.state()
            drafter.load_state(state)
    return taken


@pytest.mark.parametrize(
    ("name", "limits"),
    [("srt", {}), ("histospec", {"max_tokens": 200}), ("srt", {"max_tokens": 200, "spill_dir": "spilled"})],
)
def test_drafts_are_those_of_automata_built_when_the_rollout_begins(name, limits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = rounds(make_drafter(name, min_match=1, **limits))
    for ahead in ({}, {"indexed_tokens": 40}):
        drafter = make_drafter(name, min_match=1, history_workers=2, **limits, **ahead)
        jax.tree.map(np.testing.assert_array_equal, rounds(drafter), expected)
    assert sum(int(counts.sum()) for *_, counts in expected) > 100


def test_they_change_no_token(params, requests, expected):
    always = by_rows(lambda candidates, buckets, times, batch, length: 16)
    plain, ahead = (
        make_speculator(("histospec",), always, FEW, histospec={"min_match": 1, "history_workers": workers})
        for workers in (0, 1)
    )
    for _ in range(2):  # two prompts without a history, and with one
        counted = []
        for speculator in (plain, ahead):
            completions, statistics = roll_out(speculator, params, requests[:6])
            assert_same(completions, expected[:6])
            counted.append((statistics.drafted, statistics.accepted, statistics.steps))
            learn(speculator, requests[:6], completions)
        built(ahead.drafters["histospec"].index)
        assert counted[0] == counted[1]
    assert counted[0][1] > 0
    assert ahead.metrics(statistics)["speculation/history_indexed_ahead"] == 2


def test_its_threads_yield_to_all_others(monkeypatch):
    priorities = []
    monkeypatch.setattr(history_index.os, "setpriority", lambda *arguments: priorities.append(arguments))
    monkeypatch.setattr(history_index.sys, "platform", "linux")
    index, history = make_index()
    learned(index, history, a=8)
    built(index)
    ((kind, thread, priority),) = priorities
    assert kind == history_index.os.PRIO_PROCESS and priority == 19
    assert thread != threading.get_native_id()
