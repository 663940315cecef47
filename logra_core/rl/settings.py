"""Frozen settings of a run, one dataclass a subject: task, PPO, the methods compared, and `TrainConfig` around them; no torch, no I/O.

Defaults are the paper's published main settings (METHOD section 6); CPU-sized values are passed by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engines.rollout import SamplingConfig
from ..settings import Checked
from ..variants.momentum import check_momentum
from ..variants.settings import KLConfig, OptimConfig, SketchConfig

METHODS = ("logra", "dense", "lora", "galore")
ENGINES = ("transformers", "vllm")
COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class TaskConfig(Checked):
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
class PPOConfig(Checked):
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
class AdamConfig(Checked):
    """AdamW with a linear warm-up of `warmup` updates, then a cosine to final_fraction · lr at update `horizon`."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 9
    horizon: int = 300
    final_fraction: float = 0.1

    def _check(self) -> None:
        for name in ("beta1", "beta2"):
            self._need(name, 0 <= getattr(self, name) < 1, "0 <= value < 1")
        self._need("eps", self.eps > 0, "> 0")
        for name in ("lr", "weight_decay", "warmup"):
            self._need(name, getattr(self, name) >= 0, ">= 0")
        self._need("horizon", self.horizon >= 1, ">= 1")
        self._need("final_fraction", 0 <= self.final_fraction <= 1, "0 <= value <= 1")


@dataclass(frozen=True)
class DenseConfig(AdamConfig):
    """AdamW on the same targets: the paper's dense baseline (METHOD section 6).

    kl_control: scale AdamW's step to the budget of `KLConfig` (one process only). α stays below kl.alpha_max, so give a learning rate
    far above a plain run's (1e-4): then the budget alone decides how far a step goes.
    """

    kl_control: bool = False


@dataclass(frozen=True)
class LoRAConfig(AdamConfig):
    """W + (alpha / rank) B A on the same targets, A and B by AdamW, no dropout. Learning rate, rank and alpha are ours: tune them."""

    lr: float = 1e-5
    rank: int = 64
    alpha: float = 64.0

    def _check(self) -> None:
        super()._check()
        self._need("rank", self.rank >= 1, ">= 1")
        self._need("alpha", self.alpha > 0, "> 0")


@dataclass(frozen=True)
class GaLoreConfig(AdamConfig):
    """GaLore (arXiv 2403.03507): AdamW on the gradient projected to its `rank` leading singular directions, found anew by an SVD every
    update_proj_gap updates (the first included); its step comes back times `scale`. Gap and scale are that paper's; lr and rank ours: tune them.
    """

    lr: float = 4e-6
    rank: int = 64
    update_proj_gap: int = 200
    scale: float = 0.25

    def _check(self) -> None:
        super()._check()
        for name in ("rank", "update_proj_gap"):
            self._need(name, getattr(self, name) >= 1, ">= 1")
        self._need("scale", self.scale > 0, "> 0")


@dataclass(frozen=True)
class TrainConfig(Checked):
    """One run. model "" is the embedded policy. eval_every 0: only before and after. out: the run's folder.

    engine: of the rollouts; engines: how many of them share the prompts, or engine_urls: vLLM servers that already run.
    exact_kl_every: measure the exact KL of the step on the probe every so many updates, beside the predicted one (0: never).
    compute_dtype: of forward and backward passes under torchrun; masters stay fp32 (without any: bfloat16, and nothing else). peer_timeout:
    seconds that a process of a torchrun launch waits for the others, rollouts included, before it takes them for dead.
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
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    galore: GaLoreConfig = field(default_factory=GaLoreConfig)
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
        check_momentum(self.sketch, self.optim)
        rounds = self.optim.stochastic_rounding
        for name, value in (("method", "logra"), ("compute_dtype", "bfloat16")):
            self._need(name, not rounds or getattr(self, name) == value, f"{value} where optim.stochastic_rounding is true")

    @property
    def weight_dtype(self) -> str:
        """Of the policy as it is loaded, in the trainer and in engines of its own process."""
        return "bfloat16" if self.optim.stochastic_rounding else "float32"
