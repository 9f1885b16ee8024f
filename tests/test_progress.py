"""The progress display, on a terminal and in a log file."""

import io
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from rljax.progress import Progress
from rljax.training.interruption import StopRequest

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture
def clock():
    """Seconds that pass only when told."""
    return types.SimpleNamespace(now=100.0)


def make(clock, terminal, width=100):
    file = io.StringIO()
    how = {"force_terminal": terminal, "color_system": None, "legacy_windows": False}
    console = Console(file=file, width=width, **how)
    return Progress(console, interval=5.0, clock=lambda: clock.now), file


def run_stage(progress, clock, steps=3, seconds=10.0):
    progress.stage("grpo", total=steps)
    for step in range(1, steps + 1):
        for _ in range(4):
            clock.now += seconds / 4
            progress.update("rollout", detail="1,234 tokens, [b]56/64 done")
        progress.step(step, {"reward": 0.125 * step, "tokens_per_second": 12345.6, "loss": 0.5, "kl": None})


def test_plain_lines(clock):
    progress, file = make(clock, terminal=False, width=60)
    with progress:
        run_stage(progress, clock)
        progress.message("results are in runs/[x]")
        progress.message("x " * 100)  # not wrapped
    assert file.getvalue().splitlines() == [
        "grpo: 3 steps",
        "grpo 1/3  rollout: 1,234 tokens, [b]56/64 done",
        "grpo 1/3  rollout: 1,234 tokens, [b]56/64 done",
        "grpo 1/3  reward 0.125  12,346 tokens/s  loss 0.5  0:20 left",
        "grpo 2/3  rollout: 1,234 tokens, [b]56/64 done",
        "grpo 2/3  rollout: 1,234 tokens, [b]56/64 done",
        "grpo 2/3  reward 0.250  12,346 tokens/s  loss 0.5  0:10 left",
        "grpo 3/3  rollout: 1,234 tokens, [b]56/64 done",
        "grpo 3/3  rollout: 1,234 tokens, [b]56/64 done",
        "grpo 3/3  reward 0.375  12,346 tokens/s  loss 0.5  took 0:30",
        "results are in runs/[x]",
        "x " * 100,
    ]


def test_plain_lines_of_short_steps_keep_their_distance(clock):
    """The last one is shown."""
    progress, file = make(clock, terminal=False)
    with progress:
        progress.stage("warm start", total=23, sparse=True)
        for step in range(1, 24):
            clock.now += 1.0
            progress.step(step, {"loss": 1.0 / step})
    steps = [int(re.search(r" (\d+)/23", line)[1]) for line in file.getvalue().splitlines()[1:]]
    assert steps == [5, 10, 15, 20, 23]


@pytest.mark.parametrize("width", [52, 100])
def test_terminal_redraws_inside_its_width(clock, width):
    progress, file = make(clock, terminal=True, width=width)
    with progress:
        run_stage(progress, clock)
        progress.message("saved")
    text = CONTROL.sub("\n", file.getvalue())
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b[2K" in file.getvalue()  # redrawn in place
    assert "grpo 2/3" in text and "reward 0.250" in text and "12,346 tokens/s" in text and "0:10 left" in text
    assert "saved" in text
    loss = "" if width == 52 else "  loss 0.5"  # left out, rather than the line broken
    assert f"grpo 3/3  reward 0.375  12,346 tokens/s{loss}  took 0:30" in text
    assert ("━" in text) == (width == 100)  # the bar takes the room that is left
    assert file.getvalue().count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.parametrize("width", [20, 100])
def test_terminal_shows_what_the_step_is_doing(clock, width):
    progress, file = make(clock, terminal=True, width=width)
    with progress:
        progress.stage("grpo", total=2)
        progress.update("rollout", detail="1,234 tokens, [b]56/64 done " + "x" * 200)
        drawn = len(file.getvalue())
        progress._redraw()  # as the redrawing thread does
        lines = [line for line in CONTROL.sub("\n", file.getvalue()[drawn:]).splitlines() if line]
    assert lines[-2].startswith("grpo 0/2")
    assert lines[-1].startswith("  rollout: 1,2")
    assert lines[-1].endswith("…") and len(lines[-1]) == width


def test_a_terminal_is_left_clean_after_an_error(clock):
    progress, file = make(clock, terminal=True)
    with pytest.raises(ValueError), progress:
        progress.stage("grpo", total=2)
        raise ValueError
    assert "\x1b[?25h" in file.getvalue()
    assert sys.stdout is not file


def test_time_left_follows_recent_steps_and_forgets_compilation(clock):
    progress, file = make(clock, terminal=False)

    def step(number, seconds):
        clock.now += seconds
        progress.step(number, {})
        return file.getvalue().splitlines()[-1].split("  ")[-1]

    with progress:
        progress.stage("grpo", total=100)
        assert step(1, 60.0) == "1:39:00 left"  # all there is to go by
        assert step(2, 2.0) == "3:16 left"
        for number in range(3, 20):
            step(number, 2.0)
        for number in range(20, 30):
            last = step(number, 4.0)
        assert last == "4:44 left"  # 71 steps of 4 s


def test_time_left_counts_down_inside_a_step(clock):
    progress, _ = make(clock, terminal=True)
    with progress:
        progress.stage("grpo", total=3)
        clock.now += 10
        progress.step(1, {})
        # In the end the step after this one is still to come.
        for later, left in ((0, "0:20"), (4, "0:16"), (60, "0:10")):
            clock.now += later
            assert f"{left} left" in str(progress._render())


def test_stages_interleave(clock):
    progress, file = make(clock, terminal=False)
    with progress:
        progress.stage("grpo", total=3)
        clock.now += 10
        progress.step(1, {})
        progress.stage("evaluate", total=1)
        clock.now += 1000
        progress.step(1, {"reward": 0.5})
        progress.stage("grpo", total=3)
        clock.now += 10
        progress.step(2, {})
    lines = file.getvalue().splitlines()
    assert lines[-1] == "grpo 2/3  0:10 left"  # the evaluation's 1000 seconds are not the step's
    assert lines.count("grpo: 3 steps") == 1
    assert "evaluate 1/1  reward 0.500  took 16:40" in lines


def test_a_resumed_stage(clock):
    progress, file = make(clock, terminal=False)
    with progress:
        progress.stage("grpo", total=40, completed=20)
        clock.now += 5
        progress.update("rollout")
        clock.now += 5
        progress.step(21, {"reward": 1.0})
    assert file.getvalue().splitlines() == [
        "grpo: 40 steps, 20 done already",
        "grpo 21/40  rollout",
        "grpo 21/40  reward 1.000  3:10 left",
    ]


# A run, as far as its output goes: a signal while a step is in progress, whose message nobody can take.
_STEP = """
import signal, sys
from rljax.training.interruption import StopRequest
from rljax.progress import Progress

with Progress() as progress, StopRequest(progress.message) as stop:
    progress.stage("train", 1)
    sys.stdin.read()
    signal.raise_signal(signal.SIGINT)
    progress.step(1, {"reward": 1.0})
    progress.message(100_000 * "-")
print(stop.signal.name, "saved", file=sys.stderr)
"""


def _finish_a_step(stdout):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _STEP]
    pipes = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, env=environment, text=True)


def test_a_reader_that_has_gone_costs_nothing():
    """`train.py | tee log`: Ctrl-C reaches tee as well, which ends at once."""
    process = _finish_a_step(subprocess.PIPE)
    assert process.stdout.readline() == "train: 1 step\n"
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, f"{signal.SIGINT.name} saved\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_on_a_full_disk_costs_nothing():
    with open("/dev/full", "w") as full:
        _, errors = _finish_a_step(full).communicate("")
    assert errors.startswith(f"{signal.SIGINT.name} saved\n")


def test_a_signal_in_the_middle_of_a_line_is_noted():
    """Python refuses to write a line within the writing of another one."""

    def say(_):
        raise RuntimeError("reentrant call")

    with StopRequest(say) as stop:
        signal.raise_signal(signal.SIGINT)
    assert stop.signal == signal.SIGINT
