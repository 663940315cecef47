"""A first moment of the sketches, as Adam's, around any rule: what is moved along is their running mean.

Sketches of one A are coordinates in one basis and can be averaged; a new A starts a new mean.
"""

from __future__ import annotations

import torch

from ..optim import Rule
from ..settings import OptimConfig, SketchConfig


def first_moment(S_DR: torch.Tensor, m_DR: torch.Tensor, step: int, beta1: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Adam's first moment of sketches made with one A, after step t (from 1): (corrected for its start at 0, as it is kept), both [D, R]."""
    m_DR = torch.lerp(m_DR, S_DR, 1 - beta1)
    return m_DR / (1 - beta1**step), m_DR


class MomentumRule:
    """`rule` along the first moment; keeps it as `m` [D, R]."""

    def __init__(self, rule: Rule, beta1: float) -> None:
        self.rule, self.beta1 = rule, beta1

    def start(self, rows, columns, device):
        return self.rule.start(rows, columns, device) | {"m": torch.zeros(rows, columns, device=device)}

    def __call__(self, S_DR, V_RK, state, step, moved_DR=None):
        m_DR = state["m"] if step.age else torch.zeros_like(state["m"])  # of another A: coordinates in another basis
        mean_DR, m_DR = first_moment(S_DR, m_DR, step.age + 1, self.beta1)
        U_DR, made = self.rule(S_DR, V_RK, state, step, mean_DR)
        return U_DR, made | {"m": m_DR}


def check_momentum(sketch: SketchConfig, optim: OptimConfig) -> None:
    """Raises ConfigError where sketches of different updates cannot be averaged, being coordinates in different bases."""
    if not getattr(optim, "beta1", 0.0):
        return
    for name, wanted in (("kind", "one_sided"), ("projection", "random")):
        if hasattr(sketch, name):
            sketch._need(name, getattr(sketch, name) == wanted, f"{wanted} where OptimConfig.beta1 > 0")
    sketch._need("refresh", sketch.draw(1) == (0, 1), "false, or refresh_every above 1, where OptimConfig.beta1 > 0")
