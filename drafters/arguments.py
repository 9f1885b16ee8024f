"""What `speculation.args` may hold: each drafter declares its arguments once, as a pydantic model."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rljax.errors import ConfigError, known_names


class Arguments(BaseModel):
    """Arguments of a drafter: immutable, none unknown, none converted silently (but 1 will do for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MatchArguments(Arguments):
    """How far back a drafter looks."""

    min_match: int = Field(
        1, ge=0, description="Shortest known suffix to draft from. Shorter ones draft more, and worse."
    )
    max_match: int = Field(
        48, ge=1, description="Longest suffix that is told apart. Lower it to save time on long repetitions."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match: {self.min_match} is more than max_match {self.max_match}")
        return self


class MemoryArguments(Arguments):
    """What a drafter remembers of earlier rollouts."""

    max_tokens: int = Field(
        50_000_000, ge=0, description="Tokens of history in memory; the prompts used longest ago leave first."
    )


class SpillArguments(MemoryArguments):
    """Of memories that prompts do not share."""

    spill_dir: str | None = Field(
        None, description="Directory that keeps what memory cannot; null forgets it."
    )


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text or null",
}


def checked(key: str, name: str, model: type[Arguments], given: dict[str, Any]) -> Arguments:
    """The arguments of drafter `name`, defaults included; `key` of the config holds them.

    Raises:
      ConfigError: one line that names the argument and what would be right.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
        argument = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            problem = f"{name} has no such argument; {known_names(argument, model.model_fields)}"
        elif first["type"] == "value_error":  # of arguments that do not go together; it names them
            raise ConfigError(f"{key}.{first['ctx']['error']}") from error
        else:
            expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
            problem = f"should be {expected}, got {first['input']!r}"
        raise ConfigError(f"{key}.{argument}: {problem}") from error
