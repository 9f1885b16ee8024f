"""Weights & Biases (the `wandb` extra): a run directory is one run there, over all its sessions."""

import importlib.util
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

from rljax.config import ExperimentConfig
from rljax.durable_files import write_durably
from rljax.errors import ConfigError
from rljax.run_directory import RunDirectory

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

        self._path = directory.path / "wandb.json"
        if self._path.exists():
            self._kept = json.loads(self._path.read_text(encoding="utf-8"))
        else:
            self._kept = {"id": secrets.token_hex(4), "step": -1}
            self._keep()
        tracking = config.tracking
        self._run = wandb.init(
            project=tracking.project,
            name=tracking.name or directory.path.name,
            id=self._kept["id"],
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
        if step <= self._kept["step"]:
            return
        self._run.log({name: _shown(value) for name, value in metrics.items()}, step=step)
        self._kept["step"] = step
        self._keep()

    def close(self, failed: bool) -> None:
        """Ends the session; waits a few minutes at most for metrics that are still to be sent."""
        self._run.finish(exit_code=int(failed))

    def _keep(self) -> None:
        write_durably(self._path, json.dumps(self._kept).encode())


def _shown(value: Any) -> Any:
    """Converts numbers of NumPy and JAX to Python's, and non-finite ones to text, which breaks no axis."""
    if hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
