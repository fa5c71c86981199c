"""Draw pictures into files with matplotlib, which is imported only when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError


def check_figure_file(file: str | Path) -> None:
    """Raise ConfigError if no picture can be drawn into `file`."""
    if Path(file).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{file}: expected a name that ends in .png, .svg or .pdf")
    figure_and_patch()


def figure_and_patch() -> tuple[Any, Any]:
    """Return matplotlib's Figure and Patch; raise ConfigError if matplotlib is missing."""
    # Figure is used without pyplot, so no window system and no global state are needed.
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'mpidist[plot]'"
        ) from None
    return Figure, Patch


def save_figure(figure, file: str | Path) -> None:
    """Write a figure into `file`; raise ConfigError if that fails."""
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write the picture {file}: {error.strerror}") from None
