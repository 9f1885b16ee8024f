"""Keys of rollout workers in processes of their own; see docs/cluster.md."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rljax.config.mesh import MeshConfig
from rljax.config.section import Count, CountOrOff, PathText, Section

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class SpotConfig(Section):
    """Training an EAGLE head on workers that have nothing to decode (TLT, section 4.2)."""

    idle: CountOrOff = Field(
        0,
        description="Number of workers without requests from which the first of them trains the head and the"
        " others prepare features for it; 0 never does, and the training process trains it behind each"
        " rollout. Set 1 where rollouts end with workers idle for long and drafts pay.",
    )
    save_every: Count = Field(
        4,
        description="Updates of the head between two times that it is saved, beside training. Lower it to"
        " lose less where workers are lost; raise it where the head is large and the network slow.",
    )


class ClusterConfig(Section):
    """Rollout workers on Ray; tokens, rewards and weights are those of a run without, bit for bit."""

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

    pipe: Literal["off", "ranked", "two_tiers"] = Field(
        "off",
        description="Who decodes which prompts (RhymeRL's HistoPipe): ranked by the lengths of their last"
        " responses, ascending in odd steps and descending in even ones, so that a worker's long step follows"
        " a short one; two_tiers gives long ones more workers. Needs rollout.staleness: 1, or into_next_step."
        " Set it where prompts come again in many epochs and their lengths stay alike.",
    )
    pipe_groups: Count | None = Field(
        None,
        description="Number of ranking groups; null for one a worker. Set fewer than workers for two_tiers,"
        " such as half of them.",
    )
    pipe_min_workers: Count = Field(
        1,
        description="Fewest workers of a ranking group with two_tiers (RhymeRL's MIN_WKS). Raise it where"
        " the short groups' batches do not fit one worker.",
    )
    pipe_max_workers: Count | None = Field(
        None,
        description="Most workers of a ranking group with two_tiers (RhymeRL's MAX_WKS); null is four times"
        " an even share. Lower it where more workers no longer shorten a group, raise it where a few long"
        " responses decide how long a step takes.",
    )
    migration: bool = Field(
        False,
        description="Whether responses that become much longer than their ranking group was go on on workers"
        " that decode longer ones (RhymeRL, section 6.3). Set it with pipe.",
    )
    into_next_step: bool = Field(
        False,
        description="Whether groups that wait for nothing but responses that became much longer than expected"
        " are left to the next step, and these go on under its weights (RhymeRL's migration into the next"
        " step). Needs rollout.max_staleness: 2. Set it where one response in a batch holds up every step;"
        " timing decides which, and schedule.jsonl repeats it.",
    )
    balance: CountOrOff = Field(
        0,
        description="Responses of a worker from which on one without work takes half of them; 0 never moves"
        " any. Set it where passes over half of a batch are quicker, such as 8.",
    )
    race: CountOrOff = Field(
        0,
        description="Responses of which a worker without work decodes copies, with a drafter that they have"
        " not had (SpecActor's best-of-N); the longest copy counts. 0 never copies any. Set a few"
        " where there are several drafters and rollouts end with few responses for long.",
    )

    spot: SpotConfig = Field(
        SpotConfig(),
        description="Training the head of drafts in idle time. Set spot.idle with an EAGLE head whose drafts"
        " pay, and several workers.",
    )

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
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
