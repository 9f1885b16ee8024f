"""Answers in OpenAI's shapes: token by token the same, streamed or whole."""

import functools

import pytest

from rljax.serving.answers import Answer, Writer
from rljax.serving.jobs import Piece
from rljax.serving.protocol import ChatBody, CompletionBody, parse


class Bytes:
    """A tokenizer whose tokens are bytes; 0 is special."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(token for token in ids if token or not skip_special_tokens).decode("utf-8", "replace")


def answered(kind, text, sizes, stop=()):
    """(the whole answer, its chunks) to tokens that come so many at a time."""
    asked = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatBody else {"prompt": "x"}
    body = parse(kind, {"model": "m", "logprobs": kind is ChatBody or 0} | asked)
    shown = functools.partial(Bytes().decode, skip_special_tokens=True)
    writer, answer = Writer(body, "m", Bytes(), 1), Answer(0, Bytes().decode, stop, shown)
    chunks, tokens = [], [*text, 0]
    while tokens:
        size = next(sizes)
        piece = Piece(tokens[:size], [-0.5] * len(tokens[:size]), None if tokens[size:] else "eos")
        tokens = tokens[size:]
        chunks.append(writer.chunk(answer, answer.take(piece), piece)["choices"][0])
    return writer.whole([answer])["choices"][0], chunks


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 1, 5)])
@pytest.mark.parametrize(
    "text, stop, offsets",
    [
        ("abc", (), [0, 1, 2, 3]),
        ("a東b", (), [0, 1, 1, 1, 2, 3]),
        ("a#b", ("##",), [0, 1, 2, 3]),
        ("ab##", ("##",), [0, 1, 2, 3, 4]),
        ("ab#\0#", ("#\0#",), [0, 1, 2, 3, 3, 4]),
    ],
)
def test_offsets_say_where_tokens_are(text, stop, offsets, sizes):
    repeated = iter(sizes * 9)
    whole, chunks = answered(CompletionBody, text.encode(), repeated, stop)
    assert (
        whole["text"] == "".join(chunk["text"] for chunk in chunks) == text.split("#\0")[0].removesuffix("##")
    )
    assert whole["logprobs"]["text_offset"] == offsets
    assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == offsets
    known = [token if token.isascii() else None for token in whole["logprobs"]["tokens"]]
    for token, offset in zip(known[: len(whole["text"])], offsets, strict=False):
        assert token is None or whole["text"][offset] == token


def test_bytes_are_those_of_the_token_or_none():
    whole, _ = answered(ChatBody, "zü東".encode(), iter((1,) * 9))
    assert [each["bytes"] for each in whole["logprobs"]["content"]] == [[122], *[None] * 5, [0]]
