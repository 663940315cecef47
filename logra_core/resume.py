"""How a run holds its folder and goes on where a killed one stopped: the trainer's half that deals with checkpoints and the log.

Belongs here: what is saved, what must agree before a run may go on, and in which order. Files are checkpoint.py's business.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import torch
from tqdm.auto import tqdm

from . import checkpoint
from .config import ConfigError, TrainConfig, to_dict
from .methods import Method
from .ppo import RunningBaseline
from .rollout import RolloutEngine
from .runlog import RunLog, read_log, scrub
from .sync import full_state_bytes


def config_digest(cfg: TrainConfig) -> str:
    """16 hexadecimal digits of the settings that may not change in a run, with paths whole: a log's header keeps only parts of those."""
    values = checkpoint.as_json(to_dict(cfg))
    for name in checkpoint.FREE:
        *parents, last = name.split(".")
        functools.reduce(dict.__getitem__, parents, values).pop(last)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def refuse_another_run(log: Path, header: dict[str, Any], cfg: TrainConfig) -> None:
    """Raises ConfigError, naming what differs, if the log's header is of a run with other settings than `cfg`.

    The header's own paths depend on the folder that its writer worked in, so its digest decides; old headers have none.
    """
    digest = header.get("config_digest")
    if digest == config_digest(cfg):
        return
    differ = checkpoint.differing_fields(header.get("config", {}), scrub(checkpoint.as_json(to_dict(cfg))))
    if digest and not differ:
        differ = ["a path in its settings, such as model, of which the log keeps only the end"]
    if differ:
        raise ConfigError(f"{log} is of another run: {'; '.join(differ)}; choose another folder or remove it")


class Resumable:
    """Base of `Trainer`, which sets these."""

    cfg: TrainConfig
    out: Path
    model: torch.nn.Module
    method: Method
    engine: RolloutEngine
    baseline: RunningBaseline
    log: RunLog | None
    _lock: IO | None
    _late: Counter
    _before: float
    _rows: int

    def _start(self) -> int:
        """Open the log, restore the newest checkpoint if there is one, bring the engine into step. Returns the updates already done."""
        found, done = self._find(), 0
        if found is not None:
            done = self._restore(found)
            if done > self.cfg.updates:
                raise ConfigError(f"{found} is at update {done}; updates = {self.cfg.updates} lies before it")
        self._open_log(found, done)
        self._resync()
        return done

    def _find(self) -> Path | None:
        """Hold the run's folder, clear it of what a killed process left, return its newest checkpoint."""
        self._lock = checkpoint.lock(self.out)
        checkpoint.sweep(self.out / "checkpoint")
        return checkpoint.latest(self.out / "checkpoint")

    def _open_log(self, found: Path | None, done: int) -> None:
        log = self.out / "log.jsonl"
        if found is not None:
            if not log.exists():
                raise checkpoint.CheckpointError(f"{found} has no log beside it: {log} is missing; remove the checkpoint to start over")
            finished = done == self.cfg.updates
            self.log = RunLog.resume(log, keep=lambda row: row["update"] <= done and (row["kind"] != "end" or finished))
            rows = [r for r in read_log(log)[1] if r["kind"] != "end"]
            if len(rows) != self._rows:
                raise checkpoint.CheckpointError(f"{log} has {len(rows)} rows up to update {done}, the checkpoint {self._rows}")
        elif log.exists() and self._finished(log):
            self.log = RunLog.resume(log)
        else:
            log.unlink(missing_ok=True)
            self.log = RunLog(log, self._header())

    def _resync(self) -> None:
        self.engine.resync(full_state_bytes(self.method.weights, self.method.run_id, self.method.version))

    def _finished(self, log: Path) -> bool:
        """Of a log without a checkpoint: a run killed early, which starts over, or one of no updates, which is done. Refuses anything else."""
        header, rows = read_log(log)
        finished = any(r["kind"] == "end" for r in rows)
        if finished and not rows[-1]["update"] == self.cfg.updates == 0:
            raise ConfigError(f"{log} is of a finished run without a checkpoint; choose another folder or remove it")
        refuse_another_run(log, header, self.cfg)
        return finished

    def _restore(self, path: Path) -> int:
        weights, state = self._load(path)
        if differ := checkpoint.differing_fields(json.loads(state["config"]), checkpoint.as_json(to_dict(self.cfg))):
            raise ConfigError(f"cannot resume {path} with other settings: {'; '.join(differ)}")
        if state["frozen"] != self._frozen():
            raise checkpoint.CheckpointError(f"{path} is of another model: its frozen weights differ from those of {self.cfg.model!r}")
        if set(weights) != set(self.method.weights.modules):
            raise checkpoint.CheckpointError(f"{path} holds {len(weights)} weights; this run trains others")
        if state["threads"] != torch.get_num_threads():
            tqdm.write(f"resuming with {torch.get_num_threads()} threads what ran with {state['threads']}: last bits may differ")
        self.method.load_state_dict(state["method"])
        with torch.no_grad():
            for name, value in weights.items():
                self.method.weights.set_(name, value)
        if (ours := self.method.weights.fingerprint()) != state["fingerprint"]:
            raise checkpoint.CheckpointError(f"{path}: restored weights have fingerprint {ours}, saved {state['fingerprint']}; damaged")
        self.baseline.load_state_dict(state["baseline"])
        self._before, self._rows = state["elapsed"], state["rows"]
        return int(state["update"])

    def _save(self, update: int) -> None:
        started = time.perf_counter()
        state = {
            "config": json.dumps(to_dict(self.cfg)),
            "method": self.method.state_dict(),
            "baseline": self.baseline.state_dict(),
            "fingerprint": self.method.weights.fingerprint(),
            "frozen": self._frozen(),
            "rows": self._rows,
            "elapsed": self._elapsed(),
            "threads": torch.get_num_threads(),
        }
        self._write(update, state)
        self._late["checkpoint"] += time.perf_counter() - started

    def _frozen(self) -> str:
        return checkpoint.frozen_digest(self.model, self.method.trained())

    def _load(self, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return checkpoint.load(path)

    def _write(self, update: int, state: dict[str, Any]) -> None:
        weights = {n: self.method.weights.stored(n) for n in self.method.weights.modules}
        checkpoint.save(self.out / "checkpoint", update, weights, state)
