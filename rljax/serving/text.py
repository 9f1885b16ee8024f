"""Streams the text of a response in pieces that stay valid as more tokens arrive.

A token may end inside a character, and the end of a text may be the beginning of a stop string. Such an end
is held back until more tokens decide. The concatenated pieces are the shown text of all tokens, up to the
first stop string. Stop strings are searched in the text of all tokens, special tokens included; what is shown
may leave some out.
"""

from collections.abc import Sequence

from rljax.models.tokenizer import Decode

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to it


class TextStream:
    """The text of one response.

    Args:
      decode: function from token ids to the text in which stop strings are searched.
      stop: texts that end the response, without being part of it.
      shown: function from token ids to the text that is returned; None for `decode`.

    Attributes:
      length: number of shown characters so far, also those that are held back or cut off by a stop string.
      stopped: whether a stop string has occurred; no text follows.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), shown: Decode | None = None) -> None:
        self._full, self._shown = _Growing(decode), _Growing(shown or decode)
        self._stop = tuple(stop)
        self._held: list[tuple[str, str]] = []  # what tokens have added to both texts
        self.length = 0
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that has become certain."""
        certain = []
        for token in ids:
            self._hold(self._full.push(token), self._shown.push(token))
            certain.append(self._release())
        return "".join(certain)

    def finish(self) -> str:
        """Returns the text that was held back."""
        self._hold(self._full.rest(), self._shown.rest())
        text = self._release()
        return text + self._take(sum(len(full) for full, _ in self._held))

    def _hold(self, full: str, shown: str) -> None:
        self.length += len(shown)
        self._held.append((full, shown))

    def _release(self) -> str:
        if self.stopped:
            self._held = []
            return ""
        text = "".join(full for full, _ in self._held)
        positions = [position for position in map(text.find, self._stop) if position >= 0]
        if positions:
            self.stopped = True
            full, shown = self._held[-1]
            self._held[-1] = full, shown + self._shown.rest()  # half a character that a special token ends
            released, self._held = self._take(min(positions)), []
            return released
        longest = max(map(len, self._stop), default=1) - 1
        held = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_stop(text[-n:])), 0)
        return self._take(len(text) - held)

    def _take(self, count: int) -> str:
        """Removes the first `count` characters of the searched text that is held; returns what of them is
        shown.
        """
        taken = ""
        while self._held and len(self._held[0][0]) <= count:
            full, shown = self._held.pop(0)
            taken, count = taken + shown, count - len(full)
        if count:
            full, shown = self._held[0]
            # What is shown lacks at most a space at the beginning and a special token at the end.
            cut = max(count - max(full.find(shown), 0), 0)
            self._held[0] = full[count:], shown[cut:]
            taken += shown[:cut]
        return taken

    def _may_stop(self, end: str) -> bool:
        return any(string.startswith(end) for string in self._stop)


class _Growing:
    """The text of a growing list of tokens; `decode` makes text of token ids."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._begin = 0  # tokens before this index no longer affect decoding; later ones are decoded together
        self._returned = 0  # index of the first token whose text has not been returned

    def push(self, token: int) -> str:
        """Adds a token and returns the text that has become certain."""
        self._ids.append(token)
        text = self.rest()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._returned = self._returned, len(self._ids)
        return text

    def rest(self) -> str:
        """Returns the text that is not certain: of the new tokens, decoded after the previous ones, which may
        change its spacing.
        """
        before = self._decode(self._ids[self._begin : self._returned])
        text = self._decode(self._ids[self._begin :])
        return text[len(before) :] if text.startswith(before) else _INCOMPLETE
