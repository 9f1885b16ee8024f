"""The facts in which driver and workers must agree before they work together."""

import os
import socket
from importlib.metadata import version

from rljax.cluster.messages import Facts
from rljax.provenance import source_digest


def facts() -> Facts:
    """Returns the facts of this process."""
    return Facts(source_digest()[:8], version("jax"), socket.gethostname(), os.getpid())
