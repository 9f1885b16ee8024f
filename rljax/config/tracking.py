"""Keys of what others see of a run: Weights & Biases, and the report."""

from typing import Literal

from pydantic import Field

from rljax.config.section import CountOrOff, Section


class TrackingConfig(Section):
    """Trackers besides the run directory, and records for the report; see docs/reports.md."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled",
        description="Weights & Biases: online sends metrics there, offline keeps them in the run directory"
        " for `wandb sync`. Needs the wandb extra. TensorBoard's files are always written.",
    )
    project: str = Field(
        "rljax", min_length=1, description="Weights & Biases project. Set it to keep experiments apart."
    )
    name: str | None = Field(
        None, description="Name of the run there; null is that of the run directory. Set it to say more."
    )
    samples_per_step: CountOrOff = Field(
        1,
        le=16,
        description="Best and worst responses that are kept as text of every step, so many of each. Raise to"
        " read more of them; 0 where they are not to be kept.",
    )
    report: bool = Field(
        True,
        description="Write report.html into the run directory at the end. Turn it off where many short runs"
        " are started.",
    )
