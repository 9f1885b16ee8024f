"""Parts of the report on a GPU or TPU: `scripts/gpu_report.py` starts each module in a process of its own."""
