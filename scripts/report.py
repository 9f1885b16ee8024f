"""What training did, for one run or several: `python scripts/report.py RUN_DIR ... [--html FILE]`."""

import sys

from rljax.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
