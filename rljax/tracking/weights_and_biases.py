"""Weights & Biases (the `wandb` extra): a run directory is one run there, over all its sessions."""

import importlib.util
import math
import secrets
from collections.abc import Mapping
from typing import Any

from rljax.config import ExperimentConfig
from rljax.errors import ConfigError
from rljax.run_directory import RunDirectory
from rljax.tracking.sent_steps import SentSteps

_SECONDS_TO_START, _SECONDS_TO_FINISH = 60, 300


def check_installed() -> None:
    """Raises a ConfigError if the extra is missing."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "tracking.mode: needs wandb; install the wandb extra (pip install 'rljax[wandb]'), or set it to"
            " disabled"
        )


class WeightsAndBiases:
    """One run of Weights & Biases. `wandb.json` in the run directory keeps its id and its newest step.

    Weights & Biases accepts a step once, so steps that a resumed run repeats, with the same numbers, are not
    sent again.
    """

    def __init__(self, config: ExperimentConfig, directory: RunDirectory) -> None:
        import wandb

        self._sent = SentSteps(directory.path / "wandb.json", lambda: secrets.token_hex(4))
        tracking = config.tracking
        self._run = wandb.init(
            project=tracking.project,
            name=tracking.name or directory.path.name,
            id=self._sent.id,
            resume=None
            if tracking.mode == "offline"
            else "allow",  # offline, the id alone joins the sessions
            mode=tracking.mode,
            dir=str(directory.path),
            config=config.model_dump(),
            settings=wandb.Settings(
                console="off",  # the run shows its progress itself
                silent=True,
                login_timeout=_SECONDS_TO_START,
                init_timeout=_SECONDS_TO_START,
                finish_timeout=_SECONDS_TO_FINISH,
            ),
        )

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Sends a line of metrics, unless its step was sent before."""
        step = metrics["step"]
        if not self._sent.is_new(step):
            return
        self._run.log({name: _shown(value) for name, value in metrics.items()}, step=step)
        self._sent.sent(step)

    def close(self, failed: bool) -> None:
        """Ends the session; waits a few minutes at most for metrics that are still to be sent."""
        self._run.finish(exit_code=int(failed))


def _shown(value: Any) -> Any:
    """Converts numbers of NumPy and JAX to Python's, and non-finite ones to text, which breaks no axis."""
    if hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
