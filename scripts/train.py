"""Train a policy: `python scripts/train.py --config configs/quickstart.yaml [key=value ...]`."""

import sys

from rljax.commands.train import main, main_of_process

__all__ = ["main", "main_of_process"]

if __name__ == "__main__":
    sys.exit(main_of_process())
