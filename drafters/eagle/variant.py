"""The kinds of heads; `drafters/eagle/model.py` says what each reads and computes."""

from typing import Literal

Variant = Literal["eagle", "hass", "eagle3", "block"]
VARIANTS: tuple[Variant, ...] = ("eagle", "hass", "eagle3", "block")
