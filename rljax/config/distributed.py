"""Keys of a run over several processes; see docs/several-hosts.md."""

import os
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from rljax.config.section import AutoOnOff, Count, CountOrOff, Section


class DistributedConfig(Section):
    """The processes of a run, one or more a host; all of them run the same command."""

    enabled: AutoOnOff = Field(
        "auto",
        description="Whether this process is one of several. auto: if distributed.coordinator is set, or if"
        " srun, mpirun or a TPU pod's environment has started several. Set on where JAX finds the others by"
        " itself, as on a Cloud TPU pod; set off for an ordinary run inside a SLURM or Open MPI job.",
    )
    coordinator: str | None = Field(
        None,
        description="Address of process 0 as host:port, with any free port; null asks the launcher. Set it,"
        " with distributed.processes and distributed.process, where no launcher starts the processes.",
    )
    processes: Count | None = Field(
        None, description="Number of processes of the run. Set it together with distributed.coordinator."
    )
    process: CountOrOff | None = Field(
        None,
        description="Index of this process, from 0. Set it together with distributed.coordinator, to another"
        " number in every process.",
    )
    timeout: Annotated[int, Field(ge=1, le=86_400)] = Field(
        300,
        description="Seconds to wait at the start for processes that have not come yet. Raise it where hosts"
        " start at very different times.",
    )
    heartbeat_timeout: Annotated[int, Field(ge=5, le=86_400)] = Field(
        100,
        description="Seconds without a sign of life after which a process counts as lost and ends the"
        " others. Lower it to notice a lost host sooner; raise it where hosts pause for long.",
    )

    @model_validator(mode="after")
    def _check(self) -> "DistributedConfig":
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise ValueError(
                    f"distributed.coordinator: {self.coordinator!r} is not host:port, as in 10.0.0.1:8476"
                )
        return self

    def is_wanted(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Whether this process is one of several, by the keys and by a launcher's environment."""
        if self.enabled != "auto":
            return self.enabled == "on"
        return self.coordinator is not None or launcher(environment) is not None


def launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns what has started several processes, of which this is one: "SLURM", "Open MPI" or "TPU pod";
    None for an ordinary start.
    """
    for name, size, index in (
        ("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ):
        count = environment.get(size, "")
        if count.isdecimal() and int(count) > 1 and index in environment:
            return name
    return "TPU pod" if "," in environment.get("TPU_WORKER_HOSTNAMES", "") else None


def missing_keys(*values: object) -> str:
    """Returns what is to be said of coordinator, processes and process where only some of them are set."""
    names = ("coordinator", "processes", "process")
    missing = [f"distributed.{name}" for name, value in zip(names, values, strict=True) if value is None]
    if not missing or len(missing) == len(names):
        return ""
    present = next(name for name, value in zip(names, values, strict=True) if value is not None)
    return f"{present}: needs {' and '.join(missing)} as well"
