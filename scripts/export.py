"""Export a run's policy for Hugging Face's libraries: `python scripts/export.py runs/quickstart exported`."""

import sys

from rljax.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
