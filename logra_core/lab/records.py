"""Recorded runs as arrays and curves: what notebooks read from `data/runs/` and how they draw it. Loads no torch.

A record is a run log (`runlog.RunLog`): a header and rows of kinds "update", "eval" and "end".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engines.policy import data_folder
from ..rl.runlog import read_log


@dataclass(frozen=True)
class Run:
    """One recorded run."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]

    def series(self, key: str, kind: str = "update") -> tuple[np.ndarray, np.ndarray]:
        """(x, y): the update numbers and values of `key` (dotted keys reach into dicts) in rows of a kind that have it."""
        found = [(row["update"], value) for row in self.rows if row["kind"] == kind and (value := _get(row, key)) is not None]
        if not found:
            raise KeyError(f"no row of kind {kind!r} has {key!r}; rows hold {', '.join(self.rows[0]) if self.rows else 'nothing'}")
        return tuple(np.array(column, dtype=float) for column in zip(*found, strict=True))


def _get(row: dict, key: str) -> Any:
    for part in key.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def load_runs(folder: str | Path) -> list[Run]:
    """Every run log below a folder of `data/runs/` (a name, or a path), in order of path.

    Raises:
        FileNotFoundError: there is none.
    """
    base = Path(folder) if Path(folder).is_absolute() else data_folder() / "runs" / folder
    paths = sorted(base.rglob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"no recorded run in data/runs/{folder}")
    return [Run(*read_log(path)) for path in paths]


def stack(runs: list[Run], key: str, kind: str = "update") -> tuple[np.ndarray, np.ndarray]:
    """(x [T], y [runs, T]) of one key, over the updates that all runs have."""
    pairs = [run.series(key, kind) for run in runs]
    x = pairs[0][0]
    for other, _ in pairs[1:]:
        x = x[np.isin(x, other)]
    return x, np.stack([y[np.isin(own, x)] for own, y in pairs])


def smooth(y: np.ndarray, width: int) -> np.ndarray:
    """Trailing mean over up to `width` values along the last axis."""
    total = np.cumsum(np.concatenate([np.zeros_like(y[..., :1]), y], -1), -1)
    stop = np.arange(1, y.shape[-1] + 1)
    start = np.maximum(stop - width, 0)
    return (total[..., stop] - total[..., start]) / (stop - start)


def band(ax, x: np.ndarray, ys: np.ndarray, label: str, **style) -> None:
    """Mean over runs as a line, ± one standard deviation (ddof 1) as a band."""
    (line,) = ax.plot(x, ys.mean(0), label=label, **style)
    if len(ys) > 1:
        spread = ys.std(0, ddof=1)
        ax.fill_between(x, ys.mean(0) - spread, ys.mean(0) + spread, color=line.get_color(), alpha=0.18, linewidth=0)
