"""A whole run from one place: vLLM servers, `torchrun -m logra_core.rl.train` that uses them, its log as it grows, and the end of it all.

Belongs here: which processes a run has, where they go, and what is said when one fails. Every process is guarded (guard.py): none outlives
the one that called `train`, however that ends; `python -m logra_core.planning.launch RECIPE` is such a caller. Whether a run can work here at all
is preflight.py's question.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..engines.plugin import environment
from ..engines.policy import at_home, embedded_policy
from ..engines.vllm_local import ON_CPU
from ..engines.vllm_server import serve_command
from ..rl.configfile import load_config
from ..rl.runlog import ROOT, read_log
from ..rl.settings import TrainConfig
from ..rl.trainer import refuse_another_run
from ..settings import Checked, ConfigError
from . import guard

POLL = 0.5  # seconds between looks at the log and at the processes
TAIL = 3000  # characters of a process's own words in an error
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}


class LaunchError(RuntimeError):
    """A process of the run failed or did not come up; the message ends with its last words."""


@dataclass(frozen=True)
class LaunchConfig(Checked):
    """A recipe and the processes that run it.

    recipe: file of settings. overrides: `dotted.key=value`. ranks: processes that train. servers: vLLM servers that draw the responses,
    one GPU each (0: what the recipe names, an engine inside rank 0 or servers that run already). train_devices, rollout_devices: GPUs by number, one a rank and one a
    server; empty: CPU. kv_cache_gib: of a server, for keys and values. server_options: its further settings, by vLLM's long names.
    start_seconds: for all servers to come up.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    ranks: int = 2
    servers: int = 1
    train_devices: tuple[int, ...] = ()
    rollout_devices: tuple[int, ...] = ()
    kv_cache_gib: float = 1.0
    server_options: dict = field(default_factory=dict)
    start_seconds: float = 600.0

    def _check(self) -> None:
        self._need("ranks", self.ranks >= 1, ">= 1")
        self._need("servers", self.servers >= 0, ">= 0")
        self._need("train_devices", len(self.train_devices) in (0, self.ranks), f"none, or one for each of {self.ranks} ranks")
        self._need("rollout_devices", len(self.rollout_devices) in (0, self.servers), f"none, or one for each of {self.servers} servers")
        devices = [*self.train_devices, *self.rollout_devices]
        self._need("rollout_devices", len(set(devices)) == len(devices), "GPUs that nothing else of the run uses")
        self._need("kv_cache_gib", self.kv_cache_gib > 0, "> 0")
        self._need("start_seconds", self.start_seconds > 0, "> 0")

    def arguments(self, seed: int, urls: Sequence[str] = ()) -> list[str]:
        """Overrides of one seed's run, in a folder of its own, with rollouts from servers at `urls`."""
        own = load_config(self.recipe, self.overrides)
        given = [*self.overrides, f"seed={seed}", f"sketch.seed={seed}", f"out={own.out}/seed{seed}"]
        return given + (["engine=vllm", f"engine_urls=[{', '.join(urls)}]"] if self.servers else [])

    def config(self, seed: int) -> TrainConfig:
        """All settings of one seed's run. Raises ConfigError for a bad one."""
        return load_config(self.recipe, self.arguments(seed))

    def serving(self, port: int, cfg: TrainConfig) -> list[str]:
        """The command line of one server. Room for keys and values is given, not measured: the masters come with the first message."""

        options = {"kv_cache_memory_bytes": int(self.kv_cache_gib * 2**30)} | ({} if self.rollout_devices else ON_CPU)
        return serve_command(at_home(cfg.model or embedded_policy()), port, **(options | self.server_options))

    def command(self, seed: int, urls: Sequence[str] = ()) -> list[str]:
        """The torchrun command line of one seed's run."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks), "--master-port", str(free_port())]
        return [*torchrun, "-m", "logra_core.rl.train", self.recipe, *self.arguments(seed, urls)]


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ------------------------------------------------------------------ processes


class Guarded:
    """A command under guard.py, printing to a file; it and all that it starts end with `close`, or with this process.

    devices: GPUs that it may see (none: no change). environment: further variables. grace: seconds to end by itself before it is killed.
    cwd: its working folder (None: this process's).
    """

    def __init__(
        self, command: list[str], log: Path, devices: Sequence[int] = (), environment: dict[str, str] | None = None, grace: float = guard.GRACE,
        cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self.log, self.grace, python = log, grace, os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": python} | (environment or {})
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            words = [sys.executable, "-I", guard.__file__, str(grace), *command]
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True
            )

    def poll(self) -> int | None:
        """Exit code once the command and everything below it has ended; above 128, a signal's number + 128."""
        return self._process.poll()

    def words(self) -> str:
        """The last that it printed."""
        return self.log.read_text(errors="replace")[-TAIL:]

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._process.stdin.close()
        self._process.wait(3 * self.grace + 10)


class Servers:
    """vLLM servers with the `logra` backend, up when construction returns. A context manager; `close` ends them."""

    def __init__(self, launch: LaunchConfig, cfg: TrainConfig, folder: Path) -> None:
        self.urls, self._all = [], []
        end = time.monotonic() + launch.start_seconds
        try:
            for i in range(launch.servers):
                port = free_port()
                devices = launch.rollout_devices[i : i + 1]
                self._all.append(Guarded(launch.serving(port, cfg), folder / f"server{i}.log", devices, SERVER_ENVIRONMENT | environment()))
                self.urls.append(f"http://127.0.0.1:{port}")
            while not all(map(_healthy, self.urls)):
                self.check()
                if time.monotonic() > end:
                    slow = next(i for i, url in enumerate(self.urls) if not _healthy(url))
                    raise LaunchError(f"vLLM server {slow} is not up after {launch.start_seconds:g} s:\n{self._all[slow].words()}")
                time.sleep(POLL)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises LaunchError, with its last words, if a server has ended."""
        for i, server in enumerate(self._all):
            if (code := server.poll()) is not None:
                raise LaunchError(f"vLLM server {i} ended with code {code}:\n{server.words()}")

    def close(self) -> None:
        close_all(self._all)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def close_all(held: Sequence[Guarded]) -> None:
    """End all of them, also when the ending of one fails or is interrupted."""
    with contextlib.ExitStack() as stack:
        for one in held:
            stack.callback(one.close)


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    return False


# ------------------------------------------------------------------ runs


def state(cfg: TrainConfig) -> str:
    """Of the run in `cfg.out`: new, unfinished or finished. Raises ConfigError if what is there is another run."""
    log = Path(cfg.out) / "log.jsonl"
    if not log.exists():
        return "new"
    header, rows = read_log(log)
    refuse_another_run(log, header, cfg)
    return "finished" if rows and rows[-1]["kind"] == "end" and rows[-1]["update"] == cfg.updates else "unfinished"


def train(launch: LaunchConfig, seeds: Sequence[int], on_row: Callable[[int, dict], None] | None = None) -> dict[int, list[dict[str, Any]]]:
    """Train every seed to its end, one after the other, and return the rows of its log. Shows a progress bar.

    A finished run is left alone, a killed one goes on from its checkpoint. Servers serve all seeds; each run brings them into step first.
    on_row: called with seed and row as soon as a row is in the log, those of earlier processes included.
    Raises:
        ConfigError: a bad setting, or a folder that holds another run. LaunchError: a process failed; what was saved stays.
    """
    configs = {seed: launch.config(seed) for seed in seeds}
    todo = [seed for seed, cfg in configs.items() if state(cfg) != "finished"]
    with contextlib.ExitStack() as stack:
        servers = None
        if todo and launch.servers:
            first = configs[todo[0]]
            servers = stack.enter_context(Servers(launch, first, Path(first.out).parent))
        for seed, cfg in configs.items():
            if seed in todo:
                _train_one(launch, seed, cfg, servers, on_row)
    return {seed: read_log(Path(cfg.out) / "log.jsonl")[1] for seed, cfg in configs.items()}


def _train_one(launch: LaunchConfig, seed: int, cfg: TrainConfig, servers: Servers | None, on_row: Callable | None) -> None:
    out = Path(cfg.out)
    urls = servers.urls if servers else ()
    trainer = Guarded(launch.command(seed, urls), out / "train.log", launch.train_devices)
    bar = tqdm(total=cfg.updates, desc=f"{cfg.method} {cfg.task.name[:24]}, seed {seed}", unit="update")
    try:
        for row in _rows(trainer, out / "log.jsonl"):
            if row["kind"] == "update":
                bar.set_postfix(reward=f"{row['reward_rate']:.2f}", alpha=f"{row['alpha']:.2g}", refresh=False)
                bar.update(row["update"] - bar.n)
            if on_row is not None:
                on_row(seed, row)
        if code := trainer.poll():
            if servers:
                servers.check()
            raise LaunchError(f"training of seed {seed} ended with code {code}; started again it goes on from its checkpoint:\n{trainer.words()}")
    finally:
        bar.close()
        trainer.close()


def _rows(trainer: Guarded, log: Path) -> Iterator[dict]:
    """Rows of a log as they come, until the trainer has ended. A resumed run first drops rows after its checkpoint; they come again."""
    seen: list[dict] = []
    ended = False
    while True:
        with contextlib.suppress(FileNotFoundError):
            rows = read_log(log)[1]
            same = 0
            while same < min(len(rows), len(seen)) and rows[same] == seen[same]:
                same += 1
            yield from rows[same:]
            seen = rows
        if ended:
            return
        ended = trainer.poll() is not None
        if not ended:
            time.sleep(POLL)


# ------------------------------------------------------------------ command line


def parse(arguments: list[str] | None = None) -> tuple[LaunchConfig, list[int]]:
    """What the command line asks for: processes and seeds."""
    parser = argparse.ArgumentParser(prog="python -m logra_core.planning.launch", description="Start vLLM servers and train with them under torchrun.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for name, kind, default in (("ranks", int, 4), ("servers", int, 4), ("kv-cache-gib", float, 1.0)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--train-devices", type=int, nargs="*", default=[])
    parser.add_argument("--rollout-devices", type=int, nargs="*", default=[])
    parser.add_argument("--server-options", type=json.loads, default={}, metavar="JSON")
    given = vars(parser.parse_intermixed_args(arguments))
    seeds = given.pop("seeds")
    return LaunchConfig(**given), seeds


def main(arguments: list[str] | None = None) -> int:
    try:
        made = train(*parse(arguments))
    except (ConfigError, LaunchError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for seed, rows in made.items():
        print(f"seed {seed}: " + ", ".join(f"Pass@{k} {rows[-1]['pass_at_before'][k]:.3f} -> {v:.3f}" for k, v in rows[-1]["pass_at_after"].items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
