"""What an experiment cannot do where it runs: on its devices, in several processes, with rollout workers."""

from collections.abc import Collection

from rljax.config.contradictions import OVER_PROCESSES, WITH_WORKERS
from rljax.config.mesh import MeshConfig
from rljax.config.schema import ExperimentConfig
from rljax.config.section import broken_rule
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
    problem = broken_rule(config, OVER_PROCESSES)
    if problem is not None:
        raise ConfigError(problem)
    if speculation.drafter is None or not config.cluster.workers:
        return
    for name, kind in speculation.kinds.items():
        if kind in trained:
            raise ConfigError(
                f"speculation.drafter: {name} is trained in the processes that decode, and with"
                f" cluster.workers {num_processes} processes decode nothing; use another drafter, or"
                " cluster.workers: 0"
            )


def check_with_workers(config: ExperimentConfig) -> None:
    """Checks that the rollouts of an experiment can be decoded by workers, if it has some.

    Raises:
      ConfigError: a mechanism is not supported with workers.
    """
    problem = broken_rule(config, WITH_WORKERS) if config.cluster.workers else None
    if problem is not None:
        raise ConfigError(problem)
