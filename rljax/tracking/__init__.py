"""Trackers of metrics besides metrics.jsonl, which is all that a run itself depends on.

trackers.py            all of them together; one that fails is left out, and the run goes on
tensorboard.py         event files in the run directory, always
weights_and_biases.py  Weights & Biases, if `tracking.mode` says so
"""

from rljax.tracking.trackers import Trackers

__all__ = ["Trackers"]
