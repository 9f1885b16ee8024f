"""`python -m rljax COMMAND ...`, as the console command `rljax`."""

import sys

from rljax.commands.console import main

if __name__ == "__main__":
    sys.exit(main())
