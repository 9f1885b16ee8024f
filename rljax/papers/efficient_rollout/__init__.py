"""EfficientRollout: the policy in fewer bits drafts, once that pays, and as far as it should.

Algorithm 1 (appendix E.1), with the toggle of section 3.2 (Eq. 3) and the draft lengths of section 3.3:

    for every training step
        quantize the policy anew                                                   `drafters/quantized.py`
        until the rollout ends
            off, and predicted speed-up < 1 + epsilon: a plain step                `Toggle` in `manager.py`
            off, and predicted speed-up >= 1 + epsilon: on, until the rollout ends
            on: draft gamma tokens and verify them
        tau = tokens of a pass, over the step                                      `draft_length.py`
        min of the last P tau >= 1 + gamma * alpha_up: the next longer gamma
        max of the last P tau <= 1 + gamma * alpha_down: the next shorter one

    speed-up = tau * T_p / (gamma * T_q + T_V)                                     `roofline.py`, Eq. 1 and 2

with the seconds of a plain step, a draft step and a verifying pass by a roofline whose constants are fitted
once for a policy and a device (appendix E.3, `fit.py` and `calibration.py`) and checked by held-out passes
(appendix E.4).
"""

import itertools

from pydantic import Field, model_validator

from rljax.config.section import Buckets, Count, PathText, Rule, Section
from rljax.config.speculation_keys import SpeculationKeys


class ToggleConfig(Section):
    """EfficientRollout's toggle and patience ladder, with choice: roofline; the defaults are the paper's
    (sections 3.2, 3.3 and 4.1)."""

    margin: float = Field(
        0.05,
        ge=0,
        description="By how much speculation must be predicted to be faster before it is switched on"
        " (epsilon). Raise it where the roofline promises more than the log shows; 0 starts earliest.",
    )
    lengths: Buckets = Field(
        (5, 7, 9, 11),
        min_length=1,
        description="Draft lengths of the patience ladder, ascending (Gamma); those above"
        " speculation.max_drafts are left out. Set shorter ones where few drafts are accepted, a single one"
        " for a fixed length.",
    )
    first: Count | None = Field(
        None,
        description="Draft length of the first training step (gamma_0), one of lengths; null is the shortest."
        " Raise it where the drafter is known to be good, to skip the first rungs.",
    )
    alpha_up: float = Field(
        0.94,
        ge=0,
        le=1,
        description="Share of accepted drafts from which the next longer length is taken. Lower it where"
        " drafting and verifying a further token is cheap.",
    )
    alpha_down: float = Field(
        0.85,
        ge=0,
        le=1,
        description="Share of accepted drafts at which the next shorter length is taken. Lower it where"
        " rejected drafts cost little; it stays below alpha_up.",
    )
    patience: Count = Field(
        2,
        description="Training steps in a row that must agree before the length changes (P). Raise it where"
        " acceptance varies from step to step.",
    )

    @model_validator(mode="after")
    def _check(self) -> "ToggleConfig":
        if any(b <= a for a, b in itertools.pairwise(self.lengths)):
            raise ValueError(f"speculation.toggle.lengths: {list(self.lengths)} should be ascending")
        return self


class EfficientRolloutKeys(SpeculationKeys):
    """Keys of `choice: roofline`."""

    calibration_dir: PathText = Field(
        "cache/calibration",
        min_length=1,
        description="Directory of the device's constants from scripts/calibrate.py, for choice: roofline."
        " Move it where several machines share a directory.",
    )
    toggle: ToggleConfig = ToggleConfig()


RULES = (
    Rule(
        ("speculation.toggle.first", "speculation.toggle.lengths"),
        lambda first, lengths: first is not None and first not in lengths and str(list(lengths)),
        "speculation.toggle.first: {0} is none of lengths {found}",
    ),
    Rule(
        ("speculation.toggle.alpha_down", "speculation.toggle.alpha_up"),
        lambda down, up: down >= up,
        "speculation.toggle.alpha_down: {0} should be less than alpha_up {1}",
    ),
    Rule(
        ("speculation.choice", "speculation.drafter", "speculation.others"),
        lambda choice, drafter, others: choice == "roofline" and (drafter is None or others),
        "speculation.choice: roofline switches one drafter on and off; set speculation.drafter, and no"
        " speculation.others",
    ),
    Rule(
        ("speculation.toggle.first", "speculation.max_drafts", "speculation.choice"),
        lambda first, most, choice: choice == "roofline" and first is not None and first > most,
        "speculation.toggle.first: {0} is more than speculation.max_drafts {1}",
    ),
)
