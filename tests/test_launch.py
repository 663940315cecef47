"""Launching: nothing outlives its starter, a run killed at any moment goes on to the same end, and every failure names itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from test_train import exact, settings
from tiny import tiny_policy

from logra_core import ConfigError
from logra_core.launch import Guarded, LaunchConfig, LaunchError, Servers, state, train
from logra_core.runlog import read_log

ROOT = Path(__file__).resolve().parents[1]
# Writes its pid and those of a child and of a grandchild in another session whose parent is gone; none of them heeds SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
a = subprocess.Popen([sys.executable, "-c", sleep])
orphan = "import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, stdout=-3, stderr=-3).pid)"
b = subprocess.run([sys.executable, "-c", orphan, sleep], capture_output=True, text=True).stdout if os.name else ""
print(os.getpid(), a.pid, int(b), flush=True)
time.sleep(300)
"""
STARTER = """
import sys, time
from pathlib import Path
from logra_core.launch import Guarded
held = Guarded([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), grace=1.0)
time.sleep(300)
"""


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            pass
    return found


def until(done, seconds: float, what: str):
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return value


def pids_in(log: Path) -> list[int]:
    return [int(w) for w in log.read_text().split()] if log.exists() else []


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("end", ["closed", "starter killed", "guard told", "guard killed", "command ended"])
def test_nothing_outlives_its_starter(tmp_path, end):
    log = tmp_path / "log"
    script = STUBBORN if end != "guard killed" else STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsleep", "sleep")
    script = script.replace("time.sleep(300)\n", "raise SystemExit(3)\n") if end == "command ended" else script
    if end == "starter killed":
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        starter = subprocess.Popen([sys.executable, "-c", STARTER, script, str(log)], env=environment, start_new_session=True)
        pids = until(lambda: pids_in(log)[:3], 60, "start")
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
    else:
        held = Guarded([sys.executable, "-c", script], log, grace=1.0)
        pids = until(lambda: pids_in(log)[:3], 60, "start")
        assert end == "command ended" or len(alive(pids)) == 3
        if end == "closed":
            held.close()
            assert held.poll() == 128 + signal.SIGKILL
        elif end == "command ended":
            until(lambda: held.poll() is not None, 30, "end")
            assert held.poll() == 3
        else:
            held._process.send_signal(signal.SIGTERM if end == "guard told" else signal.SIGKILL)
    gone = pids if end != "guard killed" else pids[:1]  # no power over what a killed guard's command leaves behind
    until(lambda: not alive(gone), 60, f"{end}: processes {gone}")
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)
