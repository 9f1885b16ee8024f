"""Base class and types of the config's sections."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of sections: immutable, without unknown keys or silent conversions (except 1 for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Buckets = Annotated[tuple[Count, ...], Field(strict=False)]  # YAML has lists only; the items stay strict
