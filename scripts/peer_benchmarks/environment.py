"""An environment for TRL, whose requirements exclude ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rljax.errors import UserError

_REQUIREMENTS = ("trl==1.16.0", "torch==2.13.0")


def interpreter(directory: Path, python: str | None) -> Path:
    """The Python of TRL's environment, which is made if it is not there.

    Args:
      directory: the environment.
      python: the interpreter to make it with; None for this one.

    Raises:
      UserError: it cannot be made.
    """
    executable = directory / "bin" / "python"
    if executable.exists():
        return executable
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        subprocess.run([python or sys.executable, "-m", "venv", os.fspath(partial)], check=True)
        subprocess.run([partial / "bin" / "python", "-m", "pip", "install", "-q", *_REQUIREMENTS], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"trl: its environment cannot be made: {error}") from error
    partial.rename(directory)
    return executable
