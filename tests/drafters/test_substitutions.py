"""Drafts behind substitutions, against the same rule on lists and brute-force substring counts."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
            known = [len(reference.texts[request]) - 1 for request in some]
            rows = [text(length if length < len(line) else None) for length in known]
            forest.follow(ints(*some), *padded(rows), mixture, min_match)
            (forest.extend if live else forest.advance)(ints(*some), *padded(rows))
            for request, tokens in zip(some, rows, strict=True):
                follower.follow(request, tokens)
            for request, tokens in zip(some, rows, strict=True):
                reference.append(request, tokens)
    return forest, mixture, follower


@settings(deadline=None, max_examples=150)
@given(followed(), st.integers(1, 4))
def test_drafts_and_what_is_learned_follow_the_rule(history, budget):
    forest, mixture, follower = history
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


@pytest.mark.parametrize("live", [True, False])
def test_drafting_goes_on_behind_a_substitution(live):
    """And what agreed before it counts as a match for the budget."""
    history = [10, 11, 12, 52, 13, 52, 14, 60, 15]
    forest, mixture = SuffixForest(), new_mixture(0.5)
    root = forest.add_root()
    for _ in range(3):
        forest.extend(forest.start(ints(root)), *padded([history]))
    request = forest.start(ints(root)) if live else forest.track(ints(root))
    for token in (10, 11, 12, 99):
        forest.follow(request, *padded([[token]]), mixture)
        (forest.extend if live else forest.advance)(request, *padded([[token]]))
    assert forest.propose(request, ints(4), 4).counts.tolist() == [0]  # nothing ever followed 99
    drafts = forest.propose(request, ints(16), 16, chain_only=True, mixture=mixture, budget_per_match=0.5)
    assert drafts.match_lengths.tolist() == [0]
    assert drafts.tokens[0, :3].tolist() == [13, 52, 14]
    assert drafts.counts.tolist() == [math.floor(0.5 * 4) + 1]  # three tokens and the marker
