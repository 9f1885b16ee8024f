"""Keys of the tools that a policy may call."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, model_validator

from rljax.config.section import Count, Section
from rljax.config.task import TaskConfig

Marker = Annotated[str, Field(min_length=1)]


class ToolsConfig(Section):
    """Tools that the policy may call while it writes a response (docs/tools.md); null for none."""

    names: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)] = (
        Field(
            description="Names of the tools that the policy may call: calculator, python or yours. Set few:"
            " they are easier to learn."
        )
    )
    opening: Marker = Field(
        "<{name}>",
        description="Marker that begins a call; {name} stands for the name of the tool. Set the marker that a"
        " pretrained policy knows.",
    )
    closing: Marker = Field(
        "</{name}>",
        description="Marker that ends a call; the token that completes it triggers the tool. Set it like"
        " tools.opening.",
    )
    answer_opening: Marker = Field(
        "<result>",
        description="Marker before a tool's answer. Set the marker that a pretrained policy knows, but not"
        " one that it writes around its final answer.",
    )
    answer_closing: Marker = Field(
        "</result>", description="Marker after a tool's answer. Set it like tools.answer_opening."
    )
    max_calls: Count = Field(
        4,
        description="Most calls in a response; further ones are ordinary text. Raise it for problems of many"
        " steps.",
    )
    max_answer_length: Count = Field(
        256,
        description="Most characters of an answer; a longer one is cut and ends with a note. Raise it where"
        " the end of answers matters; answers count towards rollout.max_response_length.",
    )
    time_limit: float = Field(
        5.0,
        gt=0,
        description="Most seconds of a call; a longer one is answered by an error. Raise it for slow tools.",
    )
    max_running: Count = Field(
        8, description="Most calls at a time; others wait. Lower it where a tool needs much of the machine."
    )

    @model_validator(mode="after")
    def _check(self) -> "ToolsConfig":
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"tools.names: {list(self.names)} names a tool twice")
        for key in ("opening", "closing"):
            if len(self.names) > 1 and "{name}" not in getattr(self, key):
                raise ValueError(
                    f"tools.{key}: {getattr(self, key)!r} is the same for all of {list(self.names)}; put"
                    " {name} where the tool's name belongs"
                )
        if self.opening == self.closing:
            raise ValueError(f"tools.closing: {self.closing!r} is tools.opening, too; they must differ")
        if self.answer_opening == self.answer_closing:
            raise ValueError(
                f"tools.answer_closing: {self.answer_closing!r} is answer_opening, too; they must differ"
            )
        return self


def mistaken_answers(tools: ToolsConfig, task: TaskConfig) -> Iterator[str]:
    """Yields one line for each reward that would mistake a tool's answer for the policy's."""
    parts = [("task", task.name, task.args, task.rewards)]
    parts += [
        (f"task.mixture.{number}", part.name, part.args, part.rewards)
        for number, part in enumerate(task.mixture)
    ]
    for key, name, args, rewards in parts:
        tags = {
            f"{key}.rewards.{number}": "answer"
            for number, reward in enumerate(rewards)
            if reward.args.get("answer_in") == "tag"
        }
        if name == "reasoning_gym":
            tags[f"{key}.args.tag"] = args.get("tag", "answer")
        for where, tag in tags.items():
            if f"<{tag}>" == tools.answer_opening:
                yield (
                    f"tools.answer_opening: {tools.answer_opening!r} is where {where} looks for the policy's"
                    " answer; take another marker"
                )
