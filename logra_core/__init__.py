"""LoGRA: RL post-training with low-rank gradient sketches, predicted-KL step control and sketch sync.

logra = LoGRA(model, SketchConfig(rank=256))          # freezes, selects targets, attaches loss.backward()                                       # S += G Aᵀ,
any number of times update = logra.propose()                              # RowAdam and the update ratio alpha = controller.scale(model, update, probe)
# predicted KL -> α rollout.sync(logra.apply(update, alpha).to_bytes())   # merge here, send, merge there
"""

from .kl import ProbeBatch, StepController, exact_kl, predict_q
from .optim import LoGRA, MissingSketchError, row_adam, sgd
from .projection import Projection, ProjectionSpec, make_projection
from .settings import ConfigError, KLConfig, NonFiniteError, OptimConfig, SketchConfig
from .sketch import attach, detach
from .sync import Replica, SketchUpdate, SyncError, full_state_bytes
from .weights import Weights

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "KLConfig", "LoGRA", "MissingSketchError", "NonFiniteError", "OptimConfig", "ProbeBatch", "Projection", "ProjectionSpec",
    "Replica", "SketchConfig", "SketchUpdate", "StepController", "SyncError", "Weights", "attach", "detach", "exact_kl", "full_state_bytes",
    "make_projection", "predict_q", "row_adam", "sgd",
]  # fmt: skip
