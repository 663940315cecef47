"""Frozen settings of the method, and how a dataclass checks itself; no torch, no I/O.

A bad value raises `ConfigError` at construction and names the field, the value and what is allowed. Defaults are the paper's published main settings (METHOD
sections 3 and 4). What a name in them means is found in three tables; an entry of your own plugs in another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

DISTRIBUTIONS: dict[str, Any] = {}  # of A's entries: name -> projection.Distribution
RULES: dict[str, Any] = {}  # from sketch to direction: name -> an object like optim.RowAdamRule
ESTIMATORS: dict[str, Any] = {}  # of q: name -> kl.Estimator
SCHEDULES = ("none", "constant", "cosine")
WIRE_DTYPES = ("bfloat16", "float32")
QWEN_LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ConfigError(ValueError):
    """A setting outside what is allowed; the message names field, value and range."""


class NonFiniteError(FloatingPointError):
    """A NaN or infinity was met before the step; weights and optimizer state are unchanged."""


def _matches(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_matches(v, get_args(hint)[0]) for v in value)
    if get_args(hint) and get_origin(hint) is not dict:  # unions
        return any(_matches(value, h) for h in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


class Checked:
    """Type check of every field, then the subclass's own range checks."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list):  # JSON and YAML have no tuples
                object.__setattr__(self, f.name, value := tuple(value))
            if not _matches(value, hints[f.name]):
                raise ConfigError(f"{type(self).__name__}.{f.name} = {value!r} ({type(value).__name__}): expected {f.type}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{type(self).__name__}.{f.name} = {value!r}: expected a finite number")
        self._check()

    def _check(self) -> None:
        pass

    def _need(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{name} = {getattr(self, name)!r}: allowed is {allowed}")

    def _choice(self, name: str, allowed: Iterable[str]) -> None:
        self._need(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))


def to_dict(config: Any) -> dict:
    """Plain nested dict of a config, for JSON and checkpoints."""
    return dataclasses.asdict(config)


@dataclass(frozen=True)
class SketchConfig(Checked):
    """What is sketched and with which projection (METHOD sections 1 and 2).

    rank: rows r of A. distribution: of A's entries. refresh: draw A anew for every update, else keep the first draw. seed: run seed of A. targets:
    last name parts (`q_proj`) or dotted suffixes (`mlp.down_proj`) of the linear layers to train. A subclass may add settings, and a method `sketcher` that
    makes other sketches of them (`sketch.attach`); see `logra_core.variants`.
    """

    rank: int = 256
    distribution: str = "rademacher"
    refresh: bool = True
    seed: int = 0
    targets: tuple[str, ...] = QWEN_LLAMA_TARGETS

    def _check(self) -> None:
        self._need("rank", self.rank >= 1, ">= 1")
        self._choice("distribution", DISTRIBUTIONS)
        self._need("seed", 0 <= self.seed < 2**63, "0 <= seed < 2**63")
        self._need("targets", len(self.targets) > 0 and all(self.targets), "at least one non-empty name")

    def draw(self, version: int) -> tuple[int, int]:
        """Number of the A that update `version` + 1 is made with, and how many updates that A has made before."""
        return (version, 0) if self.refresh else (0, version)


@dataclass(frozen=True)
class OptimConfig(Checked):
    """From sketch to update (METHOD section 3). update_ratio is the optimizer's `lr`: ||update|| / ||weights||.

    rule: row_adam, sgd, or another of `RULES`. wire_dtype: to which factors are rounded before both sides merge them. A subclass may add settings, and
    methods `make_rule` and `make_rounding`; see `logra_core.variants`.
    """

    rule: str = "row_adam"
    update_ratio: float = 6e-5
    beta2: float = 0.95
    eps: float = 1e-8
    wire_dtype: str = "bfloat16"

    def _check(self) -> None:
        self._choice("rule", RULES)
        self._need("beta2", 0 <= self.beta2 < 1, "0 <= beta2 < 1")
        self._need("update_ratio", self.update_ratio >= 0, ">= 0")
        self._need("eps", self.eps >= 1e-12, ">= 1e-12 (less, and a row without gradient would outgrow fp32)")
        self._choice("wire_dtype", WIRE_DTYPES)


@dataclass(frozen=True)
class KLConfig(Checked):
    """Predicted-KL step control (METHOD section 4).

    budget: KL per update in nats (update 1); budget_end: at update `horizon` (cosine). estimator: jvp, finite_difference, or one registered with
    `kl.register_estimator`. probe_step: step of the finite difference, in units of the proposed update; with probe_kl > 0 only where the search for a step
    of about that KL (nats) starts. probe_responses: contexts come from that many responses of the batch. temperature: of the sampling distribution.
    mismatch: subtract the rollout mismatch (EMA weight 0.3, floor half the budget).
    """

    schedule: str = "cosine"
    budget: float = 2e-4
    budget_end: float = 2e-5
    horizon: int = 300
    alpha_max: float = 3.0
    estimator: str = "jvp"
    probe_step: float = 1.0
    probe_kl: float = 0.0
    probe_responses: int = 2
    temperature: float = 1.0
    mismatch: bool = True
    mismatch_weight: float = 0.3
    mismatch_floor: float = 0.5

    def _check(self) -> None:
        self._choice("schedule", SCHEDULES)
        self._choice("estimator", ESTIMATORS)
        for name in ("budget", "budget_end", "alpha_max", "probe_step", "temperature"):
            self._need(name, getattr(self, name) > 0, "> 0")
        self._need("probe_kl", self.probe_kl >= 0, ">= 0")
        for name in ("horizon", "probe_responses"):
            self._need(name, getattr(self, name) >= 1, ">= 1")
        for name in ("mismatch_weight", "mismatch_floor"):
            self._need(name, 0 <= getattr(self, name) <= 1, "0 <= value <= 1")
