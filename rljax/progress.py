"""Progress of a run: a live display on a terminal, plain lines anywhere else.

On a terminal two lines are redrawn in place (stage, bar, step, reward, tokens/s and time left; below, what
the step is doing), and a line stays behind for each finished step. In a log file or a pipe there is one line
a step, and inside a step at most one in a few seconds.
"""

import collections
import contextlib
import dataclasses
import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

_RECENT_STEPS = 10  # time left follows the recent steps: responses get longer or shorter as a policy learns
_REDRAWS_PER_SECOND = 4
_MIN_BAR = 10


class _Console(Console):
    """Standard output, which may lose its reader: the Ctrl-C that lets a run finish its step ends the `tee`
    behind it. Rich would end the program then.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # what is left in Python's own buffer goes nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


@dataclasses.dataclass
class _Stage:
    """One stage's progress.

    Attributes:
      name: name on display.
      total: steps it will take, 0 when unknown.
      sparse: steps are too short for a line each.
      done: steps finished.
      step_began: clock time.
      busy_seconds: time spent in finished steps, other stages excluded.
      recent: seconds of the latest steps.
      metrics: metrics of the last finished step.
      activity: present activity of the step, or "".
    """

    name: str
    total: int
    sparse: bool
    done: int
    step_began: float
    busy_seconds: float = 0.0
    recent: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_RECENT_STEPS + 1)
    )
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    activity: str = ""

    def seconds_left(self, now: float) -> float | None:
        """Estimate from the mean of the recent steps; None while there is nothing to go by."""
        if not self.recent or not self.total:
            return None
        recent = list(self.recent)
        if len(recent) > 1:
            recent = recent[1:]  # the first step compiles; later, the oldest of a window is no loss
        mean = sum(recent) / len(recent)
        steps_left = max(self.total - self.done, 0)
        # The current step counts down, but never below the steps that come after it.
        return max(steps_left * mean - (now - self.step_began), max(steps_left - 1, 0) * mean)


class Progress:
    """Context manager that shows how a run gets on.

        with Progress() as progress:
            progress.stage("grpo", total=40)
            progress.update("rollout", detail="1,234 tokens, 56/64 done")
            progress.step(1, {"reward": 0.25, "tokens_per_second": 1234.0})
            progress.message("saved checkpoint 10")

    Stages may interleave (an evaluation between two steps): calling `stage` with an earlier name goes back to
    it, and the time in between does not count towards its steps. Where nothing can be written, as to a full
    disk or a pipe without a reader, nothing is shown: the work goes on.

    Args:
      console: console to write to; None for standard output.
      interval: least seconds between two plain lines inside a step.
      clock: seconds, monotonic; tests set it.
    """

    def __init__(
        self,
        console: Console | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = _Console() if console is None else console
        self._interval = interval
        self._clock = clock
        self._stages: dict[str, _Stage] = {}
        self._stage: _Stage | None = None
        self._last_line = -math.inf
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=_REDRAWS_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stage = None
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def stage(self, name: str, total: int, completed: int = 0, sparse: bool = False) -> None:
        """Begins a stage, or goes back to one.

        Args:
          name: name on display, such as "warm start" or "grpo".
          total: steps it will take; 0 when unknown.
          completed: steps done before this process, when resuming.
          sparse: steps are too short for a line each (a warm start's); lines keep the interval.
        """
        now = self._clock()
        if name in self._stages:
            stage = self._stages[name]
            stage.total, stage.step_began = total, now
        else:
            stage = self._stages[name] = _Stage(name, total, sparse, completed, now)
            resumed = f", {completed:,} done already" if completed else ""
            steps = f"{total:,} step{'' if total == 1 else 's'}" if total else "started"
            self._print(f"{name}: {steps}{resumed}")
        self._stage = stage
        self._redraw()

    def update(self, activity: str, detail: str = "") -> None:
        """Says what the current step is doing, as often as one likes."""
        stage = self._current()
        stage.activity = f"{activity}: {detail}" if detail else activity
        if self._live is None and self._clock() - self._last_line >= self._interval:
            step = f"{stage.done + 1:,}/{stage.total:,}" if stage.total else f"{stage.done + 1:,}"
            self._print(f"{stage.name} {step}  {stage.activity}")

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Says that a step is finished.

        Args:
          step: its number; the first is 1. Several may be finished at once.
          metrics: shown in this order; "reward" and "tokens_per_second" have a form of their own.
        """
        stage, now = self._current(), self._clock()
        seconds = now - stage.step_began
        stage.recent.append(seconds / max(step - stage.done, 1))
        stage.busy_seconds += seconds
        stage.done, stage.step_began = step, now
        stage.metrics, stage.activity = dict(metrics), ""
        if not stage.sparse or stage.done >= stage.total or now - self._last_line >= self._interval:
            self._print("  ".join(self._parts(stage, now)))
        self._redraw()

    def message(self, text: str) -> None:
        """A line that stays."""
        self._print(text)

    def _current(self) -> _Stage:
        if self._stage is None:
            raise RuntimeError("Progress.stage comes before update and step")
        return self._stage

    def _print(self, text: str) -> None:
        self._last_line = self._clock()
        # soft_wrap: a log file has no width. No markup: text may hold [brackets] of a prompt or a path.
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=self._live is None)

    def _redraw(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.refresh()

    def _parts(self, stage: _Stage, now: float) -> list[str]:
        """Stage and step, the metrics, the time; on a narrow terminal the last metrics are left out."""
        step = f"{stage.done:,}/{stage.total:,}" if stage.total else f"{stage.done:,}"
        head = f"{stage.name} {step}"
        metrics = [_metric(name, value) for name, value in stage.metrics.items() if value is not None]
        left = stage.seconds_left(now)
        if stage.total and stage.done >= stage.total:
            times = [f"took {_duration(stage.busy_seconds)}"]
        else:
            times = [] if left is None else [f"{_duration(left)} left"]
        width = self._console.width if self._live is not None else math.inf
        while metrics and len("  ".join([head, *metrics, *times])) > width:
            metrics.pop()
        return [head, *metrics, *times]

    def _render(self) -> Text:
        """The live display; called from the redrawing thread."""
        stage, width = self._stage, self._console.width
        if stage is None:
            return Text("")
        head, *parts = self._parts(stage, self._clock())
        line = "".join(f"  {part}" for part in parts)
        room = width - len(head) - len(line) - 1
        text = Text(head, style="bold", no_wrap=True, overflow="ellipsis", end="")
        if stage.total and room >= _MIN_BAR:
            bar = min(room, 30)
            filled = min(round(bar * stage.done / stage.total), bar)
            full, empty = ("#", "-") if self._console.options.ascii_only else ("━", "╌")
            text.append(" ").append(full * filled, style="green").append(empty * (bar - filled), style="dim")
        text.append(line, style="not bold")
        lines = Text(no_wrap=True, overflow="ellipsis").append_text(text)
        return lines.append(f"\n  {stage.activity or '...'}", style="not bold dim")


def _metric(name: str, value: float) -> str:
    if name == "tokens_per_second":
        return f"{value:,.0f} tokens/s"
    if name == "reward":
        return f"reward {value:.3f}"
    return f"{name} {value:.4g}"


def _duration(seconds: float) -> str:
    """m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def silent_progress() -> Progress:
    """Returns a progress that shows nothing, for all but the first of several processes."""
    return Progress(Console(file=io.StringIO(), quiet=True))
