"""Serve a trained policy: `python scripts/serve.py runs/quickstart --port 8000`."""

import sys

from rljax.commands.serve import main

if __name__ == "__main__":
    sys.exit(main())
