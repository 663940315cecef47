"""The two-sided sketch: Y = G Ωᵀ and Z = Ψ G in one backward pass, and G rebuilt from them at a low rank.

Tropp, Yurtsever, Udell, Cevher (2017, "Practical sketching algorithms for low-rank matrix approximation", Algorithm 4):
Ĝ = Q (Ψ Q)⁺ Z with Q = orth(Y). Both sketches are linear in G, so microbatches, checkpointing and sums over data ranks are those of
the one-sided sketch; Z needs the layer's input in backward, which is saved as torch saves it for a trained weight. METHOD section 8.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..projection import ProjectionSpec, make_projection
from ..settings import SketchConfig
from ..sketch import Target, plain_dtypes, product_fp32, refuse_old_draw

LEFT = "#left"  # marks the name that Ψ is drawn for; no module name holds a `#`


def sizes(config: SketchConfig, rows: int, width: int) -> tuple[int, int]:
    """(q, p): rows of Ω [q, K] and of Ψ [p, D] for a layer W [D, K].

    q = r/2 and p = r; or, with `equal_bytes`, the largest q with p = 2q that D·q + K·p <= r·D allows, and p as large as is left.
    Always 1 <= q <= min(D, K) and q + 2 <= p <= D where D is that large: with p < q + 2 the error of Ĝ has no finite mean (Theorem 4.3).
    At the smallest ranks that lower bound can exceed the equal budget; `accumulated` tells what is really held.
    """
    q, p = config.rank // 2, config.rank
    if config.equal_bytes:
        budget = config.rank * rows
        q = budget // (rows + 2 * width)
        p = (budget - max(q, 1) * rows) // width
    q = min(max(q, 1), rows, width)
    return q, min(max(p, q + 2), rows)


def accumulated(config: SketchConfig, rows: int, width: int) -> int:
    """fp32 values that the sketch of one layer W [D, K] accumulates: D·r, or D·q + p·K."""
    if config.kind == "one_sided":
        return rows * config.rank
    q, p = sizes(config, rows, width)
    return rows * q + p * width


def rebuild(Y_DQ: torch.Tensor, Z_PK: torch.Tensor, Psi_PD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ĝ = Q (Ψ Q)⁺ Z as factors S [D, q] and V [q, K] with orthonormal rows, Ĝ = S V; fp32.

    S = Ĝ Vᵀ, so row norms of S are those of Ĝ and S stands where the one-sided sketch stands: RowAdam reads nothing else. Exact when
    rank(G) <= q. Inputs must be finite.
    """
    Q_DQ = torch.linalg.qr(Y_DQ).Q
    W_QK = torch.linalg.pinv(Psi_PD @ Q_DQ) @ Z_PK
    B_KQ, R_QQ = torch.linalg.qr(W_QK.T)
    return Q_DQ @ R_QQ.T, B_KQ.T.contiguous()


class TwoSidedTarget(Target):
    """A layer whose `sketch.grad` is Y [D, q] and Z [p, K] in one flat fp32 vector [D·q + p·K]."""

    by_value = True

    def __init__(self, name: str, module: nn.Linear, spec: ProjectionSpec, config: SketchConfig) -> None:
        self.q, self.p = sizes(config, module.out_features, module.in_features)
        super().__init__(name, module, dataclasses.replace(spec, rank=self.q))

    def sketch_shape(self) -> tuple[int, ...]:
        return (self.module.out_features * self.q + self.p * self.width,)

    def left(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Ψ [p, D] of the current draw; Ω is `projection`."""
        key = (LEFT, dtype, self.weight.device)
        if key not in self._drawn:
            spec = dataclasses.replace(self.spec, rank=self.p)
            self._drawn[key] = make_projection(spec, self.name + LEFT, self.module.out_features, dtype=dtype, device=self.weight.device)
        return self._drawn[key]

    def draw(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        return self.projection(dtype), self.left(dtype)

    def draw_shapes(self, dtype: torch.dtype = torch.float32) -> dict[tuple, tuple[int, int]]:
        return super().draw_shapes(dtype) | {(LEFT, dtype, self.weight.device): (self.p, self.module.out_features)}

    def parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views Y [D, q] and Z [p, K] of a flat vector."""
        Y, Z = flat.split([self.module.out_features * self.q, self.p * self.width])
        return Y.view(-1, self.q), Z.view(self.p, -1)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return rebuild(*self.parts(self.sketch.grad), self.left())

    def _tap(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x_NK = x.detach().to(output.dtype).reshape(-1, self.width)
        return _Tap.apply(output, x_NK, self.projection(output.dtype), self.left(output.dtype), self.sketch, self)


class _Tap(torch.autograd.Function):
    """Identity on y; the gradient of `sketch` is gᵀ(x Ωᵀ) beside (g Ψᵀ)ᵀ x, from the input x [N, K] saved in forward."""

    @staticmethod
    def forward(y, x_NK, Omega_QK, Psi_PD, sketch, target):
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        y, x_NK, Omega_QK, Psi_PD, sketch, target = inputs
        ctx.save_for_backward(x_NK)
        ctx.target, ctx.spec, ctx.forgotten, ctx.drawn = target, target.spec, target.forgotten, (Omega_QK, Psi_PD)

    @staticmethod
    def backward(ctx, g):
        refuse_old_draw(ctx)
        flat = None
        if ctx.needs_input_grad[4]:
            (x_NK,) = ctx.saved_tensors
            Omega_QK, Psi_PD = ctx.drawn
            g_ND = g.reshape(-1, g.shape[-1])
            flat = torch.empty(ctx.target.sketch_shape(), dtype=torch.float32, device=g.device)
            Y_DQ, Z_PK = ctx.target.parts(flat)
            with torch.no_grad(), plain_dtypes(g.device):
                product_fp32(g_ND.T, x_NK @ Omega_QK.T, out=Y_DQ)
                product_fp32((g_ND @ Psi_PD.T).T, x_NK, out=Z_PK)
        return g, None, None, None, flat, None

    @staticmethod
    def jvp(ctx, y_tangent, *_):
        return y_tangent.view_as(y_tangent)
