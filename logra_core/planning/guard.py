"""Run a command so that nothing of it outlives whoever started it: `python -I guard.py GRACE COMMAND ...` with a pipe as standard input.

Belongs here: the watching process, which ends the command and every process below it when the pipe closes (the starter ended it, or died,
however suddenly), when it is told to (SIGTERM, SIGINT), and when the command itself ends. Needs psutil; imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

GRACE = 20.0  # seconds between SIGTERM and SIGKILL, unless told
SUBREAPER, PARENT_DEATH = 36, 1  # prctl's PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def run(command: list[str], grace: float) -> int:
    """Run `command` to its end, or to the end of standard input; its exit code, negative for a signal."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    prctl(SUBREAPER, 1)  # what the command leaves behind becomes a child of this process, so that it is found below
    # A new session: a Ctrl-C in the terminal is the starter's affair. If this process is killed itself, the command is told to end.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: prctl(PARENT_DEATH, signal.SIGTERM))
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), stop.set()), daemon=True).start()
    while child.poll() is None and not stop.wait(0.1):
        pass
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        child.kill()
    code = child.wait()
    end = time.monotonic() + grace
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)
    return code


if __name__ == "__main__":
    code = run(sys.argv[2:], float(sys.argv[1]))
    os._exit(code if code >= 0 else 128 - code)  # not waiting for the thread that reads standard input
