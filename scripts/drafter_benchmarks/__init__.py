"""What scripts/bench_drafters.py measures."""
