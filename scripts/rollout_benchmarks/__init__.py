"""What `scripts/bench_rollout.py` measures, a module a section."""
