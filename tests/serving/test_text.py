"""Streamed text: pieces that together are the whole text, cut at the first stop string."""

import itertools
import random

import pytest

from rljax.serving.text import TextStream

# Tokens are bytes here, which decode as those of byte-level BPE do.
TEXTS = [
    "plain",
    "Zürich, 東京 🗼🗼!",
    "a\N{REPLACEMENT CHARACTER}b",
    "ends in a half: ü",
    "",
    "abababac abaac",
]


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


def tokens_of(text):
    return list(text.encode())


def pieces(ids, stop=(), seed=0, shown=None):
    """The pieces of a stream that gets the tokens a few at a time."""
    rng, stream, said = random.Random(seed), TextStream(decode, stop, shown), []
    while ids:
        count = rng.randint(1, 3)
        said.append(stream.push(ids[:count]))
        ids = ids[count:]
    return [*said, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole_text(text):
    for cut, seed in itertools.product((0, 1, 2), range(20)):  # inside a character, too
        ids = tokens_of(text)[: len(text.encode()) - cut]
        assert "".join(pieces(ids, seed=seed)) == decode(ids)  # so without half a character in it


@pytest.mark.parametrize("stop", [("aba",), ("bac", "ac"), ("z",), ("c abaac", "abaac"), ("東", "🗼!")])
def test_text_ends_before_the_first_stop_string(stop):
    for text, seed in itertools.product(TEXTS, range(20)):
        starts = [text.find(string) for string in stop if string in text]
        said = pieces(tokens_of(text), stop, seed)
        assert "".join(said) == (text[: min(starts)] if starts else text)


def test_text_comes_as_soon_as_it_is_known():
    """What may become a stop string is held back, and after one nothing is said."""
    stream = TextStream(decode, ["###"])
    assert [stream.push([token]) for token in b"a##b#"] == ["a", "", "", "##b", ""]
    assert not stream.stopped
    assert stream.finish() == "#"
    stream = TextStream(decode, ["."])
    assert stream.push(tokens_of("one. two")) == "one"
    assert stream.stopped and stream.push(tokens_of("three")) == "" and stream.finish() == ""


def without_hash(ids):
    """Decodes as a tokenizer that leaves its special tokens out; # is one."""
    return decode([token for token in ids if token != ord("#")])


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("ab#c#", (), "abc"),
        ("ab#cd", ("#",), "ab"),
        ("ab#cd", ("b#c",), "a"),
        ("ab#cd", ("#cd",), "ab"),
        ("ab#ü", ("#z", "d"), "abü"),
        ("#a##", ("###",), "a"),
        ("##ab", ("ab",), ""),
    ],
)
def test_stop_strings_are_searched_in_text_that_is_not_shown(text, stop, expected):
    for seed in range(20):
        assert "".join(pieces(tokens_of(text), stop, seed, without_hash)) == expected
        half = "".join(pieces([*b"a\xc3#b"], ("#",), seed, without_hash))
        assert half == "a\N{REPLACEMENT CHARACTER}"  # of a character before a special token


@pytest.mark.parametrize(("stop", "expected"), [("ne", "o"), (" one", ""), ("e t", "on"), ("<s> o", "")])
def test_what_is_shown_may_lack_the_space_of_its_first_word(stop, expected):
    words = ("<s>", " one", " two")
    shown = lambda ids: "".join(words[i] for i in ids if i).lstrip()  # noqa: E731
    stream = TextStream(lambda ids: "".join(words[i] for i in ids), [stop], shown)
    assert "".join([*(stream.push([token]) for token in (0, 1, 2)), stream.finish()]) == expected


def test_random_bytes():
    rng = random.Random(1)
    for seed in range(200):
        ids = [rng.choice([*b"ab#", 0xC3, 0xBC, 0xF0, 0x9F]) for _ in range(rng.randint(0, 12))]
        assert "".join(pieces(ids, seed=seed)) == decode(ids)
        assert "".join(pieces(ids, seed=seed, shown=without_hash)) == without_hash(ids)
