"""The tokens between two turns of a policy: what a chat template writes after one and before the next.

What a policy has sampled is never tokenized again: text can be tokenized in many ways, and another one is
another sequence. So a conversation continues by appending tokens. Which ones, the template says: it is
rendered with marks in place of its contents, and the text after the assistant's mark is what follows.

    sampled   31<|im_end|>
    appended              \\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rljax.errors import TokenizerError
from rljax.models.tokenizer import Tokenizer

_CUT = " ... (cut)"


class ChatTurns:
    """The tokens that lead from one turn of a policy to the next.

    Args:
      tokenizer: tokenizer of the policy, with its chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._between: dict[tuple[Any, ...], list[str]] = {}  # by roles: the template's parts

    def following(self, messages: Sequence[Mapping[str, Any]], last_token: int | None) -> list[int]:
        """Returns the tokens of messages after a turn of the policy, up to the beginning of its next turn.
        Special tokens that are written out in the contents are ordinary text.

        Args:
          messages: messages in the form of chat templates, at least one.
          last_token: last token of the policy's turn. The template's token that ends a turn is left out where
            this is it.

        Raises:
          TokenizerError: the template refuses such a conversation, or changes the contents.
        """
        first, *parts = self._parts(messages)
        ids = self._tokenizer.encode(first)
        if ids and ids[0] == last_token:
            ids = ids[1:]
        for message, part in zip(messages, parts, strict=True):
            ids += self._tokenizer.encode_plain(message["content"]) + self._tokenizer.encode(part)
        return ids

    def turn_end(self) -> int | None:
        """Returns the special token that the template writes after a turn of the policy; None where it
        writes other text there, or refuses a second turn.
        """
        try:
            text = self._parts([{"role": "user", "content": ""}])[0]
        except TokenizerError:
            return None
        ids = self._tokenizer.encode(text.lstrip())
        plain = not ids or self._tokenizer.decode(ids[:1], skip_special_tokens=True)
        return None if plain else ids[0]

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], sampled: Mapping[int, Sequence[int]]
    ) -> list[int]:
        """Returns the tokens of a conversation up to the beginning of the policy's next turn.

        Args:
          sampled: tokens that the policy has sampled for some of them, by their places. Where there are none,
            or the template does not write these messages once and in order, all is the tokenized text of the
            template.

        Raises:
          TokenizerError: the template refuses the messages.
        """
        places = sorted(sampled)
        marks = [f"@@{place}of{len(messages)}@@" for place in places]
        marked = [dict(message) for message in messages]
        for place, mark in zip(places, marks, strict=True):
            marked[place]["content"] = mark
        parts = _split(self._tokenizer.apply_chat_template(marked), marks) if places else None
        if parts is None:
            return self._tokenizer.encode_chat(messages)
        ids = self._tokenizer.encode(parts[0])
        for place, part in zip(places, parts[1:], strict=True):
            ids += self._continued(sampled[place], part)
        return ids

    def _continued(self, sampled: Sequence[int], text: str) -> list[int]:
        """Returns sampled tokens and the template's text after them, which may begin with their last one."""
        ids = self._tokenizer.encode(text)
        return [*sampled, *(ids[1:] if sampled and ids and ids[0] == sampled[-1] else ids)]

    def _parts(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the template's text after the assistant's turn, and after each message."""
        shapes = tuple(
            tuple(sorted((name, value) for name, value in message.items() if name != "content"))
            for message in messages
        )
        if shapes not in self._between:
            marks = [f"@@{number}of{len(messages) + 2}@@" for number in range(len(messages) + 2)]
            conversation = [{"role": "user", "content": marks[0]}, {"role": "assistant", "content": marks[1]}]
            conversation += [
                {**message, "content": mark} for message, mark in zip(messages, marks[2:], strict=True)
            ]
            parts = _split(self._tokenizer.apply_chat_template(conversation), marks)
            if parts is None:
                raise TokenizerError(
                    f"{self._tokenizer.directory}: the chat template does not write every message of a"
                    " conversation once, in order, so further turns cannot be appended to it"
                )
            self._between[shapes] = parts[2:]
        return self._between[shapes]


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """Returns the text before, between and after marks; None where one is missing, repeated or misplaced."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def shortened(text: str, longest: int) -> str:
    """Returns a text of up to `longest` characters; of a longer one the beginning, with a note."""
    return text if len(text) <= longest else text[: max(longest - len(_CUT), 0)] + _CUT
