"""Frozen settings of the method, and how a dataclass checks itself; no torch, no I/O.

A bad value raises `ConfigError` at construction and names the field, the value and what is allowed. Defaults are the paper's published
main settings (METHOD sections 3 and 4).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints


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

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        self._need(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))


def to_dict(config: Any) -> dict:
    """Plain nested dict of a config, for JSON and checkpoints."""
    return dataclasses.asdict(config)


def from_dict(cls: type, values: dict) -> Any:
    """Build `cls` (nested configs included) from a plain dict; unknown keys raise `ConfigError` with the known ones."""
    hints = get_type_hints(cls)
    unknown = sorted(map(str, set(values) - set(hints)))
    if unknown:
        raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(hints)}")
    made = {}
    for name, value in values.items():
        hint = hints[name]
        made[name] = from_dict(hint, value) if dataclasses.is_dataclass(hint) and isinstance(value, dict) else value
    return cls(**made)


DISTRIBUTIONS = ("rademacher", "gaussian", "orthonormal", "hadamard", "coordinates")
KINDS = ("one_sided", "two_sided")
PROJECTIONS = ("random", "activation")
STORAGES = ("fp32", "bits", "regenerate")
RULES = ("row_adam", "sgd", "orthogonal")
ESTIMATORS = ("jvp", "finite_difference", "score_sketch")
SCHEDULES = ("none", "constant", "cosine")
WIRE_DTYPES = ("bfloat16", "float32")
QWEN_LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SketchConfig(Checked):
    """What is sketched and with which projection (METHOD sections 1 and 2; the switches of section 8 are off by default).

    rank: rows r of A. ranks: other values for some layers, by parts of their names (allocation.py). distribution: of A's entries.
    refresh: redraw A after every `refresh_every` updates, else keep the first draw.
    seed: run seed of A. targets: last name parts (`q_proj`) or dotted suffixes (`mlp.down_proj`) of the linear layers to train.
    kind: two_sided accumulates G Ωᵀ and Ψ G instead of G Aᵀ (two_sided.py), Ω with r/2 rows and Ψ with r; equal_bytes: sized
    instead to what the one-sided sketch of rank r accumulates. projection: activation takes A from the layers' inputs as seen in a
    scoring pass (activation.py) of `scored_responses` responses of the batch (0: all); complement: share of random rows in that A;
    drop_leading: so many of the strongest directions are kept out of it (only they: rank of that number, complement 0).
    share_inputs: layers that read the same input (q, k, v; gate, up) share one A and one product x Aᵀ.
    projection_storage: how a random one-sided A is kept between its uses: fp32 (and in the compute dtype), bits (Rademacher's signs, one
    bit an entry) or regenerate (not at all). The entries are the same; the last two pay with time at each use.
    """

    rank: int = 256
    ranks: dict[str, int] = field(default_factory=dict)
    distribution: str = "rademacher"
    refresh: bool = True
    refresh_every: int = 1
    seed: int = 0
    targets: tuple[str, ...] = QWEN_LLAMA_TARGETS
    kind: str = "one_sided"
    equal_bytes: bool = False
    projection: str = "random"
    complement: float = 0.125
    drop_leading: int = 0
    scored_responses: int = 16
    share_inputs: bool = False
    projection_storage: str = "fp32"

    def _check(self) -> None:
        self._need("rank", self.rank >= 1, ">= 1")
        valid = all(isinstance(p, str) and p.strip(".") and type(r) is int and r >= 1 for p, r in self.ranks.items())
        self._need("ranks", valid, "a rank >= 1 for each part of a name")
        for name, allowed in (("distribution", DISTRIBUTIONS), ("kind", KINDS), ("projection", PROJECTIONS), ("projection_storage", STORAGES)):
            self._choice(name, allowed)
        self._need("complement", 0 <= self.complement <= 1, "0 <= complement <= 1")
        self._need("drop_leading", self.drop_leading >= 0, ">= 0")
        self._need("drop_leading", self.projection == "activation" or not self.drop_leading, "0 where projection is not activation")
        self._need("scored_responses", self.scored_responses >= 0, ">= 0")
        two_sided = self.kind == "two_sided"
        self._need("equal_bytes", two_sided or not self.equal_bytes, "false unless kind is two_sided")
        self._need("projection", self.projection == "random" or not two_sided, "random where kind is two_sided")
        stays = not self.refresh or self.refresh_every != 1
        self._need("refresh_every", self.refresh_every >= 1 and (self.refresh or self.refresh_every == 1), ">= 1, and 1 where refresh is false")
        self._need("projection", self.projection == "random" or not stays, "random where refresh is false or refresh_every above 1")
        self._need("share_inputs", not (two_sided and self.share_inputs), "false where kind is two_sided (its products need x, not P)")
        kept = self.projection_storage == "fp32"
        self._need("projection_storage", kept or self.projection == "random", "fp32 where projection is activation (no seed gives that A)")
        self._need("projection_storage", kept or not two_sided, "fp32 where kind is two_sided (its backward needs Ω and Ψ again)")
        self._need("projection_storage", self.projection_storage != "bits" or self.distribution == "rademacher", "bits with rademacher only")
        self._need("seed", 0 <= self.seed < 2**63, "0 <= seed < 2**63")
        self._need("targets", len(self.targets) > 0 and all(self.targets), "at least one non-empty name")

    def draw(self, version: int) -> tuple[int, int]:
        """Number of the A that update `version` + 1 is made with, and how many updates that A has made before."""
        return divmod(version, self.refresh_every) if self.refresh else (0, version)


@dataclass(frozen=True)
class OptimConfig(Checked):
    """From sketch to update (METHOD section 3). update_ratio is the optimizer's `lr`: ||update|| / ||weights||.

    rule: row_adam; sgd; or orthogonal, the direction with all singular values equal (as in Muon and Dion). beta1: what the rule turns into a
    step is a running mean of the sketches with that decay, as in Adam (0, the paper's: the last sketch); it needs an A that stays for
    some updates (one_sided, random, refresh false or refresh_every above 1; a new A starts a new mean) and as much memory again as the sketches.
    stochastic_rounding: the model is bf16 and no fp32 masters are kept, neither here nor in the engines: a merge rounds to bf16 up or down
    with the probability that keeps the mean (rounding.py), by the seed of the sketch.
    """

    rule: str = "row_adam"
    update_ratio: float = 6e-5
    beta1: float = 0.0
    beta2: float = 0.95
    eps: float = 1e-8
    wire_dtype: str = "bfloat16"
    stochastic_rounding: bool = False

    def _check(self) -> None:
        self._choice("rule", RULES)
        for name in ("beta1", "beta2"):
            self._need(name, 0 <= getattr(self, name) < 1, f"0 <= {name} < 1")
        self._need("update_ratio", self.update_ratio >= 0, ">= 0")
        self._need("eps", self.eps >= 1e-12, ">= 1e-12 (less, and a row without gradient would outgrow fp32)")
        self._choice("wire_dtype", WIRE_DTYPES)


def check_momentum(sketch: SketchConfig, optim: OptimConfig) -> None:
    """Raises ConfigError where sketches of different updates cannot be averaged, being coordinates in different bases."""
    for name, wanted in (("kind", "one_sided"), ("projection", "random")):
        sketch._need(name, not optim.beta1 or getattr(sketch, name) == wanted, f"{wanted} where OptimConfig.beta1 > 0")
    stays = not sketch.refresh or sketch.refresh_every > 1
    sketch._need("refresh", not optim.beta1 or stays, "false, or refresh_every above 1, where OptimConfig.beta1 > 0")


@dataclass(frozen=True)
class KLConfig(Checked):
    """Predicted-KL step control (METHOD section 4).

    budget: KL per update in nats (update 1); budget_end: at update `horizon` (cosine). probe_step: step of the finite difference, in
    units of the proposed update; with probe_kl > 0 only where the search for a step of about that KL (nats) starts. score_samples: tokens
    drawn at each context by the score sketch (variants/score.py), a backward pass each; q is then known to about
    √(2 / (probe_responses · score_samples)). probe_responses: contexts come from that many responses of the batch. temperature: of the
    sampling distribution. mismatch: subtract the rollout mismatch (EMA weight 0.3, floor half the budget).
    """

    schedule: str = "cosine"
    budget: float = 2e-4
    budget_end: float = 2e-5
    horizon: int = 300
    alpha_max: float = 3.0
    estimator: str = "jvp"
    probe_step: float = 1.0
    probe_kl: float = 0.0
    score_samples: int = 8
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
        for name in ("horizon", "score_samples", "probe_responses"):
            self._need(name, getattr(self, name) >= 1, ">= 1")
        for name in ("mismatch_weight", "mismatch_floor"):
            self._need(name, 0 <= getattr(self, name) <= 1, "0 <= value <= 1")
