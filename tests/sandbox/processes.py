"""What a sandboxed program left running, found by a marker in its source, that is on its command line."""

import functools
import platform
import shutil
import subprocess
import time
from pathlib import Path


@functools.cache
def namespaces():
    """Whether users can make namespaces here, by another program's word, and processes filter their system
    calls: then the jail must work.
    """
    if platform.machine() not in ("x86_64", "aarch64"):
        return False
    if not Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        return False
    unshare = shutil.which("unshare")
    command = [unshare, "--user", "--mount", "--net", "--pid", "--fork", "--map-root-user", "true"]
    return unshare is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


def running(marker):
    """Process ids whose command line holds the marker."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in command:
                pids.append(int(entry.name))
    return pids


def end(marker, seconds=5.0):
    """Waits until nothing with the marker runs, and returns what still does then."""
    deadline = time.monotonic() + seconds
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    return running(marker)
