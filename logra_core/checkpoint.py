"""Checkpoints of a run: complete or not there at all.

A checkpoint is a folder named by its update number, with `weights.safetensors` (fp32 target weights) and `state.pt` (all else, loadable
with `weights_only=True`). It is written under a temporary name, flushed to disk and renamed; only then are older ones removed. A kill at
any moment leaves the previous checkpoint or the new one, and remains of the temporary one that the next run sweeps away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from .sync import Weights

FORMAT = 1
TEMPORARY = ".tmp-"
# Settings that may change between a kill and a resume.
FREE = ("updates", "out", "eval_every", "checkpoint_every", "exact_kl_every", "sketch.projection_storage")


class CheckpointError(RuntimeError):
    """A checkpoint that does not fit this run, or is damaged."""


def lock(out: Path) -> IO:
    """Make the run's folder and hold it for this process; `CheckpointError` if another one trains there. A killed process lets go."""
    out.mkdir(parents=True, exist_ok=True)
    held = open(out / ".lock", "w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise CheckpointError(f"{out} is in use by another process") from error
    return held


def frozen_digest(model: torch.nn.Module, weights: Weights) -> str:
    """Digest of everything in the model that does not train: names and bits."""
    trained = {m.weight.data_ptr() for m in weights.modules.values()}
    digest = xxhash.xxh3_128()
    for name, value in sorted(model.state_dict().items()):
        if value.data_ptr() not in trained:
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save(folder: Path, update: int, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write checkpoint `update` under `folder`, atomically, then drop the older ones. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    made, final = folder / f"{TEMPORARY}{update:06d}", folder / f"{update:06d}"
    if final.exists():
        raise CheckpointError(f"{final} is there already; a run saves each update once")
    made.mkdir()
    save_file({n: w.detach().cpu().contiguous() for n, w in weights.items()}, made / "weights.safetensors")
    torch.save(state | {"format": FORMAT, "update": update}, made / "state.pt")
    for path in (*made.iterdir(), made):
        _flush(path)
    older = _complete(folder)
    os.rename(made, final)
    _flush(folder)
    for path in older:
        _remove(path)
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(folder)
    return found[-1] if found else None


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(weights, state) of a checkpoint; `CheckpointError` if it cannot be read."""
    try:
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        weights = load_file(path / "weights.safetensors")
    except Exception as error:  # torch and safetensors raise many kinds for damaged files
        raise CheckpointError(f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); remove it to start over") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {state.get('format')!r}; expected {FORMAT}")
    return weights, state


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
