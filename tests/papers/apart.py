"""The tests of everything else, in a copy of the repository without the papers' wing.

python -m tests.papers.apart                 # the default tier: as long as `pytest`
python -m tests.papers.apart tests/cluster   # some of it, as pytest takes it
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.scripts import load_script


def run_without_papers(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs pytest where no folder `papers` is; returns its exit status and what it says."""
    with tempfile.TemporaryDirectory(prefix="rljax-apart-") as directory:
        copy = Path(directory) / "copy"
        # With what numba has compiled of the drafters.
        load_script("mutate").copy_repository(copy, left_out=("papers", ".*"))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    status, said = run_without_papers(sys.argv[1:])
    print(said)
    sys.exit(status)
