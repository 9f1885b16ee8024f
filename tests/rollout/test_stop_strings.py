"""Stop strings: the first token after which the text holds one, however the response is cut into looks."""

import pytest

from rljax.models.tokenizer import Tokenizer
from rljax.rollout.stop_strings import StopStrings
from tests.models.checkpoints import write_tokenizer

ALPHABET = ["a", "b", "ab", "</", "answer", ">", "x", ""]


def spell(ids):
    return "".join(ALPHABET[i] for i in ids)


def in_bytes(ids):
    return bytes(ids).decode(errors="replace")


def first_end(strings, decode, ids):
    """By trying every prefix."""
    for end in range(1, len(ids) + 1):
        if any(string in decode(ids[:end]) for string in strings):
            return end
    return None


def found_in_looks(stop, ids, size):
    """What a host that looks every `size` tokens finds."""
    known = 0
    while known < len(ids):
        seen = ids[: known + size]
        end = stop.find(seen, known)
        if end is not None:
            return end
        known = len(seen)
    return None


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("strings", "ids"),
    [
        (["</answer>"], [0, 3, 4, 5, 6, 6]),
        (["</answer>"], [0, 3, 4, 3, 4, 6, 3, 4, 5]),
        (["aab", "bb"], [0, 1, 0, 2, 1, 1]),  # ends inside a token that holds more
        (["ba"], [2, 2, 2]),  # across tokens
        (["xx", "x"], [6, 6]),
        (["a"], [1, 1, 6, 5, 3]),  # never
        ([">"], [5]),
    ],
)
def test_the_end_does_not_depend_on_when_the_host_looks(strings, ids, size):
    stop = StopStrings(strings, spell)
    assert found_in_looks(stop, ids, size) == first_end(strings, spell, ids)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_of_many_byte_characters_is_found_byte_by_byte(size):
    ids = list("so: 答え🎉 and more".encode())
    end = len("so: 答え🎉".encode())
    assert found_in_looks(StopStrings(["答え🎉"], in_bytes), ids, size) == end


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_special_token_stops_as_any_text(size, tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    before, start, role = map(tokenizer.encode, ("a7", "<|im_start|>", "user\n"))
    assert len(start) == 1
    ids = [*before, *start, *role, *tokenizer.encode("b")]
    texts = ("<|im_start|>", 0), ("7<|im_", 0), ("<|im_start|>us", 2), ("im_start|>user\n", 5)
    for string, behind in texts:
        end = found_in_looks(StopStrings([string], tokenizer.decode), ids, size)
        assert end == first_end([string], tokenizer.decode, ids), string
        assert len(before) + 1 <= end <= len(before) + 1 + behind, string


def test_without_strings_nothing_is_decoded_and_an_empty_one_is_refused():
    def fail(ids):
        raise AssertionError("decoded")

    assert StopStrings([], fail).find([1, 2, 3], 0) is None
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""], spell)
