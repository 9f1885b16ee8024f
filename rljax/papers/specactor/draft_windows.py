"""The window protocol of decoupled speculation: what is drafted ahead, what is kept, what is thrown away.

SpecActor, section 4.1. The drafts of a slot that the target has not answered are one chain
behind its last token. The target verifies the first of them, and meanwhile the drafter goes on at the end:

    last token | verified now | drafted meanwhile, as if all of those were accepted

With a window of w at most w tokens are drafted at a time, and at most 2w - 1 are unanswered. The answer is
the tokens that the target sampled. Where all of them were foretold, what is left of the chain stands behind
the new last token: the next window is ready. Otherwise the whole chain is thrown away, its rejected draft
included, which so wastes at most 2w - 1 tokens.

A slot that is not `ahead` is drafted for only while none of its drafts is unanswered, as in coupled
speculation; then a rejection wastes at most w.

Arrays of NumPy alone: nothing here knows of models or devices.
"""

import numpy as np


class DraftWindows:
    """The unanswered drafts of B slots.

    Args:
      slots: number of slots, B.
      window: the largest window, w.

    Attributes:
      chains: int32 [B, 2w - 1], unanswered drafts of each slot, -1 behind the last.
      scores: float32 [B, 2w - 1], a number that came with each draft.
      windows: int32 [B], the window of each slot, up to `window`; 0 drafts nothing.
      ahead: bool [B], whether a slot is drafted for while drafts of it are unanswered.
    """

    def __init__(self, slots: int, window: int) -> None:
        self.window = window
        self.chains = np.full((slots, 2 * window - 1), -1, np.int32)
        self.scores = np.zeros(self.chains.shape, np.float32)
        self.windows = np.full(slots, window, np.int32)
        self.ahead = np.ones(slots, bool)

    @property
    def unanswered(self) -> np.ndarray:
        """Number of unanswered drafts, int32 [B]."""
        return (self.chains >= 0).sum(axis=1, dtype=np.int32)

    def room(self) -> np.ndarray:
        """Number of tokens that may be drafted now, int32 [B]."""
        unanswered = self.unanswered
        free = np.clip(np.minimum(self.windows, 2 * self.windows - 1 - unanswered), 0, None)
        return np.where(self.ahead | (unanswered == 0), free, 0).astype(np.int32)

    def extend(self, tokens: np.ndarray, scores: np.ndarray) -> None:
        """Tokens were drafted behind the chains.

        Args:
          tokens: int32 [B, T], -1 behind the last of each slot.
          scores: float32 [B, T].

        Raises:
          ValueError: more than the window allows.
        """
        begin = self.unanswered
        rows, order = np.nonzero(tokens >= 0)
        places = begin[rows] + order
        if places.size and places.max() >= self.chains.shape[1]:
            raise ValueError(f"{places.max() + 1} drafts are unanswered with a window of {self.window}")
        self.chains[rows, places] = tokens[rows, order]
        self.scores[rows, places] = scores[rows, order]

    def answer(
        self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The target sampled tokens: chains that foretold all of them go on, others are thrown away.

        Args:
          slots: int [n].
          tokens: int32 [n, T].
          counts: int [n], how many of them; a slot that got none is left as it is.

        Returns:
          foretold: int [n], how many of the tokens the chain began with.
          wasted: int [n], drafts that were thrown away.
        """
        chains, unanswered = self.chains[slots], self.unanswered[slots]
        width = min(chains.shape[1], tokens.shape[1])
        sampled = np.arange(width) < counts[:, None]
        foretold = np.cumprod((chains[:, :width] == tokens[:, :width]) & sampled, axis=1).sum(axis=1)
        wasted = np.where(foretold < counts, unanswered - foretold, 0)
        used = np.where(foretold < counts, unanswered, counts)
        self.chains[slots] = _shifted(chains, used, -1)
        self.scores[slots] = _shifted(self.scores[slots], used, 0)
        return foretold, wasted

    def drop(self, slots: np.ndarray) -> None:
        """Forgets the drafts of some slots."""
        self.chains[slots] = -1

    def keep(self, slots: np.ndarray, batch: int) -> None:
        """Keeps some slots, in that order, as the first of `batch`; the others are empty."""
        kept = DraftWindows(batch, self.window)
        for name in ("chains", "scores", "windows", "ahead"):
            getattr(kept, name)[: len(slots)] = getattr(self, name)[slots]
            setattr(self, name, getattr(kept, name))


def _shifted(array: np.ndarray, counts: np.ndarray, empty: int) -> np.ndarray:
    """Moves each row of an array [n, T] to the left by its count, int [n]."""
    places = np.arange(array.shape[1]) + counts[:, None]
    taken = np.take_along_axis(array, np.minimum(places, array.shape[1] - 1), axis=1)
    return np.where(places < array.shape[1], taken, empty).astype(array.dtype)
