"""What AMPipe's pictures share: colours, fonts, and how a picture is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import outputs
from megatron_ampipe.tools import packages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for all common kinds of colour vision, without its black and its pale yellow; the
# order keeps neighbours far apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7F7F3F")
INK, FAINT, PAPER, GRID = "#22262B", "#6B7280", "#FFFFFF", "#DDE0E4"
SUFFIXES = (".png", ".svg", ".pdf")
"""Suffixes of a picture's file, which give its format."""
PNG_DPI, _MAX_PNG_PIXELS = 180, 30_000
_WITHOUT_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def check(path: Path, *, flag: str) -> None:
    """Refuse a file of the argument ``flag`` that could not be written, or has another suffix: BadInput.

    Also raises :class:`EnvironmentMissing` if nothing can be drawn, before anything is measured.
    """
    if path.suffix not in SUFFIXES:
        names = ", ".join(SUFFIXES)
        rule = f"must end with one of {names}, which gives the format"
        raise BadInput(flag, path, rule=rule, remedy=f"Use {flag} {path.with_suffix('.png')}.")
    outputs.check(path, flag=flag)
    packages.require("matplotlib")


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Fonts and colours, for drawing and for writing."""
    import matplotlib

    # Labels come from files: a dollar sign in one is no formula. The salt makes the SVG reproducible.
    settings: Any = {
        "text.parse_math": False,
        "svg.hashsalt": "ampipe",
        "font.family": "DejaVu Sans",
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": FAINT,
    }
    with matplotlib.rc_context(settings):
        yield


def write(figure: Figure, target: Path) -> None:
    """Write a picture in the format of its suffix; the file appears only when it is complete.

    Raises:
        RunFailed: the file cannot be written.
    """
    kind = target.suffix.removeprefix(".")
    dpi = min(PNG_DPI, _MAX_PNG_PIXELS / max(figure.get_size_inches()))
    with outputs.atomic_file(target) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, metadata=_WITHOUT_DATE.get(kind))
