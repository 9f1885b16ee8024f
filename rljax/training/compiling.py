"""Compiles the programs that a run begins with, and leaves the others to a thread."""

import contextlib
from collections.abc import Callable

from rljax.assembly.decoding import warm_up
from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape
from rljax.rollout.collector import TRAINING, WantedGroups
from rljax.training.training_run import TrainingRun

_AFTER_BUCKETS = 2  # programs of updates are compiled after those of decode states so many buckets away


def compile_programs(run: TrainingRun, wait: bool | None = None) -> None:
    """Compiles every program that a run begins with. Others may follow in the background, see
    `decoding.warm_up`; `TrainingRun.close` ends that.

    Args:
      run: the run, before a step.
      wait: whether to wait for these, too; None for `engine.compile`.
    """
    run.progress.message("compiling")
    config, trained, learner = run.config, run.state.trained, run.learner
    params = run.engine.load_params(run.state.params)
    sampler = params if config.rollout.oldest_lag else None
    if run.cluster is not None:  # the workers compile what decodes
        learner.warm_up(trained, sampler)
        run.progress.message(run.pool.summary())
        run.cluster.wait()
        return
    if run.agents is not None:  # requests of any length join at any time
        warm_up(run.scheduler, params, config, requests_join=True, resumes=True)
        learner.warm_up(trained)
        run.progress.message(run.pool.summary())
        run.agents.start()
        return
    num_prompts = config.rollout.prompts_per_step
    indices, _ = run.prompts.next_problems("train", run.state.data_position, num_prompts)
    requests = run.collector.requests(WantedGroups("train", indices, 1, TRAINING, run.state.step))
    first_prompts = [len(request.prompt_ids) for request in requests]
    buckets = run.engine.buckets
    near = buckets.batch[-1], buckets.cache[0]
    thread = CompilerThread(buckets, near)

    def compile_updates(shape: Shape, should_stop: Callable[[], bool]) -> None:
        with contextlib.suppress(Exception):  # an update compiles it again, and raises
            learner.warm_up(trained, sampler, [shape[0]])

    # The programs of shared prompts depend on the responses, and the others would not be run.
    shares = learner.expects_sharing([request.prompt_ids for request in requests])
    sizes = [] if shares else run.trainer.sizes
    run.compilation.updates = BackgroundCompiler(
        compile_updates,
        buckets,
        [(rows, config.training.pack_length) for rows in sizes],
        near,
        start=False,
        thread=thread,
        distance=lambda shape: _AFTER_BUCKETS,
    )
    warm_up(run.scheduler, params, config, False, False, wait, first_prompts, thread)
    if run.engine.background is None:  # all is compiled; say now what could not be
        learner.warm_up(trained, sampler, sizes)
    run.progress.message(run.pool.summary())
    if run.compilation.left:
        run.progress.message(f"{run.compilation.left} more shapes are compiled meanwhile")
