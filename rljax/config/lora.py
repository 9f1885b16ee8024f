"""Keys of LoRA: which matrices are adapted, and by how much."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rljax.config.section import Count, PathText, Section

ALL_LINEAR = "all-linear"
TARGETS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Names of the matrices in Hugging Face's models and in PEFT -> in the params of the policy."""


class LoraConfig(Section):
    """Train two thin factors for each matrix instead of the matrix (LoRA, arXiv 2106.09685); leave the
    section out (null) to train all weights.
    """

    rank: Count = Field(
        16,
        description="Rows of the factor A and columns of B. Raise it for capacity; memory of factors and"
        " moments grows in proportion.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        description="Numerator of the scale alpha / rank of the product B A. Raise it together with rank, or"
        " raise optimizer.learning_rate, to the same effect.",
    )
    rslora: bool = Field(
        False,
        description="Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732). Set it for ranks of 64"
        " and more, whose updates the usual scale makes small.",
    )
    targets: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (ALL_LINEAR,),
        description="Matrices to adapt: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or"
        " all-linear for all of them. List fewer to save memory; attention alone learns less.",
    )
    init: Literal["kaiming", "gaussian"] = Field(
        "kaiming",
        description="Distribution of A; B starts at 0. kaiming is uniform up to in^-0.5, gaussian normal with"
        " deviation 1 / rank: the two of PEFT. Set gaussian to repeat a run that used it.",
    )
    path: PathText | None = Field(
        None,
        min_length=1,
        description="Directory of an adapter in PEFT's format to go on from, such as one after supervised"
        " training. Its rank, scale and targets must be those of the other keys; null starts a new one.",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        """PEFT takes a single name without a list, too."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "LoraConfig":
        if not self.targets:
            raise ValueError(f"policy.lora.targets: is empty; list matrices, or set {ALL_LINEAR}")
        for target in self.targets:
            if target != ALL_LINEAR and target not in TARGETS:
                raise ValueError(f"policy.lora.targets: {target!r} is unknown; {_nearest(target)}")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"policy.lora.targets: {list(self.targets)} has a name twice")
        return self

    @property
    def matrices(self) -> tuple[str, ...]:
        """The adapted matrices by their names in the params of the policy, in the order of `TARGETS`."""
        every = ALL_LINEAR in self.targets
        return tuple(ours for theirs, ours in TARGETS.items() if every or theirs in self.targets)

    @property
    def scale(self) -> float:
        """Factor of B A in the merged matrix."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def _nearest(target: str, known: Iterable[str] = (*TARGETS, ALL_LINEAR)) -> str:
    """Returns what is known, the nearest first."""
    names = list(known)
    ours = {ours: theirs for theirs, ours in TARGETS.items()}
    near = [ours[target]] if target in ours else difflib.get_close_matches(target, names, n=1, cutoff=0.5)
    return f"the nearest is {near[0]}" if near else f"known are {', '.join(names)}"
