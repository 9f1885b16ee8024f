"""The arguments of drafters (`speculation.args`): each drafter declares its own once, as a pydantic model."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rljax.config.section import PathText
from rljax.errors import ConfigError, known_names


class Arguments(BaseModel):
    """Arguments of a drafter: immutable; unknown names and conversions are errors (but 1 stands for 1.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MatchArguments(Arguments):
    """Limits on the suffix that a drafter matches."""

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
    """Limits on the history of earlier rollouts."""

    max_tokens: int = Field(
        50_000_000, ge=0, description="Tokens of history in memory; the prompts used longest ago leave first."
    )


class SpillArguments(MemoryArguments):
    """Arguments of histories that are kept prompt by prompt, and so can be spilled to files."""

    spill_dir: PathText | None = Field(
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


def checked(key: str, name: str, model: type[Arguments], values: dict[str, Any]) -> Arguments:
    """Validates the arguments of drafter `name` and fills in defaults.

    Args:
      key: the config key that holds them, for errors.
      name: the drafter, for errors.
      model: its arguments.
      values: by name, as in the config.

    Raises:
      ConfigError: one line that names the argument and a valid value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = next((e for e in problems if e["type"] == "extra_forbidden"), problems[0])
        argument = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            problem = f"{name} has no such argument; {known_names(argument, model.model_fields)}"
        elif first["type"] == "value_error":  # arguments that do not go together; the message names them
            raise ConfigError(f"{key}.{first['ctx']['error']}") from error
        else:
            expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
            problem = f"should be {expected}, got {first['input']!r}"
        raise ConfigError(f"{key}.{argument}: {problem}") from error
