"""Limits of a program in the sandbox."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the resources of one sandboxed program.

    Attributes:
      memory_mb: address space of each process, and the size of the sandbox's `/tmp`, in MiB.
      processes: number of processes and threads at a time.
      file_mb: size of the largest file, in MiB.
      open_files: number of file descriptors of each process.
      cpu_seconds: processor time of each process, in seconds; None for no limit.
    """

    memory_mb: int = 512
    processes: int = 8
    file_mb: int = 16
    open_files: int = 64
    cpu_seconds: int | None = None
