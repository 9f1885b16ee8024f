"""The section of speculative decoding: the policies that decide how much is drafted, and the keys of all.

Those of papers are in `rljax/papers` (`wing.py`).
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, field_validator

from rljax.config.speculation_keys import Policy, SpeculationKeys
from rljax.config.wing import MECHANISMS, MISSING
from rljax.config.wing import POLICIES as OF_PAPERS

POLICIES = {
    "expected": Policy(
        SpeculationKeys,
        "rljax.speculation.managers.expected:ExpectedManager",
        "before every pass, by the tokens per second predicted from acceptance and times so far",
        ("mix",),
    ),
    **OF_PAPERS,
    "fixed": Policy(
        SpeculationKeys,
        "rljax.speculation.managers.fixed:FixedManager",
        "always the one strategy of speculation.strategies",
        ("strategies",),
    ),
}
_WAYS = {name: policy.way for name, policy in POLICIES.items() if policy.way}


def readers_of(key: str) -> list[str]:
    """Returns the names of the policies that read a shared key."""
    return [name for name, policy in POLICIES.items() if key in policy.reads]


if TYPE_CHECKING:
    _Keys = SpeculationKeys
    _Choice = str
else:
    # Of several bases, pydantic takes the keys of the last one first.
    _of_papers = (
        *(policy.keys for policy in reversed(OF_PAPERS.values())),
        *(each.speculation for each in reversed(MECHANISMS.values())),
    )
    _bases = tuple(dict.fromkeys(keys for keys in _of_papers if keys is not SpeculationKeys))
    _Keys = create_model("_Keys", __base__=(*_bases, SpeculationKeys))
    _Choice = Literal[tuple(_WAYS)]


class SpeculationConfig(_Keys):
    """Speculative decoding. It shortens rollouts and, with engine.verification: coupled, changes no token."""

    choice: _Choice = Field(
        "expected",
        description="How the manager chooses drafter and draft length: "
        + "; ".join(f"{name}, {way}" for name, way in _WAYS.items())
        + ". Set fixed to measure the worth of choosing.",
    )

    @field_validator("choice", mode="before")
    @classmethod
    def _check_known(cls, choice: Any) -> Any:
        if MISSING and choice not in _WAYS:
            raise ValueError(f"speculation.choice: should be {' or '.join(_WAYS)}, got {choice!r}{MISSING}")
        return choice


OF_STEPS = {key: why for each in MECHANISMS.values() for key, why in each.of_steps.items()}
"""Keys that only training reads, with the reason."""
WITHOUT_STEPS = {key: SpeculationConfig.model_fields[key].default for key in OF_STEPS}
"""Their values where nothing is trained."""
