"""What `scripts/report_runs.py` draws and tells."""
