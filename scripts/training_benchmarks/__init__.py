"""What `scripts/bench_training.py` measures: one file a section, and the sizes they share in `policies`."""
