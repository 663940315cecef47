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
from ..settings import NonFiniteError
from ..sketch import LayerSketch, product_fp32

LEFT = "#left"  # marks the name that Ψ is drawn for; no module name holds a `#`


def sizes(rank: int, equal_bytes: bool, rows: int, width: int) -> tuple[int, int]:
    """(q, p): rows of Ω [q, K] and of Ψ [p, D] for a layer W [D, K].

    q = r/2 and p = r; or, with `equal_bytes`, the largest q with p = 2q that D·q + K·p <= r·D allows, and p as large as is left.
    Always 1 <= q <= min(D, K) and q + 2 <= p <= D where D is that large: with p < q + 2 the error of Ĝ has no finite mean (Theorem 4.3).
    At the smallest ranks that lower bound can exceed the equal budget; `accumulated` tells what is really held.
    """
    q, p = rank // 2, rank
    if equal_bytes:
        budget = rank * rows
        q = budget // (rows + 2 * width)
        p = (budget - max(q, 1) * rows) // width
    q = min(max(q, 1), rows, width)
    return q, min(max(p, q + 2), rows)


def rebuild(Y_DQ: torch.Tensor, Z_PK: torch.Tensor, Psi_PD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ĝ = Q (Ψ Q)⁺ Z as factors S [D, q] and V [q, K] with orthonormal rows, Ĝ = S V; fp32.

    S = Ĝ Vᵀ, so row norms of S are those of Ĝ and S stands where the one-sided sketch stands: RowAdam reads nothing else. Exact when
    rank(G) <= q. Inputs must be finite.
    """
    Q_DQ = torch.linalg.qr(Y_DQ).Q
    W_QK = torch.linalg.pinv(Psi_PD @ Q_DQ) @ Z_PK
    B_KQ, R_QQ = torch.linalg.qr(W_QK.T)
    return Q_DQ @ R_QQ.T, B_KQ.T.contiguous()


class TwoSidedSketch(LayerSketch):
    """A layer that accumulates Y [D, q] and Z [p, K] in one flat fp32 vector [D·q + p·K]. Ω is `matrix`, Ψ [p, D] `left`."""

    by_value = True

    def __init__(self, name: str, module: nn.Linear, spec: ProjectionSpec, equal_bytes: bool = False) -> None:
        self.q, self.p = sizes(spec.rank, equal_bytes, module.out_features, module.in_features)
        super().__init__(name, module, dataclasses.replace(spec, rank=self.q))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.module.out_features * self.q + self.p * self.module.in_features,)

    def left(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Ψ [p, D] of the current draw."""
        key = LEFT, dtype, self.module.weight.device
        if key not in self._made:
            spec = dataclasses.replace(self.projection.spec, rank=self.p)
            self._made[key] = make_projection(spec, self.name + LEFT, self.module.out_features, dtype=dtype, device=key[2])
        return self._made[key]

    def parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views Y [D, q] and Z [p, K] of a flat vector."""
        Y, Z = flat.split([self.module.out_features * self.q, self.p * self.module.in_features])
        return Y.view(-1, self.q), Z.view(self.p, -1)

    def keep(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The input itself, as torch keeps it for a trained weight."""
        self.matrix(dtype), self.left(dtype)  # in forward, where memory is counted
        return (x.detach().to(dtype).reshape(-1, x.shape[-1]),)

    def add(self, g_ND: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        """gᵀ(x Ωᵀ) beside (g Ψᵀ)ᵀ x."""
        (x_NK,) = kept
        flat = torch.empty(self.shape, dtype=torch.float32, device=g_ND.device)
        Y_DQ, Z_PK = self.parts(flat)
        product_fp32(g_ND.T, x_NK @ self.matrix(x_NK.dtype).T, out=Y_DQ)
        product_fp32((g_ND @ self.left(x_NK.dtype).T).T, x_NK, out=Z_PK)
        return flat

    def factors(self, accumulated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.isfinite(accumulated).all():
            raise NonFiniteError("nothing can be rebuilt from it")
        return rebuild(*self.parts(accumulated), self.left())
