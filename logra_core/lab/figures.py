"""The look of figures, and saving them as small PNGs that are the same bytes for the same figure."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..rl.runlog import ROOT, _replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PNG_BYTES = 200_000


def theme() -> None:
    """Set the look of every figure: colour-blind palette, text readable at half size, and line style and marker that
    change with the colour, so that a print in grey can be read."""
    import seaborn
    from cycler import cycler

    palette = seaborn.color_palette("colorblind")
    styles = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 1, 2)), (0, (8, 3)), (0, (2, 2))]
    markers = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*"]
    seaborn.set_theme(context="talk", style="whitegrid", palette=palette, font_scale=0.9, rc={
        "axes.prop_cycle": cycler(color=palette) + cycler(linestyle=styles) + cycler(marker=markers),
        "figure.figsize": (9.0, 5.5), "figure.dpi": 80, "lines.linewidth": 2.2, "lines.markersize": 6,
        "axes.titleweight": "bold", "legend.frameon": True, "grid.alpha": 0.6, "image.cmap": "cividis",
    })


def figures_folder() -> Path:
    """LOGRA_FIGURES if set, else `figures/` of the repository, else (the package is installed elsewhere) of the working folder."""
    if os.environ.get("LOGRA_FIGURES"):
        return Path(os.environ["LOGRA_FIGURES"])
    return (ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()) / "figures"


def save_figure(fig: Figure, name: str, folder: str | Path | None = None) -> Path:
    """Save `fig` as `<folder>/<name>.png`: 150 dpi, the same bytes for the same figure, under 200 kB.

    A picture over the limit is reduced to 256 colours, then to 100 dpi. folder: default `figures_folder()`.
    Raises:
        ValueError: a name with other characters than lower-case letters, digits, _ and -; or a picture that stays too big.
    """

    from PIL import Image

    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"figure name {name!r}: allowed are lower-case letters, digits, _ and -, without an ending")
    for dpi, colours in ((150, None), (150, 256), (100, 256)):
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None})
        if colours:
            image = Image.open(buffer).convert("RGB").quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            image.save(buffer := io.BytesIO(), format="png", optimize=True, dpi=(dpi, dpi))
        if len(buffer.getvalue()) < MAX_PNG_BYTES:
            target = Path(folder) if folder is not None else figures_folder()
            target.mkdir(parents=True, exist_ok=True)
            _replace(target / f"{name}.png", buffer.getvalue())
            return target / f"{name}.png"
    raise ValueError(f"figure {name!r} has {len(buffer.getvalue())} bytes at 100 dpi; allowed are {MAX_PNG_BYTES}: draw fewer points")
