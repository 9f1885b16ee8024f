"""Keys of the tools that a policy may call."""

from collections.abc import Sequence
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
        return self


def stop_in_closing(stops: Sequence[str], tools: ToolsConfig | None) -> str:
    """Returns the text that ends a response although it is part of the end of a call."""
    if tools is None:
        return ""
    closings = [tools.closing.replace("{name}", name) for name in tools.names]
    return next((stop for stop in stops if any(stop in closing for closing in closings)), "")


def mistaken_answer(tools: ToolsConfig | None, task: TaskConfig) -> str:
    """Returns the key of a reward that would mistake a tool's answer for the policy's."""
    if tools is None:
        return ""
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
                return where
    return ""
