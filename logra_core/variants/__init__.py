"""What goes beyond the paper, each plugged into the core from outside as a user's own would be; importing it registers all of it.

Distributions of A (rows), a rule (orthogonal), a first moment (momentum), where A comes from and how it is kept (inputs, activation),
another sketch (two_sided), other ranks (allocation), weights without masters (rounding), an estimator of q (score), and attention with a
forward-mode rule in little memory (attention). `settings` has the switches: `LoGRA(model, variants.SketchConfig(kind="two_sided"))`.
"""

from . import attention, orthogonal, rows, score  # noqa: F401  (they register)
from .activation import observe
from .rounding import Stochastic
from .settings import KLConfig, OptimConfig, SketchConfig

__all__ = ["KLConfig", "OptimConfig", "SketchConfig", "Stochastic", "observe"]
