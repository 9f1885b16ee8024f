"""What a worker is built from, and building it: the engine and the drafters of the run, in another process.

Workers read no file of the run. What else the config names by its path, such as a small model or a drafter of
the user's, must be there on the workers' hosts as well; what is not there ends the run with the line that a
run without workers would end with.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from drafters.registry import make_drafters
from rljax.assembly.decoding import make_numerics, make_scheduler, warm_up
from rljax.assembly.policy import Policy
from rljax.cluster.idle_work import IdleWorker, WorkerParts, make_idle_worker
from rljax.config import ExperimentConfig
from rljax.config.speculation import SpeculationConfig
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.environments.use import EnvironmentUse
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import init_params
from rljax.rollout.collector import Scheduler
from rljax.sharding import make_mesh
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a worker is built from; it reads no file of the run.

    Attributes:
      config: the experiment.
      policy: architecture of the policy.
      eos_token_ids: tokens that end a response.
      tokenizer_files: contents of the tokenizer's files, by name.
      serves: whether requests come at any time, and may have a distribution of their own, as a server's.
    """

    config: ExperimentConfig
    policy: ModelConfig
    eos_token_ids: tuple[int, ...]
    tokenizer_files: Mapping[str, bytes]
    serves: bool = False


def make_blueprint(config: ExperimentConfig, policy: Policy, serves: bool = False) -> Blueprint:
    """Returns the blueprint of the workers of a run, or of a server."""
    contents = {file.name: file.read_bytes() for file in Tokenizer.files(policy.tokenizer_directory)}
    return Blueprint(config, policy.config, tuple(policy.eos_token_ids), contents, serves)


def check_moves(scheduler: Scheduler) -> None:
    """Raises a ConfigError for episodes of an environment: its state would not move to another worker."""
    if isinstance(scheduler.tools, EnvironmentUse):
        raise ConfigError(
            "cluster.workers: the state of an environment does not move to another worker; set 0 with such a"
            " task"
        )


def check_shared(speculator: Speculator | NoDrafts) -> None:
    """Raises a ConfigError for a drafter that is trained, but not for drafters in other processes."""
    for name, training in speculator.training.items():
        if training.shared is None:
            raise ConfigError(
                f"speculation.drafter: {name} is trained on the engine's passes, which cluster.workers run;"
                " give its training a SharedTraining (drafters/training.py), or leave it out"
            )


@dataclasses.dataclass(frozen=True)
class Built:
    """The engine of a worker.

    Attributes:
      scheduler: engine, drafters and what requests need.
      fingerprint: of its numerics; None where it is not measured.
      directories: files of the drafters, which end with the worker.
      idle_worker: what it does while it has nothing to decode; None for nothing.
    """

    scheduler: Scheduler
    fingerprint: str | None
    directories: tuple[Path, ...]
    idle_worker: IdleWorker | None = None

    def close(self) -> None:
        """Ends what goes on in the background."""
        self.scheduler.engine.close()
        self.scheduler.speculator.close()
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def build(blueprint: Blueprint, name: str, get: Callable[[Any], Any], put: Callable[[Any], Any]) -> Built:
    """Builds the engine of a worker as a run does, and compiles.

    Args:
      blueprint: from `make_blueprint`.
      name: the worker's.
      get, put: those of the worker.

    Raises:
      UserError: it cannot be built here.
    """
    # Of `mesh` the worker's engine knows its own: the run's is of the process that trains.
    config = blueprint.config.model_copy(update={"mesh": blueprint.config.cluster.mesh})
    cache = config.engine.compilation_cache
    if cache is not None:
        enable_compilation_cache(cache)
    if config.mesh.num_devices > jax.local_device_count():
        raise ConfigError(
            f"cluster.mesh: {config.mesh.num_devices} devices, but {name} has {jax.local_device_count()};"
            " lower it, or reserve more for a worker"
        )
    mesh = make_mesh(config.mesh)
    numerics, invariance = make_numerics(config, blueprint.policy, mesh)
    with tempfile.TemporaryDirectory() as directory:
        for file, content in blueprint.tokenizer_files.items():
            (Path(directory) / file).write_bytes(content)
        tokenizer = Tokenizer.load(directory)
    tokenizer.eos_token_ids = blueprint.eos_token_ids
    policy = Policy(blueprint.policy, {}, tokenizer, Path(), blueprint.eos_token_ids)
    pool = ExecutablePool(bool(config.engine.row_invariant), cache)
    speculation, directories = _of_worker(config.speculation, name)
    config = config.model_copy(update={"speculation": speculation})
    drafters = make_drafters(speculation)
    scheduler = make_scheduler(config, policy, drafters, numerics, pool, mesh, blueprint.serves)
    scheduler.speculator.freeze()
    # Programs depend on shapes alone: any weights will do.
    params = scheduler.engine.load_params(init_params(blueprint.policy, config.seed))
    warm_up(scheduler, params, config, requests_join=blueprint.serves)
    idle_worker = make_idle_worker(WorkerParts(config.cluster, scheduler.speculator, params, name, get, put))
    fingerprint = None if invariance is None else invariance.fingerprint
    return Built(scheduler, fingerprint, directories, idle_worker)


def _of_worker(config: SpeculationConfig, name: str) -> tuple[SpeculationConfig, tuple[Path, ...]]:
    """Returns the drafters of a worker, which keep their files in directories of its own and save none of the
    run's.
    """
    directories: list[Path] = []

    def changed(arguments: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {key: value for key, value in arguments.items() if key != "save_dir"}
        if arguments.get("spill_dir") is not None:
            parent = Path(arguments["spill_dir"])
            with contextlib.suppress(OSError):  # the drafter says that it cannot write there
                parent.mkdir(parents=True, exist_ok=True)
                directories.append(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent)))
                arguments["spill_dir"] = str(directories[-1])
        return arguments

    others = {other: changed(arguments) for other, arguments in config.others.items()}
    return config.model_copy(update={"args": changed(config.args), "others": others}), tuple(directories)
