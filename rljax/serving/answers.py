"""Answers to clients in OpenAI's two formats, whole or as the chunks of a stream."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rljax.models.tokenizer import Decode, Tokenizer
from rljax.rollout.live_response import Ending
from rljax.serving.jobs import Piece
from rljax.serving.protocol import Body, ChatBody
from rljax.serving.scoring import Scores
from rljax.serving.text import TextStream

_REASONS: dict[Ending, str] = {"eos": "stop", "stop": "stop", "length": "length"}


def _bytes(token: str) -> list[int] | None:
    """Returns the bytes of a token; None for a part of a character, whose text does not determine them."""
    return None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())


class Answer:
    """One choice of an answer, while it is sampled.

    Args:
      index: index of the choice.
      decode: `Tokenizer.decode`; stop texts are searched in its text.
      stop: texts that end the choice, without being part of it.
      shown: function from token ids to the text of the choice.
      echoed: token ids of the prompt where the choice begins with it, else none.

    Attributes:
      tokens, logprobs: token ids and logprobs so far, including the token that ended the choice.
      offsets: position where each token's text begins, in the text before it was cut at a stop string; for a
        token inside a character, the position of the character. `echoed_offsets` are those of the prompt.
      text: text so far, with the prompt's where it is echoed.
      scores: of the prompt and the response, once it is complete and where the request wants them.
      finish_reason: OpenAI's finish reason; None while the choice runs.
    """

    def __init__(
        self, index: int, decode: Decode, stop: tuple[str, ...], shown: Decode, echoed: Sequence[int] = ()
    ) -> None:
        self.index, self.echoed = index, echoed
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.offsets: list[int] = []
        self.echoed_offsets: list[int] = []
        self.text = ""
        self.scores: Scores | None = None
        self.finish_reason: str | None = None
        prompt = TextStream(shown)
        for token in echoed:
            self.echoed_offsets.append(prompt.length)
            self.text += prompt.push([token])
        self.text += prompt.finish()
        self._begin = len(self.text)
        self._stream = TextStream(decode, stop, shown)

    def take(self, piece: Piece) -> str:
        """Returns the new part of the text."""
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        new = ""
        for token in piece.tokens:  # one by one, so that offsets do not depend on the division into pieces
            self.offsets.append(self._begin + self._stream.length)
            new += self._stream.push([token])
        if piece.ending is not None:
            new += self._stream.finish()
            self.finish_reason = _REASONS[piece.ending]
        self.text += new
        return new

    def add_scores(self, scores: Scores) -> None:
        """Takes the scores of the prompt and the complete response. Those of a greedy one take the place of
        its logprobs, which are 0.
        """
        self.scores = scores
        if scores.greedy:
            self.logprobs = scores.logprobs[len(scores.logprobs) - len(self.tokens) :].tolist()


class _Entry(NamedTuple):
    """A token of an answer, its logprob (None for the first of a prompt), and the likeliest in its place."""

    token: int
    logprob: float | None
    likeliest: list[tuple[int, float]]


class Writer:
    """Writes the answers to one request as JSON objects.

    Args:
      prompt_tokens: number of tokens of all prompts.
    """

    def __init__(self, body: Body, model: str, tokenizer: Tokenizer, prompt_tokens: int) -> None:
        self.body, self.tokenizer, self.prompt_tokens = body, tokenizer, prompt_tokens
        self.chat = isinstance(body, ChatBody)
        kind = "chat.completion" if self.chat else "text_completion"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._chunk = {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """Returns the response to a request that does not stream."""
        return {
            **self._head,
            "choices": [self._choice(answer) for answer in answers],
            "usage": self._usage(answers),
        }

    def first(self, answer: Answer) -> dict[str, Any] | None:
        """Returns the chunk that opens a choice: the role in a chat, an echoed prompt, or None."""
        if self.chat:
            return self._as_chunk(answer, {"role": "assistant", "content": ""})
        return self._as_chunk(answer, answer.text) if answer.text else None

    def chunk(self, answer: Answer, text: str, piece: Piece) -> dict[str, Any] | None:
        """Returns the chunk of a piece; None if it would be empty."""
        details = self._details(answer, len(answer.tokens) - len(piece.tokens))
        if not text and piece.ending is None and not details:
            return None
        content = ({"content": text} if text else {}) if self.chat else text
        return self._as_chunk(answer, content, details)

    def last(self, answers: list[Answer]) -> dict[str, Any] | None:
        """Returns the chunk with the usage; None if the request does not want it."""
        if not self.body.wants_usage:
            return None
        return {**self._chunk, "choices": [], "usage": self._usage(answers)}

    def _as_chunk(
        self, answer: Answer, content: Any, details: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "delta" if self.chat else "text": content,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            **(details or {}),
        }
        usage = {"usage": None} if self.body.wants_usage else {}
        return {**self._chunk, "choices": [choice], **usage}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        if self.chat:
            content = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        else:
            content = {"text": answer.text}
        return {
            "index": answer.index,
            **content,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            **self._details(answer, 0),
        }

    def _details(self, answer: Answer, first: int) -> dict[str, Any]:
        """Returns the log-probabilities and ids of the tokens from `first` on, if the request wants
        them.
        """
        details: dict[str, Any] = {}
        if self.body.wants_logprobs:
            entries = list(self._entries(answer, first))
            if self.chat:
                content = [
                    self._described(token, logprob)
                    | {"top_logprobs": [self._described(*other) for other in likeliest]}
                    for token, logprob, likeliest in entries
                ]
                details["logprobs"] = {"content": content, "refusal": None}
            else:
                details["logprobs"] = {
                    "tokens": [self._text(entry.token) for entry in entries],
                    "token_logprobs": [entry.logprob for entry in entries],
                    "top_logprobs": [*map(self._by_text, entries)] if self.body.alternatives else None,
                    "text_offset": [*answer.echoed_offsets, *answer.offsets[first:]],
                }
        if self.body.return_token_ids:
            details["token_ids"] = answer.tokens[first:]
        return details

    def _entries(self, answer: Answer, first: int) -> Iterator[_Entry]:
        """Yields the tokens of an echoed prompt, and those of the response from `first` on."""
        scores, count = answer.scores, self.body.alternatives
        if scores is None:
            for token, logprob in zip(answer.tokens[first:], answer.logprobs[first:], strict=True):
                yield _Entry(token, logprob, [])
            return
        begin = len(scores.logprobs) - len(answer.tokens)
        if answer.echoed:
            yield _Entry(answer.echoed[0], None, [])
            for row, token in enumerate(answer.echoed[1:]):
                yield _Entry(token, float(scores.logprobs[row]), scores.likeliest(row, count))
        for row, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True), begin):
            yield _Entry(token, logprob, scores.likeliest(row, count))

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _described(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": _bytes(text)}

    def _by_text(self, entry: _Entry) -> dict[str, float] | None:
        """Returns the logprobs of the likeliest tokens and of the token itself. Of those with the same text,
        as parts of characters have it, the likeliest counts.
        """
        if entry.logprob is None:
            return None
        by_text: dict[str, float] = {}
        for token, logprob in (*entry.likeliest, (entry.token, entry.logprob)):
            by_text.setdefault(self._text(token), logprob)
        return by_text

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        sampled = sum(len(answer.tokens) for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }
