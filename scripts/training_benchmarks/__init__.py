"""Measurements of `scripts/bench_training.py`: one file per section; `policies` is shared."""
