"""Which drafter drafts, how far, and how it is decided: the tokens are the same through all of it."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.config.speculation import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.errors import ConfigError
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.speculation.drafter_slots import DrafterSlots
from rljax.speculation.managers.drafting import strategies_of
from rljax.speculation.managers.expected import ExpectedManager
from rljax.speculation.managers.manager import Setup
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_choice import best_rows
from rljax.speculation.proposals import Proposal
from rljax.speculation.speculative_pass import HostProposer
from rljax.speculation.speculator import Speculator
from rljax.speculation.strategies import Strategy
from tests.speculation.speculators import (
    BUCKETS,
    CHEAP,
    FEW,
    MIXED,
    Altered,
    active_slots,
    check_log,
    check_plainly,
    check_tokens,
    device_proposer,
    learn,
    listen,
    make_engine,
    make_speculator,
    roll_out,
)
from tests.tiny_policy import CONFIG, HEAD, SLOTS, assert_same, by_rows, strategy_choice

FIXED = strategy_choice("fixed", Strategy(3, 1, 3, "quantized"))


@pytest.mark.parametrize("choice", [strategy_choice("expected"), MIXED], ids=["expected", "mixed"])
def test_the_tokens_are_those_of_plain_decoding(params, requests, expected, choice):
    check_tokens(params, requests, expected, choice)


@pytest.mark.parametrize("by", ["expected", "fixed"])
def test_a_batch_that_no_pass_verifies_decodes_plainly(params, requests, expected, by):
    strategies = (Strategy(1, 1, 1, "srt"),) if by == "fixed" else ()
    check_plainly(params, requests, expected, strategy_choice(by, *strategies))


@pytest.mark.parametrize(
    ("names", "first"), [(("prompt_lookup", "quantized"), [0, 3, 6, 1]), (("quantized",), [0, 1, 2, 3])]
)
def test_samples_of_a_prompt_wait_for_its_first_where_they_draft_from_one_another(
    params, requests, monkeypatch, names, first
):
    """Else what is likely to be long begins first, all of it, as in plain decoding."""
    prompts = sorted({request.prompt_ids for request in requests})[:3]
    asked = [dataclasses.replace(requests[0], prompt_ids=prompts[i // 3]) for i in range(9)]
    started, insert = [], DrafterSlots.insert

    def inserting(self, prefilled, assignments, requests):
        started.extend(requests)
        insert(self, prefilled, assignments, requests)

    monkeypatch.setattr(DrafterSlots, "insert", inserting)
    speculator = make_speculator(names, strategy_choice("expected"))
    monkeypatch.setattr(speculator.lengths, "expected", lambda prompt_ids: 1.0)
    roll_out(speculator, params, asked)
    assert started[:SLOTS] == first and sorted(started) == list(range(9))


def test_a_tree_of_several_drafters_is_accepted_further_than_each_of_them(params, requests, expected):
    """Both know the responses: one their first half, the other the second."""

    class Half(Altered):
        def __init__(self, first):
            super().__init__()
            self.first = first

        def propose(self, queries):
            drafts = self.inner.propose(queries)
            known = np.asarray([len(expected[request].response_ids) for request in queries.requests])
            place = queries.positions - [len(requests[request].prompt_ids) for request in queries.requests]
            mine = (place < known // 2) == self.first
            return dataclasses.replace(drafts, counts=np.where(mine, drafts.counts, 0))

    def passes(drafters, choice):
        speculator = Speculator(make_engine(), drafters, SLOTS, times=CHEAP, strategies=choice)
        learn(speculator, requests, expected)
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        return statistics.steps

    alone = [passes({"half": Half(first)}, strategy_choice("expected")) for first in (True, False)]
    both, fewest = {"one": Half(True), "other": Half(False)}, min(alone)
    assert passes(both, MIXED) < fewest
    assert passes(both, strategy_choice("fixed", Strategy(7, 7, 7, "one+other"))) < fewest


def test_what_a_strategy_verifies_of_a_tree():
    """Two below the root, each with two below; then one below the fourth. The second slot has no third."""
    parents = np.asarray([[-1, -1, 0, 0, 1, 1, 3], [-1, -1, 99, 0, 1, 1, 3]], np.int32)
    usable = np.ones((2, 7), bool)
    usable[1, 2] = False
    numbers = np.zeros((2, 7), np.int32)
    proposal = Proposal(None, numbers, parents, usable, numbers + 1.0, numbers, 0.0)

    def within(depth, top_k, nodes):
        return [np.flatnonzero(row).tolist() for row in proposal.within(Strategy(depth, top_k, nodes, "srt"))]

    assert within(7, 7, 7) == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 4, 5, 6]]
    assert within(1, 7, 7) == [[0, 1]] * 2
    assert within(2, 2, 4) == [[0, 1, 2, 3], [0, 1, 3, 4]]
    assert within(7, 1, 7) == [[0, 2], [0, 3, 6]]


def now_and_then():
    """Drafts are not always verified, also while the other half is."""
    turns = itertools.count()
    return by_rows(lambda *arguments: best_rows(*arguments) if next(turns) % 3 else 0)


@pytest.mark.parametrize(
    ("choice", "overlap"),
    [
        (now_and_then(), True),
        (by_rows(lambda *arguments: best_rows(*arguments), mix=True), False),
        (FIXED, False),
    ],
    ids=["expected", "mixed", "fixed"],
)
def test_every_token_and_second_is_in_the_log(params, requests, choice, overlap):
    check_log(params, requests, choice, overlap)


def test_expected_rates_count_the_time_of_drafting(params, requests):
    speculator = make_speculator(("quantized",), strategy_choice("expected"))
    found = []
    add = speculator.decisions.add
    speculator.decisions.add = lambda one: (found.append((one.choice, one.batch)), add(one))
    roll_out(speculator, params, requests)
    verifying = [(choice, batch) for choice, batch in found if choice.rows]
    assert verifying and all(choice.draft_seconds > 0 for choice, _ in verifying)
    for choice, batch in verifying:
        nodes = dict(BUCKETS.passes(batch))[choice.rows]
        tokens = choice.candidates.expected(choice.rows, nodes)
        seconds = CHEAP.verify(batch, 128, choice.rows) + choice.draft_seconds
        assert choice.expected_rate == pytest.approx(tokens / seconds)


def test_drafters_of_a_mixed_tree_learn_of_their_own_nodes(params, requests, expected):
    speculator = make_speculator(("srt", "suffix_decoding"), MIXED)
    verified, heard = {}, {}
    for proposer in speculator.proposers:
        record = proposer.record_outcome

        def counting(proposal, nodes, accepted, name=proposer.name, record=record):
            verified[name] = verified.get(name, 0) + int(nodes.sum())
            assert (accepted <= nodes).all()
            record(proposal, nodes, accepted)

        proposer.record_outcome = counting
        heard[proposer.name] = listen(proposer.drafter)
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        learn(speculator, requests, completions)
    assert set(verified) == {"srt", "suffix_decoding"}
    assert sum(verified.values()) > statistics.drafted  # some nodes are both drafters'
    assert {name: sum(counts) for name, counts in heard.items()} == verified


def test_more_drafters_than_a_tree_can_have_are_one_line():
    with pytest.raises(ConfigError) as raised:
        MIXED.manager([HostProposer(f"srt{i}", None, None) for i in range(9)], BUCKETS, CHEAP, SLOTS)
    message = "speculation.others: 9 drafters, and a tree holds drafts of at most 8; leave some out, or use"
    assert str(raised.value) == f"{message} speculation.choice: expected alone"


@pytest.mark.parametrize("drafter", ["srt", "quantized", pytest.param("eagle", marks=pytest.mark.long)])
def test_a_fixed_strategy_is_always_used(params, requests, expected, drafter):
    strategy = Strategy(3, 1, 3, drafter)
    choice = strategy_choice("fixed", strategy)
    eagle = HEAD | {"top_k": 1, "train": False}
    speculator = make_speculator(("prompt_lookup", drafter), choice, FEW, eagle=eagle)
    other, own = (listen(each) for each in speculator.drafters.values())
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        learn(speculator, requests, completions)
    log = speculator.decisions.take()
    assert {each["drafter"] for each in log if each["rows"]} == {drafter}
    assert all(f"always {strategy}" in each["reason"] for each in log)
    assert 0 < statistics.drafted <= 3 * statistics.verified_slots
    assert sum(other) == 0 < statistics.drafted <= sum(own)
    if drafter != "srt":  # which may have nothing to say
        assert statistics.verified > 0.9 * statistics.steps


CHAINS = (
    "quantized drafts chains, of up to speculation.max_drafts 7 tokens; give it top_k 1 and no more depth"
)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(4, 2, 7, "eagle"), "eagle is set up for trees of depth/top_k 1/2, 3/2; see its arguments"),
        (Strategy(8, 1, 7, "quantized"), CHAINS),
        (Strategy(2, 2, 3, "quantized"), CHAINS),
    ],
    ids=str,
)
def test_a_strategy_that_its_drafter_is_not_set_up_for_is_one_line(strategy, message):
    choice = strategy_choice("fixed", strategy)
    with pytest.raises(ConfigError) as raised:
        make_speculator(("eagle", "quantized"), choice, eagle={"depths": [1, 3], "unrolled_steps": 1})
    assert str(raised.value) == f"speculation.strategies: {strategy}: {message}"


@pytest.mark.parametrize(
    ("rates", "asked"),
    [
        ({"slow": 2.0}, []),  # no more than plain decoding of two slots, at a second a step
        ({"slow": 3.0}, ["slow"]),
        ({"slow": 5.0, "free": 1e9}, ["free"]),  # from whose drafts 6.2 are expected
        ({"slow": 9.0, "free": 1e9}, ["free", "slow"]),
    ],
    ids=str,
)
def test_only_a_drafter_that_may_beat_the_best_so_far_drafts(rates, asked):
    drafted = []

    def propose(name, state):
        drafted.append(name)
        nodes = np.zeros((2, 3), np.int32)
        probability = 0.9 ** (nodes + np.arange(1, 4))
        own = SimpleNamespace(name=name)
        return state, Proposal(own, nodes, nodes + np.arange(-1, 2), nodes == 0, probability, nodes, 0.0)

    proposers = [
        SimpleNamespace(
            expected_rate=lambda *_, rate=rate: rate,
            propose=lambda state, *_, name=name: propose(name, state),
        )
        for name, rate in rates.items()
    ]
    manager = ExpectedManager(Setup(proposers, BUCKETS, CHEAP, SLOTS), SpeculationConfig())
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=128))
    _, choice = manager.choose(state, active_slots(2), None)
    assert drafted == asked and bool(choice.rows) == bool(asked)
    assert choice.expected_rate == pytest.approx(2 * (1 + 0.9 + 0.81 + 0.729) / 1.1 if asked else 2.0)


def test_levels_that_had_no_room_in_a_pass_are_not_refused():
    """Chains of eight, of which three nodes each were verified; the last slot's second one was wrong."""
    proposer = device_proposer("small_model")
    nodes = np.zeros((4, 8), np.int32)
    parents = nodes + np.arange(-1, 7)
    parents[:, 3:] = 99  # what is no node may have any
    proposal = Proposal(proposer, nodes, parents, np.arange(8) < nodes + 3, nodes + 1.0, nodes, 0.0)
    verified = np.ones((4, 3), bool)
    accepted = verified.copy()
    accepted[3, 1:] = False
    proposal.record_outcome(verified, accepted)
    assert proposer.state()["chains_of_small_model"].tolist() == [11, 10]
    proposer.record_outcome(proposal, np.zeros((4, 3), bool), np.zeros((4, 3), bool))
    assert proposer.state()["chains_of_small_model"].tolist() == [11, 10]


def test_strategies_of_a_config():
    sizes = {"depth": 3, "top_k": 1, "nodes": 3}
    config = SpeculationConfig(drafter="srt", choice="fixed", strategies=[{"drafter": "srt", **sizes}])
    setup = Setup([HostProposer("srt", None, None)], BUCKETS, CHEAP, SLOTS)
    assert strategies_of(setup, config) == (Strategy(3, 1, 3, "srt"),)
    config = config.model_copy(update={"strategies": [{"drafter": "str", **sizes}]})
    with pytest.raises(ConfigError, match=r"strategies\[0\].drafter: .*'str'; did you mean 'srt'"):
        StrategyChoice(config).manager(setup.proposers, BUCKETS, CHEAP, SLOTS)


@pytest.mark.long  # above, managers choose among strategies, and the tokens are those of plain decoding
def test_a_run_that_switches_at_random_is_the_plain_run(params, requests, expected, tmp_path):
    """Any drafter, any length, any rows, in turn: no token changes."""
    small = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1)
    save_model(tmp_path, small, init_params(small, 1), "float32")
    names = ("srt", "prompt_lookup", "quantized", "eagle", "small_model")
    rng = np.random.default_rng(0)

    def choose(candidates, buckets, times, batch, length):
        sizes = [rows for rows, _ in buckets.passes(batch)] if candidates.probability.any() else []
        return int(rng.choice([0, *sizes]))

    speculator = make_speculator(
        names,
        by_rows(choose),
        Buckets((4,), (128,), (16, 32), 7),
        eagle=HEAD | {"train": False},
        small_model={"path": str(tmp_path)},
    )
    turns = itertools.cycle(rng.integers(0, len(names), 64).tolist())
    for number, proposer in enumerate(speculator.proposers):
        proposer.expected_rate = lambda *_, number=number: 1e9 if next(turns) == number else 0.0
        proposer._length = 3

    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert statistics.verified > 0
        learn(speculator, requests, completions)
