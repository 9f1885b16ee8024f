"""Whole runs with speculation: the same rewards and the same parameters as without, also after a stop."""

import itertools
import threading
import zlib
from unittest import mock

import pytest

from rljax.engine.background import CompilerThread
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.draft_length import WorthStarting
from rljax.speculation.managers import expected as expected_manager
from rljax.speculation.pass_times import PassTimes
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.training import loop
from rljax.training.learner import Learner
from tests.configs import NEEDS_PAPERS
from tests.training.tiny_run import HEAD, ONE_PASS, SHRINKING, digests, numbers, train

STEPS, HALF = 8, 4
# How the tokens came about, which drafts change.
_HOW = ("speculation/", "engine/compiled_in_background", "engine/waited_for")
_HOW += ("rollout/occupancy", "rollout/decode_steps")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory for runs in which every response has a reward of its own."""
    directory = tmp_path_factory.mktemp("world")
    luck = lambda self, problem, text: {"reward": zlib.crc32(text.encode()) % 1000 / 1000}  # noqa: E731
    with mock.patch.object(ChainArithmetic, "reward", luck):
        yield directory


def run(world, name, *overrides, drafter=None, verified=None):
    """Metrics of a run on two problems that come back every step.

    Args:
      verified: which passes verify, in turn, whatever is expected of them; None leaves it to the clock.
    """
    directory = world / name
    directory.mkdir(exist_ok=True)
    overrides = (
        "task.problems=2",
        f"training.steps={STEPS}",
        f"checkpoint.every={HALF}",
        "evaluation.problems=2",
        "evaluation.every=2",
        "warm_start.steps=20",  # more that comes back
        *overrides,
    )
    if drafter is not None:
        overrides += (f"speculation.drafter={drafter}", *ONE_PASS)
    with pytest.MonkeyPatch.context() as patch:
        if verified is not None:
            turns = itertools.cycle(verified)

            def choose(candidates, buckets, times, batch, length):
                sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
                return sizes[-1] if next(turns) else 0

            patch.setattr(expected_manager, "best_rows", choose)
            patch.setattr(PassTimes, "plain_is_old", lambda self, *_: False)
            patch.setattr(SelfProposer, "choose_length", lambda self, *_: (3, 1e9))
            patch.setattr(WorthStarting, "allows", lambda self, *_: True)  # whatever quantizing took
            patch.setattr(DeviceProposer, "expected_rate", lambda self, *_: 1e9)
        return train(directory, *overrides)


def final_state(world, name, step=STEPS):
    """Parameters and optimizer state as the run left them."""
    return digests(world / name / "run", step)


def what(lines):
    """The metrics that speculation must not change."""
    return numbers(lines, *_HOW)


@pytest.fixture(scope="module")
def plain(world):
    lines = run(world, "plain")
    assert len(lines) == STEPS + 1
    assert sum(line["gradient_norm"] > 0 for line in lines[1:]) > STEPS / 2
    assert len({line["reward/mean"] for line in lines[1:]}) > STEPS / 2
    assert final_state(world, "plain", HALF) != final_state(world, "plain")
    return lines


@pytest.fixture(scope="module")
def srt(world, plain):
    """Every batch is verified, and shrinks where that of the plain run cannot."""
    return run(world, "srt", SHRINKING, drafter="srt", verified=[True])


def check_same(world, name, lines, plain):
    steps = lines[-1]["step"]
    assert what(lines) == what(plain[: steps + 1])
    names = {"reward/mean", "gradient_norm", "mismatch/logprob_abs_max", "rollout/tokens"}
    assert names <= what(lines)[-1].keys()
    assert final_state(world, name, steps) == final_state(world, "plain", steps)


def test_a_run_with_srt_is_the_run_without(world, plain, srt):
    check_same(world, "srt", srt, plain)
    assert all(line["speculation/speculated_share"] == 1.0 for line in srt[1:])
    assert sum(line["speculation/accepted"] for line in srt[1:]) > 20
    assert len({line["engine/compilations"] for line in srt[1:]}) == 1


def test_a_run_that_trains_a_head_is_the_run_without(world, plain):
    """Behind each rollout, whatever the clock says. Other drafters take part in legs of a run, below;
    `tests/speculation` has all of them in rollouts.
    """
    options = (f"training.steps={HALF}", f"speculation.args={HEAD}")
    lines = run(world, "eagle", *options, drafter="eagle", verified=[True, True, False])
    check_same(world, "eagle", lines, plain)
    assert all(0 < line["speculation/speculated_share"] < 1 for line in lines[1:])
    assert sum(line["speculation/accepted"] for line in lines[1:]) > 0
    assert [line["speculation/head/slices"] for line in lines[1:]] == [2] * HALF


def test_a_run_with_a_drafter_from_a_file_is_the_run_without(world, plain, tmp_path, monkeypatch):
    source = """
class Pairs:
    def __init__(self, longest: int):
        self.longest = longest

    def propose(self, tokens, limit):
        ends = [end for end in range(1, len(tokens)) if tokens[end - 1] == tokens[-1]]
        return tokens[ends[-1] : ends[-1] + min(limit, self.longest)] if ends else []
"""
    (tmp_path / "mydrafter.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = (f"training.steps={HALF}", "speculation.args.longest=3")
    lines = run(world, "own", *options, drafter="./mydrafter.py:Pairs", verified=[True, True, False])
    check_same(world, "own", lines, plain)
    assert sum(line["speculation/accepted"] for line in lines[1:]) > 0


def test_a_run_that_chooses_by_its_own_clock_is_the_run_without(world, plain):
    lines = run(world, "clock", SHRINKING, f"training.steps={HALF}", drafter="srt")
    check_same(world, "clock", lines, plain)


def test_evaluation_does_not_feed_the_history(srt):
    """It holds the last two rollouts of each prompt, though problems are evaluated in between."""
    tokens = [line["rollout/tokens"] for line in srt[1:]]
    assert sum("evaluation/reward" in line for line in srt) == STEPS // 2 + 1
    history = [line["speculation/history_tokens"] for line in srt[1:]]
    assert history == [tokens[0], *(a + b for a, b in itertools.pairwise(tokens))]


def test_a_resumed_run_drafts_as_one_that_never_stopped(world, plain, srt):
    for steps in (2, HALF):
        resumed = run(world, "resumed", SHRINKING, f"training.steps={steps}", drafter="srt", verified=[True])
    check_same(world, "resumed", resumed, plain)
    names = "drafted accepted accept_length verified_per_token history_tokens history_bytes"
    for name in names.split():
        key = f"speculation/{name}"
        assert [line[key] for line in resumed[1:]] == [line[key] for line in srt[1 : HALF + 1]], name
    assert all(line["speculation/drafted"] > 5 for line in resumed[3:])


LEGS = [  # up to which step, and how drafts come about
    (2, "srt", ()),
    (3, "histospec", ("speculation.args={min_match: 1}",)),
    (4, None, ()),
    (5, "quantized", ()),
    (7, "srt", ("speculation.run_ahead_below=2", "speculation.run_ahead_share=1.0")),
    (STEPS, "srt", ()),
]


@NEEDS_PAPERS
def test_a_run_may_change_its_drafter_whenever_it_resumes(world, plain):
    """The numbers of the run without; and the history goes on where the last one that keeps it stopped."""
    for steps, drafter, options in LEGS:
        options = (f"training.steps={steps}", *options)
        lines = run(world, "changing", *options, drafter=drafter, verified=[True])
        history = [line.get("speculation/history_tokens") for line in lines]
        assert [line["step"] for line in lines] == list(range(steps + 1))
    check_same(world, "changing", [_due(line) for line in lines], plain)
    tokens = [line.get("rollout/tokens") for line in lines]
    for step in (1, 3):  # histospec keeps one rollout of a prompt; what comes along is replaced
        assert history[step] == tokens[step]
    assert history[4:6] == [None] * 2
    assert history[6] == tokens[3] + tokens[6]  # the two newest that a history has seen
    for step in (2, 7, 8):
        assert history[step] == tokens[step - 1] + tokens[step]
    ahead = [line.get("speculation/ahead_tokens") for line in lines]
    assert sum(ahead[6:8]) > 0 and ahead[:6] == [None] * 6 and ahead[8:] == [None]
    for step in (2, 3, 5, 7, 8):
        assert lines[step]["speculation/accepted"] > 0


def _due(line):
    """Without the evaluation at the end of a leg that no rhythm asked for."""
    due = line["step"] % 2 == 0
    return {name: value for name, value in line.items() if due or not name.startswith("evaluation/")}


def compiling_threads():
    return [thread for thread in threading.enumerate() if thread.name == "compiler"]


def test_passes_that_are_compiled_in_the_background_change_no_number(world, plain, monkeypatch):
    step = loop.training_step

    def wait_after_two(run):
        if run.state.step == 2:
            run.speculator.decoder.compiler.wait()
        return step(run)

    monkeypatch.setattr(loop, "training_step", wait_after_two)
    compile_updates, compile_first, threads = Learner.warm_up, loop.compile_programs, []

    def spy(*args):
        threads.append(threading.current_thread().name)
        compile_updates(*args)

    def without_updates(run):
        compile_first(run)
        assert "MainThread" not in threads  # the first rollout does not wait for updates to compile

    monkeypatch.setattr(Learner, "warm_up", spy)
    monkeypatch.setattr(loop, "compile_programs", without_updates)
    options = ("engine.compile=background", f"training.steps={HALF}")
    lines = run(world, "background", *options, drafter="srt", verified=[True])
    assert threads
    check_same(world, "background", lines, plain)
    assert lines[-1]["engine/compiled_in_background"] > 0
    assert lines[-1]["time/compiled_in_background"] > 0
    assert sum(line["speculation/accepted"] for line in lines[1:]) > 0
    assert not compiling_threads()


def test_an_interrupted_run_leaves_no_thread_behind(world, monkeypatch):
    begun, compile_next = threading.Event(), CompilerThread._compile_next

    def compile_once_begun(thread):  # whatever is in JAX's cache, there is something left to compile
        assert begun.wait(300)
        return compile_next(thread)

    def interrupt(run):
        assert not run.speculator.decoder.compiler.is_ready((4, 128))
        assert run.compilation.left and compiling_threads()
        begun.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(CompilerThread, "_compile_next", compile_once_begun)
    monkeypatch.setattr(loop, "training_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(world, "interrupted", "engine.compile=background", drafter="srt")
    assert not compiling_threads()
