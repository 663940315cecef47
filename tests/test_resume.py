"""A run killed by SIGKILL at any moment resumes to the same bits: weights, optimizer, controller, baseline and log rows.

Real processes, really killed. Ten kills fall into named phases, others at random moments; one run is of the real LLM.
"""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import SWITCHES
from test_train import VARIANTS, exact, settings, variant
from tiny import tiny_policy

from logra_core.rl import checkpoint
from logra_core.rl.configfile import from_dict
from logra_core.rl.runlog import read_log
from logra_core.rl.settings import TrainConfig

STALL = Path(__file__).with_name("stall.py")
PHASES = [
    "first evaluation", "rollout", "backward", "between update and sync", "half a row", "checkpoint begun", "checkpoint half written",
    "checkpoint written, not renamed", "checkpoint renamed, old one there", "old checkpoint half removed",
]  # fmt: skip
RESUMES_AT = dict.fromkeys(PHASES, 2) | {"first evaluation": 0, "checkpoint renamed, old one there": 4, "old checkpoint half removed": 4}
LIMIT = 240  # seconds for any wait
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["logra_core.rl.train", "reasoning_gym", "transformers.models.llama.modeling_llama"])


class Run:
    """A training process: the command itself, or (fork) the same out of a server that has imported everything, which starts 5 s sooner."""

    def __init__(self, folder: Path, cfg: TrainConfig, phase: str = "none", fork: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
        self.errors = folder / "stderr"
        arguments = (phase, str(folder / "marker"), str(folder / "config.json"))
        if fork:
            self.process = SERVER.Process(target=in_fork, args=(str(self.errors), *arguments))
            self.process.start()
        else:
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(STALL.parents[1])}
            self.process = subprocess.Popen(
                [sys.executable, str(STALL), *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=open(self.errors, "a")
            )

    def code(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def wait_for(self, condition) -> None:
        limit = time.monotonic() + LIMIT
        while not condition():
            assert self.code() is None, f"ended with {self.code()}: " + self.errors.read_text()[-2000:]
            assert time.monotonic() < limit, "nothing happened"
            time.sleep(0.002)

    def ended(self) -> int:
        limit = time.monotonic() + LIMIT
        while self.code() is None:
            assert time.monotonic() < limit, "did not end"
            time.sleep(0.01)
        return self.code()

    def finish(self) -> None:
        assert self.ended() == 0, self.errors.read_text()[-2000:]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL


def in_fork(errors: str, *arguments: str) -> None:
    sys.stdout, sys.stderr = open(os.devnull, "w"), open(errors, "a")
    import stall

    stall.main(*arguments)


def result(cfg: TrainConfig) -> dict:
    """All that must be the same to the bit."""
    path = checkpoint.latest(Path(cfg.out) / "checkpoint")
    weights, state = checkpoint.load(path)
    state["method"]["optimizer"]["param_groups"][0].get("logra", state["method"]).pop("run_id")  # a random name
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
    Run(folder, cfg).finish()
    return result(cfg)


def run_settings(policy, folder: Path, switch: str = "one_sided", method: str = "logra") -> TrainConfig:
    sketch, optim = ({"refresh_every": 4}, {"beta1": 0.9}) if switch == "momentum" else (SWITCHES[switch], {})
    return settings(policy, folder / "run", updates=5, sketch={"rank": 8, "scored_responses": 6} | sketch, optim=optim, **variant(method))


OTHERS = [*(("logra", s) for s in ("two_sided", "shared activation", "shared bits", "ranks", "momentum")), *((m, "one_sided") for m in VARIANTS[1:])]


@pytest.mark.parametrize(("method", "switch"), OTHERS)
def test_switches_and_methods_killed_in_the_backward_pass(policy, tmp_path, method, switch):
    """The third update is killed half-way: its factors by value, and the projection found while scoring, are made again to the same bits."""
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        cfg = run_settings(policy, folder, switch, method)
        if name == "killed":
            run = Run(folder, cfg, "backward", fork=True)
            run.wait_for((folder / "marker").exists)
            run.kill()
            assert checkpoint.latest(folder / "run" / "checkpoint").name == "000002"
        Run(folder, cfg, fork=True).finish()
    assert_same(result(cfg), result(run_settings(policy, tmp_path / "whole", switch, method)))


@pytest.mark.parametrize("phase", PHASES)
def test_killed_within_a_phase(policy, whole, tmp_path, phase):
    cfg = run_settings(policy, tmp_path)
    run = Run(tmp_path, cfg, phase, fork=True)
    run.wait_for((tmp_path / "marker").exists)
    run.kill()
    found = checkpoint.latest(tmp_path / "run" / "checkpoint")
    assert (int(found.name) if found else 0) == RESUMES_AT[phase]
    Run(tmp_path, cfg, fork=True).finish()
    assert_same(result(cfg), whole)


def test_killed_again_and_again_at_random_moments(policy, whole, tmp_path):
    """One run, killed after a random time each time it has made some progress, until it ends by itself."""
    cfg, kills, log = run_settings(policy, tmp_path), 0, tmp_path / "run" / "log.jsonl"
    generator = random.Random()  # new moments in every test run; the seed of a failure is in `delays`
    delays = []
    for attempt in range(20):
        run = Run(tmp_path, cfg, fork=attempt > 0)
        if attempt < 4:
            before = log.stat().st_mtime_ns if log.exists() else 0
            run.wait_for(lambda: log.exists() and log.stat().st_mtime_ns != before)
            delays.append(generator.uniform(0, 1.0))
            time.sleep(delays[-1])
            if run.code() is None:
                run.kill()
                kills += 1
                continue
        run.finish()
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
        run = Run(tmp_path / name, cfg(name))
        if name == "killed":
            folder = tmp_path / name / "run" / "checkpoint"
            run.wait_for((folder / "000001").exists)
            time.sleep(random.uniform(0, 3))
            run.kill()
            assert checkpoint.latest(folder).name in ("000001", "000002")
            run = Run(tmp_path / name, cfg(name))
        run.finish()
    assert_same(result(cfg("killed")), result(cfg("whole")))
