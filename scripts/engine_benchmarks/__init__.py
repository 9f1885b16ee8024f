"""What `scripts/bench_engine.py` measures: one file a section, and in `policies` what the sections share."""
