"""Stop strings: a response ends with the token that completes one of them.

They are looked for on the host, in the decoded text, because the same text can be tokenized in many ways. A
slot may have decoded past the end by then; what lies behind it is dropped, so a response does not depend on
when the host synced.
"""

from collections.abc import Callable, Sequence


class StopStrings:
    """Finds where a response first contains a stop string.

    Args:
      strings: the stop strings, none empty.
      decode: token ids to text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self._strings = tuple(strings)
        self._decode = decode
        # A character takes at most four byte-level tokens.
        self._window = 4 * max((len(string) for string in strings), default=0)

    def find(self, response_ids: Sequence[int], start: int, first: int = 0) -> int | None:
        """Tokens up to and including the one that completes a stop string, or None.

        Args:
          response_ids: the response so far.
          start: tokens known to hold none.
          first: the first token that counts.
        """
        if not self._strings:
            return None
        begin = max(first, start - self._window)
        if not self._contains(response_ids[begin:]):
            return None
        for end in range(start + 1, len(response_ids) + 1):
            if self._contains(response_ids[begin:end]):
                return end
        return None

    def _contains(self, ids: Sequence[int]) -> bool:
        text = self._decode(ids)
        return any(string in text for string in self._strings)
