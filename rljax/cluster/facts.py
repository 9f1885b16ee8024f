"""The facts in which driver and workers must agree before they work together."""

import functools
import hashlib
import os
import socket
from importlib.metadata import version
from pathlib import Path

import drafters
import rljax
from rljax.cluster.messages import Facts


@functools.cache
def code_digest() -> str:
    """Returns eight hexadecimal digits of the source of `rljax` and `drafters`."""
    digest = hashlib.sha256()
    for package in (rljax, drafters):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def facts() -> Facts:
    """Returns the facts of this process."""
    return Facts(code_digest(), version("jax"), socket.gethostname(), os.getpid())
