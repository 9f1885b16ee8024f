"""Drafts behind substitutions, against the same rule on lists and brute-force substring counts."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import context_loops
from drafters.suffix_automaton import SuffixForest, new_mixture
from tests.drafters.test_suffix_automaton import Reference, ints, padded, tree_paths

SUFFIX, EDIT, REPLACE, NOVEL = range(4)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a request is: its longest known suffix, the edited one (or None), what is remembered of that."""

    suffix: tuple[int, ...]
    edited: tuple[int, ...] | None = None
    agreed: tuple[bool, ...] = ()
    replaced: int | None = None
    replacement: int | None = None


@dataclasses.dataclass
class Follower:
    """What `follow` should have learned, and what should be proposed."""

    reference: Reference
    novelty: float
    min_match: int
    edits: dict[int, Place] = dataclasses.field(default_factory=dict)
    mixture: dict[tuple, list[float]] = dataclasses.field(default_factory=dict)
    memory: dict = dataclasses.field(default_factory=dict)

    def continuations(self, root, text, limit):
        """The reference's, remembered until something is inserted."""
        found = self.reference.substrings(root)
        if self.memory.get(root, (None,))[0] is not found:
            self.memory[root] = found, {}
        memory = self.memory[root][1]
        if (text, limit) not in memory:
            memory[text, limit] = self.reference.continuations(root, list(text), limit)
        return memory[text, limit]

    def known(self, root, text):
        """The longest suffix that something has followed."""
        text = tuple(text)
        length, _ = self.continuations(root, text, self.reference.max_match or 10**9)
        return text[len(text) - length :]

    def following(self, root, text):
        """Counts of what followed exactly this text."""
        length, counts = self.continuations(root, text, len(text))
        return {token: count for token, (count, _) in counts.items()} if length == len(text) else {}

    def best(self, root, text):
        counts = self.following(root, text)
        return min(counts, key=lambda token: (-counts[token], token), default=None)

    def place(self, sequence):
        root = self.reference.root_of[sequence]
        suffix = self.known(root, self.reference.context(sequence))
        past = self.edits.get(sequence)
        if past is None or past.edited is None:
            return Place(suffix)
        return self.checked(dataclasses.replace(past, suffix=suffix, edited=self.known(root, past.edited)))

    @staticmethod
    def checked(place):
        if place.edited is not None and len(place.edited) <= len(place.suffix):
            return Place(place.suffix)
        return place

    def step(self, root, place, token):
        after = Place(())
        if place.edited is not None:
            text, agrees, replaced, replacement = place.edited, True, place.replaced, place.replacement
            if token in self.following(root, text):
                text = (*text, token)
            else:
                best = self.best(root, text)
                agrees = (best, token) == (replaced, replacement)
                text, replaced, replacement = (*text, best), best, token
            agreed = (*place.agreed, agrees)[-8:]
            if sum(agreed) >= 2:
                after = Place((), text, agreed, replaced, replacement)
        if after.edited is None and place.suffix and token not in self.following(root, place.suffix):
            best = self.best(root, place.suffix)
            agreed = ((True,) * len(place.suffix) + (False,))[-8:]
            after = Place((), (*place.suffix, best), agreed, best, token)
        suffix = self.known(root, (*place.suffix, token))
        edited = None if after.edited is None else self.known(root, after.edited)
        return self.checked(dataclasses.replace(after, suffix=suffix, edited=edited))

    def weights(self, root, place):
        length = min(len(place.suffix).bit_length(), 6)
        situation = (length,)
        if place.edited is not None:
            best = self.best(root, place.edited)
            same = best == self.best(root, place.suffix)
            says = "replaced" if best == place.replaced else "same" if same else "other"
            situation = (length, sum(place.agreed) // 2, says)
        return self.mixture.setdefault(situation, [1.0, 1.0, 1.0, self.novelty])

    def sources(self, root, place):
        """Shares of tokens by source."""

        def shares(counts):
            total = sum(counts.values())
            return {token: count / total for token, count in counts.items()}

        suffix = shares(self.following(root, place.suffix)) if len(place.suffix) >= self.min_match else {}
        edit = {} if place.edited is None else shares(self.following(root, place.edited))
        replace = {place.replacement: edit[place.replaced]} if place.replaced in edit else {}
        return suffix, edit, replace

    def follow(self, sequence, tokens):
        root, place = self.reference.root_of[sequence], self.place(sequence)
        for token in tokens:
            weights = self.weights(root, place)
            parts = [w * s.get(token, 0) for w, s in zip(weights, self.sources(root, place), strict=False)]
            if sum(parts):
                for source, part in enumerate(parts):
                    weights[source] += part / sum(parts)
            else:
                weights[NOVEL] += 1
            place = self.step(root, place, token)
        self.edits[sequence] = place

    def all_paths(self, sequence, depth):
        """Log probability of every path of up to `depth` tokens."""
        root, paths = self.reference.root_of[sequence], {}

        def expand(path, score, place):
            sources, weights = self.sources(root, place), self.weights(root, place)
            total = weights[NOVEL] + sum(w for w, s in zip(weights, sources, strict=False) if s)
            p = {}
            for weight, shares in zip(weights, sources, strict=False):
                for token, share in shares.items():
                    p[token] = p.get(token, 0.0) + weight * share / total
            local = {token: math.log(value) for token, value in p.items()}
            for token, value in local.items():
                paths[(*path, token)] = score + value
                if len(path) + 1 < depth:
                    expand((*path, token), score + value, self.step(root, place, token))

        expand((), 0.0, self.place(sequence))
        return paths


@st.composite
def followed(draw):
    """A forest, what it learned, and its follower after the same calls: histories and requests interleaved,
    so that states are split while requests stand at them.
    """
    max_match = draw(st.sampled_from([None, None, 2, 5]))
    novelty, min_match = draw(st.sampled_from([0.5, 2.0])), draw(st.integers(0, 2))
    forest, reference = SuffixForest(max_match), Reference(max_match)
    follower, mixture = Follower(reference, novelty, min_match), new_mixture(novelty)
    for _ in range(draw(st.integers(1, 2))):
        forest.add_root()
        reference.roots.append([])
    alphabet = draw(st.sampled_from([[0, 1], [0, 1, 2], [0, 1, 2, 3, 4]]))
    line = draw(st.lists(st.sampled_from(alphabet), min_size=3, max_size=10))

    def text(places):
        """Part of the line, with a few tokens replaced."""
        first = draw(st.integers(0, len(line) - 1)) if places is None else places
        tokens = line[first : first + draw(st.integers(0, 7))]
        for _ in range(draw(st.integers(0, 2))):
            if tokens:
                tokens[draw(st.integers(0, len(tokens) - 1))] = draw(st.sampled_from(alphabet))
        return tokens

    requests = []
    for _ in range(draw(st.integers(2, 8))):
        root = draw(st.integers(0, len(reference.roots) - 1))
        action = draw(st.sampled_from(["past", "request", "sample", "sample", "sample"]))
        if action == "past":
            (new,) = forest.start(ints(root))
            reference.begin(root, 1.0)
            tokens = text(0)
            forest.extend(ints(new), *padded([tokens]))
            reference.append(int(new), tokens)
        elif action == "request" or not requests:
            live = draw(st.booleans())
            (new,) = forest.start(ints(root)) if live else forest.track(ints(root))
            reference.begin(root, 1.0 if live else None)
            requests.append(int(new))
        else:
            live = draw(st.booleans())
            own = [request for request in requests if (reference.matches[request] is None) == live]
            if not own:
                continue
            some = draw(st.lists(st.sampled_from(own), unique=True, min_size=1, max_size=3))
            rows = [
                text(
                    len(reference.texts[request]) - 1 if len(reference.texts[request]) <= len(line) else None
                )
                for request in some
            ]
            forest.follow(ints(*some), *padded(rows), mixture, min_match)
            (forest.extend if live else forest.advance)(ints(*some), *padded(rows))
            for request, tokens in zip(some, rows, strict=True):
                follower.follow(request, tokens)
            for request, tokens in zip(some, rows, strict=True):
                reference.append(request, tokens)
    return forest, mixture, follower


def _check(forest, mixture, follower, budget):
    learned = sorted(map(tuple, mixture[(mixture != new_mixture(follower.novelty)).any(axis=1)].tolist()))
    wanted = [weights for weights in follower.mixture.values() if weights != [1, 1, 1, follower.novelty]]
    np.testing.assert_allclose(learned, sorted(map(tuple, wanted)))
    for sequence in range(len(follower.reference.texts)):
        proposals = forest.propose(
            ints(sequence), ints(budget), 6, mixture=mixture, min_match=follower.min_match
        )
        found = tree_paths(proposals, 0)  # refuses a sibling twice, and children before their parents
        expected = follower.all_paths(sequence, budget)
        scores = proposals.log_probability[0, : len(found)]
        assert (np.diff(scores) <= 0).all()
        for path, score in found.items():
            assert score == pytest.approx(expected[path], abs=1e-3, rel=1e-3), path
        best = sorted(expected.values(), reverse=True)[:budget]
        assert scores.tolist() == pytest.approx(best, abs=1e-3, rel=1e-3)


@settings(deadline=None, max_examples=150)
@given(followed(), st.integers(1, 4))
def test_drafts_and_what_is_learned_follow_the_rule(history, budget):
    _check(*history, budget)


HISTORY = [10, 11, 12, 52, 13, 52, 14, 60, 15, 60, 16, 69, 17, 69, 18]


def _request(history, tokens, live=True, **options):
    """The forest after a history and a request that sampled `tokens` one at a time."""
    forest, mixture = SuffixForest(), new_mixture(0.5)
    root = forest.add_root()
    for text in history:
        forest.extend(forest.start(ints(root)), *padded([text]))
    request = forest.start(ints(root)) if live else forest.track(ints(root))
    for token in tokens:
        forest.follow(request, *padded([[token]]), mixture)
        (forest.extend if live else forest.advance)(request, *padded([[token]]))
    return forest, request, mixture


def _chain(forest, request, mixture, nodes=8):
    return forest.propose(request, ints(nodes), nodes, chain_only=True, mixture=mixture).tokens[0].tolist()


@pytest.mark.parametrize("live", [True, False])
def test_drafting_goes_on_behind_a_substitution(live):
    forest, request, mixture = _request([HISTORY] * 3, [10, 11, 12, 99], live)
    assert forest.propose(request, ints(4), 4).counts.tolist() == [0]  # nothing ever followed 99
    assert _chain(forest, request, mixture, nodes=1) == [13]


def test_what_agreed_counts_as_match_for_the_budget():
    forest, request, mixture = _request([HISTORY] * 3, [*HISTORY[:6], 99])
    proposals = forest.propose(request, ints(16), 16, mixture=mixture, budget_per_match=0.5)
    assert proposals.match_lengths.tolist() == [0]
    assert proposals.counts.tolist() == [math.floor(0.5 * 7) + 1]  # six tokens and the marker


def test_the_better_source_is_believed():
    """Totals change in every response and structure does not: the edited context earns its weight."""
    rng = np.random.default_rng(0)
    forest, mixture = SuffixForest(48), new_mixture(0.5)
    root = forest.add_root()

    def response():
        slots = rng.integers(100, 130, 20).tolist()
        return [token for i, slot in enumerate(slots) for token in (i, slot, 50)]

    accepted = {"with": 0, "without": 0}
    for _ in range(30):
        request, text = forest.start(ints(root)), response()
        for token in text:
            for name, learned in (("with", mixture), ("without", None)):
                drafts = forest.propose(request, ints(1), 1, mixture=learned)
                accepted[name] += int(drafts.counts[0] > 0 and drafts.tokens[0, 0] == token)
            forest.follow(request, *padded([[token]]), mixture)
            forest.extend(request, *padded([[token]]))
    predictable = 30 * 20 * 2  # what is no total
    assert accepted["with"] > 0.9 * predictable > accepted["without"]
    edited = mixture - new_mixture(0.5)
    assert edited[:, context_loops.EDIT].sum() > edited[:, context_loops.REPLACE].sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, m: f.follow(ints(7), np.array([[1]]), ints(1), m), "sequences: 7 is not known"),
        (lambda f, m: f.follow(ints(0), np.array([[-1]]), ints(1), m), r"tokens\[0, 0\]: -1"),
        (lambda f, m: f.follow(ints(0), np.array([[1]]), ints(1), m[1:]), "mixture: float64"),
        (lambda f, m: f.propose(ints(0), ints(1), 1, mixture=m.astype(int)), "mixture: int64"),
        (lambda f, m: f.propose(ints(0), ints(1), 1, mixture=m, rank="weight"), "rank: 'weight'"),
    ],
)
def test_what_is_wrong_is_refused(call, message):
    forest, _, mixture = _request([[1, 2]], [])
    with pytest.raises(ValueError, match=message):
        call(forest, mixture)
