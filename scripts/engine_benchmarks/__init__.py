"""Measurements of `scripts/bench_engine.py`: one file per section; `policies` is shared."""
