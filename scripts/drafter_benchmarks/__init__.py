"""Measurements of scripts/bench_drafters.py."""
