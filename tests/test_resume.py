"""A run killed by SIGKILL at any moment resumes to the same bits: weights, optimizer, controller, baseline and log rows.

Real subprocesses of the training command. Ten kills fall into named phases, others at random moments; one run is of the real LLM.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_train import exact, settings
from tiny import tiny_policy

from logra_core import checkpoint
from logra_core.config import TrainConfig, from_dict
from logra_core.runlog import read_log

STALL = Path(__file__).with_name("stall.py")
PHASES = [
    "first evaluation", "rollout", "backward", "between update and sync", "half a row", "checkpoint begun", "checkpoint half written",
    "checkpoint written, not renamed", "checkpoint renamed, old one there", "old checkpoint half removed",
]  # fmt: skip
RESUMES_AT = dict.fromkeys(PHASES, 2) | {"first evaluation": 0, "checkpoint renamed, old one there": 4, "old checkpoint half removed": 4}
LIMIT = 120  # seconds for any wait


def start(folder: Path, cfg: TrainConfig, phase: str = "none") -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STALL.parents[1])}
    command = [sys.executable, str(STALL), phase, str(folder / "marker"), str(folder / "config.json")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=open(folder / "stderr", "a"))


def finish(folder: Path, process: subprocess.Popen) -> None:
    assert process.wait(LIMIT) == 0, (folder / "stderr").read_text()[-2000:]


def wait_for(condition, process: subprocess.Popen, folder: Path) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, "ended too early: " + (folder / "stderr").read_text()[-2000:]
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.002)


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(LIMIT) == -signal.SIGKILL


def result(cfg: TrainConfig) -> dict:
    """All that must be the same to the bit."""
    path = checkpoint.latest(Path(cfg.out) / "checkpoint")
    weights, state = checkpoint.load(path)
    state["method"]["optimizer"]["param_groups"][0]["logra"].pop("run_id")  # a random name
    state["config"] = {k: v for k, v in json.loads(state["config"]).items() if k != "out"}
    state.pop("elapsed")
    rows = [exact(r) for r in read_log(Path(cfg.out) / "log.jsonl")[1]]
    left = sorted(p.name for p in (Path(cfg.out) / "checkpoint").iterdir())
    return {"weights": weights, "state": state, "rows": rows, "left": left}


def assert_same(a, b, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    cfg = run_settings(policy, folder)
    finish(folder, start(folder, cfg))
    return result(cfg)


def run_settings(policy, folder: Path) -> TrainConfig:
    return settings(policy, folder / "run", updates=5)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_within_a_phase(policy, whole, tmp_path, phase):
    cfg = run_settings(policy, tmp_path)
    process = start(tmp_path, cfg, phase)
    wait_for((tmp_path / "marker").exists, process, tmp_path)
    kill(process)
    found = checkpoint.latest(tmp_path / "run" / "checkpoint")
    assert (int(found.name) if found else 0) == RESUMES_AT[phase]
    finish(tmp_path, start(tmp_path, cfg))
    assert_same(result(cfg), whole)


def test_killed_again_and_again_at_random_moments(policy, whole, tmp_path):
    """One run, killed after a random time each time it has made some progress, until it ends by itself."""
    cfg, kills, log = run_settings(policy, tmp_path), 0, tmp_path / "run" / "log.jsonl"
    generator = random.Random()  # new moments in every test run; the seed of a failure is in `delays`
    delays = []
    for attempt in range(20):
        process = start(tmp_path, cfg)
        if attempt < 4:
            before = log.stat().st_mtime_ns if log.exists() else 0
            wait_for(lambda: log.exists() and log.stat().st_mtime_ns != before, process, tmp_path)
            delays.append(generator.uniform(0, 1.0))
            time.sleep(delays[-1])
            if process.poll() is None:
                kill(process)
                kills += 1
                continue
        finish(tmp_path, process)
        break
    assert kills >= 1, delays
    try:
        assert_same(result(cfg), whole)
    except AssertionError as error:
        raise AssertionError(f"after kills at {delays}: {error}") from error


def test_the_real_llm_killed_once(tmp_path):
    def cfg(name: str) -> TrainConfig:
        values = dataclasses.asdict(settings("", tmp_path / name / "run", updates=3, eval_every=0, exact_kl_every=0, checkpoint_every=1))
        values |= {"model": "", "eval_problems": 2, "eval_samples": 1, "threads": 2}
        values["ppo"] |= {"prompts_per_update": 8, "microbatch": 4}
        values["kl"] |= {"probe_responses": 1}
        return from_dict(TrainConfig, values)

    for name in ("whole", "killed"):
        process = start(tmp_path / name, cfg(name))
        if name == "killed":
            folder = tmp_path / name / "run" / "checkpoint"
            wait_for(lambda: (folder / "000001").exists(), process, tmp_path / name)
            time.sleep(random.uniform(0, 3))
            kill(process)
            assert checkpoint.latest(folder).name in ("000001", "000002")
            process = start(tmp_path / name, cfg(name))
        finish(tmp_path / name, process)
    assert_same(result(cfg("killed")), result(cfg("whole")))
