"""Syntax of calls and answers: between markers, in the text of the response.

A call is found with the token that completes its closing marker, as stop strings are: in the decoded text,
because the same text can be tokenized in many ways. Only what the policy has written since the last answer
is searched, so an answer never calls anything.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rljax.models.tokenizer import Tokenizer

_CUT = " ... (cut)"


class ToolCall(NamedTuple):
    """A call that a response contains.

    Attributes:
      end: tokens of the response up to and including the one that completes the call.
      name: name of the tool.
      text: between the markers.
    """

    end: int
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Markup:
    """The markers, and the tokens of what lies between them.

    Attributes:
      calls: opening and closing marker of each tool, by its name.
      answer: opening and closing marker of answers.
      max_answer_length: characters of an answer; a longer one is cut, and says so.
      decode: token ids to text, special tokens included.
      encode: text to token ids.
      encode_plain: the same, where special tokens that are written out are just text.
    """

    calls: dict[str, tuple[str, str]]
    answer: tuple[str, str]
    max_answer_length: int
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    encode_plain: Callable[[str], list[int]]

    def find(self, ids: Sequence[int], begin: int, known: int) -> ToolCall | None:
        """The first call in a response that is complete.

        Args:
          ids: the response so far.
          begin: first token behind the last answer.
          known: tokens known to complete none.
        """
        # A character takes at most four byte-level tokens.
        window = 4 * max(len(closing) for _, closing in self.calls.values())
        first = max(begin, known - window)
        if not self._closes(ids[first:]):
            return None
        for end in range(max(known, begin) + 1, len(ids) + 1):
            if self._closes(ids[first:end]):
                call = self._call(self.decode(ids[begin:end]))
                if call is not None:
                    return ToolCall(end, *call)
        return None

    def _closes(self, ids: Sequence[int]) -> bool:
        text = self.decode(ids)
        return any(closing in text for _, closing in self.calls.values())

    def _call(self, text: str) -> tuple[str, str] | None:
        """Name and text of the first complete call: what stands behind the last opening marker before it is
        closed.
        """
        found = []
        for name, (opening, closing) in self.calls.items():
            end = text.find(closing)
            while end >= 0:
                begin = text.rfind(opening, 0, end)
                if begin >= 0:
                    found.append((end, name, text[begin + len(opening) : end]))
                    break
                end = text.find(closing, end + 1)
        return min(found)[1:] if found else None

    def answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer between its markers. Special tokens in it are just text."""
        opening, closing = self.answer
        if len(text) > self.max_answer_length:
            text = text[: max(self.max_answer_length - len(_CUT), 0)] + _CUT
        return [*self.encode(opening), *self.encode_plain(text), *self.encode(closing)]

    def encode_response(self, text: str) -> tuple[list[int], list[bool]]:
        """A response that is written out, with its answers, as a rollout would have it: its tokens, and which
        of them are the policy's own. An answer stands right behind a call; elsewhere its markers are text.
        """
        opening, closing = map(re.escape, self.answer)
        behind = "|".join(f"(?<={re.escape(end)})" for _, end in self.calls.values())
        ids: list[int] = []
        own: list[bool] = []

        def add(more: list[int], sampled: bool) -> None:
            ids.extend(more)
            own.extend([sampled] * len(more))

        done = 0
        for answer in re.finditer(f"(?:{behind}){opening}(.*?){closing}", text, re.DOTALL):
            if self._call(text[done : answer.start()]) is not None:
                add(self.encode(text[done : answer.start()]), True)
                add(self.answer_ids(answer[1]), False)
                done = answer.end()
        add(self.encode(text[done:]), True)
        return ids, own


def make_markup(
    names: Sequence[str],
    call: tuple[str, str],
    answer: tuple[str, str],
    max_answer_length: int,
    tokenizer: Tokenizer,
) -> Markup:
    """The markup of tools.

    Args:
      names: names of the tools.
      call: opening and closing marker, in which "{name}" stands for a tool's name.
      answer, max_answer_length: see `Markup`.
      tokenizer: tokenizer of the policy.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return Markup(
        {name: (call[0].replace("{name}", name), call[1].replace("{name}", name)) for name in names},
        answer,
        max_answer_length,
        decode,
        tokenizer.encode,
        tokenizer.encode_plain,
    )
