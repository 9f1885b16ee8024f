"""What an experiment cannot do where it runs: on its devices, in several processes, with rollout workers."""

from collections.abc import Collection

from rljax.config.schema import ExperimentConfig, MeshConfig
from rljax.errors import ConfigError


def check_devices(mesh: MeshConfig, num_devices: int) -> None:
    """Raises a ConfigError if the mesh needs more than `num_devices` devices."""
    if mesh.num_devices > num_devices:
        raise ConfigError(
            f"mesh: data {mesh.data} * fsdp {mesh.fsdp} * tensor {mesh.tensor} = {mesh.num_devices} devices,"
            f" but there {'is' if num_devices == 1 else 'are'} {num_devices}"
        )


def check_over_processes(
    config: ExperimentConfig, num_devices: int, num_processes: int, trained: Collection[str]
) -> None:
    """Checks that an experiment can run in several processes with so many devices in all.

    Args:
      config: the experiment.
      num_devices: number of devices of all processes.
      num_processes: number of processes.
      trained: kinds of drafters that are trained.

    Raises:
      ConfigError: the mesh leaves devices out, or a mechanism is not supported over processes.
    """
    mesh, speculation = config.mesh, config.speculation
    if mesh.num_devices != num_devices:
        raise ConfigError(
            f"mesh: data {mesh.data} * fsdp {mesh.fsdp} * tensor {mesh.tensor} = {mesh.num_devices} devices,"
            f" but the {num_processes} processes have {num_devices}, and each must take part; the product"
            f" must be {num_devices}"
        )
    speculates = speculation.drafter is not None
    for key, used, instead in (
        ("tools", config.tools is not None, "leave the section out"),
        *((key, speculates, "set 0") for key in speculation.by_one_clock),
    ):
        if used:
            raise ConfigError(
                f"{key}: decides by the clock of one process, which {num_processes} processes cannot share;"
                f" {instead}"
            )
    if config.rollout.staleness or config.rollout.max_staleness:
        key = "staleness" if config.rollout.staleness else "max_staleness"
        raise ConfigError(f"rollout.{key}: is for one process that trains, not for {num_processes}; set 0")
    if not speculates or not config.cluster.workers:
        return
    for name, kind in speculation.kinds.items():
        if kind in trained:
            raise ConfigError(
                f"speculation.drafter: {name} is trained in the processes that decode, and with"
                f" cluster.workers {num_processes} processes decode nothing; use another drafter, or"
                " cluster.workers: 0"
            )


def check_with_workers(config: ExperimentConfig) -> None:
    """Checks that the rollouts of an experiment can be decoded by workers.

    Raises:
      ConfigError: a mechanism is not supported with workers.
    """
    if not config.cluster.workers:
        return
    if config.cluster.pipe != "off" and not (config.rollout.staleness or config.cluster.into_next_step):
        raise ConfigError(
            "cluster.pipe: every step would wait for the worker with the longest responses; set"
            " rollout.staleness to 1, or cluster.into_next_step"
        )
    if config.cluster.migration and config.rollout.max_staleness:
        raise ConfigError(
            "cluster.migration: a response that goes on under newer weights stays with its worker; set false:"
            " cluster.into_next_step moves outliers into the next step"
        )
    if config.cluster.into_next_step and config.rollout.max_staleness != 2:
        raise ConfigError(
            "cluster.into_next_step: prompts are handed out one step ahead and wait for one more; set"
            " rollout.max_staleness to 2"
        )
    if config.cluster.race and len(config.speculation.kinds) < 2:
        raise ConfigError("cluster.race: copies need another drafter; set speculation.others, too")
    if config.cluster.race and config.tools is not None:
        raise ConfigError("cluster.race: a copy would call tools again, which may answer otherwise; set 0")
    if config.cluster.spot.idle and config.rollout.max_staleness:
        raise ConfigError(
            "cluster.spot.idle: with rollout.max_staleness no rollout ends, so workers are seldom idle; set 0"
        )
    drafting = config.speculation.drafting_devices
    for key, used, instead in (
        (
            "engine.row_invariant",
            not config.engine.row_invariant,
            "bits would depend on who decodes; set true",
        ),
        (
            "cluster.weights=jax_transfer",
            config.cluster.weights == "jax_transfer" and config.distributed.is_wanted(),
            "the devices of one process send, and several train; set object_store or files",
        ),
        (
            "speculation.run_ahead_below",
            bool(config.speculation.run_ahead_below),
            "what one worker samples ahead, another would need; set 0",
        ),
        (
            f"cluster.gpus_per_worker={config.cluster.gpus_per_worker}",
            config.cluster.gpus_per_worker not in (0, config.cluster.mesh.num_devices + drafting),
            f"cluster.mesh has {config.cluster.mesh.num_devices} devices"
            + (f" and speculation.decoupled {drafting}" if drafting else "")
            + "; set as many",
        ),
        (
            "cluster.mesh",
            config.cluster.mesh.num_devices > 1 and config.cluster.numerics == "refuse",
            "without cluster.numerics=warn, since bits are not measured on several devices",
        ),
    ):
        if used:
            raise ConfigError(f"{key}: is not supported with cluster.workers: {instead}")
