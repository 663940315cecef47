"""Slow float64 oracles, one loop a sum, that tests and notebooks compare the fast path with; the fast path never imports this."""

from __future__ import annotations

import math

import torch


def sketch(g_ND: torch.Tensor, x_NK: torch.Tensor, A_RK: torch.Tensor) -> torch.Tensor:
    """S[d, r] = Σ_n g[n, d] Σ_k x[n, k] A[r, k], float64 [D, R], by way of the dense gradient G = gᵀx (METHOD section 2)."""
    G_DK = torch.zeros(g_ND.shape[1], x_NK.shape[1], dtype=torch.float64)
    for g_D, x_K in zip(g_ND.double(), x_NK.double(), strict=True):
        G_DK += torch.outer(g_D, x_K)
    S_DR = torch.zeros(g_ND.shape[1], A_RK.shape[0], dtype=torch.float64)
    for r, a_K in enumerate(A_RK.double()):
        S_DR[:, r] = (G_DK * a_K).sum(1)
    return S_DR


def two_sided(g_ND, x_NK, Omega_QK, Psi_PD) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y, Z) = (G Ωᵀ [D, q], Ψ G [p, K]) by way of the dense gradient, float64 (Tropp et al. 2017, equation 2.1)."""
    return sketch(g_ND, x_NK, Omega_QK), sketch(x_NK, g_ND, Psi_PD).T


def rebuild(Y_DQ, Z_PK, Psi_PD) -> torch.Tensor:
    """Ĝ = Q (Ψ Q)⁺ Z [D, K] float64, Q an orthonormal basis of Y's range from its singular vectors (Tropp et al. 2017, Algorithm 4)."""
    Q_DQ = torch.linalg.svd(Y_DQ.double(), full_matrices=False).U
    return Q_DQ @ torch.linalg.lstsq(Psi_PD.double() @ Q_DQ, Z_PK.double(), driver="gelsd").solution


def polar(G_DK, tolerance: float = 1e-5) -> torch.Tensor:
    """Σ_i u_i v_iᵀ [D, K] float64 over the singular directions of G that are stronger than `tolerance` times the strongest."""
    total = torch.zeros(G_DK.shape, dtype=torch.float64)
    U, sigma, V = torch.linalg.svd(G_DK.double(), full_matrices=False)
    for u_D, s, v_K in zip(U.T, sigma, V, strict=True):
        if s > tolerance * sigma[0]:
            total += torch.outer(u_D, v_K)
    return total


def row_adam(S_DR, v_D, step: int, beta2: float, eps: float):
    """(U [D, R], v [D]) of METHOD section 3 in Python floats, row by row."""
    rows = [[float(s) for s in row] for row in S_DR]
    v = [beta2 * float(old) + (1 - beta2) * math.fsum(s * s for s in row) / len(row) for old, row in zip(v_D, rows, strict=True)]
    root = [math.sqrt(value / (1 - beta2**step)) for value in v]
    floor = max(eps * math.fsum(root) / len(root), torch.finfo(torch.float32).tiny)
    inverse = [1 / (value + floor) for value in root]
    largest = max(inverse)
    inverse = [value / largest for value in inverse]
    rms = math.sqrt(math.fsum(value * value for value in inverse) / len(inverse))
    U = [[i / rms * s for s in row] for i, row in zip(inverse, rows, strict=True)]
    norm_S = math.sqrt(math.fsum(s * s for row in rows for s in row))
    norm_U = math.sqrt(math.fsum(u * u for row in U for u in row))
    scale = norm_S / norm_U if norm_U else 0.0
    return torch.tensor([[scale * u for u in row] for row in U], dtype=torch.float64), torch.tensor(v, dtype=torch.float64)


def stochastic_round(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bf16 of fp32 x [...], away from zero where bits (0 to 65535, as many) say so: with probability (|x| − lower neighbour) / ulp.

    Below the smallest normal number it is 0.
    """
    made = []
    for value, draw in zip(x.double().flatten().tolist(), bits.flatten().tolist(), strict=True):
        ulp = 2.0 ** (math.frexp(value)[1] - 8) if value else 1.0  # bf16 has 8 bits of mantissa, the leading one included
        low = math.floor(abs(value) / ulp)
        up = (abs(value) / ulp - low) + draw / 2**16 >= 1
        size = (low + up) * ulp
        made.append(0.0 if size < 2.0**-126 else math.copysign(size, value))
    return torch.tensor(made, dtype=torch.float64).reshape(x.shape).to(torch.bfloat16)


def kl(z_p_V, z_q_V, temperature: float = 1.0) -> float:
    """KL(softmax(z_p/T) ‖ softmax(z_q/T)) over one context, in nats, float64."""

    def log_softmax(z):
        scaled = [float(value) / temperature for value in z]
        top = max(scaled)
        log_sum = top + math.log(math.fsum(math.exp(value - top) for value in scaled))
        return [value - log_sum for value in scaled]

    p, q = log_softmax(z_p_V), log_softmax(z_q_V)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def predicted_q(z_CV, zdot_CV, temperature: float = 1.0) -> float:
    """q = 1/(2|P|T²) Σ_s Var_{v∼p(s)}[ż_v(s)] over contexts [C, V] (METHOD section 4), float64."""
    total = 0.0
    for z_V, zdot_V in zip(z_CV.double() / temperature, zdot_CV.double(), strict=True):
        p_V = torch.softmax(z_V, 0)
        mean = float((p_V * zdot_V).sum())
        total += float((p_V * (zdot_V - mean) ** 2).sum())
    return total / (2 * len(z_CV) * temperature**2)
