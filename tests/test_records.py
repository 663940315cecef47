"""Recorded runs as arrays: series, common updates, smoothing; clear errors for what is not there."""

import numpy as np
import pytest

from logra_core.lab.records import load_runs, smooth, stack
from logra_core.rl.runlog import RunLog


def write(path, updates):
    with RunLog(path, {"seed": 0}) as log:
        for t in updates:
            log.row("update", update=t, reward=float(t), nested={"a": 2.0 * t})
        log.row("end", update=updates[-1])


def test_series_and_stack(tmp_path):
    write(tmp_path / "seed0" / "log.jsonl", [1, 2, 3, 4])
    write(tmp_path / "seed1" / "log.jsonl", [1, 2, 4])
    runs = load_runs(tmp_path)
    assert len(runs) == 2
    x, y = runs[0].series("nested.a")
    assert x.tolist() == [1, 2, 3, 4] and y.tolist() == [2, 4, 6, 8]
    x, y = stack(runs, "reward")
    assert x.tolist() == [1, 2, 4] and y.tolist() == [[1, 2, 4], [1, 2, 4]]
    with pytest.raises(KeyError, match="rewrd"):
        runs[0].series("rewrd")
    with pytest.raises(FileNotFoundError, match="no_such"):
        load_runs("no_such")


def test_smooth_is_a_trailing_mean():
    y = np.array([[1.0, 2.0, 6.0, 4.0]])
    assert smooth(y, 2).tolist() == [[1.0, 1.5, 4.0, 5.0]]
    assert np.array_equal(smooth(y, 1), y)
