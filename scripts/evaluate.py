"""Evaluate a saved policy: `python scripts/evaluate.py runs/quickstart evaluation.samples=8`."""

import sys

from rljax.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
