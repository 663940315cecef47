"""Frozen settings of a run, one dataclass a subject; no torch, no I/O. How they check themselves is checked.py's.

A bad value raises `ConfigError` at construction and names the field, the value and what is allowed.
Defaults are the paper's published main settings (METHOD sections 3, 4 and 6); CPU-sized values are passed by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .checked import Checked, ConfigError, NonFiniteError, from_dict, to_dict  # noqa: F401  (for those who import them from here)

DISTRIBUTIONS = ("rademacher", "gaussian", "orthonormal", "hadamard", "coordinates")
KINDS = ("one_sided", "two_sided")
PROJECTIONS = ("random", "activation")
STORAGES = ("fp32", "bits", "regenerate")
RULES = ("row_adam", "sgd", "orthogonal")
ESTIMATORS = ("jvp", "finite_difference", "score_sketch")
SCHEDULES = ("none", "constant", "cosine")
METHODS = ("logra", "dense", "lora", "galore")
ENGINES = ("transformers", "vllm")
COMPUTE_DTYPES = ("float32", "bfloat16")
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
    drawn at each context by the score sketch (kl_score.py), a backward pass each; q is then known to about
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


@dataclass(frozen=True)
class SamplingConfig(Checked):
    """How responses are drawn. temperature 0 is greedy."""

    max_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0

    def _check(self) -> None:
        self._need("max_tokens", self.max_tokens >= 1, ">= 1")
        self._need("temperature", self.temperature >= 0, ">= 0")
        self._need("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1")


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
