"""Stop strings: a response ends with the token that completes one of them.

The host searches the decoded text, because the same text can be tokenized in many ways. It is the text of
all tokens: a special token, such as the marker of a turn, may be a stop string or a part of one. By then a
slot may have decoded tokens after the end; these are dropped, so that a response does not depend on the times
of host syncs.
"""

from collections.abc import Sequence

from rljax.models.tokenizer import Decode


class StopStrings:
    """Finds the first stop string in a response.

    Args:
      strings: the stop strings, none empty.
      decode: `Tokenizer.decode`.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self._strings = tuple(strings)
        self._decode = decode
        # A character takes at most four byte-level tokens.
        self._window = 4 * max((len(string) for string in strings), default=0)

    def find(self, response_ids: Sequence[int], start: int, first: int = 0) -> int | None:
        """Returns the number of tokens up to the one that completes a stop string, inclusive, or None.

        Args:
          response_ids: token ids of the response so far.
          start: number of tokens known to contain no stop string.
          first: index of the first token to search.
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
