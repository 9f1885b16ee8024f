"""Simulate a cluster: `python scripts/simulate.py workers=64 order=pipe router=two-tiers [key=value ...]`."""

import sys

from rljax.simulation.command import main

if __name__ == "__main__":
    sys.exit(main())
