"""Compiling and measuring: passes of every shape, plain steps, and drafting.

`warm_up` does it all before the first rollout. `warm_up_in_background` leaves verifying passes to a thread:
decoding is plain until those of the present decode state are ready, and their times are measured as they are
used.
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from drafters.device import SlotDrafter
from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape, compile_all
from rljax.engine.draft_tree import DraftStrategy, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import free_bytes
from rljax.engine.shapes import Pass, Shapes
from rljax.engine.state import DecodeState, half_full
from rljax.models.transformer import Params
from rljax.processes import to_host
from rljax.speculation.drafter_slots import DrafterSlots
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import Proposer

_REPEATS = 3
_SPARE_CORES = 4  # with fewer, what the first step waits for is compiled first, and alone
_VERIFY_DELAY = 1  # in buckets: after plain programs of the shapes that come next
_PLAIN_STEPS = 8  # in a row that are timed together: a call of few costs more a step than plain decoding does
_DRAFT_STEPS = 4  # likewise


def warm_up(
    engine: DecodeEngine,
    params: Params,
    proposers: Sequence[Proposer],
    drafters: DrafterSlots,
    times: PassTimes,
    shapes: Shapes,
) -> None:
    """Compiles every program that drafts and verifies, and measures the time of each.

    Args:
      params: weights from `engine.load_params`.
      times: measured times are added to it. Shapes that it has are not measured again.
      shapes: the shapes of the run's decode states.
    """
    _prepare_drafters(params, proposers, drafters, shapes)
    param_shapes = engine.param_shapes(params)
    tasks = [
        functools.partial(_compile_passes, engine, param_shapes, [each], lambda: False)
        for state in shapes.verified
        for each in shapes.passes(state)
    ]
    for leave_out in compile_all(tasks):
        leave_out()
    for state in shapes.verified:
        known = [times.has_verify(*each[:3]) for each in shapes.passes(state)]
        if not (times.has_plain(*state) and all(known)):
            for rows, measured in time_passes(engine, params, *state, _REPEATS).items():
                for seconds in measured:
                    if rows:
                        times.add_verify(*state, rows, seconds)
                    else:
                        times.add_plain(*state, seconds)
        for proposer in proposers:
            proposer.warm_up(params, *state, _REPEATS)
    times.agree()


def warm_up_in_background(
    engine: DecodeEngine,
    params: Params,
    proposers: Sequence[Proposer],
    drafters: DrafterSlots,
    shapes: Shapes,
    thread: CompilerThread | None = None,
) -> BackgroundCompiler:
    """Leaves the programs that verify and draft to a thread. On a mesh, and for states that grow, drafters on
    the device are compiled and measured at once.

    The thread begins at once where cores are to spare, else with the first rollout.

    Args:
      engine, params, proposers, drafters, shapes: see `warm_up`. The shape that the first prompts start in
        comes first; those that are not foreseen are compiled only when they are asked for.
      thread: the thread to compile in; None for one of its own.

    Returns:
      What has the verifying passes, shape by shape.
    """
    buckets, first, verified = engine.buckets, shapes.first, shapes.verified
    thread = CompilerThread(buckets, first) if thread is None else thread
    param_shapes = engine.param_shapes(params)

    def compile_passes(state: Shape, should_stop: Callable[[], bool]) -> Callable[[], None]:
        return _compile_passes(engine, param_shapes, shapes.passes(state), should_stop)

    compiler = BackgroundCompiler(compile_passes, buckets, verified, first, False, thread, _VERIFY_DELAY)
    if engine.mesh is None and not shapes.widens:
        for proposer in proposers:
            proposer.refresh(params)
            proposer.compile_in_background(params, shapes, thread)
    else:
        _prepare_drafters(params, proposers, drafters, shapes)
        for state in verified:
            for proposer in proposers:
                proposer.warm_up(params, *state, _REPEATS)
    if has_spare_cores():
        thread.start()
    return compiler


def has_spare_cores() -> bool:
    """Whether a thread may compile while the first step is compiled."""
    return (os.cpu_count() or 1) >= _SPARE_CORES


def _prepare_drafters(
    params: Params, proposers: Sequence[Proposer], drafters: DrafterSlots, shapes: Shapes
) -> None:
    """Gives the weights to drafters, and compiles what those on the device need to follow the slots and to
    draft.
    """
    for proposer in proposers:
        proposer.refresh(params)
    for slots in drafters.on_device.values():
        for batch in shapes.batches:
            slots.compile(shapes, batch, shapes.drafted(batch), lambda: False)
    for drafter in drafters.by_name.values():
        if drafter.training is not None:
            drafter.training.warm_up()


def _compile_passes(
    engine: DecodeEngine, params: Params, passes: Sequence[Pass], should_stop: Callable[[], bool]
) -> Callable[[], None]:
    """Compiles verifying passes. Returns what leaves out those that are too large."""
    too_large = []
    for batch, length, rows, nodes in passes:
        if should_stop():
            break
        needed, free = engine.compile_verify(params, batch, length, rows, nodes), free_bytes()
        if free is not None and needed > free:
            too_large.append((batch, rows, needed, free))

    def leave_out() -> None:
        for each in too_large:
            _leave_out(engine, *each)

    return leave_out


def time_passes(
    engine: DecodeEngine, params: Params, batch: int, length: int, repeats: int, passes: int | None = None
) -> dict[int, list[float]]:
    """Seconds of forward passes over a batch in half-filled caches, by rows; 0 stands for a plain step.

    The shapes take turns, so that a busy machine slows all of them. A pass that does not fit into the
    device's memory is left out, here and in rollouts.

    Args:
      params: weights from `engine.load_params`.
      repeats: measurements of each shape.
      passes: passes of a shape between two host syncs, whose mean counts; less than half of `length`. None
        for what a rollout does: one verifying pass, or a few plain steps.
    """
    state, slots = engine.init_state(batch, length), np.arange(batch)
    _drop_too_large(engine, params, state)
    widths = {0: 0} | dict(engine.buckets.passes(batch))
    measured: dict[int, list[float]] = {rows: [] for rows in widths}
    for repeat in range(repeats + 1):  # the first may compile
        for rows, seconds in measured.items():
            state = half_full(state)
            start, steps = time.perf_counter(), passes or 1
            if rows:
                tree = empty_tree(batch, widths[rows])
                for _ in range(steps):
                    state, pending = engine.verify(params, state, tree, pack_rows(tree, slots, rows))
                pending.result()
            else:
                state, result = engine.generate(params, state, max_steps=passes or _PLAIN_STEPS)
                steps = max(result.steps, 1)
            if repeat:
                seconds.append((time.perf_counter() - start) / steps)
    return measured


def _drop_too_large(engine: DecodeEngine, params: Params, state: DecodeState) -> None:
    """Takes passes that do not fit into the device's memory out of the buckets, with a warning."""
    free, batch = free_bytes(), state.batch
    if free is None:
        return
    for rows, nodes in engine.buckets.passes(batch):
        tree = empty_tree(batch, nodes)
        needed = engine.verify_bytes(params, state, tree, pack_rows(tree, np.arange(batch), rows))
        if needed > free:
            _leave_out(engine, batch, rows, needed, free)


def _leave_out(engine: DecodeEngine, batch: int, rows: int, needed: int, free: int) -> None:
    """Takes a pass that needs more bytes than are free out of the buckets."""
    engine.buckets.too_large.add((batch, rows))
    warnings.warn(
        f"a pass over {rows} tokens of {batch} responses needs {needed / 1e6:.0f} MB where"
        f" {free / 1e6:.0f} MB are free: it is left out",
        stacklevel=2,
    )


def time_drafts(
    engine: DecodeEngine, draft_params: Params, batch: int, length: int, repeats: int
) -> list[float]:
    """Seconds of a self-drafter's steps; measured as in `time_passes`."""
    state, seconds, steps = engine.init_state(batch, length), [], min(_DRAFT_STEPS, engine.buckets.max_drafts)
    for _ in range(repeats + 1):
        state = half_full(state)
        start = time.perf_counter()
        state, drafts = engine.draft(draft_params, state, steps)
        drafted = np.count_nonzero(np.asarray(drafts.tokens) >= 0, axis=1).max()
        seconds.append((time.perf_counter() - start) / int(drafted))  # all may have ended before `steps`
    return seconds[1:]  # the first may compile


def time_trees(
    engine: DecodeEngine, slots: SlotDrafter, strategy: DraftStrategy, batch: int, length: int, repeats: int
) -> list[float]:
    """Seconds of drafting a tree for every slot; measured as in `time_passes`."""
    state, measured = half_full(engine.init_state(batch, length)), []
    slots.start(batch, to_host(state.lengths))
    for _ in range(repeats + 1):
        start = time.perf_counter()
        drafted = slots.draft(state, strategy)
        np.asarray(drafted.log_probability)
        seconds = time.perf_counter() - start
        nodes = int(np.asarray(drafted.tree.valid).sum(axis=1).max())
        if nodes and strategy.top_k == 1:  # all chains may have ended before
            seconds *= strategy.depth / nodes
        measured.append(seconds)
    return measured[1:]  # the first may compile
