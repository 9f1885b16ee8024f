"""Plan a run: `python scripts/plan.py --config configs/quickstart.yaml --topology v5e:2x4 [key=value]`."""

import sys

from rljax.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
