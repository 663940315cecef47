"""The orthogonalised direction: all singular values of an update made equal, from its low-rank factors alone.

As in Muon (Jordan et al. 2024) and Dion (Ahn et al. 2025, arXiv 2504.05295, whose size √(D/K) is used). Their momentum is
`OptimConfig.beta1` (momentum.py), off by default: where the projection is new at every update there is no basis to keep one in.
"""

from __future__ import annotations

import math

import torch

from ..optim import LARGEST, SGDRule
from ..settings import RULES, NonFiniteError


def polar(T_DR: torch.Tensor) -> torch.Tensor:
    """P Bᵀ [D, R] of the singular value decomposition T = P Σ Bᵀ, by QR and a decomposition of min(D, R)² values; zero for a zero T.

    Directions below rounding (σ <= max(D, R)·ε·σ_max) are left out. T must be finite.
    """
    if T_DR.shape[0] < T_DR.shape[1]:
        return polar(T_DR.T).T
    Q_DR, R_RR = torch.linalg.qr(T_DR)
    P_RR, sigma_R, B_RR = torch.linalg.svd(R_RR)
    kept_R = sigma_R > max(T_DR.shape) * torch.finfo(T_DR.dtype).eps * sigma_R[0]
    return Q_DR @ ((P_RR * kept_R) @ B_RR)


def orthogonal(S_DR: torch.Tensor, V_RK: torch.Tensor) -> torch.Tensor:
    """U [D, R] with U V = √(D/K) · polar(S V): every direction of the update S V with the same weight. The [D, K] product is never formed.

    V = L B with orthonormal rows B (QR of Vᵀ), so polar(S V) = polar(S L) B and U = polar(S L) L⁺.
    """
    L_RR = torch.linalg.qr(V_RK.T, mode="r").R.T  # [R, min(R, K)]
    T_DR = polar(S_DR @ L_RR)
    if L_RR.shape[0] == L_RR.shape[1]:
        U_DR = torch.linalg.solve_triangular(L_RR, T_DR, upper=False, left=False)
    else:
        U_DR = T_DR @ torch.linalg.pinv(L_RR)
    return U_DR * math.sqrt(S_DR.shape[0] / V_RK.shape[1])


class OrthogonalRule(SGDRule):
    """`orthogonal`, without state."""

    def __call__(self, S_DR, V_RK, state, step, moved_DR=None):
        moved_DR = S_DR if moved_DR is None else moved_DR
        if not float(moved_DR.norm()) <= LARGEST:
            raise NonFiniteError("a decomposition of it has no defined result")
        return orthogonal(moved_DR, V_RK), {}


RULES["orthogonal"] = OrthogonalRule()
