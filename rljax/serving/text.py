"""Streams the text of a response in pieces that stay valid as more tokens arrive.

A token may end inside a character, and the end of a text may be the beginning of a stop string. Such an end
is held back until more tokens decide. The concatenated pieces are the text of all tokens, up to the first
stop string.
"""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to it


class TextStream:
    """The text of one response.

    Args:
      decode: function from token ids to text.
      stop: texts that end the response, without being part of it.

    Attributes:
      length: number of characters so far, including those that are held back or cut off by a stop string.
      stopped: whether a stop string has occurred; no text follows.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # tokens before this index no longer affect decoding; later ones are decoded together
        self._known = 0  # index of the first token whose text has not been returned
        self._held = ""
        self.length = 0
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that has become certain."""
        self._ids.extend(ids)
        text = self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._known = self._known, len(self._ids)
        self.length += len(text)
        return self._release(text)

    def finish(self) -> str:
        """Returns the text that was held back."""
        text = self._release(self._new_text())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self) -> str:
        """Returns the text of the new tokens, decoded after the previous ones, which may change its
        spacing.
        """
        before = self._decode(self._ids[self._begin : self._known])
        text = self._decode(self._ids[self._begin :])
        return text[len(before) :] if text.startswith(before) else _INCOMPLETE

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        positions = [position for position in map(text.find, self._stop) if position >= 0]
        if positions:
            self.stopped, self._held = True, ""
            return text[: min(positions)]
        longest = max(map(len, self._stop), default=1) - 1
        held = next(
            (n for n in range(min(longest, len(text)), 0, -1) if self._may_stop(text[-n:])),
            0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _may_stop(self, end: str) -> bool:
        return any(string.startswith(end) for string in self._stop)
