"""Which drafter drafts, how far, and how it is decided: the tokens are the same through all of it."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from drafters.registry import make_drafter, states_read
from rljax.config.decoding import SpeculationConfig, ToggleConfig
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftStrategy
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.errors import ConfigError
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.rollout.scheduler import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.drafter_group import DrafterGroup
from rljax.speculation.host_proposer import HostProposer
from rljax.speculation.managers.expected import ExpectedManager
from rljax.speculation.managers.papers import bandit_manager, roofline_manager
from rljax.speculation.managers.papers.bandit_manager import BanditManager
from rljax.speculation.managers.papers.draft_length_schedule import DraftLengthSchedule
from rljax.speculation.managers.papers.policy_costs import policy_costs
from rljax.speculation.managers.papers.roofline import Roofline
from rljax.speculation.managers.papers.roofline_manager import RooflineManager
from rljax.speculation.managers.papers.toggle import Toggle, Verdict
from rljax.speculation.managers.selection import StrategyChoice, strategy_choice
from rljax.speculation.pass_choice import Candidates, Choice, best_rows
from rljax.speculation.pass_record import PassRecord, VerifiedNodes
from rljax.speculation.proposals import ActiveSlots, Proposal
from rljax.speculation.speculator import Speculator
from rljax.speculation.strategies import Strategy
from tests.tiny_policy import (
    CONFIG,
    EOS,
    HEAD,
    SLOTS,
    FixedTimes,
    assert_same,
    make_params,
    make_requests,
    outcomes,
)

BUCKETS = Buckets((2, 4), (128,), (16, 32), 7)
FEW = Buckets((4,), (128,), (16,), 7)  # where drafters on the device have programs for every shape
POOL = ExecutablePool(row_invariant=True)
CHEAP = FixedTimes({0: 1.0, 16: 1.1, 32: 1.2}, draft=0.05)
BANDIT = StrategyChoice("bandit", epsilon=0.3, window=8)
MIXED = StrategyChoice(mix=True)
LADDER = StrategyChoice("ladder")


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture(scope="module")
def requests():
    return make_requests()


def make_engine(hidden_layers=None, buckets=BUCKETS):
    return DecodeEngine(
        CONFIG, Numerics(), SamplingParams(), buckets, (EOS,), 16, POOL, hidden_layers=hidden_layers
    )


@pytest.fixture(scope="module")
def expected(params, requests):
    return Scheduler(make_engine(), SLOTS).run(params, requests)[0]


def make_speculator(names, choice, buckets=BUCKETS, **arguments):
    drafters = {name: make_drafter(name, **arguments.get(name, {})) for name in names}
    return Speculator(
        make_engine(states_read(drafters, CONFIG), buckets), drafters, SLOTS, times=CHEAP, strategies=choice
    )


def toggled():
    """Such that the policy's own drafts always pay."""
    nothing = dict.fromkeys(
        ("kv_byte", "flop", "attention_flop", "slot", "verified_slot", "verifying", "draft_flop"), 0.0
    )
    costs = policy_costs(CONFIG, Numerics(), make_drafter("quantized").format)
    roofline = Roofline(costs=costs, byte=1.0, draft_byte=1e-3, draft_slot=0.0, overlap=1.0, **nothing)
    return StrategyChoice("roofline", roofline=roofline)


def roll_out(speculator, params, requests, overlap=False):
    return Scheduler(speculator.engine, SLOTS, None, speculator, overlap).run(params, requests)


def learn(speculator, requests, completions):
    speculator.learn(outcomes(requests, completions))


@pytest.mark.parametrize(
    "choice", [StrategyChoice(), MIXED, BANDIT, LADDER], ids=["expected", "mixed", "bandit", "ladder"]
)
def test_the_tokens_are_those_of_plain_decoding(params, requests, expected, choice):
    speculator = make_speculator(("srt", "suffix_decoding", "quantized"), choice)
    for _ in range(3):  # all new, then all known
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert statistics.drafted == sum(completion.drafted for completion in completions) > 0
        learn(speculator, requests, completions)
    again = make_speculator(("srt", "suffix_decoding", "quantized"), choice)
    again.load_state(speculator.state())
    assert again.manager.state().keys() == speculator.manager.state().keys()
    for name, array in speculator.manager.state().items():
        np.testing.assert_array_equal(again.manager.state()[name], array)


def test_the_policys_own_drafts_grow_longer_from_one_training_step_to_another(params, requests, expected):
    """By the roofline and the patience ladder; neither evaluation nor a step's second round is a step."""

    def make():
        speculator = make_speculator(("quantized",), toggled())
        speculator.manager._schedule = DraftLengthSchedule((2, 7), alpha_up=0.5, alpha_down=0.1)
        return speculator

    speculator, first, depths = make(), requests[:9], []
    for training, step in ((True, 0), (False, 0), (True, 1), (True, 1), (False, 0), (True, 2)):
        own = [dataclasses.replace(each, training=training, step=step) for each in first]
        completions, statistics = roll_out(speculator, params, own)
        assert_same(completions, expected[:9])
        assert statistics.verified == statistics.steps
        depths.append(max(len(each["verified"]) for each in speculator.decisions.take()))
        state, speculator = speculator.state(), make()  # the run goes on in another process
        speculator.load_state(state)
    assert depths == [2, 2, 2, 2, 2, 7]


class Head:
    """A drafter that is trained, as far as a manager looks, with trees of these depths."""

    train_below, trained = 0, False
    begin = observe = learn = state = load_state = metrics = train = freeze = lambda *_: None

    def __init__(self, depths=(2,)):
        self.strategies = tuple(DraftStrategy(depth, 2, depth) for depth in depths)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A smaller policy's directory."""
    path = tmp_path_factory.mktemp("small_model")
    small = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1)
    save_model(path, small, init_params(small, 1), "float32")
    return str(path)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["srt", "suffix_decoding", "eagle", "small_model", "quantized"])
def test_the_roofline_gates_any_drafter(params, requests, expected, small_model, drafter, overlap):
    """Where it always pays, every drafter is switched on; where it never does, none. The tokens stay."""
    arguments = {
        "eagle": HEAD | {"slices": 1},
        "small_model": {"path": small_model},
    }
    never = dataclasses.replace(toggled(), toggle=ToggleConfig(margin=100.0))
    for choice, switched_on in ((toggled(), True), (never, False)):
        speculator = make_speculator((drafter,), choice, FEW, **arguments)
        for step in range(2):
            own = [dataclasses.replace(each, step=step) for each in requests]
            completions, statistics = roll_out(speculator, params, own, overlap)
            assert_same(completions, expected)
            learn(speculator, own, completions)
        assert (statistics.verified > 0) == switched_on
        again = make_speculator((drafter,), choice, FEW, **arguments)
        again.load_state(speculator.state())
        for name, array in speculator.manager.state().items():
            np.testing.assert_array_equal(again.manager.state()[name], array)


@pytest.mark.parametrize(
    ("proposer", "seconds", "on"),
    [
        (HostProposer("srt", None, None), 1e9, True),  # drafting on the host costs nothing
        (SelfProposer("quantized", None, None, None), 1e9, True),  # the roofline knows its time
        (DeviceProposer("small_model", Head((3, 7)), None, None), 0.1, True),
        (DeviceProposer("small_model", Head((3, 7)), None, None), 1e9, False),  # measured
    ],
    ids=["host", "self", "fast", "slow"],
)
def test_the_roofline_gates_by_the_time_of_drafting(proposer, seconds, on):
    manager = toggled().manager([proposer], BUCKETS, FixedTimes({}, seconds), SLOTS)
    manager.begin(True, 0)
    assert manager._toggle(2, 128, 0.9).on == on
    # The draft length is 5: a tree of that depth, or the one with the nearest.
    assert (
        manager._strategy(5)
        == {
            "srt": Strategy(5, 5, 5, "srt"),
            "quantized": Strategy(5, 1, 5, "quantized"),
            "small_model": Strategy(3, 2, 3, "small_model"),
        }[proposer.name]
    )


def test_the_roofline_waits_for_a_head_that_is_not_trained():
    proposer = DeviceProposer("eagle", Head((3,)), None, None)
    manager = toggled().manager([proposer], BUCKETS, CHEAP, SLOTS)
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=128))
    manager.begin(True, 0)
    _, choice = manager.choose(state, active_slots(4), None)
    assert (choice.rows, choice.reason) == (0, "eagle is not trained yet")


def test_a_drafter_on_the_host_that_knows_nothing_further_has_missed(monkeypatch):
    """A pass brings no more tokens than with a wrong draft, and that is what the roofline is asked with."""
    proposer = HostProposer("srt", None, None)
    manager = toggled().manager([proposer], BUCKETS, CHEAP, SLOTS)
    manager.begin(True, 0)
    # Drafts: five, two, none and five, of which a pass had room for three. All are right.
    drafted, verified = np.asarray([5, 2, 0, 5])[:, None], np.asarray([5, 2, 0, 3])[:, None]
    nodes = np.zeros((4, 5), np.int32)
    usable, kept = np.arange(5) < drafted, np.arange(5) < verified
    proposal = Proposal(proposer, nodes, nodes + np.arange(-1, 4), usable, nodes + 1.0, nodes, 0.0)
    candidates = Candidates.from_nodes(usable, proposal.probability, np.ones(4, bool))
    choice = Choice.verify(proposal, candidates, 32, "", expected_rate=0.0, plain_rate=0.0)
    fate = VerifiedNodes(kept, kept, kept)
    manager.record(PassRecord(choice, 4, 4, 14, 1.0, requests=np.arange(4), nodes=fate))
    assert manager.state()["toggle_chains"].tolist() == [12, 10]
    # Nothing at all for two slots.
    nothing = SimpleNamespace(rows=0, seconds=1.0)
    monkeypatch.setattr(roofline_manager, "draft", lambda proposer, strategy, state, *_: (state, nothing))
    state = SimpleNamespace(batch=2, cache=SimpleNamespace(length=128))
    _, choice = manager.choose(state, active_slots(2), None)
    assert choice.rows == 0 and choice.reason.startswith("srt had nothing to verify (on since")
    assert manager.state()["toggle_chains"].tolist() == [14, 10]


def decisions_of_a_toggle(**keys):
    """Draft lengths after two steps of each acceptance, and whether a predicted speed-up of 1.2 is enough."""
    config = SpeculationConfig(
        drafter="quantized", choice="roofline", max_drafts=BUCKETS.max_drafts, toggle=ToggleConfig(**keys)
    )
    choice = strategy_choice(config, 0, toggled().roofline)
    manager = choice.manager([SelfProposer("quantized", None, None, None)], BUCKETS, CHEAP, SLOTS)
    lengths = [manager._schedule.length, *map(manager._schedule.update, (0.96, 0.96, 0.89, 0.89, 0.5, 0.5))]
    manager._toggle.predicted = lambda *shape: 1.2
    return lengths, manager._toggle(1, 128, 0.9).on


def test_every_key_of_the_toggle_changes_a_decision():
    assert decisions_of_a_toggle() == ([5, 5, 7, 7, 7, 7, 5], True)
    assert decisions_of_a_toggle(margin=0.3) == ([5, 5, 7, 7, 7, 7, 5], False)
    assert decisions_of_a_toggle(lengths=(2, 3, 6, 8)) == ([2, 2, 3, 3, 3, 3, 2], True)
    assert decisions_of_a_toggle(first=7) == ([7, 7, 7, 7, 7, 7, 5], True)
    assert decisions_of_a_toggle(alpha_up=0.97) == ([5, 5, 5, 5, 5, 5, 5], True)
    assert decisions_of_a_toggle(alpha_down=0.9) == ([5, 5, 7, 7, 5, 5, 5], True)
    assert decisions_of_a_toggle(patience=1) == ([5, 7, 7, 7, 7, 5, 5], True)


@pytest.mark.parametrize("by", ["expected", "bandit", "ladder", "fixed"])
def test_a_batch_that_no_pass_verifies_decodes_plainly(params, requests, expected, by):
    """Passes over 4 tokens: room for a draft of each of 2 slots, and for none of 4."""
    strategies = (Strategy(1, 1, 1, "srt"),) if by in ("bandit", "fixed") else ()
    choice = StrategyChoice(by, strategies=strategies, epsilon=1.0)  # whatever the clock says
    engine = make_engine(buckets=Buckets((2, 4), (128,), (4,), 7))
    times = FixedTimes({0: 1.0, 4: 1.1})
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=times, strategies=choice)
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        learn(speculator, requests, completions)
    assert statistics.verified > 0
    assert {each["batch"] for each in speculator.decisions.take()} == {2}


def test_with_thresholds_the_running_responses_choose_the_strategy(params, requests, expected):
    """Ranges need not end where batch buckets do: 3 and 4 responses are one bucket."""
    strategies = [{"drafter": "srt", "depth": n, "top_k": 1, "nodes": n} for n in (7, 3, 1)]
    section = {"drafter": "srt", "choice": "bandit", "strategies": strategies, "max_batch": 4}
    section |= {"max_drafts": 7, "batch_thresholds": (1, 2, 4), "epsilon": 0.0}
    choice = strategy_choice(SpeculationConfig(**section), 0)
    speculator = make_speculator(("srt",), choice)
    arms, choose = {}, speculator.manager.choose

    def choosing(state, active, statistics):
        state, chosen = choose(state, active, statistics)
        responses = len(active.slots) + active.standing_by
        arms.setdefault(responses, set()).add(chosen.arm and chosen.arm.nodes)
        return state, chosen

    speculator.manager.choose = choosing
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        learn(speculator, requests, completions)
    assert statistics.verified > 0
    by_range = [arms.get(1, set()), arms.get(2, set()) | arms.get(3, set()), arms[4]]
    assert by_range[0] <= {None, 7} and by_range[1:] == [{None, 3}, {None, 1}]


@pytest.mark.parametrize(
    ("names", "first"), [(("prompt_lookup", "quantized"), [0, 3, 6, 1]), (("quantized",), [0, 1, 2, 3])]
)
def test_samples_of_a_prompt_wait_for_its_first_where_they_draft_from_one_another(
    params, requests, monkeypatch, names, first
):
    """Else what is likely to be long begins first, all of it, as in plain decoding."""
    prompts = sorted({request.prompt_ids for request in requests})[:3]
    asked = [dataclasses.replace(requests[0], prompt_ids=prompts[i // 3]) for i in range(9)]
    started, insert = [], DrafterGroup.insert

    def inserting(self, prefilled, assignments, requests):
        started.extend(requests)
        insert(self, prefilled, assignments, requests)

    monkeypatch.setattr(DrafterGroup, "insert", inserting)
    speculator = make_speculator(names, StrategyChoice())
    monkeypatch.setattr(speculator.lengths, "expected", lambda prompt_ids: 1.0)
    roll_out(speculator, params, asked)
    assert started[:SLOTS] == first and sorted(started) == list(range(9))


class Altered:
    """SRT, with something done to what it proposes."""

    def __init__(self):
        self.inner = make_drafter("srt", live=False)

    def __getattr__(self, name):
        return getattr(self.inner, name)


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

    alone = [passes({"half": Half(first)}, StrategyChoice()) for first in (True, False)]
    both, fewest = {"one": Half(True), "other": Half(False)}, min(alone)
    assert passes(both, MIXED) < fewest
    assert passes(both, StrategyChoice("fixed", strategies=(Strategy(7, 7, 7, "one+other"),))) < fewest


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


FIXED = StrategyChoice("fixed", strategies=(Strategy(3, 1, 3, "quantized"),))


@pytest.mark.parametrize(
    ("choice", "overlap"),
    [(StrategyChoice(), True), (MIXED, False), (BANDIT, True), (LADDER, False), (FIXED, False)],
    ids=["expected", "mixed", "bandit", "ladder", "fixed"],
)
def test_every_token_and_second_is_in_the_log(params, requests, choice, overlap):
    carried_out, recorded, turns = [], [], itertools.count()
    if choice.by == "expected":  # now and then drafts are not verified, also while the other half is
        sometimes = lambda *arguments: best_rows(*arguments) if next(turns) % 3 else 0  # noqa: E731
        choice = dataclasses.replace(choice, choose_rows=sometimes)
    speculator = make_speculator(("srt", "quantized"), choice)
    add, record = speculator.decisions.add, speculator.manager.record
    speculator.decisions.add = lambda one: (carried_out.append(one), add(one))
    speculator.manager.record = lambda one: (recorded.append(one), record(one))
    _, statistics = roll_out(speculator, params, requests, overlap)
    log = speculator.decisions.take()
    assert sum(each["tokens"] for each in log) == statistics.tokens
    verifying = [each for each in log if each["rows"]]
    assert sum(each["visits"] for each in verifying) == statistics.verified > 0
    spent = sum(one.choice.draft_seconds + one.seconds for one in carried_out)
    assert sum(each["seconds"] for each in log) == pytest.approx(spent)
    if choice is not BANDIT:
        drafting = sum(one.choice.draft_seconds for one in carried_out)
        assert drafting >= 0.999 * statistics.draft_seconds > 0
    starts = [each["at"] for each in log]
    assert starts == sorted(starts)
    for each in verifying:  # a token of every turn, and one of every node on its path
        assert each["tokens"] == each["turns"] + sum(each["accepted"])
        assert len(each["accepted"]) <= len(each["verified"]) <= BUCKETS.max_drafts
    assert sum(sum(each["verified"]) for each in log) == statistics.drafted
    assert sum(sum(each["accepted"]) for each in log) == statistics.accepted
    if choice is not BANDIT:  # which has nothing to promise in its first tries
        assert all(each["expected"] > 0 < each["plain"] for each in log)
    # Where halves take turns, what a pass takes is for the responses of both.
    assert max(one.waiting for one in recorded if one.choice.rows) == SLOTS


def test_promises_count_the_time_of_drafting(params, requests):
    speculator = make_speculator(("quantized",), StrategyChoice())
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


def test_a_bandit_says_when_there_was_nothing_to_verify(params, requests):
    strategies = (Strategy(3, 1, 3, "prompt_lookup"),)
    choice = StrategyChoice("bandit", strategies=strategies, epsilon=0.0)
    speculator = make_speculator(("prompt_lookup",), choice)
    drafter = speculator.proposers[0].drafter
    propose = drafter.propose
    drafter.propose = lambda queries: dataclasses.replace(
        propose(queries), counts=np.zeros_like(queries.budgets)
    )
    roll_out(speculator, params, requests)
    reasons = {each["reason"] for each in speculator.decisions.take()}
    assert any(reason.startswith("prompt_lookup had nothing to verify (") for reason in reasons)


def test_drafters_of_a_mixed_tree_are_credited_for_their_own_nodes(params, requests, expected):
    speculator = make_speculator(("srt", "suffix_decoding"), MIXED)
    verified, heard = {}, {}
    for proposer in speculator.proposers:
        credit = proposer.credit

        def counting(proposal, nodes, accepted, name=proposer.name, credit=credit):
            verified[name] = verified.get(name, 0) + int(nodes.sum())
            assert (accepted <= nodes).all()
            credit(proposal, nodes, accepted)

        proposer.credit = counting
        heard[proposer.name] = listen(proposer.drafter)
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        learn(speculator, requests, completions)
    assert set(verified) == {"srt", "suffix_decoding"}
    assert sum(verified.values()) > statistics.drafted  # some nodes are both drafters'
    assert {name: sum(counts) for name, counts in heard.items()} == verified


def listen(drafter):
    """The draft nodes of its own that a drafter will hear of, visit by visit."""
    heard, observe = [], drafter.observe
    drafter.observe = lambda sampled: (heard.append(int(sampled.drafted.sum())), observe(sampled))
    return heard


def test_the_bandit_ends_up_with_what_pays(params, requests, expected):
    """Where all is drafted right, the most nodes win; a drafter that is always wrong loses to plain steps."""

    class Telling(Altered):
        def __init__(self, right):
            super().__init__()
            self.right = right

        def propose(self, queries):
            drafts = self.inner.propose(queries)
            return drafts if self.right else dataclasses.replace(drafts, tokens=(drafts.tokens + 1) % 64)

    for right in (True, False):
        strategies = (Strategy(2, 1, 2, "telling"), Strategy(7, 1, 7, "telling"))
        choice = StrategyChoice("bandit", strategies=strategies, epsilon=0.0, window=8)
        speculator = Speculator(
            make_engine(), {"telling": Telling(right)}, SLOTS, times=CHEAP, strategies=choice
        )
        chosen = []
        record = speculator.manager.record

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


class Knowing(Altered):
    """Proposes what the responses of some requests will be, and what they will not be for all others: at most
    so many tokens.
    """

    def __init__(self, right, most=BUCKETS.max_drafts):
        super().__init__()
        self.right, self.most = right, most

    def propose(self, queries):
        drafts = self.inner.propose(queries)
        right = np.asarray([int(request) in self.right for request in queries.requests])
        tokens = np.where(right[:, None], drafts.tokens, 1)
        return dataclasses.replace(drafts, tokens=tokens, counts=np.minimum(drafts.counts, self.most))


class Silent(Altered):
    """Proposes nothing."""

    def propose(self, queries):
        return dataclasses.replace(self.inner.propose(queries), counts=np.zeros_like(queries.budgets))


def test_the_ladder_begins_with_the_best_drafter_and_gives_stragglers_another(params):
    """One knows all responses but two long ones, which another knows alone."""
    requests = make_requests((3, 20, 30, 8, 9, 11), (98, 20, 20, 16, 16, 16))
    expected = Scheduler(make_engine(), SLOTS).run(params, requests)[0]
    lengths = np.asarray([len(completion.response_ids) for completion in expected])
    longest = set(np.argsort(-lengths)[:2].tolist())
    others = set(range(len(requests))) - longest

    def rollouts(drafters):
        speculator = Speculator(make_engine(), drafters, SLOTS, times=CHEAP, strategies=LADDER)
        learn(speculator, requests, expected)
        for _ in range(3):
            speculator.decisions.take()
            completions, statistics = roll_out(speculator, params, requests)
            assert_same(completions, expected)
        return speculator.decisions.take(), statistics.steps

    # Of the two that stragglers race with, one has nothing to say.
    named = {"knows the others": Knowing(others), "silent": Silent(), "knows the long": Knowing(longest)}
    both, steps = rollouts(named)
    assert both[0]["drafter"] == "knows the others" and "is first on the ladder" in both[0]["reason"]
    events = [event for each in both for event in each["events"]]
    for request in longest:
        begun, ended = (event for event in events if event.startswith(f"request {request}"))
        assert begun.endswith("; it races silent, knows the long")
        assert f"request {request} stays with knows the long, accepted: knows the others 1" in ended
        assert ", silent 0%, knows the long 9" in ended
    assert len(events) == 2 * len(longest)
    assert both[-1]["drafter"] == "knows the long"
    assert steps < rollouts({"knows the others": Knowing(others)})[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("special", ["knows one", "quantized"])
def test_a_straggler_gets_another_drafter_while_others_of_the_pass_keep_theirs(params, special, overlap):
    """A drafter knows two responses of three, and one slot is idle. Drafts on the device are only made
    for the third.
    """
    requests = make_requests((3,), (98,))
    expected = Scheduler(make_engine(), SLOTS).run(params, requests)[0]
    _, known, straggler = np.argsort([len(completion.response_ids) for completion in expected]).tolist()
    general = Knowing({0, 1, 2} - {straggler}, most=2)
    other = make_drafter("quantized") if special == "quantized" else Knowing({straggler}, most=2)
    drafters = {"general": general, special: other}
    times = FixedTimes(CHEAP.by_rows, draft=0.01)
    speculator = Speculator(make_engine(), drafters, SLOTS, times=times, strategies=LADDER)
    learn(speculator, requests, expected)
    asked, passes, record = [], [], speculator.manager.record
    proposer = speculator.proposers[1]
    propose = proposer.propose
    proposer.propose = lambda *arguments: (asked.append(len(passes)), propose(*arguments))[1]

    def recording(one):
        """Notes which drafters had nodes verified for each request."""
        if one.nodes is not None:
            drafters = {request: set() for request in one.requests.tolist()}
            for part, verified, _ in one.choice.proposal.by_drafter(one.nodes.verified, one.nodes.correct):
                for request in one.requests[verified.any(axis=1)].tolist():
                    drafters[request].add(part.name)
            passes.append(drafters)
        record(one)

    speculator.manager.record = recording
    completions, statistics = roll_out(speculator, params, requests, overlap)
    assert_same(completions, expected)
    assert statistics.steps < len(expected[straggler].response_ids)
    # Nobody but the straggler has the other drafter.
    assert all(
        {special} & names == set() for drafters in passes for r, names in drafters.items() if r != straggler
    )
    of_straggler = [drafters[straggler] for drafters in passes if straggler in drafters]
    racing = of_straggler.index({"general", special})
    assert all(names <= {"general"} for names in of_straggler[:racing])
    assert of_straggler[-1] == {special} and of_straggler.count({"general", special}) <= 8
    if not overlap:  # by which halves the two may be in different passes
        assert of_straggler.count({"general", special}) == 8
        assert {known: {"general"}, straggler: {"general", special}} in passes
        assert {known: {"general"}, straggler: {special}} in passes
        # It is asked only where the straggler has it.
        assert asked == [i for i, drafters in enumerate(passes) if special in drafters.get(straggler, ())]
    events = [event for each in speculator.decisions.take() for event in each["events"]]
    begun, ended = events
    assert begun.startswith(f"request {straggler}: general") and begun.endswith(f"it races {special}")
    assert ended.startswith(f"request {straggler} stays with {special}, accepted: general ")


@pytest.mark.parametrize("choice", [LADDER, MIXED], ids=["ladder", "mixed"])
def test_more_drafters_than_a_tree_can_have_are_one_line(choice):
    with pytest.raises(ConfigError) as raised:
        choice.manager([HostProposer(f"srt{i}", None, None) for i in range(9)], BUCKETS, CHEAP, SLOTS)
    message = "speculation.others: 9 drafters, and a tree holds drafts of at most 8; leave some out, or use"
    assert str(raised.value) == f"{message} speculation.choice: expected alone"


def test_the_ladder_decodes_plainly_where_nothing_is_worth_it_and_says_so(params, requests, expected):
    speculator = Speculator(make_engine(), {"wrong": Knowing(set())}, SLOTS, times=CHEAP, strategies=LADDER)
    learn(speculator, requests, expected)
    for _ in range(4):
        speculator.decisions.take()
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
    assert statistics.verified == 0
    assert all("wrong is first on the ladder; at" in each["reason"] for each in speculator.decisions.take())


@pytest.mark.parametrize("mix", [False, True])
def test_without_strategies_every_drafter_has_some(params, mix):
    """And each that drafts on the device some with the first on the host, where trees are mixed."""
    choice = dataclasses.replace(BANDIT, mix=mix)
    speculator = make_speculator(("srt", "quantized", "eagle"), choice, eagle={"depths": [1, 3]})
    assert isinstance(speculator.manager, BanditManager)
    arms = speculator.manager.state()["bandit_drafters"].tolist()
    assert {"", "srt", "quantized", "eagle", *(("srt+quantized", "srt+eagle") if mix else ())} == set(arms)


@pytest.mark.parametrize("drafter", ["srt", "quantized", "eagle"])
def test_a_fixed_strategy_is_always_used(params, requests, expected, drafter):
    strategy = Strategy(3, 1, 3, drafter)
    choice = StrategyChoice("fixed", strategies=(strategy,))
    eagle = HEAD | {"top_k": 1, "slices": 1}
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
    choice = StrategyChoice("fixed", strategies=(strategy,))
    with pytest.raises(ConfigError) as raised:
        make_speculator(("eagle", "quantized"), choice, eagle={"depths": [1, 3], "unrolled_steps": 1})
    assert str(raised.value) == f"speculation.strategies: {strategy}: {message}"


def test_where_no_pass_has_room_for_a_draft_a_bandit_has_nothing_to_choose_from():
    engine = make_engine(buckets=Buckets((4,), (128,), (4,), 7))
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=CHEAP, strategies=BANDIT)
    assert speculator.manager.state()["bandit_drafters"].tolist() == [""]


def test_a_head_before_it_is_trained_is_no_arm_of_the_bandit(monkeypatch):
    """And the time of a pass is for the half that waits for it, too."""
    head, history = SimpleNamespace(name="eagle", drafter=Head()), SimpleNamespace(name="srt", drafter=None)
    arms = (Strategy(2, 1, 2, "eagle"), Strategy(2, 1, 2, "srt+eagle"))
    bandit = BanditManager([history, head], BUCKETS, arms, SLOTS, 1.0, 8, 0)
    drafted = SimpleNamespace(rows=0, seconds=1.0)
    monkeypatch.setattr(bandit_manager, "draft", lambda proposer, strategy, state, *_: (state, drafted))
    state, active = SimpleNamespace(batch=4), active_slots(2, standing_by=2)

    def chosen():
        choices = []
        for _ in range(30):
            choices.append(bandit.choose(state, active, None)[1])
            bandit.record(PassRecord(choices[-1], 4, 4, 4, 1.0))
        return choices

    assert {choice.arm for choice in chosen()} == {None}
    assert "not available: eagle" in bandit.choose(state, active, None)[1].reason
    head.drafter.trained = True
    assert {choice.arm for choice in chosen()} == {None, *arms}
    assert chosen()[-1].plain_rate == pytest.approx(4.0)  # tokens of all four, a second


def active_slots(count, standing_by=0):
    slots = np.arange(count, dtype=np.int32)
    return ActiveSlots(slots, slots, slots + 100, np.ones(count, bool), standing_by)


@pytest.mark.parametrize(
    ("promises", "asked"),
    [
        ({"slow": 2.0}, []),  # no more than plain decoding of two slots, at a second a step
        ({"slow": 3.0}, ["slow"]),
        ({"slow": 5.0, "free": 1e9}, ["free"]),  # whose drafts promise 6.2
        ({"slow": 9.0, "free": 1e9}, ["free", "slow"]),
    ],
    ids=str,
)
def test_only_a_drafter_that_promises_more_than_the_best_so_far_drafts(promises, asked):
    drafted = []

    def propose(name, state):
        drafted.append(name)
        nodes = np.zeros((2, 3), np.int32)
        probability = 0.9 ** (nodes + np.arange(1, 4))
        own = SimpleNamespace(name=name)
        return state, Proposal(own, nodes, nodes + np.arange(-1, 2), nodes == 0, probability, nodes, 0.0)

    proposers = [
        SimpleNamespace(
            promise=lambda *_, promise=promise: promise,
            propose=lambda state, *_, name=name: propose(name, state),
        )
        for name, promise in promises.items()
    ]
    manager = ExpectedManager(proposers, BUCKETS, CHEAP)
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=128))
    _, choice = manager.choose(state, active_slots(2), None)
    assert drafted == asked and bool(choice.rows) == bool(asked)
    assert choice.expected_rate == pytest.approx(2 * (1 + 0.9 + 0.81 + 0.729) / 1.1 if asked else 2.0)


def test_the_toggle_is_asked_of_the_shapes_that_the_engine_computes():
    """However short the most of its responses are."""
    asked = []

    class Asked:
        begin = predicted = None

        def __call__(self, *shape):
            asked.append(shape)
            return Verdict(False, "off")

    proposer = SimpleNamespace(acceptance=0.9, drafter=None)
    one = RooflineManager(proposer, BUCKETS, CHEAP, Asked(), DraftLengthSchedule())
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=256))
    _, choice = one.choose(state, active_slots(2, standing_by=1), None)
    assert asked == [(2, 256, 0.9, 1)]
    assert choice.plain_rate == choice.expected_rate == 3.0  # a plain step takes a second


def length_after_a_step(right, verified, accepted):
    """The draft length, 5 at first and 7 or 9 at most, after a training step with these chains.

    Args:
      right, verified: number of right drafts and of verified drafts of each chain.
      accepted: how many of them a kept token came from.
    """
    proposer = SelfProposer("quantized", SimpleNamespace(), None, None)
    schedule = DraftLengthSchedule((5, 7, 9), first=7, patience=1)
    toggle = Toggle(toggled().roofline, 7)
    manager = RooflineManager(proposer, BUCKETS, CHEAP, toggle, schedule)
    manager.begin(True, 0)
    nodes = np.zeros((len(right), 7), np.int32)
    parents = nodes + np.arange(-1, 6)
    proposal = Proposal(proposer, nodes, parents, nodes == 0, nodes + 1.0, nodes, 0.0)
    counts = (np.asarray(each)[:, None] for each in (verified, accepted, right))
    fate = VerifiedNodes(*(np.arange(7) < each for each in counts))
    proposal.credit(fate.verified, fate.correct)
    slots = active_slots(len(right))
    candidates = Candidates.from_nodes(proposal.usable, proposal.probability, slots.current)
    choice = Choice.verify(proposal, candidates, 32, "", expected_rate=0.0, plain_rate=0.0)
    manager.record(PassRecord(choice, 4, len(right), 0, 1.0, requests=slots.requests, nodes=fate))
    manager.begin(True, 1)
    return manager._schedule.length


def test_chains_that_were_cut_short_count_as_far_as_they_went():
    # Whole chains, by the share that was accepted: 5 or 6 of 7, 6 or 7 of 7, all.
    assert length_after_a_step([5, 6], [7, 7], [5, 6]) == 5
    assert length_after_a_step([6, 7], [7, 7], [6, 7]) == 7
    assert length_after_a_step([7, 7], [7, 7], [7, 7]) == 9
    # The second response ended with its second draft, which was right: the five behind it were not rejected.
    assert length_after_a_step([7, 2], [7, 7], [7, 1]) == 9
    # The second draft was wrong in the token that ended the response.
    assert length_after_a_step([7, 1], [7, 7], [7, 1]) == 5
    # Passes with room for two drafts: 92.5 % of them are right, but only 82 % would be in chains of seven.
    right = [2] * 90 + [1] * 5 + [0] * 5
    assert length_after_a_step(right, [2] * 100, right) == 5


def test_levels_that_had_no_room_in_a_pass_are_not_refused():
    """Chains of eight, of which three nodes each were verified; the last slot's second one was wrong."""
    drafter = SimpleNamespace(strategies=(None,))
    proposer = DeviceProposer("small_model", drafter, None, None)
    nodes = np.zeros((4, 8), np.int32)
    parents = nodes + np.arange(-1, 7)
    parents[:, 3:] = 99  # what is no node may have any
    proposal = Proposal(proposer, nodes, parents, np.arange(8) < nodes + 3, nodes + 1.0, nodes, 0.0)
    verified = np.ones((4, 3), bool)
    accepted = verified.copy()
    accepted[3, 1:] = False
    proposal.credit(verified, accepted)
    assert proposer.state()["chains_of_small_model"].tolist() == [11, 10]
    proposer.credit(proposal, np.zeros((4, 3), bool), np.zeros((4, 3), bool))
    assert proposer.state()["chains_of_small_model"].tolist() == [11, 10]


def test_strategies_of_a_config():
    sizes = {"depth": 3, "top_k": 1, "nodes": 3}
    config = SpeculationConfig(drafter="srt", choice="bandit", strategies=[{"drafter": "srt", **sizes}])
    assert strategy_choice(config, 0).strategies == (Strategy(3, 1, 3, "srt"),)
    config = config.model_copy(update={"strategies": [{"drafter": "str", **sizes}]})
    with pytest.raises(ConfigError, match=r"strategies\[0\].drafter: .*'str'; did you mean 'srt'"):
        strategy_choice(config, 0)


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
        StrategyChoice(choose_rows=choose),
        Buckets((4,), (128,), (16, 32), 7),
        eagle=HEAD | {"slices": 1},
        small_model={"path": str(tmp_path)},
    )
    turns = itertools.cycle(rng.integers(0, len(names), 64).tolist())
    for number, proposer in enumerate(speculator.proposers):
        proposer.promise = lambda *_, number=number: 1e9 if next(turns) == number else 0.0
        proposer._length = 3

    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert statistics.verified > 0
        learn(speculator, requests, completions)
