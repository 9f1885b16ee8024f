"""Keys of tracking: Weights & Biases, MLflow, and the report."""

from typing import Literal

from pydantic import Field

from rljax.config.section import CountOrOff, Section


class TrackingConfig(Section):
    """Trackers besides the run directory, and records for the report; see docs/reports.md."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled",
        description="Weights & Biases. Set online to send metrics there, or offline to keep them in the run"
        " directory for `wandb sync`; both need the wandb extra. TensorBoard's files are always written.",
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="Store of MLflow, such as http://host:5000 or sqlite:///runs/mlflow.db; needs the mlflow"
        " extra. Set it to compare runs there; null sends nothing.",
    )
    project: str = Field(
        "rljax",
        min_length=1,
        description="Project in Weights & Biases, experiment in MLflow. Set it to keep experiments apart.",
    )
    name: str | None = Field(
        None,
        description="Name of the run in both; null takes the name of the run directory. Set it for a more"
        " descriptive name.",
    )
    samples_per_step: CountOrOff = Field(
        1,
        le=16,
        description="Number of best and of worst responses whose text is kept at every step. Raise it to read"
        " more of them; 0 keeps none.",
    )
    report: bool = Field(
        True,
        description="Write report.html into the run directory at the end. Turn it off for many short runs.",
    )
