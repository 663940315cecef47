"""The study: many recorded training runs out of one file, each launched once, resumed if it was cut, skipped when it is recorded.

`python -m logra_core.lab.study data/study.yaml [--only WORDS] [--jobs N] [--list]`, or `make study`. Belongs here: which runs there are,
in which order, and what of them is left. A run itself is `python -m logra_core.rl.train`, in a process of its own; its record is the log that
it writes, `OUT/TASK/ARM/seedN/log.jsonl`.

The file: `out` (folder of the records), `base` (recipe that every run starts from, by its path from there), `tasks` and `arms` (name -> {dotted.key: value}),
`groups` (a list of {tasks, arms, seeds}: each group is run seed by seed, so that one cut short still has every arm).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from ..planning.launch import Guarded, close_all
from ..rl.configfile import load_config, read_settings
from ..rl.runlog import ROOT, read_log
from ..settings import ConfigError

FIELDS = ("out", "base", "tasks", "arms", "groups")


@dataclass(frozen=True)
class StudyRun:
    """One run of the study. out: its folder, relative to the repository. overrides: dotted.key=value arguments of the trainer."""

    task: str
    arm: str
    seed: int
    out: str
    recipe: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.task}/{self.arm}/seed{self.seed}"

    @property
    def command(self) -> list[str]:
        """Arguments after `python`, as they appear in the record."""
        return ["-m", "logra_core.rl.train", self.recipe, *self.overrides, f"out={self.out}"]


def read_study(path: str | os.PathLike) -> list[StudyRun]:
    """Every run of a study file, in order, without repetition; each one's settings are built once, so that a bad file fails here.

    Raises:
        ConfigError: a field, task or arm that does not exist, or settings that the trainer refuses.
    """
    path, study = Path(path), read_settings(path)
    if set(study) != set(FIELDS):
        raise ConfigError(f"study file {str(path)!r}: its fields are {', '.join(study)}; expected {', '.join(FIELDS)}")
    recipe = path.parent / study["base"]
    runs: dict[str, StudyRun] = {}
    for number, group in enumerate(study["groups"], 1):
        for seed in group["seeds"]:
            for task in group["tasks"]:
                for arm in group["arms"]:
                    for kind, name in (("tasks", task), ("arms", arm)):
                        if name not in study[kind]:
                            raise ConfigError(f"study file {str(path)!r}, group {number}: {name!r} is not among its {kind}: {', '.join(study[kind])}")
                    values = {"seed": seed, "sketch.seed": seed} | study["tasks"][task] | study["arms"][arm]
                    overrides = tuple(f"{k}={json.dumps(v)}" for k, v in values.items())
                    run = StudyRun(task, arm, seed, f"{study['out']}/{task}/{arm}/seed{seed}", _relative(recipe), overrides)
                    if run.name not in runs:
                        load_config(recipe, run.overrides)
                    runs.setdefault(run.name, run)
    return list(runs.values())


def _relative(path: Path) -> str:
    full = path.resolve()
    return full.relative_to(ROOT).as_posix() if full.is_relative_to(ROOT) else str(full)


def finished(run: StudyRun) -> float | None:
    """Seconds that a recorded run took, or None when its record has no end."""
    log = ROOT / run.out / "log.jsonl"
    if not log.exists():
        return None
    rows = read_log(log)[1]
    return rows[-1]["elapsed"] if rows and rows[-1]["kind"] == "end" else None


def progress_of(run: StudyRun) -> int:
    """Updates in the record so far."""
    log = ROOT / run.out / "log.jsonl"
    return sum(row["kind"] == "update" for row in read_log(log)[1]) if log.exists() else 0


class Launcher:
    """Runs what is left, `jobs` at a time; stops at the first failure, after the others have ended. All end with this process, however it ends."""

    def __init__(self, runs: list[StudyRun], jobs: int) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs = {jobs}: allowed is >= 1")
        took = {run: finished(run) for run in runs}
        self.waiting = [run for run, seconds in took.items() if seconds is None]
        self.seconds = [seconds for seconds in took.values() if seconds is not None]
        self.jobs, self.total = jobs, len(runs)
        self.active: dict[StudyRun, Guarded] = {}
        self.failed: list[str] = []

    def run(self) -> list[str]:
        """Returns what failed: name, exit status and last line of each."""
        bar = tqdm(total=self.total, initial=self.total - len(self.waiting), desc="study", unit="run")
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            while self.active or (self.waiting and not self.failed):
                while self.waiting and len(self.active) < self.jobs and not self.failed:
                    run = self.waiting.pop(0)
                    self.active[run] = Guarded([sys.executable, *run.command], ROOT / run.out / "study.tmp", cwd=ROOT)
                time.sleep(1.0)
                for run in [r for r, process in self.active.items() if process.poll() is not None]:
                    bar.update(self._end(run))
                bar.set_postfix_str(self._postfix(), refresh=True)
        finally:
            close_all(list(self.active.values()))
            signal.signal(signal.SIGTERM, previous)
            bar.close()
        return self.failed

    def _end(self, run: StudyRun) -> int:
        """1 if the run is recorded now; its checkpoints and printed lines go then."""
        process = self.active.pop(run)
        process.close()
        folder, seconds = ROOT / run.out, finished(run)
        if process.poll() or seconds is None:
            lines = process.words().strip().splitlines() or [""]
            self.failed.append(f"{run.name}: exit status {process.poll()}: {lines[-1][:300]}")
            return 0
        self.seconds.append(seconds)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        process.log.unlink()
        return 1

    def _postfix(self) -> str:
        now = ", ".join(f"{run.name} at {progress_of(run)}" for run in self.active)
        if not self.seconds:
            return now
        left = (len(self.waiting) + 0.5 * len(self.active)) / self.jobs * sum(self.seconds) / len(self.seconds)
        return f"{now}; about {left / 60:.0f} min left"


def chosen(runs: list[StudyRun], words: list[str]) -> Iterator[StudyRun]:
    """Runs whose name holds every one of `words`."""
    return (run for run in runs if all(word in run.name for word in words))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m logra_core.lab.study", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="the study, e.g. data/study.yaml")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="runs whose TASK/ARM/seedN holds every word")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each uses the recipe's threads")
    parser.add_argument("--list", action="store_true", help="say which runs there are, start none")
    args = parser.parse_args(arguments)
    try:
        runs = list(chosen(read_study(args.file), args.only))
        if args.list:
            for run in runs:
                state = "recorded" if finished(run) is not None else f"at update {n}" if (n := progress_of(run)) else "to do"
                print(f"{run.name:<48} {state}")
            return 0
        failed = Launcher(runs, args.jobs).run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    print("\n".join(failed) if failed else f"{len(runs)} runs recorded")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
