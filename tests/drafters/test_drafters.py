"""The drafters behind their protocol: what each proposes, from whose tokens, and in which order; refusals."""

import numpy as np
import pytest
import yaml

from drafters.base import DraftRequest, Outcome, Queries, Sampled
from drafters.names import ARGUMENTS
from drafters.registry import DRAFTERS, HOST_DRAFTERS, make_drafter, make_drafters
from drafters.validation import usable_nodes
from rljax.config.speculation import SpeculationConfig
from rljax.errors import ConfigError
from tests.configs import table

A, B = (11, 12, 13), (21, 22, 23, 24)
RESPONSE = list(range(30, 60))


class Rollout:
    """A rollout of requests, as the speculator tells a drafter about it; of the first one, tokens may have
    been sampled ahead.
    """

    def __init__(self, drafter, prompts, ahead=None):
        self.drafter, self.prompts = drafter, prompts
        self.tokens = [[] for _ in prompts]
        first, *others = prompts
        drafter.begin([DraftRequest(first, None, ahead), *(DraftRequest(each, None) for each in others)])

    def say(self, request, tokens, drafted=0, accepted=0):
        """One request's next tokens; what stands behind them in the array is not among them."""
        self.tokens[request] += tokens
        row = np.full((1, len(tokens) + 2), -1, np.int32)
        row[0, : len(tokens)] = tokens
        one = lambda value: np.asarray([value], np.int32)  # noqa: E731
        self.drafter.observe(
            Sampled(one(request), row, one(len(tokens)), one(drafted), one(accepted), one(0))
        )

    def propose(self, *requests, nodes=16, budgets=None):
        requests = np.asarray(requests, np.int32)
        positions = [len(self.prompts[i]) + len(self.tokens[i]) for i in requests]
        budgets = np.full(len(requests), nodes) if budgets is None else budgets
        queries = Queries(requests, np.asarray(positions, np.int32), np.asarray(budgets, np.int32), nodes)
        drafts = self.drafter.propose(queries)
        for name, dtype in (("tokens", np.int32), ("parents", np.int32), ("log_probability", np.float32)):
            array = getattr(drafts, name)
            assert (array.dtype, array.shape) == (dtype, (len(requests), nodes)), name
        assert (drafts.counts.dtype, drafts.counts.shape) == (np.int32, (len(requests),))
        assert (drafts.counts <= budgets).all()
        returned = np.arange(nodes) < drafts.counts[:, None]
        assert (usable_nodes(drafts, queries, 10**6) == returned).all()
        for row, count in zip(drafts.log_probability, drafts.counts, strict=True):
            assert (row[:count] <= 0).all()
        return drafts

    def chain(self, request, nodes=16):
        """The path of first children."""
        drafts, path, last = self.propose(request, nodes=nodes), [], -1
        for node in range(drafts.counts[0]):
            if drafts.parents[0, node] == last:
                path.append(int(drafts.tokens[0, node]))
                last = node
        return path

    def candidates(self, request):
        """What may come next, the most promising first."""
        drafts = self.propose(request)
        first = drafts.parents[0, : drafts.counts[0]] == -1
        return drafts.tokens[0, : drafts.counts[0]][first].tolist()

    def end(self, rewards=None):
        rewards = [0.0] * len(self.prompts) if rewards is None else rewards
        self.drafter.learn(
            [
                Outcome(prompt, np.asarray(tokens, np.int32), reward)
                for prompt, tokens, reward in zip(self.prompts, self.tokens, rewards, strict=True)
            ]
        )


def learned(drafter, prompt, *responses, rewards=None):
    """The drafter after a rollout of these responses."""
    rollout = Rollout(drafter, [prompt] * len(responses))
    for request, response in enumerate(responses):
        rollout.say(request, response)
    rollout.end(rewards)
    return drafter


def after(drafter, text, prompt=A):
    """A rollout of one request, which has sampled this text."""
    rollout = Rollout(drafter, [prompt])
    rollout.say(0, text)
    return rollout


def test_every_name_has_a_drafter_and_arguments():
    assert list(ARGUMENTS) == list(DRAFTERS)


# From what requests sampled; the quantized policy is asked by the engine.
every_drafter = pytest.mark.parametrize("name", sorted(HOST_DRAFTERS))


@every_drafter
def test_nothing_is_proposed_from_nothing(name):
    rollout = Rollout(make_drafter(name), [A, A, B])
    assert rollout.propose(0, 1, 2).counts.tolist() == [0, 0, 0]
    rollout.say(0, [40, 41, 42, 43])
    assert rollout.propose(0).counts.tolist() == [0]
    rollout.end()


@every_drafter
def test_a_repeated_response_is_proposed(name):
    drafter, prompt = make_drafter(name), A
    if name == "prompt_lookup":
        prompt = (*A, *RESPONSE, 9)  # it stands in the prompt
    else:
        learned(drafter, prompt, RESPONSE)
    rollout = after(drafter, RESPONSE[:4], prompt)
    at_most = 2 if name == "histospec" else 8
    assert rollout.chain(0, nodes=8) == RESPONSE[4 : 4 + at_most]
    rollout.say(0, RESPONSE[4:7], drafted=2, accepted=2)
    assert rollout.chain(0, nodes=4) == RESPONSE[7:11]


@every_drafter
def test_drafts_are_those_of_the_requests_that_ask(name):
    """In any order, any part of the batch, each within its own budget."""
    drafter = make_drafter(name)
    prompts = [(*A, *RESPONSE[:12], 9), (*B, *RESPONSE[10:25], 9), (*A, *RESPONSE[:12], 9)]
    if name != "prompt_lookup":
        for prompt in prompts[:2]:
            learned(drafter, prompt, RESPONSE)
    rollout = Rollout(drafter, prompts)
    rollout.say(0, RESPONSE[:3])
    rollout.say(1, RESPONSE[12:17])
    rollout.say(2, RESPONSE[4:9])
    alone = [rollout.propose(i, nodes=6) for i in range(3)]
    drafts = rollout.propose(2, 0, 1, nodes=6)
    for row, i in enumerate((2, 0, 1)):
        assert drafts.counts[row] == alone[i].counts[0] > 0
        np.testing.assert_array_equal(drafts.tokens[row], alone[i].tokens[0])
        np.testing.assert_array_equal(drafts.parents[row], alone[i].parents[0])
    assert rollout.propose(0, 1, 2, nodes=6, budgets=[0, 1, 2]).counts.tolist() == [0, 1, 2]
    assert rollout.propose(nodes=6).counts.tolist() == []


def random_text(rng, length):
    return rng.integers(30, 34, length).tolist()


@every_drafter
@pytest.mark.parametrize("live", [True, False])
def test_a_drafter_with_the_state_of_another_drafts_as_it_does(name, live):
    args = {"live": live} if name in ("srt", "suffix_decoding") else {}
    rng = np.random.default_rng(0)
    drafter = make_drafter(name, **args)
    for _ in range(2):
        rollout = Rollout(drafter, [A, A, B, B])
        for turn in range(12):
            rollout.say(turn % 4, random_text(rng, 6))
        rollout.end(rng.normal(size=4).tolist())
    state = drafter.state()
    assert all(isinstance(array, np.ndarray) for array in state.values())
    other = make_drafter(name, **args)
    if state:
        other.load_state(state)
    if name == "suffix_decoding":  # equally frequent candidates come in the order in which they were inserted
        drafter.load_state(state)
    mine, others = (Rollout(each, [A, B, A, B]) for each in (drafter, other))
    proposed = 0
    for turn in range(20):
        left, right = (rollout.propose(0, 1, 2, 3) for rollout in (mine, others))
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.parents, right.parents)
        np.testing.assert_array_equal(left.log_probability, right.log_probability)
        np.testing.assert_array_equal(left.counts, right.counts)
        proposed += int(left.counts.sum())
        text = random_text(rng, 3)
        for rollout in (mine, others):
            rollout.say(turn % 4, text, drafted=2, accepted=turn % 3)
    assert proposed > 50
    sizes = [{k: v for k, v in d.metrics().items() if k.startswith("history")} for d in (drafter, other)]
    assert sizes[0] == sizes[1]


@every_drafter
def test_metrics_are_numbers_and_count_what_was_learned_alone(name):
    """A rollout that is no training, such as an evaluation, leaves nothing in the history, nor in what the
    next rollout is drafted from.
    """
    drafter = learned(make_drafter(name), A, RESPONSE, RESPONSE[:5])
    after(drafter, RESPONSE, B)
    metrics = drafter.metrics()
    assert all(isinstance(value, int | float) for value in metrics.values())
    if name != "prompt_lookup":
        assert metrics["history_tokens"] == 35 and metrics["history_bytes"] == 2 * 35 + 2 * 8 + 4 * 3
    if name != "suffix_decoding":  # the only one that drafts from other prompts
        assert after(drafter, RESPONSE[:5], B).chain(0) == []


@pytest.mark.parametrize("live", [True, False])
def test_srt_learns_from_group_mates_while_they_run(live):
    rollout = Rollout(make_drafter("srt", live=live), [A, A, B])
    rollout.say(0, RESPONSE[:6])
    assert rollout.chain(1) == (RESPONSE[:5] if live else [])  # 4 for the start of a response, and 1
    assert rollout.chain(2) == []
    rollout.say(1, RESPONSE[:3])
    assert rollout.chain(1) == (RESPONSE[3:6] if live else [])
    rollout.say(0, RESPONSE[6:8])
    assert rollout.chain(1) == (RESPONSE[3:8] if live else [])


@pytest.mark.parametrize("live", [True, False])
def test_suffix_decoding_shares_between_prompts_and_not_between_rollouts(live):
    drafter = learned(make_drafter("suffix_decoding", live=live), A, RESPONSE)
    rollout = Rollout(drafter, [B, B])
    rollout.say(0, RESPONSE[:4])
    assert rollout.chain(0) == RESPONSE[4:20]
    rollout.say(0, [90, 91, 92, 93])
    rollout.say(1, [90, 91])
    assert rollout.chain(1) == ([92, 93] if live else [])
    rollout = after(drafter, [90, 91], B)  # the one before was not learned
    assert rollout.chain(0) == []
    rollout.say(0, RESPONSE[:3])
    assert rollout.chain(0, nodes=5) == RESPONSE[3:8]


def test_prompt_lookup_continues_its_own_text():
    prompt = (1, 2, 3, 4, 5, 1, 2)
    rollout = Rollout(make_drafter("prompt_lookup"), [prompt, A, prompt])
    assert rollout.chain(0, nodes=3) == [3, 4, 5]
    rollout.say(0, [70, 71, 72, 73, 70, 71])
    assert rollout.chain(0, nodes=4) == [72, 73, 70, 71]
    # Never what others wrote, of the same prompt or of another.
    rollout.say(1, [70, 71])
    rollout.say(2, [70, 71])
    assert rollout.chain(1) == [] and rollout.chain(2) == []


@pytest.mark.parametrize("name", ["srt", "histospec"])
def test_a_spilled_history_is_drafted_from(tmp_path, name):
    drafter = make_drafter(name, max_tokens=8, spill_dir=str(tmp_path))
    learned(drafter, A, RESPONSE[:8])
    learned(drafter, B, RESPONSE[8:16])
    assert after(drafter, RESPONSE[:4]).chain(0)[:2] == RESPONSE[4:6]


@pytest.mark.parametrize("name", ["srt", "suffix_decoding"])
def test_the_longest_match_from_the_least_on_decides_and_sets_the_budget(name):
    drafter = learned(make_drafter(name, min_match=3, budget_per_match=1.5), A, RESPONSE)
    rollout = after(drafter, [99, *RESPONSE[5:7]])
    assert rollout.chain(0) == []
    rollout.say(0, [RESPONSE[7]])
    assert rollout.chain(0) == RESPONSE[8 : 8 + 5]  # floor(1.5 * 3) + 1
    texts = [30, 31, 32, 40], [39, 31, 32, 41], [39, 31, 32, 41]
    for args, wanted in ({}, [40]), ({"max_match": 2}, [41, 40]):
        assert after(learned(make_drafter(name, **args), A, *texts), [30, 31, 32]).candidates(0) == wanted


def test_histospecs_window():
    """It grows by 2 to 32 while what is drafted is accepted whole, and begins again where it is not."""
    drafter = learned(make_drafter("histospec"), A, list(range(100, 300)))
    rollout = Rollout(drafter, [A, A])
    for request in range(2):
        rollout.say(request, [100, 101, 102])
    steps = [(window, window, window) for window in (*range(2, 33, 2), 32)]  # the window, drafted, accepted
    steps += [(32, 32, 31), (2, 1, 1), (4, 0, 0), (4, 0, 0)]  # plain decoding says nothing
    for place, (window, verified, accepted) in enumerate(steps, 103):
        assert rollout.chain(0, nodes=40) == list(range(place, place + window))
        rollout.say(0, [place], verified, accepted)
    assert rollout.propose(0, nodes=3).counts.tolist() == [3]
    assert rollout.propose(1, nodes=40).counts.tolist() == [2]  # every request has its own
    assert after(drafter, [100, 101, 102]).propose(0, nodes=40).counts.tolist() == [2]


@pytest.mark.parametrize("matched", [1, 2, 3, 7, 8])
def test_histospec_matches_seven_tokens_down_to_three(matched):
    """Two texts with the same middle; which one is continued depends on how far back one looks."""
    middle = list(range(50, 50 + matched - 1))
    texts = [[30, *middle, 40], [31, *middle, 41]]
    drafter = learned(make_drafter("histospec"), A, *([9, 9, *text] for text in texts), rewards=[0.1, 1.0])
    candidates = after(drafter, [8, 8, *texts[0][:-1]]).candidates(0)
    # From 3 to 7, its own text, though the other was worth more.
    assert candidates == ([] if matched < 3 else [40] if matched <= 7 else [41])


def test_histospec_descends_one_subtree_to_its_leaf():
    """Behind more than seven drafted tokens, too, the branch is one that followed the whole match; no text is
    made of two.
    """
    same = range(60, 70)
    texts = [30, 31, 32, *same, 80, 81], [9, *same, 90, 91], [8, *same, 90, 92]
    drafter = learned(make_drafter("histospec", first_window=15), A, *texts, rewards=[0.1, 1.0, 1.0])
    assert after(drafter, [30, 31, 32]).chain(0) == [*same, 80, 81]


def test_histospecs_window_fits_into_a_pass():
    config = SpeculationConfig(drafter="histospec", args={"max_window": 32}, max_drafts=15)
    with pytest.raises(ConfigError, match=r"speculation.args.max_window: 32 is more than speculation.max_d"):
        make_drafters(config)
    make_drafters(config.model_copy(update={"max_drafts": 32}))
    make_drafters(config.model_copy(update={"args": {}}))


@pytest.mark.parametrize(
    ("endings", "rewards", "wanted"),
    [
        ([40, 40, 40, 41], [0.0, 0.0, 0.0, 1.0], 41),
        ([40, 40, 41], [0.6, 0.6, 1.0], 40),  # the sum, not the mean
        ([40, 40, 40, 41], [-1.0, -1.0, -1.0, 0.5], 41),
        ([40, 41, 41], [0.0, 0.0, 0.0], 41),  # without rewards, the frequent one
        ([40, 41, 41], [-1.0, -1.0, -1.0], 41),
        ([40, 41, 42], [0.0, 0.0, 100.0], 42),
        ([40, 41, 42], [-3.0, 0.0, 0.1], 42),
    ],
)
def test_histospec_takes_the_branch_of_the_largest_reward(endings, rewards, wanted):
    """Its probability is its share of counts, whatever the rewards' scale."""
    texts = [[30, 31, 32, 33, ending, ending + 10] for ending in endings]
    drafts = after(learned(make_drafter("histospec"), A, *texts, rewards=rewards), texts[0][:4]).propose(0)
    assert drafts.tokens[0, :2].tolist() == [wanted, wanted + 10]
    assert drafts.parents[0, :2].tolist() == [-1, 0]  # a chain, one branch only
    share = endings.count(wanted) / (len(endings) + 0.5)
    np.testing.assert_allclose(np.exp(drafts.log_probability[0, 0]), share, rtol=1e-6)


WRONG = r"""
str -> {} -> speculation\.drafter: unknown drafter 'str'; did you mean 'srt'\? Known: block, eagle,
xyz -> {} -> unknown drafter 'xyz'; Known: block, eagle, histospec, prompt_.*, quantized, small.*, srt, s.*,
    or a class of yours as module:Class$
srt -> {rolouts: 1} -> speculation\.args\.rolouts: srt has .*; did you mean 'rollouts'\? Known:
srt -> {rollouts: 1.5} -> args\.rollouts: should be a whole number, got 1\.5
srt -> {novelty: x} -> args\.novelty: should be a number, got 'x'
srt -> {live: 1} -> args\.live: should be true or false, got 1
prompt_lookup -> {substitutions: true} -> substitutions: prompt_lookup has no such argument
srt -> {spill_dir: 3} -> args\.spill_dir: should be text or null, got 3
srt -> {novelty: -0.1} -> args\.novelty: should be greater than or equal to 0, got -0\.1
srt -> {novelty: .nan} -> args\.novelty: should be a finite number, got nan
srt -> {min_match: 0, max_match: 0} -> args\.max_match: should be .* equal to 1, got 0
srt -> {min_match: 5, max_match: 4} -> args\.min_match: 5 is more than max_match 4
histospec -> {max_window: 1} -> args\.first_window: 2 is more than max_window 1
quantized -> {bits: 3} -> args\.bits: 3 is not supported; use 4 or 8
quantized -> {quantizer: rtm} -> args\.quantizer: unknown quantizer 'rtm'; .*rtn
"""


@pytest.mark.parametrize(("name", "args", "message"), table(WRONG))
def test_wrong_drafters_and_arguments_are_refused(name, args, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_drafter(name, **yaml.safe_load(args))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["srt", "suffix_decoding", "prompt_lookup"])
def test_what_was_sampled_ahead_for_one_request_serves_its_group(name):
    """But not requests that are drafted from their own tokens only."""
    rollout = Rollout(make_drafter(name), [A, A, B], ahead=np.asarray(RESPONSE, np.int32))
    for request in (1, 2):
        rollout.say(request, RESPONSE[:4])
    served = {"srt": [1], "suffix_decoding": [1, 2], "prompt_lookup": []}[name]
    for request in (1, 2):
        assert rollout.chain(request, nodes=5) == (RESPONSE[4:9] if request in served else [])
