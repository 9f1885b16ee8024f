"""What a window of drafts takes."""

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
