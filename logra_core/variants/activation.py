"""The activation-aware projection: A spans the leading directions of a layer's inputs, found while a batch is scored.

The rows of G = Σ gᵀx lie in the span of the inputs x, whose spectrum falls fast, so A = orth(Ω X) with random signs Ω keeps far more of G
than random rows do (METHOD section 8; range finder of Halko, Martinsson, Tropp 2011, "Finding structure with randomness", Algorithm 4.1).
State: Ω X [R, K] a layer, a sum over tokens; the token's position in the stream, not its microbatch, gives its column of Ω.
A is no function of a seed, so it travels by value. It is not unbiased; a share of random rows orthogonal to the rest reaches everything.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ..projection import Projection, ProjectionSpec, make_projection, sign_bytes, stream_of
from ..settings import ConfigError, NonFiniteError
from ..sketch import Target, autocast_off
from .inputs import Source

RESOLUTION = 1e-5  # directions weaker than this times the strongest are rounding, and random rows take their place


def random_signs(stream: np.random.Philox, rows: int, columns: int) -> torch.Tensor:
    """The next ±1, fp32 [rows, columns]; each row starts on a word of its own, so that rows may be drawn in any number of calls."""
    bits = torch.from_numpy(np.unpackbits(sign_bytes(stream, rows, columns), axis=1, bitorder="little", count=columns))
    return bits.to(torch.float32).mul_(2).sub_(1)


class RangeFinder:
    """Streaming range finder of one input (shared by the layers that read it).

    spec: of the update that A is for. name: of the (first) layer. complement: share of random rows, rounded up to whole rows.
    dtype: to which A is rounded, once, as it is what the other side merges with. drop: leading directions that A leaves out, found by as
    many more rows of Ω.
    """

    def __init__(self, spec: ProjectionSpec, name: str, width: int, complement: float, dtype: torch.dtype, drop: int = 0) -> None:
        self.name, self.width, self.complement, self.dtype, self.drop = name, width, complement, dtype, drop
        self.spec: ProjectionSpec | None = None
        self.restart(spec)

    def restart(self, spec: ProjectionSpec, anew: bool = False) -> None:
        """Forget everything if `spec` is of another update, or in any case."""
        if anew or spec != self.spec:
            self.spec, self.tokens, self.used = spec, 0, False
            self._sum_RK: torch.Tensor | None = None
            self._rows: torch.Tensor | None = None
            self._stream = stream_of(spec, self.name + "#range")

    def add(self, x_NK: torch.Tensor) -> None:
        """Σ += Ω X for the next N tokens, in fp32."""
        if self._sum_RK is None:
            self._sum_RK = torch.zeros(self.spec.rank + self.drop, self.width, device=x_NK.device)
        Omega_NR = random_signs(self._stream, len(x_NK), len(self._sum_RK)).to(x_NK.device)
        with autocast_off(x_NK.device):
            self._sum_RK.addmm_(Omega_NR.T, x_NK.float())
        self.tokens += len(x_NK)

    def rows(self) -> torch.Tensor:
        """A [R, K] fp32: orthonormal rows, the leading ones first, rounded to `dtype`. Raises NonFiniteError for inputs that are not finite."""
        self.used = True
        if self._rows is None:
            A_RK = leading_rows(self._sum_RK, self._random_rows, self.complement, self.name, self.drop)
            self._rows, self._sum_RK = A_RK.to(self.dtype).float(), None
        return self._rows

    def _random_rows(self, count: int) -> torch.Tensor:
        spec = ProjectionSpec(self.spec.seed, self.spec.draw, count, "gaussian")
        return make_projection(spec, self.name + "#complement", self.width, device=self._sum_RK.device)


def leading_rows(Y_RK: torch.Tensor, random_rows, complement: float, name: str = "", drop: int = 0) -> torch.Tensor:
    """Orthonormal rows [R, K] fp32: those spanning the rows of Y = Ω X, and `ceil(complement · R)` random ones orthogonal to them.

    With `drop` = m > 0, Y has R + m rows and its m strongest right singular directions are left out: all R rows are orthogonal to them.

    With random ones, the leading rows are the strongest right singular directions of Y (an R x R problem); directions that Y does not
    resolve are left to random rows too. random_rows: count -> [count, K].
    """
    if not torch.isfinite(Y_RK).all():
        raise NonFiniteError(f"inputs of {name!r} seen while scoring hold NaN or infinity: no projection can be taken from them")
    rank = len(Y_RK) - drop
    Q_KR, R_RR = torch.linalg.qr(Y_RK.T)
    lead, size = rank - math.ceil(complement * rank), R_RR.diagonal().abs()
    if not drop and lead == rank and bool(size.min() > RESOLUTION * size.max()):
        return Q_KR.T.contiguous()
    _, sigma_R, B_RR = torch.linalg.svd(R_RR.T)
    resolved = int((sigma_R > RESOLUTION * sigma_R[0]).sum())
    drop = min(drop, resolved)
    lead = min(lead, resolved - drop)
    found_RK = B_RR[: drop + lead] @ Q_KR.T
    stacked_RK = torch.cat([found_RK, random_rows(rank - lead)]) if lead < rank else found_RK
    return torch.linalg.qr(stacked_RK.T).Q.T[drop:].contiguous()


class FoundSource(Source):
    """A of what the input was seen to be, where it was; else random rows. `everyone`: the sources of the model, which forget together."""

    def __init__(self, projection: Projection, keep: str, finder: RangeFinder, everyone: list[FoundSource]) -> None:
        super().__init__(projection, keep)
        self.finder, self.everyone, self.token = finder, everyone, object()
        everyone.append(self)

    @property
    def by_value(self) -> bool:
        return self.finder.tokens > 0

    @property
    def draw(self) -> object:
        return self.token

    def make(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.finder.rows().to(device=device, dtype=dtype) if self.finder.tokens else super().make(dtype, device)

    def redraw(self, number: int) -> None:
        if number != self.projection.spec.draw:
            super().redraw(number)
            self.finder.restart(self.projection.spec)
            self.token = object()

    def clear(self) -> None:
        """Where an A was asked for, all forget what was seen, so that the next batch can be scored."""
        if any(source.made or source.finder.used for source in self.everyone):
            for source in self.everyone:
                source.made.clear()
                source.finder.restart(source.projection.spec, anew=True)
                source.token = object()


@contextlib.contextmanager
def observe(targets: Iterable[Target], mask: torch.Tensor | None = None, prefix: int = 0) -> Iterator[None]:
    """Forward passes inside, made without gradients, feed the finders of `targets`; any number of such passes add up to one A.

    mask: bool or 0/1 [B, T], True at the tokens that count (padding does not); None: all. prefix: length of a pass [1, prefix] that comes
    before those of the mask's shape, over tokens that all B rows share; weighted by √B, as B copies with signs of their own would add up.
    Raises:
        ConfigError: the targets' sketches look at no inputs. RuntimeError: A of this update is in use already. ValueError: mask and inputs
            differ in shape.
    """
    targets = list(targets)
    if not all(isinstance(getattr(t.how, "source", None), FoundSource) for t in targets):
        raise ConfigError("these sketches take no A from inputs: allowed with SketchConfig.projection = 'activation' only")
    targets = list({id(t.how.source): t for t in reversed(targets)}.values())  # the first layer of each shared input
    if used := [t.name for t in targets if t.how.source.made]:
        raise RuntimeError(f"the projection of {used[0]!r} is in use already: score the batch before its first forward pass with gradients, or zero_grad")
    handles = [t.module.register_forward_pre_hook(_Feed(t.how.source.finder, mask, prefix), with_kwargs=True) for t in targets]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Feed:
    def __init__(self, finder: RangeFinder, mask: torch.Tensor | None, prefix: int) -> None:
        self.finder, self.mask, self.prefix = finder, None if mask is None else mask.bool(), prefix

    def __call__(self, module, args: tuple, kwargs: dict) -> None:
        x = (args[0] if args else kwargs["input"]).detach()
        if self.mask is not None and self.prefix and x.shape[:-1] == (1, self.prefix):
            x = x.float() * math.sqrt(len(self.mask))
        elif self.mask is not None:
            if x.shape[:-1] != self.mask.shape:
                raise ValueError(f"mask {tuple(self.mask.shape)} does not fit the input {tuple(x.shape)} of {self.finder.name!r}")
            x = x[self.mask.to(x.device)]
        self.finder.add(x.reshape(-1, x.shape[-1]))
