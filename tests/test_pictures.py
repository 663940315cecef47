"""The pictures in committed notebooks: something is drawn in each, and what a cell saves is what it shows and what lies in figures/."""

from __future__ import annotations

import ast
import base64
import io
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pytest
from PIL import Image
from test_layout import ROOT, tracked

matplotlib.use("Agg")

COLOURED = 1e-3  # share of coloured pixels: empty axes have 0, the barest committed figure 0.0045
ALIKE = 0.8  # correlation of a cell's picture with the saved one, 64 pixels wide: the same figure has 0.95 and more, others at most 0.52


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def coloured(png: bytes) -> float:
    """Share of pixels that are clearly not grey. Every line, marker and bar of the theme has a colour; frames, grids and ticks have none."""
    image = pixels(png)
    return float((image.max(2) - image.min(2) > 40).mean())


def likeness(one: bytes, other: bytes) -> float:
    """Correlation of two pictures in grey, reduced to 64 x 40: dots an inch and margins do not count, what is drawn does."""
    small = [np.asarray(Image.open(io.BytesIO(png)).convert("L").resize((64, 40), Image.Resampling.BOX), float) for png in (one, other)]
    return float(np.corrcoef(small[0].ravel(), small[1].ravel())[0, 1])


def saved_names(source: str) -> list[str]:
    """Names that a cell passes to save_figure."""
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "save_figure"]
    return [ast.literal_eval(call.args[1]) for call in calls]


def picture_faults(path: Path, figures: Path) -> list[str]:
    found = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type != "code":
            continue
        shown = [base64.b64decode(o.data["image/png"]) for o in cell.outputs if "image/png" in o.get("data", {})]
        found += [f"cell {number}: a picture with nothing drawn in it" for png in shown if coloured(png) < COLOURED]
        for name in saved_names(cell.source):
            file = figures / f"{name}.png"
            if not shown:
                found.append(f"cell {number}: saves {name} and shows no picture")
            elif not file.is_file():
                found.append(f"cell {number}: {name}.png is not in figures/")
            elif max(likeness(png, file.read_bytes()) for png in shown) < ALIKE:
                found.append(f"cell {number}: figures/{name}.png is not the picture that is shown")
    return found


def test_committed_pictures() -> None:
    notebooks = tracked("notebooks/*.ipynb")
    found = {p.name: picture_faults(p, ROOT / "figures") for p in notebooks}
    assert not {name: texts for name, texts in found.items() if texts}
    names = [name for p in notebooks for cell in nbformat.read(p, as_version=4).cells if cell.cell_type == "code" for name in saved_names(cell.source)]
    assert len(names) == len(set(names)), "two cells save one figure"
    drawn = {p.stem for p in tracked("figures/*.png")}
    assert drawn == set(names), f"in figures/ but saved by no notebook: {sorted(drawn - set(names))}"


def drawing(empty: bool = False, flipped: bool = False) -> bytes:
    from matplotlib.figure import Figure

    fig = Figure(figsize=(14, 5.8))
    for ax in fig.subplots(1, 2):
        ax.grid(True)
        if not empty:
            ax.bar(range(5), range(5, 0, -1) if flipped else range(1, 6))
            ax.plot(range(5), [3, 1, 2, 4, 2])
    fig.savefig(buffer := io.BytesIO(), format="png", dpi=80)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("shown", "saved", "needle"),
    [
        (drawing(), drawing(), None),
        (drawing(empty=True), None, "nothing drawn"),  # made in one cell, drawn in the next: what notebook 06 once showed
        (None, drawing(), "shows no picture"),
        (drawing(), None, "not in figures"),
        (drawing(), drawing(flipped=True), "not the picture that is shown"),
    ],
    ids=["good", "empty axes", "not shown", "not saved", "another one"],
)
def test_each_rule_finds_its_breach(tmp_path: Path, shown: bytes | None, saved: bytes | None, needle: str | None) -> None:
    source = "fig, axes = plt.subplots(1, 2)" if needle == "nothing drawn" else 'save_figure(fig, "00_x")'
    outputs = [nbformat.v4.new_output("display_data", data={"image/png": base64.b64encode(shown).decode()})] if shown else []
    cell = nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    if saved:
        (tmp_path / "00_x.png").write_bytes(saved)
    found = picture_faults(tmp_path / "n.ipynb", tmp_path)
    assert (len(found) == 1 and needle in found[0]) if needle else not found, found
