"""An environment for every other library: their requirements exclude one another's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rljax.errors import UserError

PEERS = {"trl": ("trl==1.16.0", "torch==2.13.0")}
"""By library: what is installed."""


def interpreter(peer: str, directory: Path, python: str | None) -> Path:
    """The Python of a library's environment, which is made if it is not there.

    Args:
      directory: holds an environment for every library.
      python: the interpreter to make it with; None for this one.

    Raises:
      UserError: it cannot be made.
    """
    executable = directory / peer / "bin" / "python"
    if executable.exists():
        return executable
    partial = directory / f"{peer}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        subprocess.run([python or sys.executable, "-m", "venv", os.fspath(partial)], check=True)
        subprocess.run([partial / "bin" / "python", "-m", "pip", "install", "-q", *PEERS[peer]], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{peer}: its environment cannot be made: {error}") from error
    partial.rename(directory / peer)
    return executable
