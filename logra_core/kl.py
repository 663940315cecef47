"""How far a proposed update would move the policy, before it is taken, and the step scale that keeps it to a KL budget.

KL(α) ≈ α² q with q = 1/(2|P|T²) Σ_s Var_{v∼p(s)}[ż_v(s)] (METHOD section 4; the paper's Equation 6). Every estimator adds the update as a branch to the
outputs of the target layers, so weights are never touched.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as fw
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .projection import canonical_name
from .settings import ESTIMATORS, ConfigError, KLConfig, NonFiniteError

TRIES = 4  # probe steps of one finite difference with a target
CHUNK = 512  # contexts whose full-vocabulary distributions are held in float64 at a time
LOGITS = 2**26  # logits of one forward pass of a probe (256 MiB in fp32); longer batches go in parts
PART = 2**24  # elements of a layer's output rounded by chance at once


class Proposal(Protocol):
    """W ← W − α · factor · basis of each layer, without a basis W ← W − α · factor. version: number of updates after it is applied."""

    version: int
    factors: dict[str, torch.Tensor]

    def basis(self, name: str, device: torch.device) -> torch.Tensor | None: ...


Logits = Callable[[nn.Module, Any], torch.Tensor]  # (model, one part of a probe) -> logits [C, V] at its contexts


@dataclass(frozen=True)
class ProbeBatch:
    """Contexts P of the prediction: the positions from which the response tokens of some sequences are drawn.

    input_ids: [B, T] int64, prompts padded on the left, responses on the right. attention_mask: [B, T], 1 at real tokens. response_mask: [B, T] bool, True
    at response tokens; the context of the token at t ends at t - 1.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor

    def __post_init__(self) -> None:
        shapes = {n: tuple(getattr(self, n).shape) for n in ("input_ids", "attention_mask", "response_mask")}
        if len(set(shapes.values())) != 1 or self.input_ids.dim() != 2:
            raise ConfigError(f"probe batch shapes {shapes}: expected three equal [B, T]")
        if self.response_mask.dtype != torch.bool:
            raise ConfigError(f"probe batch: response_mask is {self.response_mask.dtype}; expected torch.bool")
        if (self.response_mask & (self.attention_mask == 0)).any():
            raise ConfigError("probe batch: response tokens where attention_mask is 0, so in the padding")
        if self.response_mask[:, 0].any():
            raise ConfigError("probe batch: a response token at position 0 has no context; sequences start with a prompt token")
        if not self.response_mask.any():
            raise ConfigError("probe batch without a response token: there is no context to predict on")

    @property
    def first(self) -> int:
        """Position of the earliest context of the batch."""
        return int(self.response_mask.any(0).nonzero()[0]) - 1

    @property
    def contexts(self) -> int:
        """|P|."""
        return int(self.response_mask.sum())

    def parts(self, vocabulary: int) -> Iterator[ProbeBatch]:
        """Rows in groups whose context logits stay below `LOGITS`; rows without a response token are left out."""
        kept = self.response_mask.any(1).nonzero().flatten()
        rows = max(1, LOGITS // ((self.input_ids.shape[1] - self.first) * vocabulary))
        for some in kept.split(rows):
            yield ProbeBatch(self.input_ids[some], self.attention_mask[some], self.response_mask[some])


def position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """[B, T] positions that count real tokens only, so that left padding does not shift a sequence."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def vocabulary(model: nn.Module) -> int:
    """Number of logits at a context, from the model's config; of its text part where it has several."""
    config = model.config
    return (config.get_text_config() if hasattr(config, "get_text_config") else config).vocab_size


def context_logits(model: nn.Module, probe: ProbeBatch) -> torch.Tensor:
    """Logits [C, V] of a causal language model of transformers at the contexts, row by row of the batch."""
    batch = {"input_ids": probe.input_ids, "attention_mask": probe.attention_mask, "position_ids": position_ids(probe.attention_mask)}
    logits = model(**batch, logits_to_keep=probe.input_ids.shape[1] - probe.first, use_cache=False).logits
    return logits[:, :-1][probe.response_mask[:, probe.first + 1 :]]


def parts_of(model: nn.Module, probe: Any) -> Iterator[Any]:
    """A probe in parts that fit, if it can be cut (`parts`), else as it is."""
    return probe.parts(vocabulary(model)) if hasattr(probe, "parts") else iter([probe])


def over_ranks(probe: Any, total: float, contexts: int) -> tuple[float, int]:
    """(total, contexts), summed over all processes that share the probe, if it knows of any (`over_ranks`)."""
    return probe.over_ranks(total, contexts) if hasattr(probe, "over_ranks") else (total, contexts)


def kl_divergence(z_p_CV: torch.Tensor, z_q_CV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(softmax(z_p/T) ‖ softmax(z_q/T)) of each context [C], nats, float64, full vocabulary.

    Computed as log Σ p eᵈ − Σ p d with d = (z_q − z_p)/T centred on its mean: no difference of large log-probs is taken.
    """
    p_CV = torch.softmax(z_p_CV.double() / temperature, -1)
    d_CV = (z_q_CV.double() - z_p_CV.double()) / temperature
    d_CV = d_CV - (p_CV * d_CV).sum(-1, keepdim=True)
    return torch.log1p((p_CV * torch.expm1(d_CV)).sum(-1))


def logit_variance(z_CV: torch.Tensor, zdot_CV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Var_{v∼softmax(z/T)}[ż_v] of each context [C], float64."""
    p_CV = torch.softmax(z_CV.double() / temperature, -1)
    zdot_CV = zdot_CV.double()
    return (p_CV * (zdot_CV - (p_CV * zdot_CV).sum(-1, keepdim=True)).square()).sum(-1)


@torch.no_grad()
def exact_kl(model: nn.Module, update: Proposal, probe: Any, alpha: float, temperature: float = 1.0, logits: Logits = context_logits) -> float:
    """Mean KL(current ‖ current after α · update) over the contexts, nats, by two forward passes. In bf16 with its noise, and right in the mean above it.

    probe: a `ProbeBatch`, or whatever `logits` reads.
    """
    total, contexts = 0.0, 0
    with probing(model):
        for part in parts_of(model, probe):
            before = logits(model, part)
            with _branch(model, update, alpha):
                after = logits(model, part)
            for z_p, z_q in zip(before.split(CHUNK), after.split(CHUNK), strict=True):
                total += float(kl_divergence(z_p, z_q, temperature).sum())
            contexts += len(before)
    total, contexts = over_ranks(probe, total, contexts)
    return total / contexts


def q_finite_difference(
    model: nn.Module, update: Proposal, probe: Any, step: float, temperature: float = 1.0, target: float = 0.0, logits: Logits = context_logits
) -> float:
    """q ≈ KL(step)/step² (the paper's 27B run). In bf16 it takes a step whose KL is far above the noise (1e-3 nats on SmolLM2-135M; notebook 03).

    target: KL in nats. If not 0, `step` is only the first of at most `TRIES`, until KL(step) is within a factor of two of it: a step too small drowns in
    rounding, one too large leaves the quadratic law. Raises NonFiniteError: no step came near the target, so nothing is known of q.
    """
    tried = []
    for _ in range(TRIES):
        kl = exact_kl(model, update, probe, step, temperature, logits)
        if not target or target / 2 <= kl <= 2 * target:
            return kl / step**2
        tried.append((kl, step))
        step *= 0.1 if not math.isfinite(kl) else min(max(math.sqrt(target / max(kl, 1e-30)), 0.01), 100.0)
    if not any(kl for kl, _ in tried):  # nothing moves the policy
        return 0.0
    found = ", ".join(f"{kl:.3g} at step {step:.3g}" for kl, step in tried)
    raise NonFiniteError(f"no step moved the policy by about {target:g} nats (KL {found}): set another probe_step or probe_kl")


@torch.no_grad()
def q_jvp(model: nn.Module, update: Proposal, probe: Any, temperature: float = 1.0, logits: Logits = context_logits) -> float:
    """q by one forward-mode pass: every target adds −(x Vᵀ) Uᵀ to its output's tangent; a sketched update needs no [D, K] tangent.

    Raises RuntimeError: an operation of the model has no forward-mode rule. ConfigError: its attention is of a kind without one.
    """
    total, contexts = 0.0, 0
    with probing(model), forward_mode(model), _branch(model, update, None):
        for part in parts_of(model, probe):
            try:
                z_CV, zdot_CV = fw.unpack_dual(logits(model, part))
            except (NotImplementedError, RuntimeError) as error:
                if "forward" not in str(error):
                    raise
                raise RuntimeError(f"this model has an operation without a forward-mode rule ({str(error).splitlines()[0]}): {INSTEAD}") from error
            contexts += len(z_CV)
            if zdot_CV is not None:
                for z, zdot in zip(z_CV.split(CHUNK), zdot_CV.split(CHUNK), strict=True):
                    total += float(logit_variance(z, zdot, temperature).sum())
    total, contexts = over_ranks(probe, total, contexts)
    return total / (2 * contexts * temperature**2)


INSTEAD = 'use another KLConfig.estimator, such as "finite_difference"'
FORWARD_MODE: list[Callable[[nn.Module], contextlib.AbstractContextManager]] = []  # more rules, each a context around a model


@contextlib.contextmanager
def forward_mode(model: nn.Module) -> Iterator[None]:
    """A dual level of `torch.autograd.forward_ad` in which `model` carries tangents from a layer's output to its logits.

    torch's fused attention has no forward-mode rule, its unfused kernel has; `FORWARD_MODE` may add rules that need less memory.
    """
    with contextlib.ExitStack() as stack:
        for context in (fw.dual_level(), sdpa_kernel(SDPBackend.MATH), *(make(model) for make in FORWARD_MODE)):
            stack.enter_context(context)
        yield


# (model, update, probe, config, q of the update before or None, logits) -> q of the proposal
Estimator = Callable[[nn.Module, Proposal, Any, KLConfig, float | None, Logits], float]


def _by_finite_difference(model, update, probe, config, last, logits):
    step = math.sqrt(config.probe_kl / last) if last and config.probe_kl else config.probe_step  # near the last one's
    return q_finite_difference(model, update, probe, step, config.temperature, config.probe_kl, logits)


ESTIMATORS["jvp"] = lambda model, update, probe, config, last, logits: q_jvp(model, update, probe, config.temperature, logits)
ESTIMATORS["finite_difference"] = _by_finite_difference


def predict_q(
    model: nn.Module, update: Proposal, probe: Any, config: KLConfig, last: float | None = None, estimator: Estimator | None = None,
    logits: Logits = context_logits,
) -> float:  # fmt: skip
    """q(D) of the proposed update by `estimator`, or the configured one; KL(α) ≈ α² q.

    Raises NonFiniteError: the prediction is NaN, infinite or negative.
    """
    q = (estimator or ESTIMATORS[config.estimator])(model, update, probe, config, last, logits)
    if not math.isfinite(q) or q < 0:
        raise NonFiniteError(f"predicted KL coefficient q = {q} of update {update.version}: the step is not taken")
    return q


def budget_at(config: KLConfig, update: int) -> float:
    """KL budget δ of an update (counted from 1), nats; infinite without control. Cosine from δ0 at 1 to δ1 at `horizon`, then δ1."""
    if config.schedule == "none":
        return math.inf
    if config.schedule == "constant":
        return config.budget
    progress = min(max((update - 1) / max(config.horizon - 1, 1), 0.0), 1.0)
    return config.budget_end + (config.budget - config.budget_end) * 0.5 * (1 + math.cos(math.pi * progress))


class StepController:
    """α = min(α_max, √(δ_eff/q)): rescales a proposed update to its KL budget and remembers the mismatch (METHOD section 4).

    estimator: of q, in place of the one that the settings name. logits: (model, probe) -> logits [C, V] at the probe's contexts, for a module that is no
    causal language model of transformers; the probe is then whatever it reads.
    """

    def __init__(self, config: KLConfig, estimator: Estimator | None = None, logits: Logits = context_logits) -> None:
        self.config, self.estimator, self.logits = config, estimator, logits
        self.mismatch: float | None = None
        self.q: float | None = None  # of the last update
        self.last: dict = {}

    def observe_mismatch(self, value: float) -> None:
        """Feed m ≥ 0 of one batch; averaged with weight `mismatch_weight` (the first value starts the average)."""
        if not math.isfinite(value) or value < 0:
            raise NonFiniteError(f"mismatch = {value}: expected a finite number >= 0")
        weight = self.config.mismatch_weight
        self.mismatch = value if self.mismatch is None else (1 - weight) * self.mismatch + weight * value

    def effective_budget(self, update: int) -> float:
        """max(δ − m, floor · δ) with mismatch subtraction on, else δ."""
        budget = budget_at(self.config, update)
        if not self.config.mismatch or self.mismatch is None or math.isinf(budget):
            return budget
        return max(budget - self.mismatch, self.config.mismatch_floor * budget)

    def observe_and_scale(self, model: nn.Module, update: Proposal, probe: Any, mismatch: float) -> float:
        """`scale` with the mismatch of the same batch fed before: part of what this step may spend. An error leaves nothing behind."""
        before = self.state_dict()
        try:
            self.observe_mismatch(mismatch)
            return self.scale(model, update, probe)
        except BaseException:
            self.load_state_dict(before)
            raise

    def scale(self, model: nn.Module, update: Proposal, probe: Any) -> float:
        """α of a proposed update. Without a schedule α = 1 and nothing is measured. `last` tells what was used."""
        if self.config.schedule == "none":
            alpha, q, budget = 1.0, None, math.inf
        else:
            budget = self.effective_budget(update.version)
            q = self.q = predict_q(model, update, probe, self.config, self.q, self.estimator, self.logits)
            alpha = min(self.config.alpha_max, math.sqrt(budget / q)) if q else 1.0
        self.last = {"estimator": self.config.estimator, "q": q, "budget": budget_at(self.config, update.version), "effective_budget": budget,
                     "alpha": alpha, "predicted_kl": None if q is None else alpha**2 * q}  # fmt: skip
        return alpha

    def state_dict(self) -> dict:
        return {"mismatch": self.mismatch, "q": self.q}

    def load_state_dict(self, state: dict) -> None:
        self.mismatch, self.q = state["mismatch"], state.get("q")

    def metrics(self) -> dict:
        """`last` for a log, an absent budget (no schedule) as None, and the averaged mismatch."""
        last = {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in self.last.items()}
        return last | {"mismatch_ema": self.mismatch}


@contextlib.contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no activation checkpointing), put back module by module; uncompiled, as hooks and tangents are not of the graph."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def hooked(model: nn.Module, update: Proposal, make: Callable[[str, torch.Tensor, Callable[[], torch.Tensor | None]], Callable]) -> Iterator[None]:
    """Forward hooks (with keywords) on the layers of an update: make(name, U, basis), where basis() gives V [R, K], or None for a full change.

    V is asked for at each forward, since all of a model's at once would cost what packed projections save. Raises ConfigError if the update has layers that
    the model lacks.
    """
    modules = {canonical_name(n): m for n, m in model.named_modules()}
    if unknown := [n for n in update.factors if n not in modules]:
        raise ConfigError(f"the update has layers the model lacks: {', '.join(unknown[:5])}")
    handles = []
    try:
        for name, U_DR in update.factors.items():
            hook = make(name, U_DR, lambda name=name, device=U_DR.device: update.basis(name, device))
            handles.append(modules[name].register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _branch(model: nn.Module, update: Proposal, step: float | None) -> contextlib.AbstractContextManager[None]:
    """Target layers return y − step · (x Vᵀ) Uᵀ, or y − step · x Dᵀ; with step None the branch goes into the tangent instead (forward mode)."""
    return hooked(model, update, lambda name, U_DR, basis: _BranchHook(name, U_DR, basis, step))


class _BranchHook:
    def __init__(self, name: str, U_DR: torch.Tensor, basis: Callable[[], torch.Tensor | None], step: float | None) -> None:
        self.U_DR, self.basis, self.step = U_DR, basis, step
        self.generator = torch.Generator(U_DR.device).manual_seed(zlib.crc32(name.encode()))  # the same at every call

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
        x = args[0] if args else kwargs["input"]
        if self.step is not None:
            delta = self._delta(x, output.dtype)
            # The output was rounded before the branch: in bf16 a plain sum would lose small changes systematically, and with them KL.
            return add_on_grid(output, delta, -self.step, self.generator) if output.dtype == torch.bfloat16 else output - self.step * delta
        y, tangent = fw.unpack_dual(output)
        delta = -self._delta(fw.unpack_dual(x).primal, y.dtype)
        return fw.make_dual(y, delta if tangent is None else tangent + delta)

    def _delta(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x.to(dtype)
        V_RK = self.basis()
        P = x if V_RK is None else x @ V_RK.to(dtype).T
        return P @ self.U_DR.to(dtype).T


def add_on_grid(y: torch.Tensor, change: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    """y + scale · change in bf16, rounded up or down by chance: right in the mean. Both bf16, of one shape [..., D]; the result is new.

    For a change of something that is already rounded. To nearest, every element that changes by less than half a unit in the last place would stay as it is;
    where two different fp32 sums are rounded, their places between the neighbours spare them that.
    """
    made = torch.empty_like(y, memory_format=torch.contiguous_format)
    for part, y_part, change_part in zip(*(t.reshape(-1).split(PART) for t in (made, y, change)), strict=True):
        bits = torch.randint(2**16, y_part.shape, dtype=torch.int32, device=y.device, generator=generator)
        values = y_part.float().add_(change_part, alpha=scale)
        part.copy_(cut_or_nan(values, bits))
    return made


def cut_or_nan(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """`cut_to_bfloat16` of values that may be NaN: a carry would make a number of a GPU's, which has all bits set."""
    return cut_to_bfloat16(values, bits.mul_(values == values))


def cut_to_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bf16 of contiguous fp32 `values` with `bits` (int32, below 2^16; overwritten) added below the last place that stays."""
    return bits.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
