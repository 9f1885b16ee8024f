"""Trains a draft head before RL, on the policy's rollouts of the training prompts (TLT, section 6.4, "after
initial warm-up").

Each round samples rollouts with the real engine, computes their features in one packed forward pass, and runs
`slices_per_round` updates. DIR.partial holds the state of an interrupted run, which resumes with the same
bits; at the end DIR holds the head in the layout that SGLang or vLLM loads.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from drafters.eagle.checkpoint import ServingEngine, check_layers, save_head
from drafters.eagle.evaluation import Acceptance, describe, evaluate_head
from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig, init_head, shared_params
from drafters.eagle.objective import HeadTraining, Variant, published_training
from drafters.eagle.saving import AsyncHeadSaver
from drafters.eagle.spot_trainer import BufferSettings, HeadTrainer, head_optimizer
from drafters.eagle.states import StateReader, States
from rljax.assembly.checkpoint import RunCheckpoints
from rljax.config import ExperimentConfig, load_config
from rljax.config.speculation import WITHOUT_STEPS
from rljax.durable_files import sync_directory, write_durably
from rljax.engine.executables import enable_compilation_cache
from rljax.engine.number_type import with_number_type
from rljax.errors import Interrupted, UserError
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.progress import Progress
from rljax.rollout.collector import EVALUATION, TRAINING, Group, WantedGroups
from rljax.run_directory import RunDirectory
from rljax.tasks.base import Split
from rljax.training.building import make_run
from rljax.training.interruption import StopRequest
from rljax.training.training_run import TrainingRun

_SETTINGS, _TRAINER, _VOCABULARY = "warm_up.json", "trainer.npz", "vocabulary"
_MAY_CHANGE = ("steps", "heldout", "engine")


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Settings of a warm-up.

    Attributes:
      block: shape of a block head; None for the default one.
      training: losses and unrolled steps; None for the published ones. The policy's sampling distribution
        takes the place of its own.
      draft_vocabulary: number of tokens that the head can draft, those most frequent in the first rollouts;
        None for the policy's vocabulary.
      slices_per_round: number of updates on the rollouts of a step before the next are sampled.
      heldout: number of held-out problems to measure acceptance on.
      depth: number of drafted tokens in that measurement.
      engine: serving engine whose layout the head is saved in.
      buffer: bounds of the training data in memory.
    """

    variant: Variant = "eagle3"
    block: BlockShape | None = None
    training: HeadTraining | None = None
    draft_vocabulary: int | None = None
    steps: int = 400
    slices_per_round: int = 100
    learning_rate: float = 1e-3
    heldout: int = 64
    depth: int = 6
    engine: ServingEngine = "sglang"
    buffer: BufferSettings = dataclasses.field(default_factory=BufferSettings)


class PolicyRollouts:
    """Rollouts of a run's present policy, with their features.

    Args:
      run: run with the policy, the prompts and the engine.
      head: head that reads the features.
    """

    def __init__(self, run: TrainingRun, head: HeadConfig) -> None:
        self.run = run
        training = run.config.training
        self._reader = StateReader(head, run.numerics, training.pack_length, training.rows_per_microbatch)

    def training(self, step: int) -> Iterator[States]:
        """Samples the prompts of an RL step and yields their features."""
        rollout = self.run.config.rollout
        first = step * rollout.prompts_per_step
        return self.read(
            self._collect(
                "train",
                range(first, first + rollout.prompts_per_step),
                rollout.samples_per_prompt,
                TRAINING,
                step,
            )
        )

    def heldout(self, problems: int) -> list[States]:
        """Samples held-out prompts and returns their features."""
        return list(self.read(self._collect("heldout", range(problems), 1, EVALUATION, 0)))

    def read(self, groups: Sequence[Group]) -> Iterator[States]:
        """Yields the features of groups that the present policy has sampled."""
        pairs = [
            (group.prompt_ids, completion.response_ids)
            for group in groups
            for completion in group.completions
        ]
        return self._reader.read(self.run.state.params, pairs)

    def _collect(self, split: Split, indices: range, samples: int, purpose: int, step: int) -> list[Group]:
        params = self.run.engine.load_params(self.run.state.params)
        wanted = WantedGroups(split, indices, samples, purpose, step)
        return self.run.collector.collect(params, wanted)[0]


def make_trainer(run: TrainingRun, head: HeadConfig, settings: WarmUp) -> HeadTrainer:
    """Returns the trainer of a new head, on packed rows of the same size as the policy's.

    Args:
      run: run with the policy.
      settings: objective, learning rate and buffer are read.
    """
    training = published_training(head.variant) if settings.training is None else settings.training
    training = dataclasses.replace(training, sampling=run.engine.sampling)
    pack_length = run.config.training.pack_length
    return HeadTrainer(
        head,
        training,
        head_optimizer(settings.learning_rate),
        rope_table(head.policy, pack_length + training.steps),
        # A head decides no token, so its bits need not be the decoder's.
        dataclasses.replace(run.numerics, row_invariant=False),
        settings.buffer,
        pack_length,
        run.config.training.rows_per_microbatch,
        run.config.seed,
        init_head(head, run.state.params, run.config.seed),
        mesh=run.engine.mesh,
    )


def measure(
    run: TrainingRun, head: HeadConfig, params: Params, shared: Params, heldout: Sequence[States], depth: int
) -> Acceptance:
    """Returns the acceptance of a head by `evaluate_head`, at most a block deep. `shared` are weights of the
    policy that sampled `heldout`.
    """
    training = run.config.training
    if head.block is not None:
        depth = min(depth, head.block.size)
    return evaluate_head(
        params,
        head,
        shared,
        heldout,
        rope_table(head.policy, training.pack_length + depth),
        dataclasses.replace(run.numerics, row_invariant=False),
        depth,
        training.pack_length,
        training.rows_per_microbatch,
        run.engine.sampling,
    )


def with_vocabulary(run: TrainingRun, head: HeadConfig, size: int, sampled: Sequence[States]) -> HeadConfig:
    """Returns the head with a draft vocabulary: responses' most frequent tokens, and those that end one.

    Raises:
      UserError: the head cannot have one, or not one of that size.
    """
    counts = np.zeros(head.policy.vocab_size, np.int64)
    for tokens, _, response in sampled:
        counts += np.bincount(tokens[response], minlength=len(counts))
    try:
        if not len(run.engine.eos_token_ids) < size <= head.policy.used_rows:
            raise ValueError(
                f"{size} is not above the {len(run.engine.eos_token_ids)} tokens that end a"
                f" response, and at most the policy's {head.policy.used_rows}"
            )
        vocabulary = DraftVocabulary.most_frequent(counts, size, run.engine.eos_token_ids)
        return dataclasses.replace(head, vocabulary=vocabulary)
    except ValueError as error:
        raise UserError(f"--draft-vocabulary: {error}") from error


def warm_up(config: ExperimentConfig, settings: WarmUp, output: str | Path) -> tuple[Acceptance, Acceptance]:
    """Trains a head for the config's policy and saves it. Resumes an interrupted call.

    Args:
      config: the experiment; its drafter is ignored.
      output: directory to write; must not exist, or be empty.

    Returns:
      Acceptance on held-out rollouts before and after the training.

    Raises:
      UserError: the output exists, the settings differ from those of the interrupted call, or the serving
        engine could not load such a head.
      Interrupted: a signal asked to stop; the state is saved.
    """
    training = settings.training or published_training(settings.variant)
    if config.training.pack_length <= training.steps + 1:
        raise UserError(
            f"training.pack_length: {config.training.pack_length} is too short for {training.steps} unrolled"
            " steps"
        )
    if settings.block is not None and training.steps > settings.block.size:
        raise UserError(
            f"--unrolled-steps: {training.steps} is more than the {settings.block.size} positions of a block"
        )
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} exists and is not an empty directory; choose another one")
    if config.engine.compilation_cache is not None:
        enable_compilation_cache(config.engine.compilation_cache)
    partial = output.with_name(f"{output.name}.partial")
    # Any drafter gives the same rollouts, and the configured one may be the head that is to be trained.
    speculation = config.speculation.model_copy(update={"drafter": None, **WITHOUT_STEPS})
    directory = RunDirectory(partial)
    begun = directory.config_path.exists()
    dtype = load_config(directory.config_path).policy.compute_dtype if begun else None
    config = with_number_type(config, dtype)
    config = config.model_copy(update={"run_dir": str(partial), "speculation": speculation})
    directory.write_config(config)
    _check_settings(partial / _SETTINGS, settings)
    checkpoints = RunCheckpoints(directory.checkpoints_path, config.checkpoint.keep)
    try:
        with Progress() as progress:
            run = make_run(config, directory, checkpoints, progress, time.perf_counter())
            head = HeadConfig(settings.variant, run.trainer.config, block=settings.block)
            if settings.variant == "eagle3":
                check_layers(output, head)
            before, after = _train(run, head, settings, partial / _TRAINER, output)
    finally:
        checkpoints.close()
    shutil.rmtree(partial)
    return before, after


def _train(
    run: TrainingRun, head: HeadConfig, settings: WarmUp, file: Path, output: Path
) -> tuple[Acceptance, Acceptance]:
    """Trains the head, and returns its acceptance before and after."""
    progress, rollouts = run.progress, PolicyRollouts(run, head)
    first: list[States] = []
    state: dict[str, np.ndarray] = {}
    if file.exists():
        with np.load(file) as arrays:
            state = dict(arrays)
    if _VOCABULARY in state:
        head = dataclasses.replace(head, vocabulary=DraftVocabulary(state.pop(_VOCABULARY)))
    elif settings.draft_vocabulary is not None:
        first = list(rollouts.training(0))
        head = with_vocabulary(run, head, settings.draft_vocabulary, first)
    trainer = make_trainer(run, head, settings)
    shared = shared_params(run.state.params, head.policy)
    heldout = rollouts.heldout(settings.heldout)

    # Measure the new head, then resume.
    before = measure(run, head, trainer.params, shared, heldout, settings.depth)
    progress.message(f"before: {describe(before)}")
    done = 0
    if state:
        done = int(state.pop("done"))
        trainer.load_state(state)
        progress.message(f"resumed after {done} updates")

    # Update by update; new rollouts at the start of each round.
    progress.stage("head", settings.steps, completed=done, sparse=True)
    with StopRequest(progress.message) as stop:
        while done < settings.steps:
            if done % settings.slices_per_round == 0:
                _save(file, trainer, done)
                number = done // settings.slices_per_round
                progress.update("rollout", f"round {number + 1}")
                trainer.begin_step(0)  # the policy stays as it is, so no rollout is too old to learn from
                for sequence in first if first and number == 0 else rollouts.training(number):
                    trainer.add(*sequence)
            start = time.perf_counter()
            metrics = trainer.slice(shared)
            if metrics is None:
                raise UserError(
                    "no rollout has a response that a head could learn from: responses of at least two tokens"
                    " are needed, and room for them in the buffer"
                )
            done += 1
            progress.step(
                done,
                {
                    "tokens_per_second": metrics["tokens"] / (time.perf_counter() - start),
                    "loss": metrics["loss"],
                    "accept_length": metrics["accept_length"],
                },
            )
            if stop.signal is not None and done < settings.steps:
                _save(file, trainer, done)
                raise Interrupted(f"stopped after {done} updates, which are saved", stop.signal)

    # Measure again and save.
    _save(file, trainer, done)
    after = measure(run, head, trainer.params, shared, heldout, settings.depth)
    progress.message(f"after:  {describe(after)}")
    if head.block is None:
        save_head(output, head, jax.device_get(trainer.params), engine=settings.engine)
    else:
        saver = AsyncHeadSaver(output)
        saver.save(done, trainer.params, head)
        saver.wait()
    progress.message(f"head: {output} ({settings.variant}, {done} updates)")
    return before, after


def _check_settings(file: Path, settings: WarmUp) -> None:
    """Writes the settings, or compares them with those of the call to be resumed."""
    new = json.loads(json.dumps(dataclasses.asdict(settings)))
    if file.exists():
        old = json.loads(file.read_text(encoding="utf-8"))
        for name, value in new.items():
            if name not in _MAY_CHANGE and old.get(name) != value:
                raise UserError(
                    f"{name}: is {value}, but {file.parent} was begun with {old.get(name)}; set it back to go"
                    " on with that head, or delete the directory"
                )
    write_durably(file, json.dumps(new, indent=1).encode())


def _save(file: Path, trainer: HeadTrainer, done: int) -> None:
    """Replaces the file with the trainer's state atomically."""
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "wb") as stream:
        vocabulary = trainer.head.vocabulary
        known = {} if vocabulary is None else {_VOCABULARY: vocabulary.tokens}
        np.savez(stream, done=np.asarray(done), **known, **trainer.state())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    sync_directory(file.parent)
