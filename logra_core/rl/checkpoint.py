"""Checkpoints of a run: complete or not there at all.

A checkpoint is a folder named by its update number, with `weights.safetensors` (fp32 target weights) and `state.pt` (all else, loadable
with `weights_only=True`). Several processes write their rows of the large tensors with torch.distributed.checkpoint instead of the former;
either kind is read by any number of processes. It is written under a temporary name, flushed to disk and renamed; only then are older
ones removed. A kill at any moment leaves the previous checkpoint or the new one, and remains of the temporary one that the next run
sweeps away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

FORMAT = 1
TEMPORARY = ".tmp-"
SHARDED = "sharded tensor: "
# Settings that may change between a kill and a resume. Servers may have moved (with another number of them other responses are drawn).
FREE = (
    "updates", "out", "eval_every", "checkpoint_every", "exact_kl_every", "peer_timeout", "engine_urls", "sketch.projection_storage",
)  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that does not fit this run, or is damaged."""


def lock(out: Path) -> IO:
    """Make the run's folder and hold it for this process; `CheckpointError` if another one trains there. A killed process lets go."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"out = {str(out)!r}: a file is in the way; allowed is a folder, or a name that is not there yet") from error
    held = open(out / ".lock", "w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise CheckpointError(f"{out} is in use by another process") from error
    return held


def frozen_digest(model: torch.nn.Module, trained: Iterable[torch.Tensor]) -> str:
    """Digest of everything in the model but the tensors that train: names and bits."""
    trained = {t.data_ptr() for t in trained}
    digest = xxhash.xxh3_128()
    for name, value in sorted(model.state_dict().items()):
        if value.data_ptr() not in trained:
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save(folder: Path, update: int, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write checkpoint `update` under `folder`, atomically, then drop the older ones. Returns its path."""
    made = begin(folder, update)
    with _writing(made):
        save_file({n: w.detach().cpu().contiguous() for n, w in weights.items()}, made / "weights.safetensors")
    return finish(made, state)


@contextlib.contextmanager
def _writing(made: Path) -> Iterator[None]:
    """A disk that fills, or refuses, becomes a CheckpointError that says so and what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises the second, safetensors the third
        free = shutil.disk_usage(made).free / 2**20
        raise CheckpointError(
            f"checkpoint {made.name.removeprefix(TEMPORARY)} could not be written to {made.parent} ({free:,.0f} MiB free): {error}. "
            "The one before it is whole: make room and start the run again"
        ) from error


def begin(folder: Path, update: int) -> Path:
    """The folder, under a temporary name, to write checkpoint `update` into."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    if (folder / f"{update:06d}").exists():
        raise CheckpointError(f"{folder / f'{update:06d}'} is there already; a run saves each update once")
    made = folder / f"{TEMPORARY}{update:06d}"
    made.mkdir()
    return made


def finish(made: Path, state: dict[str, Any]) -> Path:
    """Add the state, flush, give the folder its name, drop the older checkpoints."""
    folder, number = made.parent, made.name.removeprefix(TEMPORARY)
    with _writing(made):
        torch.save(state | {"format": FORMAT, "update": int(number)}, made / "state.pt")
        for path in (*made.iterdir(), made):
            _flush(path)
    older = _complete(folder)
    os.rename(made, folder / number)
    _flush(folder)
    for path in older:
        _remove(path)
    return folder / number


def save_shards(made: Path, weights: dict[str, DTensor], state: dict[str, Any]) -> dict[str, Any]:
    """Write the weights, and the DTensors found in `state`, with torch.distributed.checkpoint: every rank its rows. Collective.

    Returns:
        `state` with a note in each DTensor's place, for `finish`.
    """
    shards = {f"weights/{n}": w for n, w in weights.items()}
    noted = _walk(state, lambda path, value: _note(shards, path, value))
    dcp.save(shards, storage_writer=dcp.FileSystemWriter(made, single_file_per_rank=True, sync_files=True))
    return noted


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(folder)
    return found[-1] if found else None


def load(path: Path, empty: Callable[[torch.Size, torch.dtype], torch.Tensor] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(weights, state) of a checkpoint, whoever wrote it; `CheckpointError` if it cannot be read.

    empty: makes the DTensor that a sharded tensor is loaded into (then collective); None: a whole tensor, in one process.
    """
    try:
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if (path / ".metadata").exists():
            shards = _load_shards(path, empty)
            state = _walk(state, lambda where, value: shards[value.removeprefix(SHARDED)] if _is_note(value) else value)
            weights = {n.removeprefix("weights/"): w for n, w in shards.items() if n.startswith("weights/")}
        else:
            weights = load_file(path / "weights.safetensors")
    except Exception as error:  # torch and safetensors raise many kinds for damaged files
        raise CheckpointError(f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); remove it to start over") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {state.get('format')!r}; expected {FORMAT}")
    return weights, state


def _load_shards(path: Path, empty: Callable[[torch.Size, torch.dtype], torch.Tensor] | None) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(path)
    sizes = {n: (m.size, m.properties.dtype) for n, m in reader.read_metadata().state_dict_metadata.items()}
    shards = {n: torch.empty(size, dtype=dtype) if empty is None else empty(size, dtype) for n, (size, dtype) in sizes.items()}
    dcp.load(shards, storage_reader=reader, no_dist=empty is None)
    return shards


def _walk(value: Any, change: Callable[[str, Any], Any], path: str = "state") -> Any:
    """A copy of nested dicts, lists and tuples with every leaf changed."""
    if isinstance(value, dict):
        return {k: _walk(v, change, f"{path}/{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_walk(v, change, f"{path}/{i}") for i, v in enumerate(value))
    return change(path, value)


def _note(shards: dict[str, DTensor], path: str, value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    shards[path] = value
    return SHARDED + path


def _is_note(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(SHARDED)


def as_json(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def differing_fields(saved: dict, now: dict, prefix: str = "") -> list[str]:
    """Dotted names, with both values, of settings (as JSON gives them) that differ and may not; `FREE` ones may."""
    found = []
    for key in sorted(set(saved) | set(now)):
        name, a, b = prefix + key, saved.get(key, "(absent)"), now.get(key, "(absent)")
        if isinstance(a, dict) and isinstance(b, dict):
            found += differing_fields(a, b, name + ".")
        elif name not in FREE and a != b:
            found.append(f"{name} (saved {a!r}, now {b!r})")
    return found


def sweep(folder: Path) -> None:
    """Remove what killed runs left behind."""
    if folder.is_dir():
        for path in folder.glob(TEMPORARY + "*"):
            shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("[0-9]*") if p.is_dir()) if folder.is_dir() else []


def _remove(path: Path) -> None:
    doomed = path.with_name(f"{TEMPORARY}old-{path.name}")  # renamed first: a half-removed folder must not look complete
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
