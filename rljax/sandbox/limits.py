"""Limits of a program in the sandbox."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Upper bounds of one sandboxed program.

    Attributes:
      memory_mb: address space of each process, and the size of the sandbox's `/tmp`, in MiB.
      processes: processes and threads at once.
      file_mb: the largest file, in MiB.
      open_files: file descriptors of each process.
      cpu_seconds: processor time of each process; None for no bound.
    """

    memory_mb: int = 512
    processes: int = 8
    file_mb: int = 16
    open_files: int = 64
    cpu_seconds: int | None = None
