"""What a window of drafts takes."""

import dataclasses
from typing import Literal

Mode = Literal["plain", "coupled", "decoupled"]
"""A way to decode: without drafts, drafting before each pass, or drafting ahead of it on other devices."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """Seconds that are affine in the batch: `per_request` for each, and `fixed`."""

    per_request: float
    fixed: float

    def __call__(self, batch: float) -> float:
        return batch * self.per_request + self.fixed
