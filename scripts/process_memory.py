"""Memory of processes, as Linux counts it."""

from pathlib import Path


def memory_kilobytes(key: str, process: int | str = "self") -> int | None:
    """Returns a value from Linux's status of a process; None on other systems, and once it has ended.

    Args:
      key: such as VmRSS, the resident size, and VmHWM, its peak.
      process: its number.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{key}:")), None)


def forget_peak() -> None:
    """Lets the kernel count the peak of this process anew: what compiling took is not the update's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
