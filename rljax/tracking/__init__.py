"""Trackers of metrics besides metrics.jsonl; a run depends on none of them.

trackers.py            all trackers of a run; one that fails is dropped, and the run continues
tensorboard.py         event files in the run directory, always written
weights_and_biases.py  Weights & Biases, unless `tracking.mode` is disabled
mlflow.py              MLflow, where `tracking.mlflow` names a store
sent_steps.py          which steps these two have, over the sessions of a run
"""

from rljax.tracking.trackers import Trackers

__all__ = ["Trackers"]
