"""The study launcher: what a file asks for, real runs of a tiny model, one killed and resumed, recorded runs never repeated."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny import tiny_policy

from logra_core.lab.study import finished, main, read_study
from logra_core.rl.runlog import ROOT, read_log
from logra_core.settings import ConfigError

RECIPE = {
    "updates": 3, "eval_problems": 4, "eval_samples": 1, "eval_every": 0, "checkpoint_every": 1, "threads": 1, "sampling": {"max_tokens": 4},
    "eval_sampling": {"max_tokens": 4}, "ppo": {"prompts_per_update": 4, "microbatch": 4}, "task": {"name": "chain_sum"},
}  # fmt: skip
STUDY = {
    "base": "base.yaml", "tasks": {"sums": {"task.options": {"min_terms": 2, "max_terms": 2}}, "bits": {"task.name": "count_bits"}},
    "arms": {"r4": {"sketch.rank": 4}, "r8": {"sketch.rank": 8}},
    "groups": [{"tasks": ["sums"], "arms": ["r4", "r8"], "seeds": [0, 1]}, {"tasks": ["sums", "bits"], "arms": ["r8"], "seeds": [0]}],
}  # fmt: skip


def write(folder: Path, **changes) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(RECIPE | {"model": str(folder / "policy")}))
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY | {"out": str(folder / "runs")} | changes))
    return folder / "study.yaml"


def test_runs_in_order_without_repetition(tmp_path):
    runs = read_study(write(tmp_path))
    assert [r.name for r in runs] == ["sums/r4/seed0", "sums/r8/seed0", "sums/r4/seed1", "sums/r8/seed1", "bits/r8/seed0"]
    assert runs[3].overrides[:2] == ("seed=1", "sketch.seed=1") and "sketch.rank=8" in runs[3].overrides


@pytest.mark.parametrize("changes, words", [
    ({"arms": {"r4": {"sketch.rnak": 4}}, "groups": [{"tasks": ["sums"], "arms": ["r4"], "seeds": [0]}]}, "rnak"),
    ({"groups": [{"tasks": ["sums"], "arms": ["r5"], "seeds": [0]}]}, "'r5' is not among its arms: r4, r8"),
    ({"groups": [{"tasks": ["sum"], "arms": ["r4"], "seeds": [0]}]}, "'sum' is not among its tasks"),
    ({"goups": []}, "expected out, base, tasks, arms, groups"),
    ({"arms": {"r4": {"sketch.rank": 0}}, "groups": [{"tasks": ["sums"], "arms": ["r4"], "seeds": [0]}]}, "rank = 0"),
])  # fmt: skip
def test_a_bad_file_starts_nothing(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        read_study(write(tmp_path, **changes))


def test_the_committed_study_is_valid():
    runs = read_study(ROOT / "data" / "study.yaml")
    assert len(runs) == len({r.out for r in runs}) and all(not Path(r.out).is_absolute() for r in runs)


def test_killed_resumed_and_never_repeated(tmp_path, capsys):
    tiny_policy(tmp_path / "policy")
    path = write(tmp_path, groups=[{"tasks": ["sums"], "arms": ["r4"], "seeds": [0, 1]}])
    first, second = read_study(path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    launcher = subprocess.Popen([sys.executable, "-m", "logra_core.lab.study", str(path)], env=environment, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 240
    while not (Path(first.out) / "checkpoint").is_dir() or not list((Path(first.out) / "checkpoint").glob("*1*")):
        assert time.monotonic() < limit and launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143
    assert finished(second) is None
    assert main([str(path), "--jobs", "2"]) == 0
    assert finished(first) and finished(second) and "2 runs recorded" in capsys.readouterr().out
    assert [p.name for p in sorted(Path(first.out).iterdir()) if p.name != ".lock"] == ["log.jsonl"]
    header, rows = read_log(Path(first.out) / "log.jsonl")
    assert "logra_core.rl.train" in header["command"] and json.dumps(header["config"]["sketch"]["rank"]) == "4"
    assert [r["update"] for r in rows if r["kind"] == "update"] == [1, 2, 3]
    before = (Path(first.out) / "log.jsonl").read_bytes()
    assert main([str(path)]) == 0 and (Path(first.out) / "log.jsonl").read_bytes() == before
    assert main([str(path), "--list"]) == 0 and capsys.readouterr().out.count("recorded") >= 2


def test_a_failing_run_is_named_and_stops_the_rest(tmp_path, capsys):
    path = write(tmp_path, groups=[{"tasks": ["sums"], "arms": ["r4", "r8"], "seeds": [0]}])  # there is no model
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "sums/r4/seed0: exit status 2" in said and "r8" not in said
