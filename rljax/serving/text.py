"""A response's text while its tokens come: in pieces that need not be taken back.

A token may end inside a character, and a text may turn out to be the beginning of a stop string: such an end
is held back until it is known. All pieces together are the text of all tokens, up to the first stop string.
"""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character decode to


class TextStream:
    """The text of one response.

    Args:
      decode: token ids to text.
      stop: texts that end the response and do not belong to it.

    Attributes:
      length: characters so far, with what is held back and what a stop string has cut off.
      stopped: whether one of them was found; nothing follows.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # what is before stands for itself; from here on tokens are decoded together
        self._known = 0  # of the tokens from there, those whose text has been taken
        self._held = ""
        self.length = 0
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that is certain after these tokens."""
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
        """The text of the tokens that are not known yet; those before say how they join it."""
        before = self._decode(self._ids[self._begin : self._known])
        text = self._decode(self._ids[self._begin :])
        return text[len(before) :] if text.startswith(before) else _INCOMPLETE

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stop), default=1) - 1
        held = next(
            (n for n in range(min(longest, len(text)), 0, -1) if self._may_stop(text[-n:])),
            0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _may_stop(self, end: str) -> bool:
        return any(string.startswith(end) for string in self._stop)
