"""`python stall.py PHASE MARKER config.json`: the training command, halted within one phase of one update so that a test can kill it there.

Nothing is replaced: each function runs as it is, and the process stands still before, within or after its n-th call, having made MARKER.
"""

import os
import sys
import time

from logra_core.engines import rollout
from logra_core.rl import checkpoint, runlog
from logra_core.rl import trainer as train
from logra_core.rl.methods import LograMethod
from logra_core.rl.train import main as main_of_train

MARKER = ""


def stand_still() -> None:
    open(MARKER, "w").close()
    time.sleep(120)


def halt(owner, name: str, nth: int, after: bool = False) -> None:
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == nth and not after:
            stand_still()
        result = original(*arguments, **keywords)
        if calls[0] == nth and after:
            stand_still()
        return result

    setattr(owner, name, wrapped)


def half_a_row() -> None:
    original = runlog.os.write

    def write(descriptor, data):
        if b'"kind":"update","update":3,' in bytes(data):
            original(descriptor, bytes(data)[: len(data) // 2])
            os.fsync(descriptor)
            stand_still()
        return original(descriptor, data)

    runlog.os.write = write


PHASES = {
    "first evaluation": lambda: halt(train.Trainer, "_evaluate", 1),
    "rollout": lambda: halt(rollout._Recorder, "finish", 6 * 2 + 6 * 3 + 4),
    "backward": lambda: halt(train, "ppo_loss", 3 * 2 + 2),
    "between update and sync": lambda: halt(LograMethod, "apply", 3, after=True),
    "half a row": half_a_row,
    "checkpoint begun": lambda: halt(checkpoint, "save_file", 2),
    "checkpoint half written": lambda: halt(checkpoint, "save_file", 2, after=True),
    "checkpoint written, not renamed": lambda: halt(checkpoint.os, "rename", 2),
    "checkpoint renamed, old one there": lambda: halt(checkpoint, "_remove", 1),
    "old checkpoint half removed": lambda: halt(checkpoint.shutil, "rmtree", 1),
    "none": lambda: None,
}


def main(phase: str, marker: str, config: str) -> None:
    global MARKER
    MARKER = marker
    PHASES[phase]()
    raise SystemExit(main_of_train([config]))


if __name__ == "__main__":
    main(*sys.argv[1:])
