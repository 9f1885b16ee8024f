"""Suffix automata against a brute-force index of all substrings."""

import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drafters import compilation, draft_loops
from drafters import suffix_loops as kernels
from drafters.suffix_automaton import SuffixForest, new_mixture

MARKER = kernels.MARKER
LARGE = 2**31 - 1  # the largest token there can be
MIXTURE = new_mixture(0.5)


@dataclasses.dataclass
class Reference:
    """What a forest should answer, from lists: sequences per root, and contexts that only read."""

    max_match: int | None = None
    roots: list[list[int]] = dataclasses.field(default_factory=list)  # sequence numbers per root
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    weights: list[float] = dataclasses.field(default_factory=list)
    root_of: list[int] = dataclasses.field(default_factory=list)
    matches: list[int | None] = dataclasses.field(default_factory=list)  # of contexts that only read
    index: dict = dataclasses.field(default_factory=dict)

    def begin(self, root: int, weight: float | None) -> None:
        """A sequence with a weight is inserted, one without only reads."""
        self.texts.append([MARKER])
        self.weights.append(0.0 if weight is None else weight)
        self.root_of.append(root)
        self.matches.append(1 if weight is None else None)
        if weight is not None:
            self.roots[root].append(len(self.texts) - 1)
            self.index.pop(root, None)

    def append(self, sequence: int, tokens: list[int]) -> None:
        root = self.root_of[sequence]
        if self.matches[sequence] is None:
            self.texts[sequence] += tokens
            self.index.pop(root, None)
            return
        for token in tokens:
            text = [*self.texts[sequence], token]
            length = self.matches[sequence] + 1
            while length and tuple(text[-length:]) not in self.substrings(root):
                length -= 1
            self.texts[sequence], self.matches[sequence] = text, length

    def substrings(self, root: int) -> dict[tuple[int, ...], tuple[int, float]]:
        """Count and weight of every substring, markers included, from scratch."""
        if root not in self.index:
            found: dict[tuple[int, ...], tuple[int, float]] = {}
            for sequence in self.roots[root]:
                text, weight = self.texts[sequence], self.weights[sequence]
                for first, last in itertools.combinations(range(len(text) + 1), 2):
                    count, total = found.get(tuple(text[first:last]), (0, 0.0))
                    found[tuple(text[first:last])] = (count + 1, total + weight)
            self.index[root] = found
        return self.index[root]

    def continuations(self, root: int, context: list[int], limit: int) -> tuple[int, dict]:
        """Length of the longest suffix with a continuation, and count and weight of its continuations."""
        found = self.substrings(root)
        alphabet = sorted({text[0] for text in found if len(text) == 1} - {MARKER})
        for length in range(min(limit, len(context)), -1, -1):
            suffix = tuple(context[len(context) - length :])
            following = {t: found[(*suffix, t)] for t in alphabet if (*suffix, t) in found}
            if following:
                return length, following
        return 0, {}

    def context(self, sequence: int) -> list[int]:
        text, match = self.texts[sequence], self.matches[sequence]
        return text if match is None else text[len(text) - match :]

    def all_paths(self, sequence, depth, *, min_match=1, max_match=None, novelty=0.5):
        """Log probability of every path of up to `depth` tokens, and the length of the match."""
        root, limit = self.root_of[sequence], self.max_match or 10**9
        context = self.context(sequence)
        matched, _ = self.continuations(root, context, min(limit, 10**9 if max_match is None else max_match))
        paths: dict[tuple[int, ...], float] = {}

        def expand(path: tuple[int, ...], score: float) -> None:
            if len(path) == depth:
                return
            # Cut to the match and what was followed since; the latter is checked level by level.
            text = [*context[len(context) - matched :], *path]
            length, following = self.continuations(root, text, limit)
            if length < min_match:
                return
            masses = {t: float(mass[0]) for t, mass in following.items()}
            total = sum(masses.values()) + novelty
            local = {t: math.log(mass / total) for t, mass in masses.items() if mass > 0}
            for token, value in local.items():
                paths[(*path, token)] = score + value
                expand((*path, token), score + value)

        expand((), 0.0)
        return paths, matched


def count_in(forest: SuffixForest, root: int, string: tuple[int, ...]) -> tuple[int, float] | None:
    """Count and weight of a string by walking the automaton; None if it is not in there."""
    state = int(forest._roots[root])
    for token in string:
        state = kernels.find_edge(forest._nodes, forest._table, state, token)
        if state < 0:
            return None
    return int(forest._nodes[state, kernels.COUNT]), float(forest._node_weights[state, kernels.WEIGHT])


def tree_paths(proposals, row: int) -> dict[tuple[int, ...], float]:
    """The nodes of a tree as paths from the context."""
    paths: list[tuple[int, ...]] = []
    for node in range(proposals.counts[row]):
        parent = proposals.parents[row, node]
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), int(proposals.tokens[row, node])))
    assert len(set(paths)) == len(paths), "a node twice"
    return dict(zip(paths, proposals.log_probability[row].tolist(), strict=False))


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, rows), default=0)
    # What is beyond the counts is not looked at.
    tokens = np.full((len(rows), width), -7, np.int32)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = values
    return tokens, np.array([len(values) for values in rows], np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def histories(draw, max_steps=10):
    """A forest and its reference after the same interleaved calls."""
    max_match = draw(st.sampled_from([None, None, 1, 2, 4]))
    forest, reference = SuffixForest(max_match), Reference(max_match)
    for _ in range(draw(st.integers(1, 2))):
        assert forest.add_root() == len(reference.roots)
        reference.roots.append([])
    alphabet = st.sampled_from(draw(st.sampled_from([[5], [0, 1], [0, 1, LARGE]])))
    chunks = st.lists(alphabet, max_size=7)
    for _ in range(draw(st.integers(1, max_steps))):
        root = draw(st.integers(0, len(reference.roots) - 1))
        inserted = [s for s, match in enumerate(reference.matches) if match is None]
        followed = [s for s, match in enumerate(reference.matches) if match is not None]
        action = draw(st.sampled_from(["start", "extend", "extend", "repeat", "track", "advance"]))
        if action == "start" or not inserted:
            weights = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=1, max_size=3))
            ids = forest.start(np.full(len(weights), root), np.array(weights, np.float32))
            assert ids.tolist() == list(range(len(reference.texts), len(reference.texts) + len(weights)))
            for weight in weights:
                reference.begin(root, weight)
        elif action == "track" or (action == "advance" and not followed):
            assert forest.track(ints(root)).tolist() == [len(reference.texts)]
            reference.begin(root, None)
        elif action == "repeat":  # a whole sequence once more, under the same root
            original = draw(st.sampled_from(inserted))
            (copy,) = forest.start(ints(reference.root_of[original]), np.ones(1, np.float32))
            reference.begin(reference.root_of[original], 1.0)
            text = reference.texts[original][1:]
            forest.extend(ints(copy), *padded([text]))
            reference.append(int(copy), text)
        else:
            ids = inserted if action == "extend" else followed
            some = draw(st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=4))
            rows = [draw(chunks) for _ in some]
            (forest.extend if action == "extend" else forest.advance)(ints(*some), *padded(rows))
            for sequence, tokens in zip(some, rows, strict=True):
                reference.append(sequence, tokens)
    return forest, reference


@settings(deadline=None, max_examples=150)
@given(histories())
def test_counts_and_weights_are_those_of_all_substrings(history):
    forest, reference = history
    for root in range(len(reference.roots)):
        expected = reference.substrings(root)
        for string, (count, weight) in expected.items():
            found = count_in(forest, root, string)
            assert found is not None, string
            if reference.max_match is None or len(string) <= reference.max_match + 1:
                assert found == (count, weight), string
        alphabet = {string[0] for string in expected if len(string) == 1} | {0}
        for string in itertools.product(sorted(alphabet), repeat=3):
            assert (count_in(forest, root, string) is None) == (string not in expected), string
    texts = zip(reference.texts, reference.matches, strict=True)
    assert forest.num_tokens == sum(len(text) - 1 for text, match in texts if match is None)


OPTIONS = {
    "min_match": st.integers(0, 3),
    "max_match": st.integers(0, 4),
    "novelty": st.sampled_from([0.0, 0.5, 3.0]),
}


@settings(deadline=None, max_examples=150)
@given(histories(), st.fixed_dictionaries({}, optional=OPTIONS), st.integers(0, 12))
def test_proposals_are_the_most_probable_paths(history, options, budget):
    """And a chain follows the best child of each."""
    forest, reference = history
    for sequence in range(len(reference.texts)):
        proposals = forest.propose(ints(sequence), ints(budget), 12, **options)
        expected, matched = reference.all_paths(sequence, budget, **options)
        assert proposals.match_lengths[0] == matched
        found = tree_paths(proposals, 0)
        scores = proposals.log_probability[0]
        assert (np.diff(scores[: len(found)]) <= 0).all()
        assert np.isneginf(scores[len(found) :]).all()
        for path, score in found.items():
            assert score == pytest.approx(expected[path], abs=1e-5, rel=1e-4), path
        best = sorted(expected.values(), reverse=True)[:budget]
        assert sorted(found.values(), reverse=True) == pytest.approx(best, abs=1e-5, rel=1e-4)
        chain = tree_paths(forest.propose(ints(sequence), ints(budget), 12, chain_only=True, **options), 0)
        *_, last = (), *chain
        for length in range(1, len(last) + 1):
            siblings = [score for path, score in expected.items() if path[:-1] == last[: length - 1]]
            assert last[:length] in chain and expected[last[:length]] == max(siblings)
        assert len(last) == len(chain)
        assert len(chain) == budget or not any(path[:-1] == last for path in expected)


@settings(deadline=None, max_examples=80)
@given(histories(), st.integers(1, 8), st.integers(0, 4))
def test_by_weight_a_chain_goes_down_one_subtree(history, budget, max_match):
    """Every token is the heaviest behind the whole match with the path so far."""
    forest, reference = history
    assume(reference.max_match is None)
    for sequence in range(len(reference.texts)):
        root, context = reference.root_of[sequence], reference.context(sequence)
        matched, following = reference.continuations(root, context, max_match)
        options = {"rank": "weight", "min_match": 0, "max_match": max_match}
        proposals = forest.propose(ints(sequence), ints(budget), 8, **options)
        tokens = proposals.tokens[0, : proposals.counts[0]].tolist()
        text, score = context[len(context) - matched :], 0.0
        for place, token in enumerate(tokens):
            assert following[token][1] == max(weight for _, weight in following.values())
            score += math.log(following[token][0] / (sum(count for count, _ in following.values()) + 0.5))
            assert proposals.log_probability[0, place] == pytest.approx(score, abs=1e-5, rel=1e-4)
            text = [*text, token]
            length, following = reference.continuations(root, text, 10**9)
            if length < len(text):
                following = {}
        assert len(tokens) == budget or not following


def _one_prompt(*texts: list[int]) -> tuple[SuffixForest, np.ndarray]:
    forest = SuffixForest()
    ids = forest.start(np.full(len(texts), forest.add_root()))
    forest.extend(ids, *padded(list(texts)))
    return forest, ids


def test_a_least_probability_ends_the_growth():
    forest, ids = _one_prompt([1, 2, 3], [1, 2, 4], [1, 2, 4], [1])
    # Behind the start and 1: 2 with 3 of 3.5; behind 2: 4 with 2, 3 with 1 of 3.5.
    for least, wanted in (0.9, []), (0.5, [2]), (0.1, [2, 4, 3]):
        tokens = forest.propose(ids[3:], ints(9), 9, min_probability=least).tokens[0]
        assert tokens[tokens > 0].tolist() == wanted


def test_many_children_and_large_trees():
    rng = np.random.default_rng(0)
    followers = rng.permutation(5000)[:700].tolist()
    forest, ids = _one_prompt(
        *([9000, token, token + 10000] for token in followers), [9000, followers[3]], [9000]
    )
    proposals = forest.propose(ids[-1:], ints(1500), 1500, novelty=0.0)
    assert proposals.counts.tolist() == [1400]
    first = proposals.tokens[0, :1400][proposals.parents[0, :1400] == -1]
    assert sorted(first.tolist()) == sorted(followers)
    proposals = forest.propose(ids[-1:], ints(2), 64)
    assert proposals.tokens[0, :2].tolist() == [followers[3], followers[3] + 10000]


@pytest.mark.parametrize("children", [650, 850, 1050])
def test_a_split_of_a_state_with_many_children_finds_room(children):
    forest, _ = _one_prompt(*([1, 2, token] for token in range(10, 10 + children)))
    forest.extend(forest.start(ints(0)), *padded([[3, 2, 9]]))
    assert forest._header[kernels.EDGES] <= kernels.MAX_LOAD * len(forest._table)
    assert count_in(forest, 0, (2, 10 + children - 1)) == (1, 1.0)
    assert count_in(forest, 0, (2,)) == (children + 1, children + 1.0)


def test_threads_may_ask_at_once():
    rng = np.random.default_rng(0)
    forest, ids = _one_prompt(*(rng.integers(0, 8, 400).tolist() for _ in range(16)))

    def ask(_):
        return forest.propose(ids, np.full(16, 12, np.int32), 12)

    alone = ask(0)
    with ThreadPoolExecutor(4) as threads:
        for proposals in threads.map(ask, range(32)):
            np.testing.assert_array_equal(proposals.tokens, alone.tokens)
            np.testing.assert_array_equal(proposals.log_probability, alone.log_probability)
    assert draft_loops.propose.targetoptions["nogil"] and kernels.extend.targetoptions["nogil"]


def test_memory_is_accounted_for():
    rng = np.random.default_rng(0)
    empty = SuffixForest().nbytes
    assert empty < 2000, "a forest a prompt must be affordable"
    forest, _ = _one_prompt(*(rng.integers(0, 30000, 500).tolist() for _ in range(8)))
    assert forest.num_tokens == 4000
    assert 4000 * 32 < forest.used_bytes <= forest.nbytes < 2.5 * forest.used_bytes


def adopting(forest, limit, roots):
    other = SuffixForest(limit)
    for _ in range(roots):
        other.add_root()
    forest.adopt(other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.extend(ints(0, 0), np.array([[1, 2], [3, -4]]), ints(2, 2)), r"tokens\[1, 1\]: -4"),
        (lambda f: f.extend(ints(0), np.array([[2**31]]), ints(1)), "tokens: .* int32"),
        (lambda f: f.extend(ints(0), np.array([[1.5]]), ints(1)), "tokens: float64"),
        (lambda f: f.extend(ints(0), np.array([[1]]), ints(2)), r"counts\[0\]: 2, expected 0 to 1"),
        (lambda f: f.extend(ints(0), ints(1, 2), ints(1)), r"tokens: shape \[2\]"),
        (lambda f: f.extend(ints(2), np.array([[1]]), ints(1)), "sequences: 2 is not known"),
        (lambda f: f.extend(ints(1), np.array([[1]]), ints(1)), "sequences: 1 was begun with track"),
        (lambda f: f.advance(ints(0), np.array([[1]]), ints(1)), "sequences: 0 was begun with start"),
        (lambda f: f.follow(ints(7), np.array([[1]]), ints(1), MIXTURE), "sequences: 7 is not known"),
        (lambda f: f.follow(ints(0), np.array([[-1]]), ints(1), MIXTURE), r"tokens\[0, 0\]: -1"),
        (lambda f: f.follow(ints(0), np.array([[1]]), ints(1), MIXTURE[1:]), "mixture: float64"),
        (lambda f: f.propose(ints(7), ints(1), 1), "sequences: 7 is not known"),
        (lambda f: f.propose(ints(0), ints(1, 2), 1), r"budgets: shape \[2\], expected \[1\]"),
        (lambda f: f.propose(ints(0), ints(1), 0), "max_nodes: 0"),
        (lambda f: f.propose(ints(0), ints(1), 1, rank="reward"), "rank: 'reward'"),
        (lambda f: f.propose(ints(0), ints(1), 1, novelty=math.nan), "novelty"),
        (lambda f: f.propose(ints(0), ints(1), 1, mixture=MIXTURE.astype(int)), "mixture: int64"),
        (lambda f: f.propose(ints(0), ints(1), 1, mixture=MIXTURE, rank="weight"), "rank: 'weight'"),
        (lambda f: f.start(ints(1)), "roots: 1 is not known"),
        (lambda f: f.start(ints(0), np.array([math.nan])), "weights"),
        (lambda f: f.track(ints(-1)), "roots: -1 is not known"),
        (lambda f: adopting(f, 5, roots=1), "expected 1 with None"),
        (lambda f: adopting(f, None, roots=0), "0 automata"),
        (lambda f: SuffixForest(max_match=0), "max_match: 0"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(call, message):
    forest, _ = _one_prompt([1, 2, 1])
    forest.track(ints(0))
    before = forest._header.tolist(), forest._nodes[:6].tolist(), forest._states[:2].tolist()
    with pytest.raises(ValueError, match=message):
        call(forest)
    assert before == (forest._header.tolist(), forest._nodes[:6].tolist(), forest._states[:2].tolist())


def test_compiles_without_a_place_for_its_cache(monkeypatch):
    real = numba.njit

    def refusing(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return real(**options)

    monkeypatch.setattr(numba, "njit", refusing)
    assert compilation.compiled(lambda x: x + 1)(2) == 3


@pytest.mark.parametrize("max_match", [None, 4])
def test_adopted_automata_are_those_that_were_built_in_place(max_match):
    """Whatever is drafted from them, and they grow on."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, (3, 40)).astype(np.int32) for _ in range(5)]
    weights, everything = np.asarray([1, 2, 5], np.float32), np.full(3, 40, np.int32)

    def grow(forest, text):
        forest.extend(forest.start(np.full(3, forest.add_root()), weights), text, everything)
        return forest

    here, there = SuffixForest(max_match), SuffixForest(max_match)
    for number, text in enumerate(texts):
        grow(here, text)
        assert there.adopt(grow(SuffixForest(max_match), text)) == number
    drafted, contexts = [], rng.integers(0, 4, (120, 5))
    ranks = ("count",) if max_match else ("count", "weight")  # of longer strings, no weights are kept
    for forest in (here, there):
        grow(forest, texts[0])
        forest.extend(forest.start(ints(1, 1, 3)), texts[2], everything)
        readers = forest.track(np.repeat(np.arange(6, dtype=np.int32), 20))
        forest.advance(readers, contexts, np.tile(np.arange(20) % 6, 6))
        budgets = np.full(120, 12)
        drafted.append([forest.propose(readers, budgets, 12, rank=rank) for rank in ranks])
        assert forest.num_tokens == 7 * 3 * 40
    for mine, theirs in zip(*drafted, strict=True):
        assert (mine.counts > 0).sum() > 100
        for name in ("tokens", "parents", "counts", "log_probability", "match_lengths"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
