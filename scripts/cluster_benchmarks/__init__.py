"""Sections of `scripts/bench_cluster.py`; `runs` is shared."""
