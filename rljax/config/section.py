"""Base class and types of the config's sections."""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Base of sections: immutable, without unknown keys or silent conversions (except 1 for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _on_or_off(value: object) -> object:
    """YAML reads `on` and `off` without quotes as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


AutoOnOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]  # no shell expands ~ in key=~/directory
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Buckets = Annotated[tuple[Count, ...], Field(strict=False)]  # YAML has lists only; the items stay strict
