"""Frozen settings of a run, one dataclass a subject; no torch, no I/O.

A bad value raises `ConfigError` at construction and names the field, the value and what is allowed.
Defaults are the paper's published main settings (METHOD sections 3, 4 and 6); CPU-sized values are passed by the caller.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

DISTRIBUTIONS = ("rademacher", "gaussian", "orthonormal", "hadamard")
KINDS = ("one_sided", "two_sided")
PROJECTIONS = ("random", "activation")
STORAGES = ("fp32", "bits", "regenerate")
RULES = ("row_adam", "sgd", "orthogonal")
ESTIMATORS = ("jvp", "finite_difference")
SCHEDULES = ("none", "constant", "cosine")
METHODS = ("logra", "dense")
ENGINES = ("transformers", "vllm")
COMPUTE_DTYPES = ("float32", "bfloat16")
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


class _Checked:
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


@dataclass(frozen=True)
class SketchConfig(_Checked):
    """What is sketched and with which projection (METHOD sections 1 and 2; the switches of section 8 are off by default).

    rank: rows r of A. distribution: of A's entries. refresh: redraw A after every update, else keep the first draw.
    seed: run seed of A. targets: last name parts (`q_proj`) or dotted suffixes (`mlp.down_proj`) of the linear layers to train.
    kind: two_sided accumulates G Ωᵀ and Ψ G instead of G Aᵀ (two_sided.py), Ω with r/2 rows and Ψ with r; equal_bytes: sized
    instead to what the one-sided sketch of rank r accumulates. projection: activation takes A from the layers' inputs as seen in a
    scoring pass (activation.py) of `scored_responses` responses of the batch (0: all); complement: share of random rows in that A.
    share_inputs: layers that read the same input (q, k, v; gate, up) share one A and one product x Aᵀ.
    projection_storage: how a random one-sided A is kept between its uses: fp32 (and in the compute dtype), bits (Rademacher's signs, one
    bit an entry) or regenerate (not at all). The entries are the same; the last two pay with time at each use.
    """

    rank: int = 256
    distribution: str = "rademacher"
    refresh: bool = True
    seed: int = 0
    targets: tuple[str, ...] = QWEN_LLAMA_TARGETS
    kind: str = "one_sided"
    equal_bytes: bool = False
    projection: str = "random"
    complement: float = 0.125
    scored_responses: int = 16
    share_inputs: bool = False
    projection_storage: str = "fp32"

    def _check(self) -> None:
        self._need("rank", self.rank >= 1, ">= 1")
        self._choice("distribution", DISTRIBUTIONS)
        self._choice("kind", KINDS)
        self._choice("projection", PROJECTIONS)
        self._need("complement", 0 <= self.complement <= 1, "0 <= complement <= 1")
        self._need("scored_responses", self.scored_responses >= 0, ">= 0")
        two_sided = self.kind == "two_sided"
        self._need("equal_bytes", two_sided or not self.equal_bytes, "false unless kind is two_sided")
        self._need("projection", self.projection == "random" or not two_sided, "random where kind is two_sided")
        self._need("projection", self.projection == "random" or self.refresh, "random where refresh is false")
        self._need("share_inputs", not (two_sided and self.share_inputs), "false where kind is two_sided (its products need x, not P)")
        self._choice("projection_storage", STORAGES)
        kept = self.projection_storage == "fp32"
        self._need("projection_storage", kept or self.projection == "random", "fp32 where projection is activation (no seed gives that A)")
        self._need("projection_storage", kept or not two_sided, "fp32 where kind is two_sided (its backward needs Ω and Ψ again)")
        self._need("projection_storage", self.projection_storage != "bits" or self.distribution == "rademacher", "bits with rademacher only")
        self._need("seed", 0 <= self.seed < 2**63, "0 <= seed < 2**63")
        self._need("targets", len(self.targets) > 0 and all(self.targets), "at least one non-empty name")


@dataclass(frozen=True)
class OptimConfig(_Checked):
    """From sketch to update (METHOD section 3). update_ratio is the optimizer's `lr`: ||update|| / ||weights||.

    rule: row_adam; sgd; or orthogonal, the direction with all singular values equal (as in Muon and Dion).
    """

    rule: str = "row_adam"
    update_ratio: float = 6e-5
    beta2: float = 0.95
    eps: float = 1e-8
    wire_dtype: str = "bfloat16"

    def _check(self) -> None:
        self._choice("rule", RULES)
        self._need("update_ratio", self.update_ratio >= 0, ">= 0")
        self._need("beta2", 0 <= self.beta2 < 1, "0 <= beta2 < 1")
        self._need("eps", self.eps >= 0, ">= 0")
        self._choice("wire_dtype", WIRE_DTYPES)


@dataclass(frozen=True)
class KLConfig(_Checked):
    """Predicted-KL step control (METHOD section 4).

    budget: KL per update in nats (update 1); budget_end: at update `horizon` (cosine). probe_step: step of the finite
    difference, in units of the proposed update. probe_responses: contexts come from that many responses of the batch.
    temperature: of the sampling distribution. mismatch: subtract the rollout mismatch (EMA weight 0.3, floor half the budget).
    """

    schedule: str = "cosine"
    budget: float = 2e-4
    budget_end: float = 2e-5
    horizon: int = 300
    alpha_max: float = 3.0
    estimator: str = "jvp"
    probe_step: float = 1.0
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
        self._need("horizon", self.horizon >= 1, ">= 1")
        self._need("probe_responses", self.probe_responses >= 1, ">= 1")
        for name in ("mismatch_weight", "mismatch_floor"):
            self._need(name, 0 <= getattr(self, name) <= 1, "0 <= value <= 1")


@dataclass(frozen=True)
class SamplingConfig(_Checked):
    """How responses are drawn. temperature 0 is greedy."""

    max_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0

    def _check(self) -> None:
        self._need("max_tokens", self.max_tokens >= 1, ">= 1")
        self._need("temperature", self.temperature >= 0, ">= 0")
        self._need("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1")


@dataclass(frozen=True)
class TaskConfig(_Checked):
    """Which problems. name: a reasoning-gym dataset, a `+`-joined mixture of them, or `math`.

    options: passed to the reasoning-gym dataset (one dict, or {dataset name: dict} for a mixture).
    train_data / eval_data: for `math`, a hub id or a local .jsonl / .parquet file or folder; prompt_field and answer_field its columns.
    """

    name: str = "chain_sum"
    options: dict = field(default_factory=dict)
    train_data: str = "BytedTsinghua-SIA/DAPO-Math-17k"
    eval_data: str = "HuggingFaceH4/MATH-500"
    prompt_field: str = "problem"
    answer_field: str = "answer"
    system_prompt: str = ""
    instruction: str = ""
    seed: int = 0
    grader_seconds: float = 5.0
    grader_workers: int = 1

    def _check(self) -> None:
        self._need("name", bool(self.name), "a task name")
        self._need("grader_seconds", self.grader_seconds > 0, "> 0")
        self._need("grader_workers", self.grader_workers >= 1, ">= 1")


@dataclass(frozen=True)
class PPOConfig(_Checked):
    """The RL algorithm of the main comparison (METHOD section 6).

    logit_chunk: tokens whose logits exist at once in forward and backward, recomputed in backward; 0: all of a microbatch.
    """

    prompts_per_update: int = 128
    microbatch: int = 8
    failure_reward: float = -0.01
    baseline_weight: float = 0.1
    clip: float = 0.2
    tis_cap: float = 2.0
    logit_chunk: int = 0

    def _check(self) -> None:
        self._need("prompts_per_update", self.prompts_per_update >= 1, ">= 1")
        self._need("microbatch", self.microbatch >= 1, ">= 1")
        self._need("baseline_weight", 0 < self.baseline_weight <= 1, "0 < value <= 1")
        self._need("clip", 0 < self.clip < 1, "0 < clip < 1")
        self._need("tis_cap", self.tis_cap >= 1, ">= 1")
        self._need("logit_chunk", self.logit_chunk >= 0, ">= 0")


@dataclass(frozen=True)
class DenseConfig(_Checked):
    """AdamW on the same targets: the paper's dense baseline (METHOD section 6)."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 9
    horizon: int = 300
    final_fraction: float = 0.1

    def _check(self) -> None:
        self._need("lr", self.lr >= 0, ">= 0")
        for name in ("beta1", "beta2"):
            self._need(name, 0 <= getattr(self, name) < 1, "0 <= value < 1")
        self._need("eps", self.eps > 0, "> 0")
        self._need("weight_decay", self.weight_decay >= 0, ">= 0")
        self._need("warmup", self.warmup >= 0, ">= 0")
        self._need("horizon", self.horizon >= 1, ">= 1")
        self._need("final_fraction", 0 <= self.final_fraction <= 1, "0 <= value <= 1")


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """One run. model "" is the embedded policy. eval_every 0: only before and after. out: the run's folder.

    engine: of the rollouts; engines: how many of them share the prompts, or engine_urls: vLLM servers that already run.
    exact_kl_every: measure the exact KL of the step on the probe every so many updates, beside the predicted one (0: never).
    compute_dtype: of forward and backward passes under torchrun; masters stay fp32. peer_timeout: seconds that a process of a torchrun
    launch waits for the others, rollouts included, before it takes them for dead.
    """

    out: str = "data/runs/run"
    model: str = ""
    method: str = "logra"
    engine: str = "transformers"
    engines: int = 1
    engine_urls: tuple[str, ...] = ()
    updates: int = 300
    seed: int = 0
    eval_problems: int = 500
    eval_samples: int = 4
    eval_every: int = 5
    checkpoint_every: int = 5
    threads: int = 0
    gradient_checkpointing: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.7, top_p=0.7))
    task: TaskConfig = field(default_factory=TaskConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    exact_kl_every: int = 0
    compute_dtype: str = "float32"
    peer_timeout: float = 1800.0

    def _check(self) -> None:
        self._choice("method", METHODS)
        self._choice("engine", ENGINES)
        self._choice("compute_dtype", COMPUTE_DTYPES)
        for name in ("updates", "eval_every", "threads", "seed", "exact_kl_every"):
            self._need(name, getattr(self, name) >= 0, ">= 0")
        for name in ("eval_problems", "eval_samples", "checkpoint_every", "engines"):
            self._need(name, getattr(self, name) >= 1, ">= 1")
        object.__setattr__(self, "engine_urls", tuple(self.engine_urls))
        self._need("engine_urls", not self.engine_urls or (self.engine == "vllm" and self.engines == 1), "with engine vllm and engines 1")
        self._need("out", bool(self.out), "a folder")
        self._need("peer_timeout", self.peer_timeout > 0, "> 0")


def to_dict(config: Any) -> dict:
    """Plain nested dict of a config, for JSON and checkpoints."""
    return dataclasses.asdict(config)


def from_dict(cls: type, values: dict) -> Any:
    """Build `cls` (nested configs included) from a plain dict; unknown keys raise `ConfigError` with the known ones."""
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(hints)}")
    made = {}
    for name, value in values.items():
        hint = hints[name]
        made[name] = from_dict(hint, value) if dataclasses.is_dataclass(hint) and isinstance(value, dict) else value
    return cls(**made)
