"""Keys of rollout workers in processes of their own that do not belong to a single paper, and what a paper's
mechanism for them is known by; see docs/cluster.md.

A mechanism has a class that extends `ClusterKeys` with keys of its own.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from rljax.config.mesh import MeshConfig
from rljax.config.section import Count, CountOrOff, PathText, Rule, Section
from rljax.config.speculation_keys import SpeculationKeys

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ClusterKeys(Section):
    """Keys that do not belong to a single paper; in a mechanism's class, with its own keys after them."""

    workers: CountOrOff = Field(
        0,
        description="Number of rollout workers to keep running, each a process with an engine of its own; 0"
        " decodes in the training process, without Ray. Set it where rollouts take most of a step and there"
        " are cores, GPUs or hosts to share them.",
    )
    address: str | None = Field(
        None,
        description="Address of a Ray cluster to join, as host:port of its head, or auto for one that runs on"
        " this machine; null starts one here. Set it to use several machines.",
    )
    cpus_per_worker: Count = Field(
        1,
        description="Cores that Ray reserves for a worker. Raise it where a worker should have a machine, or"
        " a large part of one, to itself.",
    )
    gpus_per_worker: CountOrOff = Field(
        0,
        description="GPUs that Ray reserves for a worker. Set it to the number of devices of cluster.mesh, 1"
        " without one, where workers decode on GPUs.",
    )
    mesh: MeshConfig = Field(
        MeshConfig(),
        description="Mesh of each worker's own devices, which decode together. Set it where the policy does"
        " not fit one device; else several workers are faster, and lose less where one is lost.",
    )
    resources_per_worker: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="Further resources of Ray's that a worker needs, by name, such as {TPU: 1} or a label of"
        " your own. Set it to say on which nodes workers may be.",
    )
    lease_seconds: Seconds = Field(
        10.0,
        description="Seconds of silence after which a worker counts as lost and its responses go on"
        " elsewhere. Lower it to lose less time to a host that hangs; raise it where hosts pause for long.",
    )
    patience_seconds: Seconds = Field(
        300.0,
        description="Seconds without any worker after which the run saves its last step and ends. Raise it"
        " where machines come back late, as preemptible ones do.",
    )
    connect_seconds: Seconds = Field(
        15.0,
        description="Seconds to wait for the cluster at cluster.address. Raise it for a slow network.",
    )
    fetch_seconds: Seconds = Field(
        120.0,
        description="Seconds that a worker waits for a version of the weights before it asks again. Raise it"
        " for large policies over slow networks.",
    )
    weights: Literal["object_store", "files", "jax_transfer"] = Field(
        "object_store",
        description="How weights come to the workers: Ray's object store (one copy a node), files in"
        " weights_dir, or jax.experimental.transfer from device to device. What fails falls back to the"
        " object store. Set files where a shared disk is faster, jax_transfer to spare the host's memory.",
    )
    weights_dir: PathText | None = Field(
        None,
        min_length=1,
        description="Directory of the weights with weights: files, which all workers see; null is shared"
        " memory, for workers on this machine. Set it to a shared disk for several machines.",
    )
    replay: PathText | None = Field(
        None,
        min_length=1,
        description="Run directory, or its schedule.jsonl, whose batches are formed again, every token by"
        " the same version of the weights. Set it to repeat a run with rollout.max_staleness bit for bit.",
    )
    numerics: Literal["refuse", "warn"] = Field(
        "refuse",
        description="Reaction to a worker whose processor computes other bits: refuse it, or admit it and"
        " count the tokens that are found to differ. Set warn for a mixed cluster where the same bits do"
        " not matter.",
    )

    balance: CountOrOff = Field(
        0,
        description="Responses of a worker from which on one without work takes half of them; 0 never moves"
        " any. Set it where passes over half of a batch are quicker, such as 8.",
    )

    @model_validator(mode="after")
    def _check(self) -> "ClusterKeys":
        address = self.address
        if address is None or address == "auto":
            return self
        host, _, port = address.rpartition(":")
        if "://" in address:
            raise ValueError(
                f"cluster.address: {address!r} is a Ray client's; start the run on a node of the cluster,"
                " with cluster.address=auto or host:port"
            )
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError(f"cluster.address: {address!r} is not auto or host:port, as in 10.0.0.1:6379")
        return self


class Mechanism(NamedTuple):
    """What a paper adds to rollouts besides a policy.

    Attributes:
      keys: class of its keys; `ClusterKeys` for none.
      speculation: class of its keys in the section `speculation`.
      of_steps: those of them that only training reads, since what follows a step is known there alone; with
        the reason that an evaluation gives.
      idle_requests: where the function is that makes what idle slots decode, as `module:function`; empty for
        none. See `rljax/speculation/idle_requests.py`.
      extras: where the function is that yields what takes part in a run's steps (`rljax/training/extras.py`).
      routing: where its `Routing` is, as `module:Class`; empty where it has no say in who decodes what.
      idle_work: where the function is that makes the driver's part of what workers do in idle time, as
        `module:function`; empty for none. See `rljax/cluster/idle_work.py` for both functions.
      idle_worker: where the function is that makes a worker's part.
      rules: its keys that contradict each other, or others.
      with_workers: the same, where there are workers.
    """

    keys: type[ClusterKeys] = ClusterKeys
    speculation: type[SpeculationKeys] = SpeculationKeys
    of_steps: Mapping[str, str] = MappingProxyType({})
    idle_requests: str = ""
    extras: str = ""
    routing: str = ""
    idle_work: str = ""
    idle_worker: str = ""
    rules: tuple[Rule, ...] = ()
    with_workers: tuple[Rule, ...] = ()
