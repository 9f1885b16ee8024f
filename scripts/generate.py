"""Ask a trained policy: `python scripts/generate.py runs/quickstart "47a5b8c9="`."""

import sys

from rljax.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
