"""TLT's manager in rollouts: what pays is used, and the log says why."""

import dataclasses
from types import SimpleNamespace

import pytest

from drafters.base import Drafter
from rljax.config.speculation import SpeculationConfig
from rljax.papers.tlt import bandit
from rljax.papers.tlt.bandit import BanditManager
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.speculative_pass import HostProposer
from rljax.speculation.speculator import Speculator
from rljax.speculation.strategies import Strategy
from tests.speculation.speculators import (
    BUCKETS,
    CHEAP,
    Knowing,
    Silent,
    active_slots,
    device_proposer,
    learn,
    make_engine,
    make_speculator,
    roll_out,
)
from tests.tiny_policy import SLOTS, assert_same, strategy_choice


def test_with_thresholds_the_running_responses_choose_the_strategy(params, requests, expected):
    """Ranges need not end where batch buckets do: 3 and 4 responses are one bucket."""
    strategies = [{"drafter": "srt", "depth": n, "top_k": 1, "nodes": n} for n in (7, 3, 1)]
    section = {"drafter": "srt", "choice": "bandit", "strategies": strategies, "max_batch": 4}
    section |= {"max_drafts": 7, "batch_thresholds": (1, 2, 4), "epsilon": 0.0}
    choice = StrategyChoice(SpeculationConfig(**section))
    speculator = make_speculator(("srt",), choice)
    arms, choose = {}, speculator.manager.choose

    def choosing(state, active, statistics):
        state, chosen = choose(state, active, statistics)
        responses = len(active.slots) + active.inactive
        arms.setdefault(responses, set()).add(chosen.arm and chosen.arm.nodes)
        return state, chosen

    speculator.manager.choose = choosing
    verified = 0
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        learn(speculator, requests, completions)
        verified += statistics.verified  # tries of every arm; then the clock decides
    assert verified > 0
    by_range = [arms.get(1, set()), arms.get(2, set()) | arms.get(3, set()), arms[4]]
    assert by_range[0] <= {None, 7} and by_range[1:] == [{None, 3}, {None, 1}]


def test_a_bandit_says_when_there_was_nothing_to_verify(params, requests):
    choice = strategy_choice("bandit", Strategy(3, 1, 3, "silent"), epsilon=0.0)
    speculator = Speculator(make_engine(), {"silent": Silent()}, SLOTS, times=CHEAP, strategies=choice)
    roll_out(speculator, params, requests)
    reasons = {each["reason"] for each in speculator.decisions.take()}
    assert any(reason.startswith("silent had nothing to verify (") for reason in reasons)


def test_the_bandit_ends_up_with_what_pays(params, requests, expected):
    """Where all is drafted right, the most nodes win; a drafter that is always wrong loses to plain steps."""
    for right in (True, False):
        drafter = Knowing(range(len(requests)) if right else ())
        strategies = (Strategy(2, 1, 2, "knowing"), Strategy(7, 1, 7, "knowing"))
        choice = strategy_choice("bandit", *strategies, epsilon=0.0, window=8)
        speculator = Speculator(make_engine(), {"knowing": drafter}, SLOTS, times=CHEAP, strategies=choice)
        chosen, record = [], speculator.manager.record

        def recording(one, record=record, chosen=chosen):
            arm = one.choice.arm
            chosen.append(arm)
            steps = -(-one.tokens // one.waiting)  # plain visits take several steps
            seconds = {2: 1.1, 7: 1.2}[arm.nodes] if arm else steps
            record(dataclasses.replace(one, seconds=seconds))

        speculator.manager.record = recording
        learn(speculator, requests, expected)
        for _ in range(2):
            completions, _ = roll_out(speculator, params, requests)
            assert_same(completions, expected)
        last = chosen[-20:]
        assert last.count(strategies[1] if right else None) > 10, last


@pytest.mark.parametrize("mix", [False, True])
def test_without_strategies_every_drafter_has_some(params, mix):
    """And each that drafts on the device some with the first on the host, where trees are mixed."""
    choice = strategy_choice("bandit", mix=mix)
    speculator = make_speculator(("srt", "quantized", "eagle"), choice, eagle={"depths": [1, 3]})
    assert isinstance(speculator.manager, BanditManager)
    arms = speculator.manager.state()["bandit_drafters"].tolist()
    assert {"", "srt", "quantized", "eagle", *(("srt+quantized", "srt+eagle") if mix else ())} == set(arms)


def test_a_head_before_it_is_trained_is_no_arm_of_the_bandit(monkeypatch):
    """And the time of a pass is for the half that waits for it, too."""
    head, history = device_proposer("eagle", trained=False), HostProposer("srt", Drafter(), None)
    arms = (Strategy(2, 2, 2, "eagle"), Strategy(2, 2, 2, "srt+eagle"))
    choice = strategy_choice("bandit", *arms, epsilon=1.0, window=8)
    manager = choice.manager([history, head], BUCKETS, CHEAP, SLOTS)
    drafted = SimpleNamespace(rows=0, seconds=1.0)
    monkeypatch.setattr(bandit, "draft", lambda proposer, strategy, state, *_: (state, drafted))
    state, active = SimpleNamespace(batch=4), active_slots(2, inactive=2)

    def chosen():
        choices = []
        for _ in range(30):
            choices.append(manager.choose(state, active, None)[1])
            manager.record(PassRecord(choices[-1], 4, 4, 4, 1.0))
        return choices

    assert {choice.arm for choice in chosen()} == {None}
    assert "not available: eagle" in manager.choose(state, active, None)[1].reason
    head.drafter.training.trained = True
    assert {choice.arm for choice in chosen()} == {None, *arms}
    assert chosen()[-1].plain_rate == pytest.approx(4.0)  # tokens of all four, a second
