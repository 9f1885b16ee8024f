"""What the figures of all reports share: colours, and how they come to be files."""

from pathlib import Path
from typing import TYPE_CHECKING

from rljax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's


def new_figure(option: str, width: float, height: float) -> "Figure":
    """An empty figure of so many inches; a UserError that names the option if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"{option} needs matplotlib: install the plot extra (pip install -e '.[plot]')"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Writes it, in the format that the name ends in."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the plot cannot be written there: {error}") from error
