"""What travels from trainer to rollout policy, and how a second copy of the weights follows the first without drifting.

`SketchUpdate` carries the factor αηU of every layer and the seed of A (METHOD section 5). A merge is additive and so not
idempotent: a `Replica` takes version n + 1 of its own run only, checks digests, stages, and either commits whole or stays as it was.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from .projection import ProjectionSpec, at_rank, make_projection, projection_digest
from .settings import ConfigError
from .sketch import select_targets
from .variants.rounding import Rounding
from .weights import Masters, RoundedWeights, Weights

# The second is of bf16 weights without masters: whoever knows only the first refuses it.
FORMAT, ROUNDING_FORMAT = 1, 2
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}


class SyncError(RuntimeError):
    """A message that was refused; the receiver is as it was before."""


@dataclass(frozen=True, eq=False)
class SketchUpdate:
    """An update W ← W − Σ factor · V of every target, V drawn from `projection` or given by value.

    run_id: the run it belongs to. version: number of updates after it is applied (from 1).
    factors: name -> [D, R]; as proposed in fp32, as sent rounded to the wire dtype with α inside.
    widths: name -> K. ranks: name -> R where it is not that of `projection`.
    bases: name -> V [R, K] by value, rounded alike, where no seed gives V; any R; a shared tensor is sent once.
    fingerprint: of the weights after the update ("" when not checked). rounded: whether it may be merged and sent.
    rounding_seed: of the stochastic rounding (rounding.py) of bf16 weights without masters; None: into fp32 masters, nothing is rounded.
    """

    run_id: str
    version: int
    projection: ProjectionSpec
    factors: dict[str, torch.Tensor]
    widths: dict[str, int]
    bases: dict[str, torch.Tensor] = field(default_factory=dict)
    fingerprint: str = ""
    rounded: bool = False
    drawn: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)  # A at hand already; saves drawing it again
    ranks: dict[str, int] = field(default_factory=dict)
    rounding_seed: int | None = None

    @property
    def rounding(self) -> Rounding | None:
        """Which random bits the merge rounds with."""
        return None if self.rounding_seed is None else Rounding(self.rounding_seed, self.version)

    def basis(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """V [R, K] fp32 of a layer."""
        if (made := self.bases.get(name, self.drawn.get(name))) is None:
            made = make_projection(at_rank(self.projection, self.ranks, name), name, self.widths[name], device=device)
        return made.to(device=device, dtype=torch.float32)

    def scaled(self, alpha: float, dtype: torch.dtype) -> SketchUpdate:
        """α · update, rounded once to `dtype`: what both sides merge (METHOD section 5)."""
        if self.rounded:
            raise SyncError("this update is scaled and rounded already; scale the proposed one")
        if not (0 <= alpha < float("inf")):
            raise ConfigError(f"alpha = {alpha!r}: expected a finite number >= 0")
        rows = {"dtype": dtype, "memory_format": torch.contiguous_format}  # as on the other side: a product's bits depend on the layout
        factors = {n: torch.mul(U_DR, alpha, out=torch.empty_like(U_DR, **rows)) for n, U_DR in self.factors.items()}
        rounded = {id(V_RK): torch.empty_like(V_RK, **rows).copy_(V_RK) for V_RK in self.bases.values()}
        return dataclasses.replace(self, factors=factors, bases={n: rounded[id(V)] for n, V in self.bases.items()}, rounded=True)

    def payload_bytes(self) -> int:
        """Bytes of the factors, Σ D·R·(bytes an element) as in METHOD section 5, and of the bases sent by value."""
        return sum(t.numel() * t.element_size() for t in (*self.factors.values(), *{id(t): t for t in self.bases.values()}.values()))

    def to_bytes(self, fingerprint: str | None = None) -> bytes:
        """The message: safetensors, with everything but the factors in a digested header."""
        if not self.rounded:
            raise SyncError("only a scaled and rounded update may be sent: take what LoGRA.apply returns")
        source = {id(V_RK): n for n, V_RK in reversed(self.bases.items())}  # of each distinct V, the first layer: it sends it
        header = {
            "format": FORMAT,
            "kind": "update",
            "run_id": self.run_id,
            "version": self.version,
            "projection": dataclasses.asdict(self.projection),
            "widths": self.widths,
            "projection_digest": projection_digest(self.projection, {n: k for n, k in self.widths.items() if n not in self.bases}, self.drawn, self.ranks),
            "fingerprint": self.fingerprint if fingerprint is None else fingerprint,
            "same_basis": {n: source[id(V_RK)] for n, V_RK in self.bases.items() if source[id(V_RK)] != n},
        } | ({"ranks": self.ranks} if self.ranks else {})
        if self.rounding_seed is not None:
            header |= {"format": ROUNDING_FORMAT, "rounding_seed": self.rounding_seed}
        tensors = {f"U.{n}": t for n, t in self.factors.items()} | {f"V.{n}": self.bases[n] for n in source.values()}
        return _pack(header, tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> SketchUpdate:
        """Parse and check a message; A is drawn anew and its digest compared with the sender's.

        Raises:
            SyncError: truncated, corrupted, of another kind or format, or A differs from the sender's.
        """
        header, tensors = _unpack(data, "update")
        try:
            projection = ProjectionSpec(**header["projection"])
            factors = {n[2:]: t for n, t in tensors.items() if n.startswith("U.")}
            bases = {n[2:]: t for n, t in tensors.items() if n.startswith("V.")}
            bases |= {n: bases[first] for n, first in header["same_basis"].items()}
            widths, ranks = {n: int(k) for n, k in header["widths"].items()}, header.get("ranks", {})
            drawn = {n: make_projection(at_rank(projection, ranks, n), n, k) for n, k in widths.items() if n not in bases}
            seed = header["rounding_seed"] if rounds(header) else None
            made = factors, widths, bases, header["fingerprint"], True, drawn, ranks, seed
            update = cls(header["run_id"], header["version"], projection, *made)
            update.rounding  # its seed and version are checked
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise SyncError(f"update message with a malformed header: {error!r}") from error
        if (ours := projection_digest(projection, {n: widths[n] for n in drawn}, drawn)) != header["projection_digest"]:
            raise SyncError(f"the sender's projections have digest {header['projection_digest']}, ours {ours}: not the same A on both sides")
        return update


def full_state_bytes(weights: Masters, run_id: str, version: int) -> bytes:
    """The full resync message: every target's fp32 master [D, K] (without masters: its bf16 weight), run and version."""
    header = {"format": FORMAT, "kind": "full", "run_id": run_id, "version": version, "fingerprint": weights.fingerprint()}
    header |= {"format": ROUNDING_FORMAT} if weights.rounds else {}
    return _pack(header, {f"W.{n}": weights.stored(n) for n in weights.shapes})


def rounds(header: dict) -> bool:
    """Whether a message is about bf16 weights without masters."""
    return header["format"] == ROUNDING_FORMAT


def message_header(data: bytes) -> dict:
    """Header of a message of either kind, with nothing checked beyond its form. Raises SyncError if it has none."""
    try:
        length = int.from_bytes(data[:8], "little")
        return json.loads(json.loads(bytes(data[8 : 8 + length]))["__metadata__"]["logra"])
    except (ValueError, KeyError, TypeError) as error:
        raise SyncError(f"not a LoGRA message ({len(data)} bytes): {error}") from error


def read_full_state(data: bytes) -> tuple[dict, dict[str, torch.Tensor]]:
    """Header (run_id, version, fingerprint) and name -> W [D, K] of a full resync message. Raises SyncError if it is damaged."""
    header, tensors = _unpack(data, "full")
    return header, {n[2:]: t for n, t in tensors.items()}


class Replica:
    """A second copy of the policy, kept in step by messages alone.

    Args:
        model: whose target layers follow the trainer's (other parameters must be equal already, they never train), or the masters alone.
        targets: as in `SketchConfig.targets`; not used with masters.
        run_id, version: what the weights are now; by default version 0 of whichever run sends first.
        stochastic_rounding: as in `OptimConfig.stochastic_rounding`: the model is bf16 and no masters are kept. Not used with masters.
    """

    def __init__(
        self, model: nn.Module | Masters, targets: tuple[str, ...] = (), run_id: str | None = None, version: int = 0,
        stochastic_rounding: bool = False,
    ) -> None:  # fmt: skip
        kind = RoundedWeights if stochastic_rounding else Weights
        self.weights = model if isinstance(model, Masters) else kind(select_targets(model, targets))
        self.run_id, self.version = run_id, version

    def fingerprint(self) -> str:
        return self.weights.fingerprint()

    def apply(self, update: SketchUpdate | bytes) -> None:
        """Merge version n + 1, whole or not at all.

        Raises:
            SyncError: anything else than the next update of this run, or the result is not the sender's. NonFiniteError: it is not
            finite in bf16, where that is all that is kept. Nothing has changed.
        """
        self.prepare(update)()

    def resync(self, data: bytes) -> None:
        """Take over a full copy of the trainer's targets, whatever the state before; heals every refusal.

        Raises:
            SyncError: the message is damaged or of another model; nothing has changed.
        """
        self.prepare_full(data)()

    def prepare(self, update: SketchUpdate | bytes) -> Callable[[], None]:
        """Check an update without changing anything. Returns the commit, which changes everything or nothing.

        Raises:
            SyncError: as `apply`, except for a result that is not the sender's, which the commit finds.
        """
        update = SketchUpdate.from_bytes(update) if isinstance(update, (bytes, bytearray, memoryview)) else update
        self._check_order(update)
        self._check_rounding(update.rounding_seed is not None)
        rank = dict.fromkeys(update.factors, update.projection.rank) | update.ranks | {n: t.shape[0] for n, t in update.bases.items() if t.dim() == 2}
        self._check_tensors({n: (t, (d, rank[n])) for n, t, (d, k) in self._pair(update.factors)}, "factor")
        self._check_tensors({n: (t, (rank.get(n), k)) for n, t, (d, k) in self._pair(update.bases, False)}, "basis")
        if wrong := [n for n, k in update.widths.items() if k != self.weights.shapes[n][1]]:
            raise SyncError(f"update {update.version}: widths do not fit {', '.join(wrong[:5])}")

        def commit() -> None:
            self._check_order(update)
            merge = self.weights.merge_
            self._commit(lambda name: merge(name, update.factors[name], update.basis(name), update.rounding), update.fingerprint)
            self.run_id, self.version = update.run_id, update.version

        return commit

    def prepare_full(self, data: bytes) -> Callable[[], None]:
        """As `prepare`, for a full resync message."""
        return self.prepare_state(*read_full_state(data))

    def prepare_state(self, header: dict, state: dict[str, torch.Tensor]) -> Callable[[], None]:
        """As `prepare_full`, for a message read already."""
        self._check_rounding(rounds(header))
        self._check_tensors({n: (t, shape) for n, t, shape in self._pair(state)}, "weight")
        if self.weights.rounds and (other := {n: t.dtype for n, t in state.items() if t.dtype != torch.bfloat16}):
            raise SyncError("weight not in bfloat16, though no masters are kept: " + ", ".join(f"{n} ({d})" for n, d in list(other.items())[:5]))

        def commit() -> None:
            self._commit(lambda name: self.weights.set_(name, state[name]), header["fingerprint"])
            self.run_id, self.version = header["run_id"], header["version"]

        return commit

    def _check_order(self, update: SketchUpdate) -> None:
        if not update.rounded:
            raise SyncError("an update that was never scaled and rounded: take what LoGRA.apply returns")
        if self.run_id not in (None, update.run_id):
            raise SyncError(f"update of run {update.run_id!r}, but this replica follows run {self.run_id!r}")
        if update.version != self.version + 1:
            kind = "repeated or out of order" if update.version <= self.version else "an earlier one was dropped"
            raise SyncError(f"update {update.version} at version {self.version} ({kind}): expected {self.version + 1}, or a full resync")

    def _check_rounding(self, theirs: bool) -> None:
        if theirs != self.weights.rounds:
            kinds = {True: "rounds bf16 weights stochastically", False: "keeps fp32 masters"}
            raise SyncError(f"stochastic_rounding differs: the sender {kinds[theirs]}, this replica {kinds[not theirs]}")

    def _pair(self, given: dict, all_of_them: bool = True):
        ours = self.weights.shapes
        unknown, missing = sorted(set(given) - set(ours)), sorted(set(ours) - set(given)) if all_of_them else []
        if unknown or missing:
            raise SyncError(f"layers differ: {len(unknown)} unknown here ({', '.join(unknown[:5])}), {len(missing)} missing ({', '.join(missing[:5])})")
        return [(n, given[n], ours[n]) for n in given]

    @staticmethod
    def _check_tensors(items: dict, what: str) -> None:
        shapes = [f"{n}: {list(t.shape)}, expected {list(shape)}" for n, (t, shape) in items.items() if tuple(t.shape) != shape]
        if shapes:
            raise SyncError(f"{what} of the wrong shape: " + "; ".join(shapes[:5]))
        if bad := [n for n, (t, _) in items.items() if not t.is_floating_point() or not torch.isfinite(t).all()]:
            raise SyncError(f"{what} not finite: {', '.join(bad[:5])}")

    @torch.no_grad()
    def _commit(self, change, fingerprint: str) -> None:
        """Change every layer and publish; put all bits back on any failure (costs one copy of what is stored meanwhile)."""
        kept: dict[str, Any] = {}
        published = False
        try:
            for name in self.weights.shapes:
                kept[name] = self.weights.keep(name)
                change(name)
            if fingerprint and (ours := self.fingerprint()) != fingerprint:
                raise SyncError(f"weights after the update have fingerprint {ours}, the sender's {fingerprint}: the copies had drifted; resync")
            published = True
            self.weights.publish()
        except BaseException:
            for name, before in kept.items():
                self.weights.put_back_(name, before)
            if published:
                self.weights.publish()
            raise


def _pack(header: dict, tensors: dict[str, torch.Tensor]) -> bytes:
    tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    header = header | {"digest": _digest(header, tensors)}
    return save_safetensors(tensors, metadata={"logra": json.dumps(header, sort_keys=True)})


def _unpack(data: bytes, kind: str) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        data = bytes(data)
        tensors = load_safetensors(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["logra"])
        digest = header.pop("digest")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SyncError(f"not a whole LoGRA message ({len(data)} bytes): {error}") from error
    if header.get("format") not in (FORMAT, ROUNDING_FORMAT) or header.get("kind") != kind:
        given = f"message of format {header.get('format')!r} and kind {header.get('kind')!r}"
        raise SyncError(f"{given}: expected format {FORMAT} or {ROUNDING_FORMAT}, kind {kind!r}")
    if (ours := _digest(header, tensors)) != digest:
        raise SyncError(f"message digest {digest}, content {ours}: corrupted on the way")
    return header, tensors


def _digest(header: dict, tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name}|{_DTYPES.get(t.dtype, str(t.dtype))}|{list(t.shape)}".encode())
        digest.update(t.view(torch.uint8).numpy() if t.numel() else b"")
    return digest.hexdigest()
