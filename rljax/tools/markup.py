"""Syntax of calls and answers: between markers, in the text of the response.

A call is detected at the token that completes its closing marker. As for stop strings, the decoded text is
searched, because the same text can be tokenized in many ways. The search covers only the policy's text since
the last answer, so an answer cannot contain a call.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rljax.models.tokenizer import Decode, Tokenizer

_CUT = " ... (cut)"


class ToolCall(NamedTuple):
    """A call in a response.

    Attributes:
      end: number of response tokens up to and including the one that completes the call.
      text: text between the markers.
    """

    end: int
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Markup:
    """The markers of calls and answers, with the functions that tokenize text between them.

    Attributes:
      calls: opening and closing marker of each tool, by its name.
      answer: opening and closing marker of answers.
      max_answer_length: most characters of an answer; a longer one is cut and ends with a note.
      decode: maps token ids to text, special tokens included.
      encode: maps text to token ids.
      encode_plain: as `encode`, but the text of a special token is encoded as ordinary text.
    """

    calls: dict[str, tuple[str, str]]
    answer: tuple[str, str]
    max_answer_length: int
    decode: Decode
    encode: Callable[[str], list[int]]
    encode_plain: Callable[[str], list[int]]

    def find(self, ids: Sequence[int], begin: int, known: int) -> ToolCall | None:
        """Returns the first complete call in a response, or None.

        Args:
          ids: token ids of the response so far.
          begin: index of the first token after the last answer.
          known: number of leading tokens that complete no call, as known from earlier searches.
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
        """Returns tool name and text of the first complete call: the text from the last opening marker before
        a closing marker.
        """
        calls = []
        for name, (opening, closing) in self.calls.items():
            end = text.find(closing)
            while end >= 0:
                begin = text.rfind(opening, 0, end)
                if begin >= 0:
                    calls.append((end, name, text[begin + len(opening) : end]))
                    break
                end = text.find(closing, end + 1)
        return min(calls)[1:] if calls else None

    def answer_ids(self, text: str) -> list[int]:
        """Returns the tokens of an answer with its markers. Special tokens in the answer are ordinary
        text.
        """
        opening, closing = self.answer
        if len(text) > self.max_answer_length:
            text = text[: max(self.max_answer_length - len(_CUT), 0)] + _CUT
        return [*self.encode(opening), *self.encode_plain(text), *self.encode(closing)]

    def encode_response(self, text: str) -> tuple[list[int], list[bool]]:
        """Tokenizes a written response with its answers as in a rollout. An answer directly follows a call;
        elsewhere its markers are ordinary text.

        Returns:
          The token ids, and for each token whether the policy sampled it (False for answers).
        """
        opening, closing = map(re.escape, self.answer)
        after_call = "|".join(f"(?<={re.escape(end)})" for _, end in self.calls.values())
        ids: list[int] = []
        sampled: list[bool] = []

        def add(part: list[int], by_policy: bool) -> None:
            ids.extend(part)
            sampled.extend([by_policy] * len(part))

        done = 0
        for answer in re.finditer(f"(?:{after_call}){opening}(.*?){closing}", text, re.DOTALL):
            if self._call(text[done : answer.start()]) is not None:
                add(self.encode(text[done : answer.start()]), True)
                add(self.answer_ids(answer[1]), False)
                done = answer.end()
        add(self.encode(text[done:]), True)
        return ids, sampled


def make_markup(
    names: Sequence[str],
    call: tuple[str, str],
    answer: tuple[str, str],
    max_answer_length: int,
    tokenizer: Tokenizer,
) -> Markup:
    """Returns the markup of tools.

    Args:
      call: opening and closing marker; "{name}" in them stands for the name of a tool.
      answer, max_answer_length: see `Markup`.
    """

    return Markup(
        {name: (call[0].replace("{name}", name), call[1].replace("{name}", name)) for name in names},
        answer,
        max_answer_length,
        tokenizer.decode,
        tokenizer.encode,
        tokenizer.encode_plain,
    )
