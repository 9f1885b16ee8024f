"""Measurements of `scripts/bench_rollout.py`: one module per section."""
