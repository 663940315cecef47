"""What travels from trainer to rollout policy, and how a second copy of the weights follows the first without drifting.

`SketchUpdate` carries the factor αηU of every layer and the seed of A, or V by value (METHOD section 5). A merge is additive and so not idempotent:
a `Replica` takes version n + 1 of its own run only, checks digests, stages, and either commits whole or stays as it was.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from .projection import Projection, ProjectionSpec, projection_digest
from .settings import ConfigError
from .sketch import select_targets
from .weights import Masters, Weights, not_finite

FORMAT = 3


class SyncError(RuntimeError):
    """A message that was refused; the receiver is as it was before."""


@dataclass(frozen=True, eq=False)
class SketchUpdate:
    """An update W ← W − Σ factor · V of every target.

    run_id: the run it belongs to. version: number of updates after it is applied (from 1). factors: name -> [D, R]; as proposed in fp32, as sent rounded to
    the wire dtype with α inside. bases: name -> V [R, K]: a `Projection`, which a seed gives, or a tensor by value, rounded alike; a shared tensor is sent
    once. seed: of the run. weights: how both sides keep their weights (`Weights.kind`). fingerprint: of the weights after the update. rounded: whether it
    may be merged and sent. drawn: V at hand already, while it is; saves making it again.
    """

    run_id: str
    version: int
    factors: dict[str, torch.Tensor]
    bases: dict[str, Projection | torch.Tensor]
    seed: int = 0
    weights: str = Masters.kind
    fingerprint: str = ""
    rounded: bool = False
    drawn: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    seal: Callable[[], str] | None = field(default=None, repr=False)

    def basis(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """V [R, K] fp32 of a layer."""
        made = self.drawn.get(name, self.bases[name])
        return made.matrix(device=device) if isinstance(made, Projection) else made.to(device=device, dtype=torch.float32)

    @property
    def by_value(self) -> dict[str, torch.Tensor]:
        """The V that are sent."""
        return {n: V for n, V in self.bases.items() if isinstance(V, torch.Tensor)}

    @property
    def projections(self) -> dict[str, Projection]:
        """The V that the receiver makes of seeds."""
        return {n: V for n, V in self.bases.items() if isinstance(V, Projection)}

    def scaled(self, alpha: float, dtype: torch.dtype) -> SketchUpdate:
        """α · update, rounded once to `dtype`: what both sides merge (METHOD section 5)."""
        if self.rounded:
            raise SyncError("this update is scaled and rounded already; scale the proposed one")
        if not (0 <= alpha < float("inf")):
            raise ConfigError(f"alpha = {alpha!r}: expected a finite number >= 0")
        rows = {"dtype": dtype, "memory_format": torch.contiguous_format}  # as on the other side: a product's bits depend on the layout
        factors = {n: torch.mul(U_DR, alpha, out=torch.empty_like(U_DR, **rows)) for n, U_DR in self.factors.items()}
        rounded = {id(V_RK): torch.empty_like(V_RK, **rows).copy_(V_RK) for V_RK in self.by_value.values()}
        bases = {n: V if isinstance(V, Projection) else rounded[id(V)] for n, V in self.bases.items()}
        drawn = {n: V for n, V in self.drawn.items() if isinstance(bases[n], Projection)}
        return dataclasses.replace(self, factors=factors, bases=bases, rounded=True, drawn=drawn)

    def sealed(self, seal: Callable[[], str]) -> SketchUpdate:
        """With the weights' fingerprint to be had from `seal` when it is sent; without what is at hand."""
        return dataclasses.replace(self, seal=seal, drawn={})

    def payload_bytes(self) -> int:
        """Bytes of the factors, Σ D·R·(bytes an element) as in METHOD section 5, and of the bases sent by value."""
        return sum(t.numel() * t.element_size() for t in (*self.factors.values(), *{id(t): t for t in self.by_value.values()}.values()))

    def to_bytes(self, fingerprint: str | None = None) -> bytes:
        """The message: safetensors, with everything but the factors in a digested header.

        fingerprint: of the weights after the update, which the receiver compares with its own; by default theirs, if `LoGRA.apply` made this update. ""
        leaves it out, and with it the proof that both policies are equal.
        """
        if not self.rounded:
            raise SyncError("only a scaled and rounded update may be sent: take what LoGRA.apply returns")
        if fingerprint is None:
            fingerprint = self.seal() if self.seal is not None else self.fingerprint
        by_value, seeded = self.by_value, self.projections
        source = {id(V_RK): n for n, V_RK in reversed(by_value.items())}  # of each distinct V, the first layer: it sends it
        header = {"format": FORMAT, "kind": "update", "run_id": self.run_id, "version": self.version, "seed": self.seed, "weights": self.weights,
                  "fingerprint": fingerprint, "projection_digest": projection_digest(seeded),
                  "draw": sorted({(p.spec.seed, p.spec.draw, p.spec.distribution) for p in seeded.values()}),
                  "widths": {n: p.width for n, p in seeded.items()}, "drawn_for": {n: p.name for n, p in seeded.items() if p.name != n},
                  "same_basis": {n: source[id(V_RK)] for n, V_RK in by_value.items() if source[id(V_RK)] != n}}  # fmt: skip
        if len(header["draw"]) > 1:
            raise SyncError(f"one message holds one draw; these bases are of {header['draw']}")
        return _pack(header, {f"U.{n}": t for n, t in self.factors.items()} | {f"V.{n}": by_value[n] for n in source.values()})

    @classmethod
    def from_bytes(cls, data: bytes) -> SketchUpdate:
        """Parse and check a message; the bits of A are drawn anew and their digest compared with the sender's.

        Raises SyncError: truncated, corrupted, of another kind or format, or A differs from the sender's.
        """
        header, tensors = _unpack(data, "update")
        try:
            factors = {n[2:]: t for n, t in tensors.items() if n.startswith("U.")}
            bases: dict[str, Any] = {n[2:]: t for n, t in tensors.items() if n.startswith("V.")}
            bases |= {n: bases[first] for n, first in header["same_basis"].items()}
            for what, least in (("seed", 0), ("version", 1)):
                if type(header[what]) is not int or header[what] < least:
                    raise ValueError(f"{what} = {header[what]!r}: expected an integer >= {least}")
            if strange := sorted((set(bases) | set(header["widths"])) ^ set(factors)):
                raise SyncError(f"factors and bases are of different layers: {', '.join(strange[:5])}")
            seeded = {}
            for name, width in header["widths"].items():
                seed, draw, distribution = header["draw"][0]
                spec = ProjectionSpec(seed, draw, factors[name].shape[1], distribution)
                seeded[name] = Projection(spec, header["drawn_for"].get(name, name), int(width))
            update = cls(header["run_id"], header["version"], factors, bases | seeded, header["seed"], header["weights"], header["fingerprint"], True)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise SyncError(f"update message with a malformed header: {error!r}") from error
        if (ours := projection_digest(seeded)) != header["projection_digest"]:
            raise SyncError(f"the sender's projections have digest {header['projection_digest']}, ours {ours}: not the same A on both sides")
        return update


def full_state_bytes(weights: Weights, run_id: str, version: int) -> bytes:
    """The full resync message: every target's fp32 master [D, K] (without masters: its weight), run and version."""
    header = {"format": FORMAT, "kind": "full", "run_id": run_id, "version": version, "weights": weights.kind, "fingerprint": weights.fingerprint()}
    return _pack(header, {f"W.{n}": weights.stored(n) for n in weights.shapes})


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
        model: whose target layers follow the trainer's (other parameters must be equal already, they never train), or the weights alone. targets: as in
        `SketchConfig.targets`; not used with weights. run_id, version: what the weights are now; by default version 0 of whichever run sends first.
        rounding: how a model's weights are kept, as on the trainer's side; fp32 masters unless told.
    """

    def __init__(
        self, model: nn.Module | Weights, targets: tuple[str, ...] = (), run_id: str | None = None, version: int = 0,
        rounding: Masters | None = None,
    ) -> None:  # fmt: skip
        self.weights = model if isinstance(model, Weights) else Weights(select_targets(model, targets), rounding)
        self.run_id, self.version = run_id, version

    def fingerprint(self) -> str:
        return self.weights.fingerprint()

    def apply(self, update: SketchUpdate | bytes) -> None:
        """Merge version n + 1, whole or not at all.

        Raises SyncError: anything else than the next update of this run, or the result is not the sender's. NonFiniteError: it is not finite as the weights
        are kept. Nothing has changed.
        """
        self.prepare(update)()

    def resync(self, data: bytes) -> None:
        """Take over a full copy of the trainer's targets, whatever the state before; heals every refusal.

        Raises SyncError: the message is damaged or of another model; nothing has changed.
        """
        self.prepare_full(data)()

    def prepare(self, update: SketchUpdate | bytes) -> Callable[[], None]:
        """Check an update without changing anything. Returns the commit, which changes everything or nothing.

        Raises SyncError: as `apply`, except for a result that is not the sender's, which the commit finds.
        """
        update = SketchUpdate.from_bytes(update) if isinstance(update, (bytes, bytearray, memoryview)) else update
        self._check_order(update)
        self._check_kind(update.weights)
        by_value = update.by_value
        rank = {n: by_value[n].shape[0] if n in by_value else p.spec.rank for n, p in update.bases.items() if n not in by_value or by_value[n].dim() == 2}
        self._check_tensors({n: (t, (d, rank.get(n))) for n, t, (d, k) in self._pair(update.factors)}, "factor")
        self._check_tensors({n: (t, (rank.get(n), k)) for n, t, (d, k) in self._pair(by_value, False)}, "basis")
        if wrong := [n for n, p in update.projections.items() if p.width != self.weights.shapes[n][1]]:
            raise SyncError(f"update {update.version}: widths do not fit {', '.join(wrong[:5])}")

        def commit() -> None:
            self._check_order(update)
            merge = self.weights.merge_
            self._commit(lambda name: merge(name, update.factors[name], update.basis(name), update), update.fingerprint)
            self.run_id, self.version = update.run_id, update.version

        return commit

    def prepare_full(self, data: bytes) -> Callable[[], None]:
        """As `prepare`, for a full resync message."""
        return self.prepare_state(*read_full_state(data))

    def prepare_state(self, header: dict, state: dict[str, torch.Tensor]) -> Callable[[], None]:
        """As `prepare_full`, for a message read already."""
        self._check_kind(header["weights"])
        self._check_tensors({n: (t, shape) for n, t, shape in self._pair(state)}, "weight")
        if why := self.weights.rounding.refused(state):
            raise SyncError(why)

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

    def _check_kind(self, theirs: str) -> None:
        if theirs != self.weights.kind:
            raise SyncError(f"weights are kept differently: the sender has {theirs!r}, this replica {self.weights.kind!r}")

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
        if bad := [n for n, (t, _) in items.items() if not t.is_floating_point()] or not_finite({n: t for n, (t, _) in items.items()}):
            raise SyncError(f"{what} not finite: {', '.join(bad[:5])}")

    @torch.no_grad()
    def _commit(self, change: Callable[[str], None], fingerprint: str) -> None:
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
        tensors, header = load_safetensors(bytes(data)), message_header(data)
        digest = header.pop("digest")
    except (SafetensorError, SyncError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SyncError(f"not a whole LoGRA message ({len(data)} bytes): {error}") from error
    if header.get("format") != FORMAT or header.get("kind") != kind:
        given = f"message of format {header.get('format')!r} and kind {header.get('kind')!r}"
        raise SyncError(f"{given}: expected format {FORMAT}, kind {kind!r}")
    if (ours := _digest(header, tensors)) != digest:
        raise SyncError(f"message digest {digest}, content {ours}: corrupted on the way")
    return header, tensors


def _digest(header: dict, tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name}|{t.dtype}|{list(t.shape)}".encode())
        digest.update(t.view(torch.uint8).numpy() if t.numel() else b"")
    return digest.hexdigest()
