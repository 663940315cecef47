"""What goes beyond the paper, each plugged into the core from outside as a user's own would be; importing it registers all of it."""

from . import attention, orthogonal, rows, score  # noqa: F401  (they register)
from .activation import observe
from .rounding import Stochastic
from .settings import KLConfig, OptimConfig, SketchConfig

__all__ = ["KLConfig", "OptimConfig", "SketchConfig", "Stochastic", "observe"]
