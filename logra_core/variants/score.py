"""q without forward mode: tokens drawn from the policy at the probe's contexts, and one ordinary backward pass of their log-probs a draw.

With v ∼ p drawn anew at each context of a sequence b, f_b = ⟨∇_W Σ_s log p(v_s), U V⟩ has mean 0, scores at different positions are
uncorrelated, and E Σ_b f_b² = Σ_s Var[ż_v]/T² = 2|P| q (METHOD section 8; the identity of Fisher information and score variance).
f_b = ⟨S_b, U⟩ with S_b = G_b Vᵀ in the update's own basis V, whatever sketch it came from: Σ_n (g_n U) · (V x_n) over the tokens n of b,
so that not even a sketch a sequence is held. Any attention kernel will do. A sequence of many contexts gives f_b² with a relative standard
deviation of about √2: that of q is √(2 / (sequences · samples)) or, where a few contexts or sequences weigh most, more; that of α is half of it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from ..kl import CHUNK, Logits, ProbeBatch, context_logits, hooked, over_ranks, parts_of, probing
from ..settings import ESTIMATORS
from ..sketch import autocast_off
from ..sync import SketchUpdate


def q_score_sketch(
    model: nn.Module, update: SketchUpdate, probe: ProbeBatch, samples: int, temperature: float = 1.0, logits: Logits = context_logits
) -> float:
    """q estimated from `samples` draws of a token at each context; the same number whenever update version and probe are the same.

    Nothing is left behind: no weight and no sketch gets a gradient. Costs a forward pass and `samples` backward passes without weight
    gradients; activations are kept, or recomputed where the model checkpoints them (non-reentrant).
    Raises:
        ConfigError: the update has layers the model lacks. RuntimeError: a target's output has no row for each sequence.
    """
    total, contexts, seen = 0.0, 0, Counter()
    with probing(model), _still_checkpointing(model), paused(model), torch.enable_grad(), _tapped(model, update) as taps:
        for part in parts_of(model, probe):
            uniform_SC = _uniforms(update.version, part, samples, seen)
            total += float(sum(f_B.square().sum() for f_B in scores(model, part, taps, uniform_SC, temperature, logits)))
            contexts += uniform_SC.shape[1]
    total, contexts = over_ranks(probe, total / samples, contexts)
    return total / (2 * contexts)


def _by_score_sketch(model, update, probe, config, last, logits):
    return q_score_sketch(model, update, probe, config.score_samples, config.temperature, logits)


ESTIMATORS["score_sketch"] = _by_score_sketch


@contextlib.contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Forward passes inside are not sketched, though they have gradients."""
    targets = [t for m in model.modules() for t in getattr(m, "_logra_targets", {}).values()]
    try:
        for target in targets:
            target.stop()
        yield
    finally:
        for target in targets:
            target.start()


def scores(model: nn.Module, part: ProbeBatch, taps: _Step, uniform_SC: torch.Tensor, temperature: float, logits: Logits = context_logits) -> Iterator[torch.Tensor]:
    """For each row of `uniform_SC` [samples, contexts], f_B [B] float64: d/dstep of Σ log p(v) of each sequence, v drawn by that row."""
    taps.step_B = torch.zeros(len(part.input_ids), dtype=torch.float64, device=part.input_ids.device, requires_grad=True)
    z_CV = logits(model, part)
    for i, uniform_C in enumerate(uniform_SC):
        _, grad_CV = draw_tokens(z_CV.detach(), uniform_C, temperature)
        (f_B,) = torch.autograd.grad(z_CV, taps.step_B, grad_CV, retain_graph=i + 1 < len(uniform_SC))
        yield f_B


def draw_tokens(z_CV: torch.Tensor, uniform_C: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """v [C] ∼ p = softmax(z/T) by inverse distribution function of uniform_C, and ∂log p(v)/∂z = (1_v − p)/T [C, V] in z's dtype."""
    tokens, grads = [], torch.empty_like(z_CV)
    for z, u, grad in zip(z_CV.split(CHUNK), uniform_C.to(z_CV.device).split(CHUNK), grads.split(CHUNK), strict=True):
        p_CV = torch.softmax(z.double() / temperature, -1)
        below_CV = p_CV.cumsum(-1)
        v_C1 = torch.searchsorted(below_CV, u[:, None] * below_CV[:, -1:]).clamp(max=z.shape[-1] - 1)
        grad.copy_(p_CV.neg_().scatter_add_(-1, v_C1, torch.ones_like(v_C1, dtype=torch.float64)) / temperature)
        tokens.append(v_C1[:, 0])
    return torch.cat(tokens), grads


def _uniforms(version: int, part: ProbeBatch, samples: int, seen: Counter) -> torch.Tensor:
    """Uniform numbers [samples, contexts] float64, a function of the update and of each sequence's own tokens: neither padding nor the
    cut into parts or over ranks matters. seen: how often a sequence came before, so that copies get draws of their own."""
    made = []
    for ids, attention, response in zip(part.input_ids.cpu(), part.attention_mask.cpu(), part.response_mask.cpu(), strict=True):
        kept = attention.bool() | response
        key = hashlib.blake2b(f"score|{version}|{ids[kept].tolist()}|{response[kept].tolist()}".encode(), digest_size=16).digest()
        seen[key] += 1
        words = np.frombuffer(key, dtype="<u8").astype(np.uint64) + np.array([0, seen[key]], dtype=np.uint64)
        count = int(response.sum())
        raw = np.random.Philox(key=words).random_raw(samples * count).reshape(samples, count)
        made.append(torch.from_numpy(((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53))
    return torch.cat(made, 1)


class _Step:
    """step_B [B] float64, zeros: the step along the update, one for each sequence of the part at hand."""

    step_B: torch.Tensor


@contextlib.contextmanager
def _tapped(model: nn.Module, update: SketchUpdate) -> Iterator[_Step]:
    """Outputs of the target layers depend on `step_B` as if each sequence had weights W + step · U V."""
    taps = _Step()
    with hooked(model, update, lambda name, U_DR, basis: _TapHook(name, U_DR, basis, taps)):
        yield taps


class _TapHook:
    def __init__(self, name: str, U_DR: torch.Tensor, basis: Callable[[], torch.Tensor], taps: _Step) -> None:
        self.name, self.U_DR, self.basis, self.taps = name, U_DR, basis, taps

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
        x, rows = args[0] if args else kwargs["input"], len(self.taps.step_B)
        if output.numel() % (rows * output.shape[-1]):
            raise RuntimeError(f"output {tuple(output.shape)} of {self.name!r} does not hold {rows} sequences: use another KLConfig.estimator")
        with torch.no_grad():
            P_NR = x.detach().to(output.dtype).reshape(-1, x.shape[-1]) @ self.basis().to(output.dtype).T
        return _Tap.apply(output, P_NR, self.taps.step_B, self.U_DR)


class _Tap(torch.autograd.Function):
    """Identity on y; the gradient of step_B is Σ_n (g_n U) · P_n over the tokens of each sequence, P = x Vᵀ [N, R]."""

    @staticmethod
    def forward(ctx, y, P_NR, step_B, U_DR):
        ctx.save_for_backward(P_NR)
        ctx.U_DR, ctx.rows = U_DR, len(step_B)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, g):
        (P_NR,) = ctx.saved_tensors
        with autocast_off(g.device):
            gU_NR = g.reshape(-1, g.shape[-1]).float() @ ctx.U_DR.float()
            f_B = (gU_NR.double() * P_NR.double()).reshape(ctx.rows, -1).sum(1)
        return g, None, f_B, None


@contextlib.contextmanager
def _still_checkpointing(model: nn.Module) -> Iterator[None]:
    """Blocks that recompute their activations go on doing so in evaluation mode, by their own flag; not in a model with dropout."""
    blocks, config = [], getattr(model, "config", None)
    dropout = any(isinstance(value, float) and value for name, value in vars(config).items() if "drop" in name) if config is not None else True
    for module in () if dropout else model.modules():
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None) or {}
        # reentrant checkpointing refuses `autograd.grad`
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant") is False and not module.training:
            blocks.append(module)
    try:
        for module in blocks:
            module.training = True
        yield
    finally:
        for module in blocks:
            module.training = False
