"""Answers to clients in OpenAI's two formats, whole or as the chunks of a stream."""

import time
import uuid
from typing import Any

from rljax.models.tokenizer import Decode, Tokenizer
from rljax.serving.protocol import Body, ChatBody
from rljax.serving.text import TextStream
from rljax.serving.worker import Ending, Piece

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

    Attributes:
      tokens, logprobs: token ids and logprobs so far, including the token that ended the choice.
      offsets: position where each token's text begins, in the text before it was cut at a stop string; for a
        token inside a character, the position of the character.
      text: text so far.
      finish_reason: OpenAI's finish reason; None while the choice runs.
    """

    def __init__(self, index: int, decode: Decode, stop: tuple[str, ...], shown: Decode) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.offsets: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stream = TextStream(decode, stop, shown)

    def take(self, piece: Piece) -> str:
        """Returns the new part of the text."""
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        new = ""
        for token in piece.tokens:  # one by one, so that offsets do not depend on the division into pieces
            self.offsets.append(self._stream.length)
            new += self._stream.push([token])
        if piece.ending is not None:
            new += self._stream.finish()
            self.finish_reason = _REASONS[piece.ending]
        self.text += new
        return new


class Writer:
    """Writes the answers to one request as JSON objects.

    Args:
      body: body of the HTTP request.
      model: name of the policy.
      tokenizer: tokenizer of the policy.
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
        """Returns the chunk that opens a choice of a chat; None for completions."""
        return self._as_chunk(answer, {"role": "assistant", "content": ""}) if self.chat else None

    def chunk(self, answer: Answer, text: str, piece: Piece) -> dict[str, Any] | None:
        """Returns the chunk of a piece; None if it would be empty."""
        details = self._details(answer, len(answer.tokens) - len(piece.tokens))
        if not text and piece.ending is None and not details:
            return None
        content = ({"content": text} if text else {}) if self.chat else text
        return self._as_chunk(answer, content, details)

    def last(self, answers: list[Answer]) -> dict[str, Any] | None:
        """Returns the chunk with the usage; None if the request does not ask for it."""
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
        """Returns the log-probabilities and ids of the tokens from `first` on, if the request asks for
        them.
        """
        tokens, logprobs = answer.tokens[first:], answer.logprobs[first:]
        details: dict[str, Any] = {}
        if self.body.wants_logprobs:
            texts = [self.tokenizer.decode([token]) for token in tokens]
            if self.chat:
                content = [
                    {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
                    for text, logprob in zip(texts, logprobs, strict=True)
                ]
                details["logprobs"] = {"content": content, "refusal": None}
            else:
                details["logprobs"] = {
                    "tokens": texts,
                    "token_logprobs": logprobs,
                    "top_logprobs": None,
                    "text_offset": answer.offsets[first:],
                }
        if self.body.return_token_ids:
            details["token_ids"] = tokens
        return details

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        sampled = sum(len(answer.tokens) for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }
