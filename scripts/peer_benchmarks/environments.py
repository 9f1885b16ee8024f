"""An environment for every other library: their requirements exclude one another's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rljax.errors import UserError

PEERS = {"trl": (("trl==1.16.0", "torch==2.13.0"), (3, 10)), "tunix": (("google-tunix==0.1.7",), (3, 11))}
"""By library: what is installed, and the oldest Python that it runs on."""


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
    requirements, oldest = PEERS[peer]
    if python is None and sys.version_info[:2] < oldest:
        raise UserError(f"{peer} needs Python {'.'.join(map(str, oldest))}: name one with --python")
    partial = directory / f"{peer}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        subprocess.run([python or sys.executable, "-m", "venv", os.fspath(partial)], check=True)
        subprocess.run([partial / "bin" / "python", "-m", "pip", "install", "-q", *requirements], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{peer}: its environment cannot be made: {error}") from error
    partial.rename(directory / peer)
    return executable
