"""Parts of the report on a GPU: `scripts/gpu_report.py` starts each module in a process of its own."""
