"""Trees of several drafters as one: against paths in dictionaries, and how much agreement is worth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import Drafts, Queries
from drafters.mixed import MOST_DRAFTERS, Agreement, mix, nodes_by_drafter
from drafters.validation import usable_nodes


def drafts(*trees, width=8):
    """Drafts and probabilities from a list of (token, parent, probability) for every query."""
    shape = (len(trees), width)
    tokens, parents = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    probability = np.zeros(shape)
    for row, tree in enumerate(trees):
        for node, (token, parent, likely) in enumerate(tree):
            tokens[row, node], parents[row, node], probability[row, node] = token, parent, likely
    counts = np.asarray([len(tree) for tree in trees], np.int32)
    return Drafts(tokens, parents, np.zeros(shape, np.float32), counts), probability


def mixed(*drafters, budgets=None, nodes=16, independence=1.0, width=8):
    """Mixes drafters, each given as trees for all queries."""
    proposals, probabilities = zip(*(drafts(*trees, width=width) for trees in drafters), strict=True)
    budgets = np.full(len(drafters[0]), nodes) if budgets is None else np.asarray(budgets)
    if np.isscalar(independence):
        independence = [independence] * (1 << len(drafters))
    return mix(proposals, probabilities, budgets, nodes, np.asarray(independence, np.float64))


def paths_of(mixture, row):
    """The tree as a dictionary from paths to their places."""
    paths = []
    for node in range(mixture.drafts.counts[row]):
        parent = mixture.drafts.parents[row, node]
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), int(mixture.drafts.tokens[row, node])))
    assert len(set(paths)) == len(paths)
    return {path: place for place, path in enumerate(paths)}


def reference(trees, independence):
    """One query's trees by the definition: every path's probability, origins and drafters' nodes."""
    said, nodes = {}, {}
    for drafter, tree in enumerate(trees):
        own = {-1: ((), 1.0)}
        for node, (token, parent, likely) in enumerate(tree):
            if parent < node and parent in own and likely > 0:
                path = (*own[parent][0], token)
                own[node] = path, min(likely, own[parent][1])
                by_drafter = said.setdefault(path, {})
                by_drafter[drafter] = max(by_drafter.get(drafter, 0.0), own[node][1])
                nodes[drafter, node] = path
    total = {(): 1.0}
    for path in sorted(said, key=len):
        shares = [own / said.get(path[:-1], {}).get(drafter, 1.0) for drafter, own in said[path].items()]
        with np.errstate(divide="ignore"):  # 1 - product of (1 - share), exact for the smallest ones, too
            pooled = -np.expm1(np.log1p(-np.asarray(shares)).sum())
        worth = max(shares) + independence[sum(1 << drafter for drafter in said[path])] * (
            pooled - max(shares)
        )
        total[path] = min(total[path[:-1]], max(total[path[:-1]] * worth, *said[path].values()))
    del total[()]
    return total, {path: sum(1 << drafter for drafter in own) for path, own in said.items()}, nodes


PROBABILITIES = [0.0, -0.5, float("nan"), 1e-300, 0.1, 0.25, 0.5, 0.5, 0.7, 0.9, 1.0, 1.5]


@st.composite
def problems(draw):
    """Trees of few tokens, so that paths meet; nodes that are none, and more likely than their parents."""
    drafters, queries, width = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 12))
    node = st.tuples(st.integers(0, 2), st.integers(-2, width), st.sampled_from(PROBABILITIES))
    trees = [[draw(st.lists(node, max_size=width)) for _ in range(queries)] for _ in range(drafters)]
    nodes = draw(st.integers(0, 24))
    budgets = draw(st.lists(st.integers(-1, 30), min_size=queries, max_size=queries))
    seed = draw(st.integers(0, 2**31))
    return trees, width, nodes, budgets, np.random.default_rng(seed).random(1 << drafters)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_as_paths_in_dictionaries(problem):
    trees, width, nodes, budgets, independence = problem
    mixture = mixed(*trees, budgets=budgets, nodes=nodes, independence=independence, width=width)
    rows = np.arange(len(budgets), dtype=np.int32)
    queries = Queries(rows, rows, np.asarray(budgets, np.int32).reshape(-1), nodes)
    usable = usable_nodes(mixture.drafts, queries, vocab_size=3)  # it is a draft tree
    assert (usable == (np.arange(nodes) < mixture.drafts.counts[:, None])).all()
    for row, budget in enumerate(budgets):
        total, origins, own_nodes = reference([tree[row] for tree in trees], independence)
        places, likely = paths_of(mixture, row), mixture.probability[row]
        parents = mixture.drafts.parents[row]
        assert len(places) == min(max(budget, 0), nodes, len(total))
        for path, place in places.items():
            np.testing.assert_allclose(likely[place], total[path], rtol=1e-9)
            assert mixture.origins[row, place] == origins[path]
            assert 0 < likely[place] <= (likely[parents[place]] if parents[place] >= 0 else 1.0)
            assert 0 < mixture.strongest[row, place] <= mixture.pooled[row, place] <= 1
        # The likeliest are taken, in their order; what ties with the last of them may be left out.
        assert (np.diff(likely) <= 0).all()
        if places:
            left_out = [value for path, value in total.items() if path not in places]
            assert max(left_out, default=0.0) <= likely[len(places) - 1] * (1 + 1e-9)
        for (drafter, node), path in own_nodes.items():
            assert mixture.places[drafter, row, node] == places.get(path, -1)
        assert (mixture.places[:, row] >= 0).sum() == sum(path in places for path in own_nodes.values())
        beyond = np.arange(nodes) >= len(places)
        assert not mixture.probability[row, beyond].any() and not mixture.origins[row, beyond].any()
        for drafter, tree in enumerate(trees):  # never below what a drafter says
            said = [1.0] * (width + 1)  # the root's is the last
            for node, (_, parent, own) in enumerate(tree[row]):
                if mixture.places[drafter, row, node] >= 0:
                    said[node] = min(own, said[parent])
                    assert likely[mixture.places[drafter, row, node]] >= said[node]


def test_two_drafters_by_hand():
    """One says 5 6, the other 5 7 and 5 6 8."""
    first = [(5, -1, 0.5), (6, 0, 0.4)]
    second = [(5, -1, 0.8), (7, 0, 0.4), (6, 0, 0.2), (8, 2, 0.1)]
    mixture = mixed([first], [second], independence=1.0)
    p5 = 1 - 0.5 * 0.2
    p56 = p5 * (1 - (1 - 0.4 / 0.5) * (1 - 0.2 / 0.8))
    want = {(5,): p5, (5, 6): p56, (5, 7): p5 * 0.5, (5, 6, 8): p56 * 0.5}
    places = paths_of(mixture, 0)
    assert sorted(places) == sorted(want)
    for path, place in places.items():
        np.testing.assert_allclose(mixture.probability[0, place], want[path])
    assert [mixture.origins[0, places[path]] for path in want] == [3, 3, 2, 2]
    assert mixture.places[0, 0, :3].tolist() == [places[(5,)], places[(5, 6)], -1]
    assert mixture.places[1, 0, 1] == places[(5, 7)]
    half = mixed([first], [second], independence=[9, 9, 9, 0.5])
    np.testing.assert_allclose(half.probability[0, 0], 0.8 + 0.5 * (p5 - 0.8))
    none = mixed([first], [second], independence=0.0)
    np.testing.assert_allclose(none.probability[0, 0], 0.8)


def test_nodes_are_counted_for_who_proposed_them():
    mixture = mixed([[(5, -1, 0.5), (6, 0, 0.4)], []], [[(5, -1, 0.8)], [(1, -1, 0.3)]], nodes=3)
    assert nodes_by_drafter(mixture, np.ones((2, 3), bool)).tolist() == [[2, 0], [1, 1]]
    only_first = np.zeros((2, 3), bool)
    only_first[0, 0] = True
    assert nodes_by_drafter(mixture, only_first).tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["same", "independent"])
def test_what_agreement_is_worth_is_learned(kind):
    """Two drafters that know the same, or independent things; each says 0.5 and is right about that."""
    rng = np.random.default_rng(0)
    agreement = Agreement(2)
    assert agreement.independence[3] == 0.5
    for _ in range(200):
        mixture = mixed([[(5, -1, 0.5)]] * 8, [[(5, -1, 0.5)]] * 8, independence=agreement.independence)
        judged = mixture.origins > 0
        right = rng.random((8, 2)) < 0.5
        accepted = judged & (right.any(1) if kind == "independent" else right[:, 0])[:, None]
        agreement.observe(mixture, judged, accepted)
    last = mixed([[(5, -1, 0.5)]], [[(5, -1, 0.5)]], independence=agreement.independence)
    np.testing.assert_allclose(last.probability[0, 0], 0.75 if kind == "independent" else 0.5, atol=0.03)
    assert agreement.independence[1] == 0.5  # alone, a drafter's node says nothing of agreement


def test_what_is_known_of_agreement_is_forgotten_and_restored():
    agreement, again = Agreement(2), Agreement(2)
    mixture = mixed([[(5, -1, 0.5)]], [[(5, -1, 0.5)]])
    everything = mixture.origins > 0
    for _ in range(40):
        agreement.observe(mixture, everything, everything)
    learned = agreement.independence[3]
    assert learned == 1.0
    again.load_state(agreement.state())
    np.testing.assert_array_equal(again.independence, agreement.independence)
    again.observe(mixture, everything, ~everything)
    assert agreement.independence[3] == learned  # they share nothing
    for _ in range(20):
        agreement.forget()
    np.testing.assert_allclose(agreement.independence[3], 0.5, atol=1e-3)
    three = Agreement(3)
    three.load_state(again.state())
    assert len(three.independence) == 8


def test_numbers_of_drafters():
    with pytest.raises(ValueError, match="1 to 8"):
        Agreement(MOST_DRAFTERS + 1)
    tree = drafts([(1, -1, 0.5)])
    with pytest.raises(ValueError, match="expected 2\\^drafters"):
        mix([tree[0]] * 2, [tree[1]] * 2, np.ones(1), 4, np.ones(2))
