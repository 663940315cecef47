"""LoGRA: RL post-training with low-rank gradient sketches, predicted-KL step control and sketch sync.

    logra = LoGRA(model, SketchConfig(rank=256))          # freezes, selects targets, attaches
    loss.backward()                                       # S += G Aᵀ, any number of times
    update = logra.propose()                              # RowAdam and the update ratio
    alpha = controller.scale(model, update, probe)        # predicted KL -> α
    rollout.sync(logra.apply(update, alpha).to_bytes())   # merge here, send, merge there
"""

from .config import (
    ConfigError,
    DenseConfig,
    KLConfig,
    OptimConfig,
    PPOConfig,
    SamplingConfig,
    SketchConfig,
    TaskConfig,
    TrainConfig,
)
from .kl import ProbeBatch, StepController, exact_kl, predict_q
from .optim import LoGRA, MissingSketchError, NonFiniteError, row_adam, sgd
from .policy import embedded_policy, load_policy
from .projection import ProjectionSpec, make_projection
from .shapes import target_table
from .sketch import attach, detach
from .sync import Replica, SketchUpdate, SyncError, full_state_bytes
from .weights import Weights

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DenseConfig",
    "KLConfig",
    "LoGRA",
    "MissingSketchError",
    "NonFiniteError",
    "OptimConfig",
    "PPOConfig",
    "ProbeBatch",
    "ProjectionSpec",
    "Replica",
    "SamplingConfig",
    "SketchConfig",
    "SketchUpdate",
    "StepController",
    "SyncError",
    "TaskConfig",
    "TrainConfig",
    "Weights",
    "attach",
    "detach",
    "embedded_policy",
    "exact_kl",
    "full_state_bytes",
    "load_policy",
    "make_projection",
    "predict_q",
    "row_adam",
    "sgd",
    "target_table",
]
