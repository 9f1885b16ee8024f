"""Colours and styles of all reports' figures, and writing figures to files or into a page."""

import dataclasses
import html
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
INK, CARD, GRID = "#010101", "#fefefe", "#dadada"
MOST_POINTS = 400  # of a curve; more would not be visible

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # the name of a run may be $a_b$
    "font.family": "sans-serif",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.dpi": 200,  # of dots, the only elements that are not vector graphics
    "legend.framealpha": 0.0,
    "legend.edgecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "xtick.color",
            "ytick.color",
            "legend.labelcolor",
        ),
        INK,
    ),
}
_VARIABLES = {INK: "--ink", "#000000": "--ink", CARD: "--card", GRID: "--grid"} | {
    color: f"--s{number}" for number, color in enumerate(COLORS)
}


# Parts of an SVG that a page does not need; the page sets the fonts.
_TIDIED = [
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"<metadata>.*?</metadata>|<style.*?</style>", ""),
        (r'<g id="[^"]*">', "<g>"),
        (r"font-family: [^;\"]*;? ?", ""),
        (r"\s*\n\s*", " "),
        (r"> <", "><"),
    )
]
_TAG, _LONG_NUMBER = re.compile(r"<[^>]*>"), re.compile(r"(\d\.\d\d)\d+")


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure, sizes in inches."""
    from matplotlib.figure import Figure  # takes half a second to import, and most commands draw nothing

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Writes a figure, in the format of the path's suffix."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the plot cannot be written there: {error}") from error


@dataclasses.dataclass(frozen=True)
class Panel:
    """A part of a page with a figure.

    Attributes:
      title: title, unique on the page.
      caption: caption of the figure.
      draw: function that draws on axes.
      height: height of the figure in inches.
    """

    title: str
    caption: str
    draw: Callable[["Axes"], None]
    height: float = 2.8


def svg_of(panel: Panel) -> str:
    """Returns the figure of a panel as an SVG element, for light and dark pages.

    The colours are CSS variables (`--ink`, `--card`, `--grid`, `--s0` to `--s5`). The figure is 4.6 inches
    wide without scaling, so that its text is legible on a phone.
    """
    style = _STYLE | {"svg.hashsalt": panel.title}  # makes the names of clip paths unique on the page
    import matplotlib

    with matplotlib.rc_context(style):
        figure = new_figure(4.6, panel.height)
        axes = figure.subplots()
        panel.draw(axes)
        axes.set_title("")
        axes.grid(True, linewidth=0.6)
        axes.set_axisbelow(True)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern, replacement in _TIDIED:
        svg = pattern.sub(replacement, svg)
    svg = _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag.group()), svg)
    start, rest = svg[: svg.index(">")], svg[svg.index(">") :]
    svg = re.sub(r' (width|height)="[^"]*"', "", start) + rest  # the view box scales with the page
    svg = re.sub(r"#[0-9a-f]{6}\b", _variable, svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(panel.title)}"', 1)


def integer_steps(axes: "Axes") -> None:
    """Labels the x axis with whole steps."""
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)


def legend_above(axes: "Axes") -> None:
    """Puts a legend above the axes if there is more than one curve, so that it hides none of them."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        longest = max(map(len, labels))
        axes.legend(
            handles,
            [label if len(label) <= 44 else f"{label[:21]}...{label[-20:]}" for label in labels],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=1 if longest > 24 else 2 if longest > 14 else 4,  # as many as fit side by side
            fontsize=8,
            borderpad=0.2,
            columnspacing=1.2,
            handlelength=1.5,
        )


def draw_curve(
    axes: "Axes",
    steps: np.ndarray,
    values: np.ndarray,
    color: str,
    marker: str | None = None,
    **style: Any,
) -> None:
    """Draws a curve; without a marker it is a dot where there is but one value."""
    values = in_blocks(values)
    marker = marker_of(values) if marker is None else marker
    axes.plot(in_blocks(steps), values, color=color, marker=marker, **style)


def marker_of(values: np.ndarray) -> str | None:
    """Returns a dot as the marker of a curve with a single point, which would be invisible as a line."""
    return "o" if np.isfinite(values).sum() == 1 else None


def in_blocks(
    values: np.ndarray, most: int = MOST_POINTS, reduce: Callable[..., np.ndarray] = np.nanmean
) -> np.ndarray:
    """Reduces [n] values to at most `most` by merging neighbours; NaN where a block has no finite value."""
    width = -(-len(values) // most)
    if width <= 1:
        return values
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, width)
    known = np.isfinite(blocks).any(1)
    reduced = np.full(len(blocks), np.nan)
    reduced[known] = reduce(blocks[known], axis=1)
    return reduced


def _variable(match: re.Match[str]) -> str:
    color = match.group()
    return f"var({_VARIABLES[color]})" if color in _VARIABLES else color
