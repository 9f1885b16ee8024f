"""The arguments of drafters (`speculation.args`): each drafter has its own, as a pydantic model.

They stand apart from the drafters, which import JAX or numba, so that errors are instant. Those of `eagle`
are in `drafters/eagle/arguments.py`.
"""

from typing import Any, Literal, Self

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


class IndexArguments(SpillArguments):
    """When the automata of such histories are built."""

    history_workers: int = Field(
        0,
        ge=0,
        description="Threads that build the automata of finished responses while the engine decodes and the"
        " policy learns; 0 builds them when their prompt returns. Set it where cores are idle and prompts"
        " return with many tokens: a rollout then begins earlier.",
    )
    indexed_tokens: int = Field(
        5_000_000,
        ge=1,
        description="Response tokens whose automata history_workers keep ready, at some 80 bytes each. Raise"
        " it towards the tokens of a rollout where speculation/history_indexed_ahead stays below"
        " history_prompts, lower it to save memory.",
    )


class SuffixArguments(MatchArguments):
    """Arguments of `SuffixDrafter`."""

    live: bool = Field(
        True, description="Also learn from rollouts while they run. Off shows what these are worth."
    )
    substitutions: bool = Field(
        True,
        description="Also draft what followed in history where a request sampled something else. Off where"
        " responses repeat each other exactly or not at all, to save host time, and for ablations.",
    )
    budget_per_match: float = Field(
        4.0,
        ge=0,
        description="Draft nodes per token of match: SuffixDecoding's alpha, SRT's B(q). Lower it where short"
        " matches draft badly.",
    )
    novelty: float = Field(
        0.5,
        ge=0,
        description="Pseudo-count of tokens that never followed a context (with substitutions: that no source"
        " knew). Raise it to trust few observations less.",
    )


class RememberingArguments(MemoryArguments, SuffixArguments):
    """Arguments of suffix drafters with a history."""

    rollouts: int = Field(
        2, ge=1, description="Rollouts kept of each prompt. Raise for more history, from older policies."
    )


class SrtArguments(IndexArguments, RememberingArguments):
    """Arguments of `srt`."""


class SuffixDecodingArguments(RememberingArguments):
    """Arguments of `suffix_decoding`."""

    min_match: int = Field(2, ge=0, description="Shortest known suffix to draft from.")


class PromptLookupArguments(MatchArguments):
    """Arguments of `prompt_lookup`."""

    min_match: int = Field(2, ge=0, description="Shortest known suffix to draft from.")
    max_match: int = Field(16, ge=1, description="Longest suffix that is told apart.")


class HistoSpecArguments(IndexArguments, MatchArguments):
    """Arguments of `HistoSpec`."""

    min_match: int = Field(3, ge=0, description="Shortest suffix that is matched.")
    max_match: int = Field(7, ge=1, description="Longest suffix that is matched.")
    first_window: int = Field(2, ge=1, description="Draft tokens at first and after a rejection.")
    window_step: int = Field(
        2, ge=0, description="How much the window grows after every draft accepted whole."
    )
    max_window: int | None = Field(
        None,
        ge=1,
        description="Most draft tokens, up to speculation.max_drafts; null is 32, as published, or"
        " speculation.max_drafts where that is smaller. Lower it where verifying is expensive.",
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.max_window is not None and self.first_window > self.max_window:
            raise ValueError(f"first_window: {self.first_window} is more than max_window {self.max_window}")
        return self


class SmallModelArguments(Arguments):
    """Arguments of `SmallModelDrafter`."""

    path: PathText = Field(
        description="Hugging Face directory of a model with the policy's vocabulary, or its name on the hub."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Type of its weights and products; null is the policy's."
    )
    layout: Literal["split", "replicated"] = Field(
        "split",
        description="Its weights on a mesh: split over as many devices of mesh.tensor as divide its heads and"
        " MLP, or all of them on every device, which takes more memory and has no collectives: for models"
        " so small that these take longer than reading the weights.",
    )
    slices: int = Field(
        0,
        ge=0,
        description="Updates a rollout, at most, on the policy's responses (TLT, Table 8); 0 leaves the model"
        " as it is. Set it where fewer and fewer drafts are accepted, or the model was never tuned for the"
        " task. The step waits for it, unless cluster.spot lets idle workers do it.",
    )
    rows: int = Field(
        1, ge=1, description="Rows of an update, as long as the longest sequence. Fewer take less memory."
    )
    learning_rate: float = Field(
        1e-5, gt=0, description="Of the small model. Raise it for toy models; lower it if sft/loss jumps."
    )


class QuantizedArguments(Arguments):
    """Arguments of `QuantizedDrafter`."""

    bits: int | None = Field(
        None,
        description="4 or 8 a weight; null is 4 on an accelerator with a tuned kernel for it, else 8. 4 reads"
        " less memory; 8 is closer to the policy, and what a CPU is fast with.",
    )
    quantizer: str = Field(
        "rtn",
        description="rtn rounds to nearest; clipped leaves less squared error, takes longer to refresh, and"
        " was accepted no more for SmolLM2.",
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
