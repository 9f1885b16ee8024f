"""What a window of drafts takes, and how many tokens it brings."""

import dataclasses
from typing import Literal

Mode = Literal["plain", "coupled", "decoupled"]
"""A way to decode: without drafts, drafting before each pass, or drafting ahead of it on other devices."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """Seconds that are affine in the batch: `each` a request, and `base`."""

    each: float
    base: float

    def __call__(self, batch: float) -> float:
        return batch * self.each + self.base


def accepted_coupled(acceptance: float, window: int) -> float:
    """Tokens of a verified chain, with the one that verification adds (Leviathan et al., equation 1)."""
    if acceptance >= 1.0:
        return window + 1.0
    return (1.0 - acceptance ** (window + 1)) / (1.0 - acceptance)


def accepted_decoupled(acceptance: float, window: int) -> float:
    """tau_w: tokens of a window, where a rejection wastes the next one too: hence the half (section 4.1)."""
    partial = sum(acceptance**a * (1.0 - acceptance) * (a + 1) / 2 for a in range(window))
    return partial + window * acceptance**window
